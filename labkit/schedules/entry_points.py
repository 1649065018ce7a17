"""The sources' entry points: choose a schedule, make a runtime, run one step.

They take Megatron's argument names plus `groups`, which Megatron keeps in globals. What has no meaning here is refused
in a sentence, never ignored. Code that trains for many steps makes one `PipelineRuntime` and keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from labkit.parallel.groups import ParallelGroups
from labkit.schedules.builders import one_f_one_b
from labkit.schedules.runtime import ForwardStep, PipelineRuntime, Transport

_REFUSED = {
    "decoder_seq_length": "an encoder-decoder's stages need shapes of their own; set variable_seq_lengths instead",
    "param_sync_func": "parameters are gathered ahead only by the interleaved schedule",
    "adjust_tensor_shapes_fn": "give tensor_shape, or set variable_seq_lengths",
    "first_val_step": "it steers fp8 weight caching, which labkit does not have",
    "force_all_reduce": "gradients are reduced by finalize_model_grads, outside the schedule",
    "p2p_communicator": "the transfers follow from groups, batch_p2p_comm and variable_seq_lengths",
    "pg_collection": "labkit's name for it is groups",
}


def get_forward_backward_func(
    pp_size: int | None = None, vp_size: int | None = None, *, groups: ParallelGroups | None = None
) -> Callable[..., list[Any]]:
    """The entry point for a layout: no pipelining at pp 1, else 1F1B. Sizes not given come from `groups`.

    Raises ValueError where neither is given and for several chunks on a rank.
    """
    if groups is not None:
        pp_size = groups.pp.size if pp_size is None else pp_size
        vp_size = groups.config.vpp if vp_size is None else vp_size
    if pp_size is None:
        raise ValueError("give pp_size, or groups: labkit keeps no global layout")
    if (vp_size or 1) > 1:
        raise ValueError(f"vp_size is {vp_size}: run interleaved chunks with a Schedule of yours and PipelineRuntime")
    return forward_backward_pipelining_without_interleaving if pp_size > 1 else forward_backward_no_pipelining


def forward_backward_no_pipelining(*, groups: ParallelGroups, **arguments: Any) -> list[Any]:
    """Forward and backward of each microbatch in turn, gradients synchronised with the last.

    Arguments and errors as in `forward_backward_pipelining_without_interleaving`; `groups` must have one stage.
    """
    if groups.pp.size != 1:
        raise ValueError(
            f"the pipeline has {groups.pp.size} stages: get_forward_backward_func gives the right function"
        )
    return forward_backward_pipelining_without_interleaving(groups=groups, **arguments)


def forward_backward_pipelining_without_interleaving(
    *,
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    groups: ParallelGroups,
    dtype: Any = None,
    tensor_shape: Sequence[int] | None = None,
    seq_length: int | None = None,
    micro_batch_size: int | None = None,
    hidden_size: int | None = None,
    sequence_parallel: bool = False,
    variable_seq_lengths: bool = False,
    grad_scaler: Callable[..., Any] | None = None,
    timers: Any = None,
    collect_non_loss_data: bool = False,
    enable_autocast: bool = False,
    no_sync_func: Callable[..., Any] | None = None,
    grad_sync_func: Callable[..., Any] | None = None,
    calculate_per_token_loss: bool = False,
    deallocate_pipeline_outputs: bool = False,
    forward_only: bool = False,
    overlap_p2p_comm: bool = False,
    batch_p2p_comm: bool | None = None,
    use_ring_exchange_p2p: bool = False,
    **refused: Any,
) -> list[Any]:
    """One step under 1F1B; returns the metrics of every microbatch on the last stage, [] elsewhere.

    model, data_iterator: one chunk and its iterator, or lists of one.
    tensor_shape: (S, B, H) of a whole sample's activation; or seq_length, micro_batch_size and hidden_size. S is
        divided by the context-parallel size where seq_length is given (tensor_shape is taken as it is), and by the
        tensor-parallel size under sequence_parallel. Neither is needed at pp 1 or with variable_seq_lengths.
    dtype: of the tensors between stages, and of autocast where enable_autocast is set.
    batch_p2p_comm: True batches the transfers between two actions, False orders them even/odd, None posts receives
        ahead and lets sends run behind the computation.
    The rest as in `PipelineRuntime`. Raises ValueError for what the sources offer and labkit does not.
    """
    _refuse(refused)
    if overlap_p2p_comm:
        raise ValueError("overlap_p2p_comm: it needs interleaving (though batch_p2p_comm=None overlaps)")
    if use_ring_exchange_p2p:
        raise ValueError("use_ring_exchange_p2p: torch.distributed has no ring_exchange; use batch_p2p_comm=True")
    if enable_autocast and dtype is None:
        raise ValueError("enable_autocast needs the dtype to cast to")
    chunks = model if isinstance(model, list | tuple) else [model]
    if len(chunks) != 1:
        raise ValueError(f"{len(chunks)} model chunks given: the schedule without interleaving takes one")
    sizes = (seq_length, micro_batch_size, hidden_size)
    shape = _tensor_shape(groups, tensor_shape, sizes, sequence_parallel)
    if shape is None and not variable_seq_lengths and groups.pp.size > 1:
        raise ValueError("give tensor_shape, or seq_length, micro_batch_size and hidden_size, or variable_seq_lengths")
    transports: dict[bool | None, Transport] = {None: "posted", True: "batched", False: "even_odd"}
    runtime = PipelineRuntime(
        one_f_one_b(groups.pp.size, num_microbatches),
        chunks,
        groups,
        forward_step_func=forward_step_func,
        tensor_shape=None if variable_seq_lengths else shape,
        dtype=dtype,
        transport=transports[batch_p2p_comm],
        grad_scaler=grad_scaler,
        calculate_per_token_loss=calculate_per_token_loss,
        no_sync_func=no_sync_func,
        grad_sync_func=grad_sync_func,
        deallocate_pipeline_outputs=deallocate_pipeline_outputs,
        timers=timers,
        autocast_dtype=dtype if enable_autocast else None,
    )
    return runtime.run(data_iterator, num_microbatches, forward_only, collect_non_loss_data=collect_non_loss_data)


def _refuse(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if name not in _REFUSED:
            raise TypeError(f"unexpected argument {name!r}")
        if value is not None and value is not False:
            raise ValueError(f"{name} is not supported: {_REFUSED[name]}")


def _tensor_shape(
    groups: ParallelGroups, shape: Sequence[int] | None, sizes: tuple[int | None, ...], sequence_parallel: bool
) -> tuple[int, ...] | None:
    if shape is None:
        length, batch, hidden = sizes
        if length is None or batch is None or hidden is None:
            return None
        shape = (length // groups.cp.size, batch, hidden)
    split = groups.tp.size if sequence_parallel else 1
    if shape[0] % split:
        raise ValueError(f"sequence_parallel cuts {shape[0]} positions into {split} equal parts")
    return (shape[0] // split, *shape[1:])
