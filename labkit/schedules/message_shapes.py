"""Shapes of the tensors that stages send to each other.

What stage s sends to stage s + 1 in the forward comes back as gradients of the same shapes. So shapes belong to the
border after a stage, not to a direction.

Legend: S = sequence, B = microbatch, H = hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Shape = tuple[int, ...]
TensorShape = Sequence[int] | Sequence[Sequence[int]] | Callable[[int], Sequence[Sequence[int]]] | None
"""One shape, a list of shapes, or stage -> the list of what it sends; None is one tensor of varying lengths."""


def shapes_of_messages(tensor_shape: TensorShape, num_stages: int) -> list[tuple[Shape, ...]]:
    """Return, for every stage but the last, the shapes of the tensors that it sends on. Raises ValueError for no shape
    at all."""
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


def stage_shapes(
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    *,
    cp: int = 1,
    tp: int = 1,
    split_rank: int | None = None,
    decoder_seq_length: int | None = None,
) -> TensorShape:
    """Return the shape of what a stage sends: (S / cp, B, H), with sequence parallelism (S / (cp tp), B, H).

    tp: ranks that divide the sequence; 1 without sequence parallelism.
    split_rank: first stage of a decoder. The result is then a function from the stage: an encoder stage sends its
        hidden states, a decoder stage its own, of `decoder_seq_length` (None means `seq_length`), and the encoder's
        output.

    Raises ValueError for a length that cannot be divided.
    """

    def shape(length: int) -> Shape:
        return equal_parts(equal_parts(length, cp, "cp"), tp, "tp, sequence_parallel"), micro_batch_size, hidden_size

    encoder = shape(seq_length)
    if split_rank is None:
        return encoder
    decoder = shape(seq_length if decoder_seq_length is None else decoder_seq_length)
    return lambda stage: [encoder] if stage < split_rank else [decoder, encoder]


def equal_parts(length: int, parts: int, axis: str) -> int:
    """Return the positions of each part. Raises ValueError if the parts would be unequal; `axis` names the ranks."""
    if length % parts:
        raise ValueError(f"{length} positions cannot be cut into {parts} equal parts ({axis})")
    return length // parts
