"""Random states with names: some ranks must draw the same numbers, others must not.

Outside a tensor-parallel region activations are alike on every rank of the group, so dropout must draw the same mask on
all of them. Inside, each rank holds its own part and must draw its own mask. Under sequence parallelism each rank draws
its own mask outside as well. Megatron keeps one generator state for each kind and swaps it in for the region.

| state                 | seed, with s = seed + 100 pp_rank | draws                                                 |
|-----------------------|-----------------------------------|-------------------------------------------------------|
| torch's default state | s                                 | dropout after embeddings and before residuals         |
| `model-parallel-rng`  | s + 2718 + tp_rank                | dropout in attention and of sequence parts, jitter    |
| `data-parallel-rng`   | s                                 | nothing of labkit's                                   |
| `expert-parallel-rng` | s + 1024 + 100 ep_rank + etp_rank | nothing of labkit's: experts have no dropout          |

"Sequence parts" are the activations outside a region, which sequence parallelism cuts over the ranks. Without tensor
parallelism the jitter of a router comes from the default state. The last two states serve modules written for Megatron,
which has them as well. Initial weights come from no state: each weight is drawn by its own name
(`parameters/weights.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labkit.comm.capturing import recorded_call, require_whole_process
from labkit.comm.groups import ParallelGroups

DATA_PARALLEL = "data-parallel-rng"
MODEL_PARALLEL = "model-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"
_listeners: list[Callable[[RngTracker], None]] = []


@contextmanager
def forks_noted(note: Callable[[RngTracker], None]) -> Iterator[None]:
    """Inside the block every `fork` of any tracker first calls `note(tracker)`. A capture thus learns all random states
    that captured code draws from."""
    _listeners.append(note)
    try:
        yield
    finally:
        _listeners.remove(note)


class RngTracker:
    """Named states of this device's default generator.

    On the host a state is a tensor of bytes, swapped in and saved again. On a GPU a state is a generator, and the
    default generator is pointed at its state ("graph-safe" in torch), because during a capture bytes can be neither
    read nor written.

    Args:
        device: device of the generator; None is the host.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = torch.device(device or "cpu")
        self._states: dict[str, Any] = {}
        self._seeds: set[int] = set()

    def _on_gpu(self) -> torch.Generator | None:
        """Return the GPU's default generator; None on the host."""
        if self._device.type != "cuda":
            return None
        torch.cuda.init()
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        return torch.cuda.default_generators[index]

    def _current_state(self) -> Any:
        gpu = self._on_gpu()
        return torch.get_rng_state() if gpu is None else gpu.graphsafe_get_state()

    def _switch_to(self, state: Any) -> None:
        gpu = self._on_gpu()
        if gpu is None:
            torch.set_rng_state(state)
        else:
            gpu.graphsafe_set_state(state)

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators on a GPU; none on the host. A `torch.cuda.CUDAGraph` must register them
        (`register_generator_state`) before it captures code that draws from them."""
        return [state for state in self._states.values() if isinstance(state, torch.Generator)]

    def add(self, name: str, seed: int) -> None:
        """Make a state that starts from `seed`; the default generator does not change.

        Raises:
            ValueError: the name or the seed is in use. Equal seeds would give two regions the same masks.
        """
        if name in self._states:
            raise ValueError(f"random state {name!r} exists already; known are {', '.join(self._states)}")
        if seed in self._seeds:
            raise ValueError(f"seed {seed} for {name!r} is used by another random state; choose another")
        before, gpu = self._current_state(), self._on_gpu()
        if gpu is None:
            # Not torch.manual_seed: that would reseed every GPU as well.
            torch.default_generator.manual_seed(seed)
        else:
            self._switch_to(gpu.clone_state())
            gpu.manual_seed(seed)
        self._states[name] = self._current_state()
        self._seeds.add(seed)
        self._switch_to(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from the named state inside the block; the named state advances, and the outer state resumes after it.

        Raises:
            ValueError: no state has that name.
            BrokenProcessError: a failed capture has left this process unable to draw.
        """
        require_whole_process()
        if name not in self._states:
            raise ValueError(f"no random state {name!r}; known are {', '.join(self._states) or 'none'}")
        for note in _listeners:
            note(self)
        outer: list[Any] = []

        def enter() -> None:
            outer[:] = [self._current_state()]
            self._switch_to(self._states[name])

        def leave() -> None:
            self._states[name] = self._current_state()
            self._switch_to(outer[0])

        recorded_call(enter)  # a graph that draws inside the block draws from the named state at each replay
        try:
            yield
        finally:
            recorded_call(leave)

    def get_states(self) -> dict[str, Tensor]:
        """Return copies of all states, for checkpoints and recomputation."""
        states = self._states.items()
        return {name: s.get_state() if isinstance(s, torch.Generator) else s.clone() for name, s in states}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Set the states that `get_states` returned."""
        gpu = self._on_gpu()
        if gpu is None:
            self._states = {name: state.clone() for name, state in states.items()}
            return
        self._states = {name: self._states[name] if name in self._states else gpu.clone_state() for name in states}
        for name, state in states.items():
            self._states[name].set_state(state)  # in place: graphs hold these generators


def seed_default_generators(seed: int, groups: ParallelGroups) -> int:
    """Seed torch's default generators, Python's `random` and numpy's, as Megatron does. Return their common seed."""
    own = seed + 100 * groups.pp.rank
    torch.manual_seed(own)  # every device
    random.seed(own)
    np.random.seed(own % 2**32)  # noqa: NPY002 (code that runs inside a rank may draw from it)
    return own


def model_parallel_seed(seed: int, groups: ParallelGroups, *, device: torch.device | str | None = None) -> RngTracker:
    """Seed torch's default generator and make the three named states for this rank, by the table of this module.

    Args:
        seed: seed of the run.
        groups: give pp_rank, tp_rank, ep_rank and etp_rank.
        device: device of the generator that `fork` switches; None is `groups.device` if it has one, else the host.
    """
    own = seed_default_generators(seed, groups)
    tracker = RngTracker(device if device is not None else getattr(groups, "device", None))
    tracker.add(DATA_PARALLEL, own)
    tracker.add(MODEL_PARALLEL, own + 2718 + groups.tp.rank)
    tracker.add(EXPERT_PARALLEL, own + 1024 + 100 * groups.ep.rank + groups.etp.rank)
    return tracker
