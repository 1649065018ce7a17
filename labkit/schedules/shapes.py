"""Shapes of what stages send each other.

What stage s sends to stage s + 1 in the forward comes back as gradients of the same shapes, so shapes belong to the
border after a stage, not to a direction.

Legend: S = sequence, B = microbatch, H = hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.parallel.groups import ParallelGroups

Shape = tuple[int, ...]
TensorShape = Sequence[int] | Sequence[Sequence[int]] | Callable[[int], Sequence[Sequence[int]]] | None
"""One shape, a list of shapes, or stage -> the list of what it sends; None is one tensor of varying lengths."""


def shapes_of_messages(tensor_shape: TensorShape, num_stages: int) -> list[tuple[Shape, ...]]:
    """For every stage but the last the shapes of the tensors it sends on. Raises ValueError for no shape at all."""
    stages = range(num_stages - 1)
    if tensor_shape is None:
        return [((),) for _ in stages]
    if callable(tensor_shape):
        given = [list(tensor_shape(stage)) for stage in stages]
    else:
        listed: list[Any] = list(tensor_shape)
        several = bool(listed) and not isinstance(listed[0], int)
        given = [listed if several else [listed] for _ in stages]
    for stage, shapes in enumerate(given):
        if not shapes:
            raise ValueError(f"tensor_shape gives no shape for stage {stage}: a stage sends at least one tensor")
    return [tuple(tuple(int(size) for size in shape) for shape in shapes) for shapes in given]


def only_shape(shapes: Sequence[tuple[Shape, ...]]) -> Shape | None:
    """The shape of every message, if they are all one tensor of the same shape."""
    kinds = set(shapes)
    return next(iter(kinds))[0] if len(kinds) == 1 and all(len(kind) == 1 for kind in kinds) else None


def sequence_shapes(
    groups: ParallelGroups,
    *,
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    decoder_seq_length: int | None,
    sequence_parallel: bool,
) -> TensorShape:
    """(S, B, H) of what stages send, from the sizes of a whole sample, as Megatron computes it.

    S is divided by the context-parallel size, and by the tensor-parallel size under sequence parallelism. With a
    `split_rank` the stages from it on send two tensors: the decoder's hidden states, `decoder_seq_length` long, and the
    encoder's output. Raises ValueError for a length that cannot be divided.
    """

    def shape(length: int) -> Shape:
        whole = (_part(length, groups.cp.size, "cp"), micro_batch_size, hidden_size)
        return split_over_tensor_parallel(groups, whole) if sequence_parallel else whole

    split = groups.config.split_rank
    if split is None:
        return shape(seq_length)
    encoder, decoder = shape(seq_length), shape(seq_length if decoder_seq_length is None else decoder_seq_length)
    return lambda stage: [encoder] if stage < split else [decoder, encoder]


def split_over_tensor_parallel(groups: ParallelGroups, shape: TensorShape) -> Shape:
    """One shape with its S divided by the tensor-parallel size. Raises ValueError where that cannot be."""
    if callable(shape) or not shape or not all(isinstance(size, int) for size in shape):
        raise ValueError("sequence_parallel divides one tensor_shape: give several shapes as they are when divided")
    length, *rest = (int(size) for size in shape)  # pyright: ignore[reportArgumentType]
    return (_part(length, groups.tp.size, "tp, sequence_parallel"), *rest)


def _part(length: int, parts: int, axis: str) -> int:
    if length % parts:
        raise ValueError(f"{length} positions cannot be cut into {parts} equal parts ({axis})")
    return length // parts
