"""A training step of megatron-core's own GPT on CPU, of the same shape and from the same weights as one of ours.

Its own are the model (local layer spec), DistributedDataParallel, the pipeline schedule and the finalisation of
gradients. Gradient norm, clipping and AdamW are ours on both sides: its own clipping insists on CUDA tensors, and its
optimizer on apex or Transformer Engine for speed, so a difference there would say nothing.

Runs inside a rank (`labkit.launch.run`), where it initialises megatron's `parallel_state`.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import Any

import megatron_on_cpu
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from labkit.config import RunConfig
from labkit.models import GPTModel
from labkit.parallel import Group, ParallelGroups
from labkit.parallel.data_parallel.gradients import clip_factor, gradient_statistics
from labkit.parallel.data_parallel.optimizer import Optimizer, parameter_groups
from labkit.parallel.parameters.parameter_record import record_of
from labkit.parallel.parameters.weights import gather_parameter

Batch = dict[str, Tensor]

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # what megatron asks for; silences a warning


def load() -> SimpleNamespace:
    """What is used of megatron-core, imported with its CUDA queries answered for the CPU."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed = importlib.import_module("megatron.core.distributed")
        found = SimpleNamespace(
            parallel_state=importlib.import_module("megatron.core.parallel_state"),
            DistributedDataParallel=distributed.DistributedDataParallel,
            DistributedDataParallelConfig=distributed.DistributedDataParallelConfig,
            finalize_model_grads=distributed.finalize_model_grads,
            GPTModel=importlib.import_module("megatron.core.models.gpt").GPTModel,
            specs=importlib.import_module("megatron.core.models.gpt.gpt_layer_specs"),
            get_forward_backward_func=importlib.import_module(
                "megatron.core.pipeline_parallel"
            ).get_forward_backward_func,
            TransformerConfig=importlib.import_module("megatron.core.transformer").TransformerConfig,
        )
    megatron_on_cpu.settle()
    return found


def transformer_config(mcore: SimpleNamespace, config: RunConfig, vpp: int = 1) -> Any:
    """Megatron's config of the same model and layout: everything that needs CUDA kernels off, all else as it is.

    With interleaving its transfers overlap with computation (`overlap_p2p_comm`), which is its faster way; outputs are
    then not deallocated, because gloo still reads their memory while it sends (losses were wrong otherwise).
    """
    model, parallel = config.model, config.parallel
    chunked = {"virtual_pipeline_model_parallel_size": vpp, "overlap_p2p_comm": True, "batch_p2p_comm": False}
    return mcore.TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        ffn_hidden_size=model.ffn_hidden or 4 * model.hidden,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        sequence_parallel=parallel.sequence_parallel,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        layernorm_epsilon=model.norm_eps,
        activation_func=F.gelu,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        deallocate_pipeline_outputs=vpp == 1,
        finalize_model_grads_func=mcore.finalize_model_grads,
        **(chunked if vpp > 1 else {}),
    )


def set_interleaving(mcore: SimpleNamespace, vpp: int) -> None:
    """Megatron keeps the number of chunks in a global: set it before building or running a model."""
    mcore.parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)


def build_chunks(mcore: SimpleNamespace, config: RunConfig, groups: ParallelGroups, vpp: int = 1) -> list[nn.Module]:
    """Megatron's GPT for this rank, each chunk wrapped in its DistributedDataParallel."""
    state = mcore.parallel_state
    if not state.model_parallel_is_initialized():
        parallel = config.parallel
        state.initialize_model_parallel(parallel.tp, parallel.pp)
    set_interleaving(mcore, vpp)
    transformer = transformer_config(mcore, config, vpp)
    ddp = mcore.DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    first, last = groups.pp.rank == 0, groups.pp.rank == groups.pp.size - 1
    chunks = []
    for chunk in range(vpp):
        model = mcore.GPTModel(
            transformer,
            mcore.specs.get_gpt_layer_local_spec(),
            vocab_size=config.model.vocab_size,
            max_sequence_length=config.model.seq_length,
            pre_process=first and chunk == 0,
            post_process=last and chunk == vpp - 1,
            share_embeddings_and_output_weights=True,
            position_embedding_type="learned_absolute",
            vp_stage=chunk if vpp > 1 else None,
        )
        chunks.append(mcore.DistributedDataParallel(transformer, ddp, model))
    return chunks


NAMES = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight", "embedding.word.weight"),
    (r"embedding\.position_embeddings\.weight", "embedding.position.weight"),
    (r"decoder\.final_layernorm\.(\w+)", r"final_norm.\1"),
    (r"decoder\.(layers\.\d+)\.input_layernorm\.(\w+)", r"\1.attention.norm.\2"),
    (r"decoder\.(layers\.\d+)\.self_attention\.linear_(qkv|proj)\.(\w+)", r"\1.attention.\2.\3"),
    (r"decoder\.(layers\.\d+)\.pre_mlp_layernorm\.(\w+)", r"\1.mlp.norm.\2"),
    (r"decoder\.(layers\.\d+)\.mlp\.linear_(fc1|fc2)\.(\w+)", r"\1.mlp.\2.\3"),
)
"""Megatron's parameter names -> ours; the tensors have the same order inside."""


def our_name(name: str, first_layer: int) -> str:
    """Our name of megatron's parameter; it counts layers from the first of the stage, we over the whole model."""
    name = re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + first_layer}", name)
    for pattern, ours in NAMES:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, ours, name)
    raise ValueError(f"no name of ours for megatron's {name}")


def their_part(tensor: Tensor, like: nn.Parameter, tp: Group) -> Tensor:
    """Megatron's part of what `tensor`, a parameter or its gradient, is our part of: the same slice on the same rank.
    Only where key/value heads are fewer than ranks it cuts qkv evenly, and we copy the heads. Called by all of tp."""
    if record_of(like).replicated is None:
        return tensor
    return gather_parameter(tensor, like, tp).chunk(tp.size)[tp.rank]


def copy_weights(ours: GPTModel, theirs: nn.Module) -> None:
    """Give megatron's chunk (unwrapped) our weights, and the marks by which our gradient norm counts each once."""
    first_layer = min((int(index) for index in ours.layers), default=0)
    source = {parameter.full_name: parameter for parameter in ours.parameters()}  # type: ignore[attr-defined]
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            own = source.pop(our_name(name, first_layer))
            parameter.copy_(their_part(own, own, ours.group))
            record, like = record_of(parameter), record_of(own)
            record.tensor_model_parallel, record.shared = like.tensor_model_parallel, like.shared
    assert not source, f"megatron's model has no {', '.join(source)}"


def causal_mask(length: int) -> Tensor:
    """True where a query may not look; megatron takes it explicitly where its fused softmax is off."""
    return torch.ones(length, length).triu(1).bool()[None, None]


def make_schedule(
    config: RunConfig, groups: ParallelGroups, ours: Sequence[GPTModel], num_microbatches: int
) -> tuple[Callable[[list[Batch]], list[float]], list[nn.Module]]:
    """(a function that zeroes gradients, runs the microbatches and finalises gradients, the wrapped chunks).

    The function returns the losses of the microbatches on the last stage, [] elsewhere. The chunks start from the
    weights of `ours`, this rank's chunks of the same layout; several of them are interleaved.
    """
    mcore, vpp = load(), len(ours)
    chunks = build_chunks(mcore, config, groups, vpp)
    for own, chunk in zip(ours, chunks, strict=True):
        copy_weights(own, chunk.module)  # type: ignore[arg-type]
    run_schedule = mcore.get_forward_backward_func()
    positions = torch.arange(config.model.seq_length).expand(config.train.micro_batch_size, -1)
    mask = causal_mask(config.model.seq_length)

    def forward_step(iterator: Iterator[Batch], chunk: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
        batch = next(iterator)
        output = chunk(batch["tokens_BS"], positions, mask, labels=batch["labels_BS"])
        return output, lambda loss_BS: (loss_BS.mean(), {"loss": loss_BS.detach().mean()})

    def run(batches: list[Batch]) -> list[float]:
        set_interleaving(mcore, vpp)
        for chunk in chunks:
            chunk.zero_grad_buffer()  # type: ignore[operator]
        reports = run_schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if vpp > 1 else iter(batches),
            model=chunks if vpp > 1 else chunks[0],
            num_microbatches=num_microbatches,
            seq_length=config.model.seq_length,
            micro_batch_size=config.train.micro_batch_size,
            forward_only=False,
        )
        return [float(report["loss"]) for report in reports]

    return run, chunks


def make_step(
    config: RunConfig, groups: ParallelGroups, batches: Iterator[Batch], ours: GPTModel
) -> tuple[Callable[[], float | None], nn.Module]:
    """(a function that does one training step and returns the loss on the last stage, the wrapped model).

    The model starts from the weights of `ours`, this rank's chunk of the same layout.
    """
    microbatches = config.train.global_batch_size // config.train.micro_batch_size
    run, [model] = make_schedule(config, groups, [ours], microbatches)
    optimizer = Optimizer(parameter_groups([model]), config.optim, layout=groups)

    def step() -> float | None:
        losses = run(list(islice(batches, microbatches)))
        pieces, others = optimizer.gradient_pieces(), optimizer.uncounted_pieces()
        norm = gradient_statistics(pieces, others, optimizer.norm_groups, groups.device).norm
        optimizer.step(config.optim.lr, clip_factor(norm, config.optim.clip_grad))
        return sum(losses) / len(losses) if losses else None

    return step, model
