"""Bytes of weight gradients outside of the gradient buffers, in closed form. No torch.

Where products add their weight gradients into `main_grad` themselves (`optim.gradient_accumulation_fusion`), autograd
still wants a gradient of the weight's type. Transformer Engine gives it an empty tensor, one for each shape, which it
keeps. Without the fusion there is a real gradient in its place, until it has been added. The output layer is not the
engine's, so its gradient exists only while it runs backward, in both cases; if it is deferred, its inputs and the
gradients of logits wait, and its empty tensor stays.

Source: `get_dummy_wgrad` in transformer_engine/pytorch/module/base.py, since April 2025, and
`LinearWithGradAccumulationAndAsyncCommunication` in megatron/core/tensor_parallel/layers.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from labkit.config import RunConfig
from labkit.plan.activations import Share
from labkit.plan.device_libraries import Term
from labkit.plan.sizes import padded_vocab
from labkit.plan.stages import StageContents
from labkit.plan.state_tensors import layer_matrices
from labkit.plan.workload import Workload
from labkit.plan.zero_stages import ELEMENT_BYTES


def placeholders(workload: Workload, stages: Sequence[StageContents]) -> Term:
    """Return the empty tensors that are kept in place of weight gradients: the engine's, and a deferred one's."""
    config, name = workload.config, "placeholders"
    width = ELEMENT_BYTES[config.optim.precision]
    if config.model.transformer_impl != "transformer_engine" or not config.optim.gradient_accumulation_fusion:
        return Term(name, 0, "none")
    sizes = {size for holds in stages for size in _layer_sizes(config, holds)}
    if workload.extras.deferred_gradients is not None:
        sizes |= {output_gradient(config, holds) // width for holds in stages if holds.loss}
    return Term(name, sum(sizes) * width, f"({' + '.join(f'{size:,}' for size in sorted(sizes))}) x {width} bytes")


def deferred_bytes(workload: Workload, share: Share, stages: Sequence[StageContents]) -> int:
    """Return the bytes of inputs and logits' gradients that wait until the output layer's gradient is computed."""
    config, limit = workload.config, workload.extras.deferred_gradients
    if limit is None or not any(holds.loss for holds in stages):
        return 0
    microbatches, model = config.num_microbatches(workload.world_size), config.model
    columns = padded_vocab(model, share.tp) // share.tp + model.hidden
    return min(limit or microbatches, microbatches) * share.tokens(model) * columns * share.element_bytes


def largest_gradient(config: RunConfig, holds: StageContents) -> int:
    """Return the bytes of the largest weight gradient of a layer that exists until it has been added."""
    if config.optim.gradient_accumulation_fusion:
        return 0
    return max(_layer_sizes(config, holds), default=0) * ELEMENT_BYTES[config.optim.precision]


def output_gradient(config: RunConfig, holds: StageContents) -> int:
    """Return the bytes of the output layer's weight gradient; 0 on a stage without it."""
    tp = config.parallel.tp
    rows = padded_vocab(config.model, tp) // tp if holds.loss else 0
    return rows * config.model.hidden * ELEMENT_BYTES[config.optim.precision]


def _layer_sizes(config: RunConfig, holds: StageContents) -> set[int]:
    """Return the elements of a stage's different matrices. Matrices of one size are taken for one shape."""
    return {size for index in holds.layers for part in layer_matrices(config, index) for size in part}
