"""When gradients are synchronised and parameters gathered: our step beside megatron-core's own, recorded."""

import warnings
from contextlib import contextmanager

import pytest
import torch
from pipeline_stages import SHAPE, Stage, forward_step, microbatches

from labkit.config import ParallelConfig
from labkit.launch import run
from labkit.parallel import initialize_model_parallel
from labkit.schedules import get_forward_backward_func

pytestmark = pytest.mark.oracle


class _Log:
    """What one step does, in order; a backward says whether no_sync held."""

    def __init__(self, chunks):
        self.chunks, self.said, self.held = chunks, [], False

    @contextmanager
    def no_sync(self):
        self.held = True
        yield
        self.held = False

    def number(self, parameters):
        first = next(iter(parameters))
        return next(i for i, chunk in enumerate(self.chunks) if chunk.linear.weight is first)

    def step(self, iterator, model):
        output, loss_func = forward_step(iterator, model)
        chunk = self.chunks.index(model)
        self.said.append(f"F{chunk}")
        output.register_hook(lambda gradient: self.said.append(f"B{chunk}{' held' if self.held else ''}"))
        return output, loss_func

    def functions(self, grad_sync):
        say = lambda word: lambda parameters: self.said.append(f"{word} {self.number(parameters)}")  # noqa: E731
        return {
            "no_sync_func": self.no_sync,
            "grad_sync_func": say("sync") if grad_sync else None,
            "param_sync_func": say("gather") if len(self.chunks) > 1 else None,
        }


def _arguments(chunks, count, step):
    several = len(chunks) > 1
    return {
        "forward_step_func": step,
        "data_iterator": [iter(microbatches(count)) for _ in chunks] if several else iter(microbatches(count)),
        "model": chunks if several else chunks[0],
        "num_microbatches": count,
        "seq_length": SHAPE[0],
        "micro_batch_size": SHAPE[1],
    }


def _megatrons(pp, vpp, count, grad_sync):
    import megatron_on_cpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.pipeline_parallel import get_forward_backward_func as theirs
    megatron_on_cpu.settle()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp if vpp > 1 else None)
    chunks = [Stage(chunk * pp + torch.distributed.get_rank()) for chunk in range(vpp)]
    log = _Log(chunks)
    config = ModelParallelConfig(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        microbatch_group_size_per_vp_stage=pp,
        pipeline_dtype=torch.float64,
        **log.functions(grad_sync),
    )
    config.hidden_size = SHAPE[2]  # of a TransformerConfig, which the loop expects
    config.calculate_per_token_loss = config.fine_grained_activation_offloading = False
    config.num_moe_experts = config.mtp_num_layers = None
    for chunk in chunks:
        chunk.config, chunk.model_type = config, None
    plain = Stage.set_input_tensor
    for chunk in chunks:  # megatron hands over a list
        chunk.set_input_tensor = lambda x, chunk=chunk: plain(chunk, x[0] if isinstance(x, list) else x)
    theirs()(forward_only=False, **_arguments(chunks, count, log.step))
    return log.said


def _ours(pp, vpp, count, grad_sync):
    groups = initialize_model_parallel(ParallelConfig(pp=pp, vpp=vpp))
    log = _Log([Stage(chunk * pp + groups.pp.rank) for chunk in range(vpp)])
    how = {"groups": groups, "hidden_size": SHAPE[2], "dtype": torch.float64, **log.functions(grad_sync)}
    get_forward_backward_func(groups=groups)(**_arguments(log.chunks, count, log.step), **how)
    return log.said


CASES = [(1, 6), (2, 4), (2, 8), (3, 8)]


def _both(pp):
    cases = [(vpp, count, sync) for vpp, count in CASES for sync in (False, True)]
    ours = [_ours(pp, *case) for case in cases]  # all before megatron makes its groups, which count differently
    return [(case, mine, _megatrons(pp, *case)) for case, mine in zip(cases, ours, strict=True)]


@pytest.mark.parametrize("pp", [2, 4])
def test_each_rank_does_the_same_in_the_same_order(pp):
    for rank, compared in enumerate(run(_both, pp, pp)):
        for (vpp, count, grad_sync), ours, theirs in compared:
            assert ours == theirs, (vpp, count, grad_sync)
            assert any("sync" in word for word in ours) == (grad_sync and (vpp > 1 or rank > 0))
