"""One sentence for whatever a user's own forward step returns that the training loop cannot use.

Megatron's `pretrain` and labkit's runtime leave the form of a loss to the caller. Here the loop itself reads the
metrics, because it reports one mean over the global batch. A form that would give wrong gradients silently is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

from torch import Tensor, nn

FORMS = "(loss, metrics) or (sum of losses, number of tokens, metrics)"


def checked_forward_step(forward_step: Callable[..., Any], *, cp: int) -> Callable[..., Any]:
    """Return `forward_step` with a loss function that raises ValueError where it returns what the loop cannot use.

    cp: context-parallel ranks. With more than one, a loss of two items would have to be this rank's part of the
        sample's mean, as in Megatron; a mean over the rank's own positions makes gradients cp times too large and
        cannot be told from it, so two items are rejected.
    """

    def step(data_iterator: Iterator[Any], model: nn.Module) -> tuple[Any, Callable[..., Any]]:
        returned = forward_step(data_iterator, model)
        if not isinstance(returned, tuple | list) or len(returned) != 2:
            raise ValueError(f"forward_step returned {_words(returned)}; it must return (output, loss function)")
        output, loss_func = returned

        def loss(output: Any, **options: Any) -> Any:  # the last stage alone calls it: elsewhere it may be anything
            if not callable(loss_func):
                raise ValueError(
                    f"forward_step returned {_words(loss_func)} as its loss function on the last stage; give a "
                    f"function that returns {FORMS}"
                )
            returned = loss_func(output, **options)
            if not options.get("non_loss_data", False):
                _check_loss(returned, cp)
            return returned

        return output, loss

    return step


def _check_loss(returned: Any, cp: int) -> None:
    """Raise ValueError unless a loss function returned one of the two FORMS, and metrics that the loop can add up."""
    whole = isinstance(returned, tuple | list) and len(returned) in (2, 3)
    loss, metrics = (returned[0], returned[-1]) if whole else (None, None)
    numbers = [metrics.get(name) for name in ("loss_sum", "tokens")] if isinstance(metrics, Mapping) else [None]
    if not whole or not isinstance(loss, Tensor) or not all(map(_is_one_number, [loss, *numbers])):
        raise ValueError(
            f"the loss function returned {_words(returned)}; it must return {FORMS}, where the loss is a tensor of one "
            "number, and metrics a dict with two numbers, from which pretrain reports the mean over the global batch: "
            "loss_sum, the sum of this microbatch's losses on this rank, and tokens, the number of them"
        )
    if len(returned) == 2 and cp > 1:
        raise ValueError(
            f"the loss function returned (loss, metrics), and with parallel.cp = {cp} a rank cannot form the mean of a "
            "sample, of which it holds a part; return (sum of losses, number of tokens, metrics) of this rank's "
            "positions, and the mean is formed over cp"
        )


def _is_one_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)


def _words(value: Any) -> str:
    """Return the value in words: `a tensor of shape (4, 16)`, `(1.5, a dict with loss_sum)`, `None`."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_words, value))})"
    if isinstance(value, Mapping):
        return f"a dict with {', '.join(f'{key}: {_words(item)}' for key, item in value.items()) or 'no keys'}"
    return f"{value}" if value is None or isinstance(value, Real) else f"a {type(value).__name__}"
