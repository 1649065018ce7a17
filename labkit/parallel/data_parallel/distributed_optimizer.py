"""The distributed optimizer (ZeRO stage 1, arXiv 1910.02054; Megatron's `DistributedOptimizer`).

Without it, d data-parallel replicas keep the whole optimizer state d times. Here rank r keeps and updates the r-th part
of every gradient bucket, a d-th of everything:

    reduce-scatter   each rank has the summed gradient of its own parts                  (d-1)/d bytes of the gradients
    AdamW            on its parts: fp32 master and both moments exist for them alone
    all-gather       every rank has all updated parameters                               (d-1)/d bytes of the parameters

With gradients and parameters of one width, this moves as many bytes as the all-reduce that it replaces.

    weights   gradient   master of the own parts   bytes per parameter
    fp64      fp64       the weight itself         16 + 16/d
    fp32      fp32       the weight itself          8 +  8/d
    bf16      fp32       fp32                       6 + 12/d
    bf16      bf16       fp32                       4 + 16/d   (the last 4/d, the gradient in fp32, during the update)

AdamW acts on each element by itself, so a cut through a parameter changes nothing. The updated parameters equal those
of an optimizer that is whole on every rank. With several instances, each instance keeps the whole state once. Parts are
then also reduced over the instances, and gathered inside each instance.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from labkit.comm.groups import Group, ParallelGroups
from labkit.config import OptimConfig
from labkit.parallel.data_parallel.bucket_layout import Piece, pieces_of_rank
from labkit.parallel.data_parallel.distributed_data_parallel import DistributedDataParallel
from labkit.parallel.data_parallel.grad_buffers import GradBuffer, own_part
from labkit.parallel.data_parallel.gradients import counted_elements, split_gradient
from labkit.parallel.data_parallel.optimizer import ParameterGroup, UpdatedPart, adamw, give_gradients
from labkit.parallel.data_parallel.param_gather import finish_param_sync, param_gathers
from labkit.parallel.parameters.parameter_record import main_grad_of


@dataclass(frozen=True)
class OwnedPiece:
    """A run of elements that this rank updates. Tensors are flat views."""

    piece: Piece
    """Place in the buffer."""
    parameter: nn.Parameter
    """Parameter that the run belongs to."""
    gradient: Tensor
    """View of the gradient buffer."""
    master: Tensor
    """Tensor that AdamW updates: in the parameter buffer, or in the fp32 copy of this rank's parts."""
    counted: int
    """Number of elements, from the first on, that this rank counts in the global norm."""
    instances: Group
    """The ranks that update the same elements, one in each instance."""


@dataclass(frozen=True)
class _Shard:
    """This rank's part of one buffer."""

    buffer: GradBuffer
    weights: list[Tensor]
    """This rank's part of the parameters of each bucket."""
    masters: list[Tensor]
    """Tensors that AdamW updates: `weights` itself, or fp32 copies."""

    def write_back(self) -> None:
        """Round fp32 masters into the parameters. Weights that are their own masters need no copy."""
        for weight, master in zip(self.weights, self.masters):
            if master is not weight:
                weight.copy_(master)


class DistributedOptimizer:
    """AdamW over this rank's parts of the buffers; a `labkit.parallel.data_parallel.optimizer.MegatronOptimizer`."""

    def __init__(
        self,
        groups: Iterable[ParameterGroup],
        chunks: Sequence[nn.Module],
        layout: ParallelGroups,
        optim: OptimConfig,
    ) -> None:
        """Take this rank's parts and copy 16-bit parts to fp32 masters, without communication.

        groups: weight decay and learning rate of each parameter.
        chunks: all model chunks of the rank, wrapped with `distributed_optimizer=True`.

        Raises ValueError for chunks wrapped otherwise, and for parameters that no chunk holds.
        """
        self.groups, self._chunks = list(groups), _checked(chunks)
        self.norm_groups: tuple[Group, ...] = (layout.world,)
        group_of = {id(p): number for number, group in enumerate(self.groups) for p in group.params}
        _check_held(self.groups, self._chunks)
        self._shards = [_shard(buffer) for chunk in self._chunks for buffer in chunk.buffers]
        self.pieces: list[list[OwnedPiece]] = [[] for _ in self.groups]
        """The pieces that this rank updates, for each parameter group; there may be none."""
        for shard in self._shards:
            for owned in _pieces(shard, layout):
                if id(owned.parameter) in group_of:
                    self.pieces[group_of[id(owned.parameter)]].append(owned)
        self.adamw = adamw(self.groups, [[owned.master for owned in pieces] for pieces in self.pieces], optim)

    def _all_pieces(self) -> list[OwnedPiece]:
        return [owned for pieces in self.pieces for owned in pieces]

    def updated_parts(self) -> Iterator[UpdatedPart]:
        """Yield this rank's pieces, with a copy in each instance."""
        for owned in self._all_pieces():
            instances = owned.instances
            first = owned.piece.offset_in_parameter
            yield UpdatedPart(owned.parameter, first, owned.master, instances.rank, instances.size)

    def gradient_pieces(self) -> list[Tensor]:
        """Return this rank's gradients that count in the norm: no tied copy, no replica over tp, only one instance."""
        return [grad for owned in self._all_pieces() for grad in split_gradient(owned.gradient, owned.counted)[0]]

    def uncounted_pieces(self) -> list[Tensor]:
        """Return the other gradients of this rank, which do not count in the norm."""
        return [grad for owned in self._all_pieces() for grad in split_gradient(owned.gradient, owned.counted)[1]]

    @torch.no_grad()
    def step(self, lr: float, factor: float = 1.0) -> None:
        """Update this rank's parts from `factor` times their gradients, at learning rate `lr` times each group's
        factor, and gather all parameters.

        Chunks wrapped with `overlap_param_gather` gather during the next forward, others at once.
        """
        finish_param_sync(self._chunks)  # gathers modules that no forward has called since the last update
        for group, pieces, state in zip(self.groups, self.pieces, self.adamw.param_groups):
            state["lr"] = lr * group.lr_factor
            give_gradients([owned.master for owned in pieces], [owned.gradient for owned in pieces], factor)
        self.adamw.step()
        for owned in self._all_pieces():
            owned.master.grad = None
        for shard in self._shards:
            shard.write_back()
        gathers = list(param_gathers(self._chunks))
        for gather in gathers:
            gather.updated()
        at_once = [gather for gather in gathers if not gather.overlap]
        for gather in at_once:
            gather.start()
        for gather in at_once:
            gather.finish()

    def state_bytes(self) -> dict[str, int]:
        """Return bytes by content, as `Optimizer.state_bytes` does: whole parameters and gradients, and the state of
        this rank's parts. `padding` is the cost of the alignment of all buffers together."""
        parameters = [p for shard in self._shards for p in shard.buffer.parameters]
        pieces = self._all_pieces()
        masters = sum(owned.master.nbytes for owned in pieces if owned.master.dtype != owned.parameter.dtype)
        sizes = {
            "parameter": sum(p.nbytes for p in parameters),
            "gradient": sum(main_grad_of(p).nbytes for p in parameters),
            "master": masters,
            "moments": sum(2 * owned.master.nbytes for owned in pieces),
        }
        return sizes | {"padding": self._allocated() - sizes["parameter"] - sizes["gradient"] - masters}

    def _allocated(self) -> int:
        """Return the number of bytes in all buffers and fp32 copies."""
        total = 0
        for shard in self._shards:
            assert shard.buffer.param_data is not None
            total += shard.buffer.param_data.nbytes + shard.buffer.grad_data.nbytes
            total += sum(m.nbytes for m, w in zip(shard.masters, shard.weights) if m is not w)
        return total


def _checked(chunks: Sequence[nn.Module]) -> list[DistributedDataParallel]:
    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel) or chunk.param_gather is None:
            raise ValueError(
                "the distributed optimizer needs reduce-scattered gradients: wrap each chunk in "
                "DistributedDataParallel(chunk, groups, distributed_optimizer=True)"
            )
    return list(chunks)  # pyright: ignore[reportReturnType]


def _check_held(groups: Sequence[ParameterGroup], chunks: Sequence[DistributedDataParallel]) -> None:
    held = {id(p) for chunk in chunks for buffer in chunk.buffers for p in buffer.parameters}
    for group in groups:
        for name, parameter in zip(group.names, group.params):
            if id(parameter) not in held:
                raise ValueError(
                    f"{name} is in none of the gradient buffers; give the optimizer the chunks that hold its parameters"
                )


def _shard(buffer: GradBuffer) -> _Shard:
    weights: list[Tensor] = []
    for bucket in buffer.buckets:
        assert bucket.param_data is not None
        weights.append(own_part(bucket.param_data, buffer.group))
    widened = buffer.param_dtype.itemsize < 4
    return _Shard(buffer, weights, [weight.float() if widened else weight for weight in weights])


def _pieces(shard: _Shard, layout: ParallelGroups) -> list[OwnedPiece]:
    """Return the pieces of a buffer that this rank owns, in the order of the buffer."""
    buffer = shard.buffer
    group, first_instance = buffer.group, buffer.reduction.across.rank == 0
    parameters = dict(zip(buffer.names, buffer.parameters))
    owned: list[OwnedPiece] = []
    for piece in pieces_of_rank(buffer.plan, group.size, group.rank):
        bucket, master = buffer.plan.buckets[piece.bucket], shard.masters[piece.bucket]
        start = piece.start - bucket.start - group.rank * master.numel()
        parameter = parameters[piece.name]
        counted = counted_elements(parameter, layout) if first_instance else 0
        owned.append(
            OwnedPiece(
                piece,
                parameter,
                buffer.grad_data[piece.start : piece.end],
                master[start : start + piece.numel],
                min(max(counted - piece.offset_in_parameter, 0), piece.numel),
                buffer.reduction.across,
            )
        )
    return owned
