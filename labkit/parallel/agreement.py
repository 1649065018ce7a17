"""Do two ranks that are about to exchange messages mean the same run?

A message has no name and no shape. Ranks that were given different tensor shapes, types or numbers of microbatches
would take each other's bytes for something else, or wait for ever. So before the first message between two ranks each
says through torch's store what it was given, and compares: a few round trips once, with nothing sent to a GPU.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import torch.distributed as dist

from labkit.launch import waiting
from labkit.parallel.groups import ParallelGroups

_numbers: Counter[str] = Counter()
"""Process group -> agreements made over it so far in this process; equal numbers belong together."""


class Agreement:
    """What this rank was given for one run, to be compared with each rank that it exchanges messages with."""

    def __init__(self, groups: ParallelGroups, given: Mapping[str, str], peers: set[int]) -> None:
        """Say `given` (name of an argument -> its value as text) to `peers`, counted within the pipeline."""
        self._pp, self._given = groups.pp, dict(given)
        if not peers:
            return
        name = groups.pp.process_group.group_name
        self._prefix = f"labkit/agreement/{name}/{_numbers[name]}"
        _numbers[name] += 1
        self._store = dist.distributed_c10d._get_default_store()
        for peer in peers:
            self._store.set(f"{self._prefix}/{self._pp.rank}-{peer}", json.dumps(self._given))

    def confirm(self, peer: int) -> None:
        """Wait until `peer` has said what it was given. Raises ValueError, naming both ranks, where it differs."""
        key = f"{self._prefix}/{peer}-{self._pp.rank}"
        with waiting(f"agreement pp, rank {peer} of the pipeline to start its run"):
            theirs = json.loads(self._store.get(key))
        self._store.delete_key(key)
        for name in sorted(self._given.keys() | theirs.keys()):
            here, there = self._given.get(name, "nothing"), theirs.get(name, "nothing")
            if here != there:
                raise ValueError(
                    f"the ranks of the pipeline disagree on {name}: rank {self._pp.rank} has {here}, rank {peer} has "
                    f"{there}; give all ranks of a pipeline the same"
                )
