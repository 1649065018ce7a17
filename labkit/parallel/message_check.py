"""Point-to-point messages of the debug mode: both sides say in the store what they send or expect.

torch compares collectives between ranks (`TORCH_DISTRIBUTED_DEBUG=DETAIL`), but not messages: on gloo a message that is
too long aborts the receiver, and one that is too short or of another type is taken as it is. Whoever comes second to a
message compares, and raises before it sends or receives. gloo transfers nothing before both sides are there.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor

_numbers: Counter[str] = Counter()
"""Process group, sender and receiver -> messages so far on this side; equal numbers belong together."""


def check(way: str, x: Tensor, process_group: Any, peer: int) -> None:
    """Announce a `send` to or `recv` from global rank `peer`; RuntimeError if the other side announced otherwise."""
    here = dist.get_rank()
    source, target = (here, peer) if way == "send" else (peer, here)
    pair = f"labkit/message/{process_group.group_name}/{source}-{target}"
    key, mine = f"{pair}/{_numbers[pair]}", f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    _numbers[pair] += 1
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{key}/{way}", mine)
    other = f"{key}/{'recv' if way == 'send' else 'send'}"
    if store.check([other]) and (theirs := store.get(other).decode()) != mine:
        sent, expected = (mine, theirs) if way == "send" else (theirs, mine)
        raise RuntimeError(
            f"the ranks disagree on a message: rank {source} sends {sent}, rank {target} expects {expected}"
        )
