"""The state of one rank as named pieces of whole tensors. The same list serves saving and loading.

    NAME               a parameter, in the precision in which AdamW updates it (fp32 for 16-bit weights)
    exp_avg.NAME       AdamW's first moment
    exp_avg_sq.NAME    its second moment
    NAME of a buffer   such as the bias of a router's experts
    fp8.LAYER.history, fp8.LAYER.scale     amax history and scales of a layer
    rng.RANK.STATE     a random state of a rank, as bytes

After every step a 16-bit weight is its fp32 copy, rounded. So only the copy is stored, and a run in any precision can
read it. A tensor that several ranks hold is written by one of them, and the work is divided by bytes.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups
from labkit.fp8.scaling import Float8Scaling
from labkit.parallel.data_parallel.optimizer import MegatronOptimizer, named_parameters
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import parameter_seed
from labkit.parallel.random import RngTracker, model_parallel_seed
from labkit.train.checkpoint.boxes import Box, boxes_of_run, full_shape_of, placements, whole
from labkit.train.checkpoint.shard_files import Reader

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of AdamW's two running means."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a named tensor that this rank holds."""

    name: str
    """Name of the stored tensor."""
    full_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    """Place in the whole tensor."""
    values: Tensor
    """The elements, a view of the rank's tensor: saving reads it, loading writes it."""
    written: bool
    """True if this rank is the one that writes it."""


def fill(pieces: Iterable[Piece], reader: Reader) -> None:
    """Read the pieces from a checkpoint that has no `misfits`."""
    for piece in pieces:
        reader.read(piece.name, piece.box, piece.values)


class RankWeights:
    """Parameters and buffers of one rank, which is all that an evaluation needs."""

    def __init__(self, chunks: Sequence[nn.Module], groups: ParallelGroups) -> None:
        """chunks: the rank's model chunks, wrapped for data parallelism or not."""
        self._models = [getattr(chunk, "module", chunk) for chunk in chunks]
        self._groups = groups
        self._names = {id(p): name for name, p in named_parameters(self._models).items()}

    def whole_pieces(self) -> Iterator[Piece]:
        """Yield all elements of the rank's parameters, also those that other ranks update, and its buffers."""
        for parameter in self._parameters():
            yield from self._pieces(parameter, "", parameter, 0, False)
        yield from self._buffer_pieces()

    def load_weights(self, reader: Reader) -> None:
        """Fill parameters and buffers from a checkpoint that has no `misfits`."""
        fill(self.whole_pieces(), reader)

    def misfits(self, reader: Reader, pieces: Iterable[Piece] | None = None) -> str:
        """Return why the checkpoint's tensors are not those of this rank's model, or an empty string.

        pieces: the pieces to fill; None is parameters and buffers.
        """
        stored, problems = reader.manifest.tensors, dict[str, None]()
        for piece in self.whole_pieces() if pieces is None else pieces:
            there = stored.get(piece.name)
            if there is None:
                problems[f"{piece.name} is missing"] = None
            elif there.shape != piece.full_shape:
                problems[f"{piece.name} has shape {list(there.shape)}, the model's is {list(piece.full_shape)}"] = None
        if not problems:
            return ""
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        return (
            f"{reader.folder} does not fit the model: {'; '.join(list(problems)[:5])}{more}; load a checkpoint of this "
            "model, or change the configuration"
        )

    def _parameters(self) -> list[nn.Parameter]:
        return list(named_parameters(self._models).values())

    def _pieces(self, parameter: nn.Parameter, before: str, values: Tensor, first: int, mine: bool) -> Iterator[Piece]:
        """Yield the boxes of `values`: elements `first` and following of the rank's flattened parameter."""
        record, shape, values = record_of(parameter), tuple(parameter.shape), values.detach()
        name, full = before + self._names[id(parameter)], full_shape_of(record, parameter.shape, self._groups)
        places = placements(record, shape, self._groups)
        if tuple(values.shape) == shape:
            parts = [(whole(shape), values)]
        else:
            runs = boxes_of_run(shape, first, first + values.numel())
            parts = [(box, values[at - first : at - first + box.numel].view(box.shape)) for box, at in runs]
        for box, held in parts:
            for place in filter(None, (place.of(box) for place in places)):
                view = box.view(held, place.local)
                yield Piece(name, full, place.box, view, mine and not place.copied)

    def _buffer_pieces(self) -> Iterator[Piece]:
        """Yield persistent buffers by their names in the whole model; every rank of a stage has the same."""
        first = self._groups.tp.rank == 0 and self._groups.dp_cp.rank == 0
        for model in self._models:
            for path, module in model.named_modules():
                for name, buffer in module.named_buffers(recurse=False):
                    if name not in module._non_persistent_buffers_set:
                        named = f"{path}.{name}" if path else name
                        yield Piece(named, tuple(buffer.shape), whole(buffer.shape), buffer, first)


class RankState(RankWeights):
    """Parameters, optimizer state, buffers, fp8 scales and random states of one rank."""

    def __init__(self, chunks: Sequence[nn.Module], optimizer: MegatronOptimizer, groups: ParallelGroups) -> None:
        """chunks: the rank's wrapped model chunks."""
        super().__init__(chunks, groups)
        self._optimizer = optimizer

    # ---- tensors that a layout cuts ----

    def pieces(self, *, with_moments: bool) -> Iterator[Piece]:
        """Yield all pieces to save. with_moments: AdamW has made a step, so its moments exist."""
        turns = _Turns()
        for part in self._optimizer.updated_parts():
            mine = self._is_mine(part.parameter, part.copy, part.copies, part.master.nbytes, turns)
            yield from self._pieces(part.parameter, "", part.master, part.first, mine)
            for moment in MOMENTS if with_moments else ():
                values = self._optimizer.adamw.state[part.master][moment]
                yield from self._pieces(part.parameter, f"{moment}.", values, part.first, mine)
        in_optimizer = {id(p) for group in self._optimizer.groups for p in group.params}
        for parameter in self._parameters():
            if id(parameter) not in in_optimizer:
                copies = self._groups.dp_cp if record_of(parameter).allreduce else self._groups.edp
                mine = self._is_mine(parameter, copies.rank, copies.size, parameter.nbytes, turns)
                yield from self._pieces(parameter, "", parameter, 0, mine)
        yield from self._buffer_pieces()

    def to_load(self, *, with_moments: bool) -> list[Piece]:
        """Return all pieces that a checkpoint of any layout and precision fills.

        with_moments: first give AdamW moments of zeros, so that there are pieces for them. Padding of the vocabulary is
        in no piece and keeps its zeros.
        """
        if with_moments:
            self._make_moments()
        return [*self.pieces(with_moments=with_moments), *self.whole_pieces()]

    def _make_moments(self) -> None:
        for part in self._optimizer.updated_parts():
            moments = {moment: torch.zeros_like(part.master) for moment in MOMENTS}
            self._optimizer.adamw.state[part.master].update(moments)

    def set_adam_steps(self, steps: int) -> None:
        """Tell AdamW how many updates its moments have seen; its correction of their bias depends on that."""
        for part in self._optimizer.updated_parts():
            made = torch.tensor(float(steps), dtype=torch.float32, device=part.master.device)
            self._optimizer.adamw.state[part.master]["step"] = made

    def _is_mine(self, parameter: nn.Parameter, copy: int, copies: int, size: int, turns: _Turns) -> bool:
        """Return True if this rank writes the elements. `copy` of `copies` counts data-parallel replicas."""
        record = record_of(parameter)
        if record.shared:
            return False
        if not record.tensor_model_parallel:
            group = self._groups.tp if record.allreduce else self._groups.etp
            copy, copies = group.rank * copies + copy, group.size * copies
        kind = (record.allreduce, record.tensor_model_parallel, copies)
        return turns.take(kind, copies, size) == copy

    # ---- fp8 ----

    def _scalings(self) -> list[Float8Scaling]:
        held = [getattr(model, "precision", None) for model in self._models]
        return [precision for precision in held if isinstance(precision, Float8Scaling)]

    def fp8_pieces(self) -> Iterator[Piece]:
        """Yield history and scales of the `delayed` recipe; all ranks of a stage have the same."""
        first = self._groups.tp_dp_cp.rank == 0
        for scaling in self._scalings():
            for name, values in scaling.layer_states().items():
                yield Piece(f"fp8.{name}", tuple(values.shape), whole(values.shape), values, first)

    def load_fp8(self, reader: Reader, step: int) -> bool:
        """Load what `fp8_pieces` stored. Return False if something is missing; that history then starts anew."""
        found = True
        for scaling in self._scalings():
            fresh = scaling.layer_states()
            stored = {name: reader.manifest.tensors.get(f"fp8.{name}") for name in fresh}
            if any(there is None or there.shape != tuple(fresh[name].shape) for name, there in stored.items()):
                found = False
                continue
            scaling.load_layer_states({name: reader.read_whole(f"fp8.{name}") for name in fresh}, steps=step)
        return found

    # ---- random states ----

    def rng_pieces(self) -> Iterator[Piece]:
        """Yield the random states of this rank: torch's, those of the tracker, Python's and numpy's."""
        for name, state in self._random_states().items():
            named = f"rng.{self._groups.rank:05d}.{name}"
            yield Piece(named, tuple(state.shape), whole(state.shape), state, True)

    def _random_states(self) -> dict[str, Tensor]:
        states = {"torch": torch.get_rng_state()}
        if self._groups.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self._groups.device)
        for tracker in self._trackers():
            states |= {f"tracker.{name}": state for name, state in tracker.get_states().items()}
        states["python"] = _as_bytes(random.getstate())
        name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 (a user may draw from it)
        states["numpy"] = _as_bytes([name, [int(key) for key in keys], *rest])
        return {name: state.cpu() for name, state in states.items()}

    def load_rng(self, reader: Reader) -> None:
        """Restore the random states that this rank saved; only the layout that saved them can."""
        states = {
            name: reader.read_whole(f"rng.{self._groups.rank:05d}.{name}")
            for name in self._random_states()
            if f"rng.{self._groups.rank:05d}.{name}" in reader.manifest.tensors
        }
        torch.set_rng_state(states["torch"])
        if "cuda" in states and self._groups.device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], self._groups.device)
        named = {name.removeprefix("tracker."): s for name, s in states.items() if name.startswith("tracker.")}
        for tracker in self._trackers() if named else ():
            tracker.set_states(named)
        version, numbers, gauss = _from_bytes(states["python"])
        random.setstate((version, tuple(numbers), gauss))
        name, keys, *rest = _from_bytes(states["numpy"])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002

    def derive_rng(self, seed: int, step: int) -> None:
        """Derive random states from seed, step and this rank's place, for a layout that saved none."""
        fresh = model_parallel_seed(parameter_seed(seed, f"resumed after step {step}"), self._groups)
        for tracker in self._trackers():
            tracker.set_states(fresh.get_states())

    def _trackers(self) -> list[RngTracker]:
        found = {id(rng): rng for model in self._models if (rng := getattr(model, "rng", None)) is not None}
        return [tracker for tracker in found.values() if isinstance(tracker, RngTracker)]


class _Turns:
    """Divides tensors among the ranks that hold copies: the next goes to the copy with the fewest bytes so far.

    All ranks that hold copies of one tensor hold copies of the same tensors, in the same order, so they agree without
    communication.
    """

    def __init__(self) -> None:
        self._bytes: defaultdict[Any, list[int]] = defaultdict(list)

    def take(self, kind: Any, copies: int, size: int) -> int:
        held = self._bytes[kind] = self._bytes[kind] or [0] * copies
        turn = held.index(min(held))
        held[turn] += size
        return turn


def _as_bytes(state: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def _from_bytes(state: Tensor) -> Any:
    return json.loads(state.numpy().tobytes())
