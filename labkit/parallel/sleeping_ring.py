"""The ring with blocks that sleep instead of computing, so that the waiting of many ranks can be timed on few cores.

Keys travel for real, between real processes and behind the blocks as in `ring_attention`; only the products are slept.
"""

from __future__ import annotations

import time

import torch

from labkit.events import Event, recording, span
from labkit.parallel.collectives import barrier
from labkit.parallel.context_plan import Layout, chunk_length, ring_plan
from labkit.parallel.groups import Group
from labkit.parallel.ring_attention import ring_steps


def sleeping_ring(
    group: Group, seq_length: int, *, layout: Layout = "zigzag", causal: bool = True, seconds_per_pair: float = 1e-5
) -> list[Event]:
    """One forward of ring attention on this rank, a block asleep for its number of (query, key) pairs.

    Every rank of `group` calls this; all begin together. Returns this rank's Events: blocks have the kind `forward` and
    are named after the rank whose keys they read (`kv 2`), messages are `send` and `recv`, and what was waited for is
    `wait`.

    Raises:
        ValueError: a length that 2 cp does not divide, or no such layout.
    """
    chunk = chunk_length(seq_length, group.size)
    plan = ring_plan(group.size, group.rank, causal=causal, layout=layout)
    keys_and_values = torch.zeros(2, 1, 1, 2 * chunk, 8)
    barrier(group)
    with recording(group.rank) as recorder:
        for step, (block, _) in enumerate(zip(plan, ring_steps(keys_and_values, group), strict=True)):
            if block is not None:
                with span(f"kv {(group.rank - step) % group.size}", "forward"):
                    time.sleep(block.pairs(chunk) * seconds_per_pair)
    return recorder.events
