"""Megatron's entry points: choose a schedule, make a runtime, run one step.

They take Megatron's argument names plus `groups`, which Megatron keeps in globals. They reject an argument that has no
meaning here; they never ignore it. Code that trains for many steps makes one `PipelineRuntime` and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from numbers import Integral
from typing import Any, TypedDict, Unpack

from labkit.comm.groups import ParallelGroups
from labkit.schedules.builders import interleaved
from labkit.schedules.ir import Schedule
from labkit.schedules.lowering import DEFAULT_TRANSPORT, Transport
from labkit.schedules.message_shapes import Shape, TensorShape, equal_parts, stage_shapes
from labkit.schedules.runtime import ForwardStep, PipelineRuntime, chunks_of

_REFUSED = {
    "adjust_tensor_shapes_fn": "give tensor_shape, or set variable_seq_lengths",
    "first_val_step": "it says when fp8 weights are cast again, which labkit does after each update",
    "force_all_reduce": "gradients are reduced by finalize_model_grads, outside the schedule",
    "finalize_model_grads_func": "call it after the step: the schedule ends with the last backward",
    "overlap_moe_expert_parallel_comm": "give PipelineRuntime a schedule with merged pairs",
    "p2p_communicator": "the transfers follow from groups, batch_p2p_comm and variable_seq_lengths",
    "pg_collection": "labkit's name for it is groups",
}


class StepArguments(TypedDict, total=False):
    """Arguments of the three entry points besides model, data and groups, by Megatron's names."""

    grad_scaler: Callable[..., Any] | None
    """Applied to the loss before its backward."""
    timers: Any
    """`timers(name, log_level=n)` gives an object with `start` and `stop`."""
    collect_non_loss_data: bool
    """Call the loss function with `non_loss_data=True` and return its results; needs forward_only."""
    forward_only: bool
    """Losses without gradients."""
    enable_autocast: bool
    """Run forwards, but not the loss function, under torch.autocast with `dtype`."""
    dtype: Any
    """Type of the tensors between stages; None means the type of the first floating-point parameter."""
    calculate_per_token_loss: bool
    """Leave a loss of three items unscaled; the end of the step divides gradients by the number of tokens. A model with
    experts then needs seq_length and micro_batch_size."""
    no_sync_func: Any
    """A context in which backwards only accumulate, or a list with one per chunk; None takes the chunks' `no_sync`."""
    grad_sync_func: Any
    """Called with a chunk's parameters to synchronise their gradients, or a list with one per chunk.

    As in Megatron, nobody calls it at pp 1, nor on the first rank without interleaving. There the last backward runs
    outside `no_sync_func`'s context, and its hooks synchronise."""
    param_sync_func: Any
    """Called with a chunk's parameters before its first forward, or a list with one per chunk; interleaving only."""
    deallocate_pipeline_outputs: bool
    """Free an output's values once it is sent; False unless given, as in Megatron."""
    tensor_shape: TensorShape
    """(S, B, H) of the tensor that a rank sends, or another form that `PipelineRuntime` takes. Instead of it: the next
    three."""
    seq_length: int | None
    """Length of a whole sample; this function divides it by the context-parallel size."""
    micro_batch_size: int | None
    """Samples in a microbatch."""
    hidden_size: int | None
    """H."""
    decoder_seq_length: int | None
    """Length of the decoder's sequence, for a `groups.config.split_rank`."""
    sequence_parallel: bool
    """Divide S by the tensor-parallel size."""
    variable_seq_lengths: bool
    """Send three sizes before each tensor; no shape is needed."""
    batch_p2p_comm: bool | None
    """True batches the transfers between two actions, False orders them even/odd, None posts receives ahead and lets
    sends run behind the computation. With variable_seq_lengths nothing is one batch: True and False then only wait."""
    overlap_p2p_comm: bool
    """As batch_p2p_comm None; interleaving only, and not together with batch_p2p_comm=True."""
    use_ring_exchange_p2p: bool
    """Rejected."""
    num_microbatches_with_partial_activation_checkpoints: int | None
    """Number of microbatches in flight that recompute nothing; None leaves it to the model."""
    microbatch_group_size_per_vp_stage: int | None
    """Microbatches that a chunk runs before the next chunk's turn; None is pp. Interleaving only."""


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, *, groups: ParallelGroups | None = None
) -> Callable[..., list[Any]]:
    """Return the entry point for a layout: no pipelining at pp 1, 1F1B with one chunk per rank, else interleaving.

    Sizes not given come from `groups`. Raises ValueError if the call gives neither.
    """
    if groups is not None:
        pp_size = groups.pp.size if pp_size is None else pp_size
        vp_size = groups.config.vpp if vp_size is None else vp_size
    if pp_size is None:
        raise ValueError("give pp_size, or groups: labkit keeps no global layout")
    if pp_size == 1:
        return forward_backward_no_pipelining
    if (vp_size or 1) > 1:
        return forward_backward_pipelining_with_interleaving
    return forward_backward_pipelining_without_interleaving


def forward_backward_no_pipelining(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    groups: ParallelGroups,
    **arguments: Unpack[StepArguments],
) -> list[Any]:
    """Run forward and backward of each microbatch in turn; the last backward synchronises gradients.

    Arguments and errors as in `forward_backward_pipelining_without_interleaving`; `groups` must have one stage.
    """
    if groups.pp.size != 1:
        raise ValueError(
            f"the pipeline has {groups.pp.size} stages: get_forward_backward_func gives the right function"
        )
    return forward_backward_pipelining_without_interleaving(
        forward_step_func=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        num_microbatches=num_microbatches,
        groups=groups,
        **arguments,
    )


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    groups: ParallelGroups,
    **arguments: Unpack[StepArguments],
) -> list[Any]:
    """Run one step under 1F1B; return the metrics of every microbatch on the last stage, [] elsewhere.

    forward_step_func: (data iterator, chunk) -> (output, loss function).
    model, data_iterator: one chunk and its iterator, or lists of one (of chunks also an `nn.ModuleList`).
    arguments: those of `StepArguments`. With `groups.config.split_rank` the first ranks are the encoder and send its
        hidden states. The other ranks send the decoder's and the encoder's output.

    Raises ValueError for options of Megatron that labkit does not offer.
    """
    chunks = chunks_of(model)
    if len(chunks) != 1:
        raise ValueError(f"{len(chunks)} model chunks given: the schedule without interleaving takes one")
    if arguments.get("overlap_p2p_comm"):
        raise ValueError("overlap_p2p_comm: it needs interleaving (though batch_p2p_comm=None overlaps)")
    if arguments.get("param_sync_func") is not None:
        raise ValueError("param_sync_func: only the interleaved schedule prefetches parameters")
    if arguments.pop("microbatch_group_size_per_vp_stage", None) is not None:
        raise ValueError("microbatch_group_size_per_vp_stage: there are no virtual stages without interleaving")
    schedule = _schedule(groups.pp.size, 1, num_microbatches)
    return _run(schedule, chunks, groups, forward_step_func, data_iterator, **arguments)


def forward_backward_pipelining_with_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Sequence[Any],
    model: Sequence[Any],
    num_microbatches: int,
    groups: ParallelGroups,
    **arguments: Unpack[StepArguments],
) -> list[Any]:
    """Run one step under interleaved 1F1B; return the metrics of every microbatch on the last rank, [] elsewhere.

    forward_step_func: (data iterator, chunk) -> (output, loss function).
    model, data_iterator: one chunk and its iterator for each virtual stage of the rank, the earliest stage first, in
        lists or tuples (chunks also in an `nn.ModuleList`).
    arguments: those of `StepArguments`.

    Raises ValueError for options of Megatron that labkit does not offer, for an encoder-decoder, and for numbers of
    microbatches that interleaving cannot run.
    """
    if groups.config.split_rank is not None or arguments.get("decoder_seq_length") is not None:
        raise ValueError(
            "an encoder-decoder cannot be interleaved: split_rank gives the first ranks to the encoder and the others "
            "to the decoder, and interleaving would put chunks of both on every rank"
        )
    chunks = chunks_of(model)
    if len(chunks) < 2:
        raise ValueError(
            "interleaving needs a list of two or more model chunks per rank; with one use the 1F1B function"
        )
    if not isinstance(data_iterator, list | tuple) or len(data_iterator) != len(chunks):
        raise ValueError(f"interleaving needs a list of data iterators, one for each of the {len(chunks)} model chunks")
    group_size = arguments.pop("microbatch_group_size_per_vp_stage", None)
    schedule = _schedule(groups.pp.size, len(chunks), num_microbatches, group_size)
    return _run(schedule, chunks, groups, forward_step_func, data_iterator, **arguments)


_schedule = lru_cache(maxsize=16)(interleaved)
"""The schedule of a step: 1F1B for one chunk per rank. It is kept with its `derived` values, because every step makes a
runtime of its own."""


def _run(
    schedule: Schedule,
    chunks: list[Any],
    groups: ParallelGroups,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    *,
    dtype: Any = None,
    tensor_shape: TensorShape = None,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    hidden_size: int | None = None,
    decoder_seq_length: int | None = None,
    sequence_parallel: bool = False,
    variable_seq_lengths: bool = False,
    enable_autocast: bool = False,
    overlap_p2p_comm: bool = False,
    batch_p2p_comm: bool | None = None,
    use_ring_exchange_p2p: bool = False,
    collect_non_loss_data: bool = False,
    forward_only: bool = False,
    deallocate_pipeline_outputs: bool = False,
    **others: Any,
) -> list[Any]:
    """Make a runtime for `schedule` and run one step; `others` are those that the runtime takes by the same names."""
    _refuse(others)
    if enable_autocast and dtype is None:
        raise ValueError("enable_autocast=True needs the type to compute in: give dtype=torch.bfloat16 as well")
    if decoder_seq_length is not None and groups.config.split_rank is None and groups.pp.size > 1:
        raise ValueError("decoder_seq_length belongs to an encoder-decoder: set split_rank in the parallel config")
    lengths = (seq_length, micro_batch_size, hidden_size)
    runtime = PipelineRuntime(
        schedule,
        chunks,
        groups,
        forward_step_func=forward_step_func,
        tensor_shape=_shape(groups, tensor_shape, lengths, decoder_seq_length, sequence_parallel, variable_seq_lengths),
        variable_seq_lengths=variable_seq_lengths,
        dtype=dtype,
        transport=_transport(overlap_p2p_comm, batch_p2p_comm, use_ring_exchange_p2p),
        deallocate_pipeline_outputs=deallocate_pipeline_outputs,
        autocast_dtype=dtype if enable_autocast else None,
        tokens_per_microbatch=seq_length * micro_batch_size if seq_length and micro_batch_size else None,
        **others,
    )
    return runtime.run(data_iterator, None, forward_only, collect_non_loss_data=collect_non_loss_data)


def _refuse(others: dict[str, Any]) -> None:
    """Remove rejected arguments from `others` if they are off. Raise for those that are on, and for unknown names."""
    for name in sorted(others.keys() - StepArguments.__annotations__.keys()):
        if name not in _REFUSED:
            raise TypeError(f"unexpected argument {name!r}")
        value = others.pop(name)
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported: {_REFUSED[name]}")


def _transport(overlap: bool, batched: bool | None, ring: bool) -> Transport:
    if ring:
        raise ValueError("use_ring_exchange_p2p: torch.distributed has no ring_exchange; use batch_p2p_comm=True")
    if overlap and batched:
        raise ValueError(
            "overlap_p2p_comm waits for each transfer on its own, batch_p2p_comm for all of a batch: set one of them"
        )
    if overlap or batched is None:
        return DEFAULT_TRANSPORT
    return "batched" if batched else "even_odd"


def _shape(
    groups: ParallelGroups,
    shape: TensorShape,
    sizes: tuple[int | None, int | None, int | None],
    decoder_seq_length: int | None,
    sequence_parallel: bool,
    variable: bool,
) -> TensorShape:
    length, batch, hidden = sizes
    split = groups.config.split_rank
    _check_sizes(seq_length=length, micro_batch_size=batch, hidden_size=hidden, decoder_seq_length=decoder_seq_length)
    if groups.pp.size == 1:
        return None
    if shape is not None:
        return _split_over_tensor_parallel(groups, shape) if sequence_parallel else shape
    if length is not None and batch is not None and hidden is not None:
        return stage_shapes(
            length,
            batch,
            hidden,
            cp=groups.cp.size,
            tp=groups.tp.size if sequence_parallel else 1,
            split_rank=split,
            decoder_seq_length=decoder_seq_length,
        )
    if not variable:
        raise ValueError("give tensor_shape, or seq_length, micro_batch_size and hidden_size, or variable_seq_lengths")
    return None if split is None else lambda stage: [()] * (1 if stage < split else 2)


def _check_sizes(**sizes: object) -> None:
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, Integral) or isinstance(size, bool) or size < 1):
            raise ValueError(f"{name} = {size!r}: must be an integer of at least 1; give it as in {name}=128")


def _split_over_tensor_parallel(groups: ParallelGroups, shape: TensorShape) -> Shape:
    """Return one shape with its S divided by the tensor-parallel size. Raises ValueError if that is impossible."""
    if callable(shape) or not shape or not all(isinstance(size, int) for size in shape):
        raise ValueError("sequence_parallel divides one tensor_shape: divide several shapes yourself")
    length, *rest = (int(size) for size in shape)  # pyright: ignore[reportArgumentType]
    return (equal_parts(length, groups.tp.size, "tp, sequence_parallel"), *rest)
