"""Full states: whole tensors by `full_name`. Ranks load their parts from them, and gather them again.

full = full_state_from_hugging_face(config, safetensors.torch.load_file("model.safetensors"), moe)
load_full_state(chunks, full, groups)             # each rank keeps its slices
full = gather_full_state(chunks, groups)          # whole tensors of the stage, on each of its ranks
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups
from labkit.parallel.parameters.parameter_record import name_of, record_of
from labkit.parallel.parameters.weights import gather_expert_parameter, gather_parameter, tensor_part


def load_full_state(chunks: Sequence[nn.Module], full: Mapping[str, Tensor], groups: ParallelGroups) -> None:
    """Copy whole tensors, by `full_name`, into this rank's parameters: its slice by tp, or by ep and etp.

    Rows that pad the vocabulary become zero.

    Raises:
        ValueError: a tensor that is missing or has another shape than the model's.
    """
    with torch.no_grad():
        for parameter in _parameters(chunks):
            name, shape = name_of(parameter), record_of(parameter).full_shape
            if name not in full or tuple(full[name].shape) != shape:
                found = f"has shape {tuple(full[name].shape)}" if name in full else "is missing"
                raise ValueError(f"{name} {found}; the model needs {shape}")
            parameter.copy_(_local_part(full[name], parameter, groups))


def gather_full_state(chunks: Sequence[nn.Module], groups: ParallelGroups) -> dict[str, Tensor]:
    """Return whole tensors of this rank's chunks, by `full_name`, on each rank of the stage.

    This is the inverse of `load_full_state`. All ranks of the stage call it.
    """
    return {
        name_of(parameter): gather_expert_parameter(parameter, parameter, etp=groups.etp, ep=groups.ep)
        if record_of(parameter).expert_parallel
        else gather_parameter(parameter, parameter, groups.tp)
        for parameter in _parameters(chunks)
    }


def _parameters(chunks: Sequence[nn.Module]) -> Iterable[nn.Parameter]:
    return (parameter for chunk in chunks for parameter in chunk.parameters())


def _local_part(full: Tensor, like: nn.Parameter, groups: ParallelGroups) -> Tensor:
    record, tp = record_of(like), groups.tp
    if record.expert_parallel:
        full, tp = tensor_part(full, groups.ep.rank, groups.ep.size, 0), groups.etp
    dim, replicated = record.partition_dim, record.replicated
    rows = like.shape[0] * (tp.size if dim == 0 else 1)
    if rows > full.shape[0] and replicated is None:  # a vocabulary table: its padding depends on tp
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])
    if dim < 0:
        return full
    return tensor_part(full, tp.rank, tp.size, dim, record.partition_stride, replicated)
