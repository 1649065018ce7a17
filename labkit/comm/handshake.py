"""Do two ranks that are about to exchange messages mean the same?

A message has no name and no shape. So ranks that were given different tensor shapes, types or numbers of microbatches
would mistake each other's bytes for something else, or deadlock. Both checks below go through torch's store, and send
nothing to a GPU.

- `handshake`: before the first message of a run each rank tells its neighbours what it was given, and compares.
- `check_message`: in the debug mode both sides of every single message compare.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import DebugLevel, get_debug_level

from labkit.comm.groups import ParallelGroups
from labkit.comm.ledger import dtype_name
from labkit.launch import waiting

_handshakes: Counter[str] = Counter()
"""Process group -> handshakes over it so far in this process; equal numbers belong together."""
_messages: Counter[str] = Counter()
"""Process group, sender and receiver -> messages so far on this side; equal numbers belong together."""


def handshake(groups: ParallelGroups, given: Mapping[str, str], peers: set[int]) -> None:
    """Compare `given` (name of an argument -> its value as text) with what `peers` were given.

    peers: ranks counted within the pipeline, which all call this too. Waits until each of them has.

    Raises ValueError, naming both ranks, where a value differs.
    """
    if not peers:
        return
    pp, name = groups.pp, groups.pp.process_group.group_name
    prefix = f"labkit/handshake/{name}/{_handshakes[name]}"
    _handshakes[name] += 1
    store = dist.distributed_c10d._get_default_store()
    for peer in peers:
        store.set(f"{prefix}/{pp.rank}-{peer}", json.dumps(dict(given)))
    for peer in sorted(peers):
        key = f"{prefix}/{peer}-{pp.rank}"
        with waiting(f"handshake pp, rank {peer} of the pipeline to start its run"):
            theirs = json.loads(store.get(key))
        store.delete_key(key)
        for what in sorted(given.keys() | theirs.keys()):
            here, there = given.get(what, "nothing"), theirs.get(what, "nothing")
            if here != there:
                raise ValueError(
                    f"the ranks of the pipeline disagree on {what}: rank {pp.rank} has {here}, rank {peer} has "
                    f"{there}; give all ranks of a pipeline the same"
                )


@cache
def checked_by_torch() -> bool:
    """Return True in torch's debug mode, which is fixed when a group is made. The slow answer of torch is cached."""
    return get_debug_level() == DebugLevel.DETAIL


def check_message(way: str, x: Tensor, process_group: Any, peer: int) -> None:
    """In torch's debug mode compare a `send` to or `recv` from global rank `peer` with what the other side announced.

    torch compares collectives between ranks (`TORCH_DISTRIBUTED_DEBUG=DETAIL`), but not messages. On gloo a message
    that is too long aborts the receiver, and one that is too short or of another type is taken as it is. The side that
    comes second to a message compares, and raises before anything is transferred, because gloo waits for both sides.

    Raises RuntimeError if the other side announced a message of another shape or type.
    """
    if not checked_by_torch():
        return
    here = dist.get_rank()
    source, target = (here, peer) if way == "send" else (peer, here)
    pair = f"labkit/message/{process_group.group_name}/{source}-{target}"
    key, mine = f"{pair}/{_messages[pair]}", f"{tuple(x.shape)} {dtype_name(x.dtype)}"
    _messages[pair] += 1
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}/{way}", mine)
    other = f"{key}/{'recv' if way == 'send' else 'send'}"
    if store.check([other]) and (theirs := store.get(other).decode()) != mine:
        sent, expected = (mine, theirs) if way == "send" else (theirs, mine)
        raise RuntimeError(
            f"the ranks disagree on a message: rank {source} sends {sent}, rank {target} expects {expected}"
        )
