"""Free an activation once it has been sent, and still run its backward.

After a stage has sent its output, it needs only the output's graph, because the receiver has the values. In a pipeline
with w warm-up forwards this frees the memory of w + 1 activations on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd import Variable


def deallocate_output_tensor(output: Tensor | None, deallocate_pipeline_outputs: bool = True) -> None:
    """Shrink a sent activation to one element; its graph stays for the backward.

    A view is left alone, because its storage belongs to another tensor, and so is a stage's input that it handed on
    unchanged.
    """
    if output is None or not deallocate_pipeline_outputs or output._is_view() or output.is_leaf:
        return
    output.data = _one_element(output.dtype, output.device)


@cache
def _one_element(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the tensor that all shrunk activations of one type and device share, because nobody reads or writes it."""
    return torch.empty(1, dtype=dtype, device=device)


def custom_backward(output: Tensor | Sequence[Tensor], grad_output: Tensor | Sequence[Tensor] | None) -> None:
    """Run the backward of `output`, which may have been shrunk, with the gradient of its full shape.

    Several outputs, each with its gradient, take one pass, because their graphs may share nodes. An output that needs
    no gradient is left out. `torch.autograd.backward` would compare the gradient's shape with that of the shrunk
    output, so this calls the engine below it, which knows the shapes from the graph.
    """
    outputs = [output] if isinstance(output, Tensor) else list(output)
    if grad_output is None:
        assert len(outputs) == 1 and outputs[0].numel() == 1, "only a scalar loss has an implicit gradient"
        grad_output = torch.ones_like(outputs[0])
    gradients = [grad_output] if isinstance(grad_output, Tensor) else list(grad_output)
    pairs = [(x, gradient) for x, gradient in zip(outputs, gradients, strict=True) if x.requires_grad]
    if not pairs:
        return
    roots, gradients = zip(*pairs, strict=True)
    Variable._execution_engine.run_backward(  # pyright: ignore[reportAttributeAccessIssue]
        tensors=roots,
        grad_tensors=gradients,
        keep_graph=False,
        create_graph=False,
        inputs=(),
        allow_unreachable=True,
        accumulate_grad=True,
    )
