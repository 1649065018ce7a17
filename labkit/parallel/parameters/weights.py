"""Parameters whose initial values do not depend on the layout, and the way from a rank's part back to the whole.

Every weight is a function of (seed, name, full shape): each rank draws the same full tensor and keeps its slice. So a
model starts from the same numbers on one process and on any tp x pp x dp. A difference between layouts is a fault.
The draw costs a host thread some nanoseconds per number, so a minute and more for ten billion. A run that compares no
layouts can use a `DeviceSeed`, which draws only a rank's slice, on its device.

`tag_parameter` writes a parameter's part of the model into its record (`parameter_record.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from labkit.comm import collectives
from labkit.comm.groups import Group
from labkit.parallel.parameters.parameter_record import Replicated, record_of


def parameter_seed(seed: int, name: str) -> int:
    """Return a 63-bit seed for one parameter: the same for the same (seed, name), unrelated otherwise."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class DeviceSeed:
    """A seed with which a rank draws only its own part of a weight, on its device.

    The numbers depend on (seed, name, part) and on the model of the device. They are the same in every run of a layout,
    and differ in another layout. Ranks that hold the same part draw the same numbers: uncut parameters, replicated
    rows, the copy of a tied weight, the parts of data-parallel replicas.
    """

    value: int


Seed = int | DeviceSeed
"""Seed of weights. A number gives the same values in every layout."""


class WeightOptions(TypedDict, total=False):
    """The options with which a model draws its weights, as `make_parameter` explains them."""

    seed: Seed
    std: float
    dtype: torch.dtype
    device: torch.device | str | None


def draw(
    name: str,
    shape: Sequence[int],
    *,
    seed: int,
    std: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw N(0, std) by (seed, name) on `device` (None is the host), with the numbers of its kind of generator.

    The result is float64 for float64, else float32, which the caller rounds.
    """
    where = torch.device("cpu" if device is None else device)
    generator = torch.Generator(where).manual_seed(parameter_seed(seed, name))
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.empty(tuple(shape), dtype=drawn, device=where).normal_(0.0, std, generator=generator)


def tensor_part(
    full: Tensor, rank: int, size: int, dim: int, stride: int = 1, replicated: Replicated | None = None
) -> Tensor:
    """Return the part of rank `rank` of a full tensor: its 1/size of each of `stride` equal blocks along `dim`.

    `replicated` describes another cut, in which neighbours hold rows alike.
    """
    if size == 1:
        return full
    if replicated is not None:
        block = tensor_part(full, rank // replicated.ranks, size // replicated.ranks, 0)
        cut, alike = block[: -replicated.rows], block[-replicated.rows :]
        return torch.cat([tensor_part(cut, rank % replicated.ranks, replicated.ranks, 0), alike])
    if full.shape[dim] % (size * stride):
        raise ValueError(
            f"dimension {dim} of {tuple(full.shape)} cannot be cut into {stride} x {size} equal parts: "
            f"{full.shape[dim]} must be a multiple of {size * stride}"
        )
    chunks = full.chunk(size * stride, dim=dim)
    return torch.cat(chunks[rank::size], dim=dim)


@dataclass(frozen=True)
class _Cut:
    """The part of a tensor that a rank holds: arguments of `tensor_part`."""

    rank: int = 0
    size: int = 1
    dim: int = 0
    stride: int = 1
    replicated: Replicated | None = None

    def part(self, full: Tensor) -> Tensor:
        return tensor_part(full, self.rank, self.size, self.dim, self.stride, self.replicated)


def _drawn_part(
    name: str,
    full_shape: Sequence[int],
    cut: _Cut,
    *,
    seed: Seed,
    std: float,
    padded_rows: int | None = None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Tensor:
    """Return a rank's part of a normal draw, the same for all layouts; with a `DeviceSeed` a draw of its own."""
    if isinstance(seed, DeviceSeed):
        part = _drawn_here(name, full_shape, cut, padded_rows, seed=seed.value, std=std, dtype=dtype, device=device)
    else:
        part = cut.part(_padded(draw(name, full_shape, seed=seed, std=std, dtype=dtype), padded_rows))
    return part.to(device=device, dtype=dtype).contiguous()


def _drawn_here(name: str, full_shape: Sequence[int], cut: _Cut, padded_rows: int | None, **drawn: Any) -> Tensor:
    """Draw the part on its device. The seed's name contains the part, so equal parts get equal numbers."""
    shape = cut.part(_padded(torch.empty(tuple(full_shape), device="meta"), padded_rows)).shape
    own = name if cut.size == 1 else f"{name}, part {cut.rank} of {cut.size} along {cut.dim}"
    if cut.size > 1 and cut.replicated is not None:
        ranks, alike = cut.replicated.ranks, cut.replicated.rows
        shared = f"{name}, rows of block {cut.rank // ranks} of {cut.size // ranks}"
        rows = (draw(own, (shape[0] - alike, *shape[1:]), **drawn), draw(shared, (alike, *shape[1:]), **drawn))
        return torch.cat(rows)
    part = draw(own, shape, **drawn)
    if padded_rows is not None:  # then dimension 0 is cut, in one block
        part[max(0, full_shape[0] - cut.rank * shape[0]) :] = 0
    return part


def _padded(full: Tensor, rows: int | None) -> Tensor:
    """Pad `full` with zeros along dimension 0, up to `rows`."""
    if rows is None or rows <= full.shape[0]:
        return full
    return torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])


def make_parameter(
    name: str,
    full_shape: Sequence[int],
    *,
    seed: Seed = 0,
    std: float | None = None,
    fill: float | None = None,
    group: Group | None = None,
    partition_dim: int | None = None,
    partition_stride: int = 1,
    replicated: Replicated | None = None,
    padded_rows: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """Return this rank's part of a parameter, drawn by (seed, name) or filled.

    Args:
        name: name in the whole model.
        full_shape: shape in one process, without padding.
        seed: seed of the run; a `DeviceSeed` draws only this part, on `device`.
        std: standard deviation of a normal draw; give exactly one of `std` and `fill`.
        fill: constant value.
        group: the tensor-parallel group that cuts the parameter; None if every rank has it in full.
        partition_dim: dimension that is cut; given together with `group`.
        partition_stride: number of blocks along that dimension, each split separately.
        replicated: rows that neighbours hold alike; then dimension 0 is cut, in one block.
        padded_rows: after the draw, grow dimension 0 to this size with zeros (vocabulary tables). Padding depends on
            the layout, so it must not change a real weight.
        dtype: type of the parameter. Half precision is drawn in float32 and rounded.
        device: device of the parameter; None is the host.

    Raises:
        ValueError: neither or both of std and fill, or a size that the group does not divide.
    """
    if (std is None) == (fill is None):
        raise ValueError(f"parameter {name}: give either std or fill, got std={std}, fill={fill}")
    is_cut, cut = False, _Cut()
    if group is not None and partition_dim is not None and group.size > 1:
        is_cut, cut = True, _Cut(group.rank, group.size, partition_dim, partition_stride, replicated)
    made: dict[str, Any] = {"dtype": dtype, "device": device}
    if std is not None:
        part = _drawn_part(name, full_shape, cut, seed=seed, std=std, padded_rows=padded_rows, **made)
    else:
        assert fill is not None
        part = cut.part(_padded(torch.full(tuple(full_shape), fill, dtype=dtype), padded_rows)).to(**made).contiguous()
    return tag_parameter(
        nn.Parameter(part),
        full_name=name,
        full_shape=full_shape,
        tensor_model_parallel=is_cut,
        partition_dim=partition_dim if is_cut and partition_dim is not None else -1,
        partition_stride=partition_stride,
        replicated=replicated if is_cut else None,
    )


def make_expert_parameter(
    name: str,
    part: str,
    full_shape: Sequence[int],
    *,
    ep: Group,
    etp: Group,
    partition_dim: int,
    partition_stride: int = 1,
    seed: Seed = 0,
    std: float = 0.02,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """Return the weights of this rank's experts, stacked along dimension 0.

    `ep` cuts the stack, `etp` cuts each expert. Expert e is drawn as `<name>.<e>.<part>`, so its values depend neither
    on ep nor on the number of experts. With a number as seed they do not depend on the layout at all.

    Args:
        name: name of the experts in the whole model, `layers.3.mlp.experts`.
        part: `fc1.weight`; the parameter's `full_name` is `<name>.<part>`.
        full_shape: shape of the stack in one process, (E, ..).
        ep: expert-parallel group; its rank r holds the r-th 1/ep of the experts.
        etp: expert-tensor-parallel group.
        partition_dim: dimension of the stack that etp cuts; 1 or more.
        partition_stride: number of blocks along that dimension, each split separately.
        seed, std: seed and standard deviation of the normal draw.
        dtype, device: as in `make_parameter`.

    Raises:
        ValueError: ep does not divide the number of experts, or etp does not divide the dimension.
    """
    experts = full_shape[0]
    if experts % ep.size:
        raise ValueError(f"{name}: {experts} experts cannot be divided over ep={ep.size}; choose a multiple of it")
    if full_shape[partition_dim] % (etp.size * partition_stride):
        raise ValueError(
            f"{name}.{part}: dimension {partition_dim} of {tuple(full_shape)} cannot be cut over etp={etp.size} in "
            f"{partition_stride} block(s); it must be a multiple of {etp.size * partition_stride}"
        )
    local = experts // ep.size
    cut = _Cut(etp.rank, etp.size, partition_dim - 1, partition_stride)
    made: dict[str, Any] = {"seed": seed, "std": std, "dtype": dtype, "device": device}
    drawn = [
        _drawn_part(f"{name}.{expert}.{part}", full_shape[1:], cut, **made)
        for expert in range(ep.rank * local, (ep.rank + 1) * local)
    ]
    parameter = tag_parameter(
        nn.Parameter(torch.stack(drawn)),
        full_name=f"{name}.{part}",
        full_shape=full_shape,
        tensor_model_parallel=etp.size > 1,
        partition_dim=partition_dim if etp.size > 1 else -1,
        partition_stride=partition_stride,
    )
    record = record_of(parameter)
    record.allreduce, record.expert_parallel = False, True
    return parameter


def tag_parameter(
    parameter: nn.Parameter,
    *,
    full_name: str,
    full_shape: Sequence[int],
    tensor_model_parallel: bool = False,
    partition_dim: int = -1,
    partition_stride: int = 1,
    replicated: Replicated | None = None,
) -> nn.Parameter:
    """Name the parameter, write its part of the model into its record, and return the parameter."""
    parameter.full_name = full_name  # pyright: ignore[reportAttributeAccessIssue]
    record = record_of(parameter)
    record.full_shape, record.tensor_model_parallel = tuple(full_shape), tensor_model_parallel
    record.partition_dim, record.partition_stride = partition_dim, partition_stride
    record.replicated = replicated
    return parameter


def gather_parameter(tensor: Tensor, like: nn.Parameter, group: Group) -> Tensor:
    """Gather the full, unpadded tensor from the ranks' parts; the inverse of the slice that made `like`.

    `tensor` is this rank's part: the parameter, its gradient or an optimizer state of the same shape. All ranks of
    `group` call this.
    """
    full, record = tensor.detach(), record_of(like)
    if record.tensor_model_parallel:
        parts = collectives.all_gather(full.contiguous(), group).chunk(group.size)
        full = _joined(parts, record.partition_dim, record.partition_stride, record.replicated)
    return full[: record.full_shape[0]] if full.dim() else full


def gather_expert_parameter(tensor: Tensor, like: nn.Parameter, *, etp: Group, ep: Group) -> Tensor:
    """Gather the full stack [E, ..] from the ranks' parts; the inverse of the cut of `make_expert_parameter`.

    `tensor` is as in `gather_parameter`. All ranks of etp x ep call this.
    """
    experts, record = tensor.detach().contiguous(), record_of(like)
    if record.tensor_model_parallel:
        parts = collectives.all_gather(experts, etp).chunk(etp.size)
        experts = _joined(parts, record.partition_dim, record.partition_stride)
    return collectives.all_gather(experts.contiguous(), ep)


def _joined(parts: Sequence[Tensor], dim: int, stride: int, replicated: Replicated | None = None) -> Tensor:
    """Join the parts that `tensor_part` made. Replicated rows come from the first neighbour."""
    if replicated is not None:
        ranks, rows = replicated.ranks, replicated.rows
        neighbours = [parts[first : first + ranks] for first in range(0, len(parts), ranks)]
        return torch.cat([x for few in neighbours for x in (*(part[:-rows] for part in few), few[0][-rows:])])
    blocks = [part.chunk(stride, dim=dim) for part in parts]
    return torch.cat([of_rank[block] for block in range(stride) for of_rank in blocks], dim=dim)
