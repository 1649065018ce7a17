"""A sent activation takes no memory until its backward: what is left of it when the next action begins."""

import math

import pytest
from pipeline_stages import SHAPE, Stage, forward_step, microbatches
from torch.multiprocessing.reductions import StorageWeakRef

from labkit.config import ParallelConfig
from labkit.parallel import initialize_model_parallel
from labkit.schedules import PipelineRuntime, get_forward_backward_func, gpipe, one_f_one_b

COUNT = 4
WHOLE = math.prod(SHAPE)


def _left_over(builder, transport, **deallocate):
    """At the start of every forward but the first, of all outputs before: their sizes, and whose memory is gone.

    A `builder` of None runs the entry point.
    """
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    outputs, storages, seen = [], [], []

    def step(data_iterator, model):
        if outputs:
            seen.append(([output.numel() for output in outputs], [storage.expired() for storage in storages]))
        output, loss_func = forward_step(data_iterator, model)
        outputs.append(output)
        storages.append(StorageWeakRef(output.untyped_storage()))
        return output, loss_func

    chunk, data = Stage(groups.pp.rank), iter(microbatches(COUNT))
    how = {"forward_step_func": step, "tensor_shape": SHAPE, **deallocate}
    if builder is None:
        get_forward_backward_func(groups=groups)(
            data_iterator=data, model=chunk, num_microbatches=COUNT, groups=groups, **how
        )
    else:
        PipelineRuntime(builder(2, COUNT), chunk, groups, transport=transport, **how).run(data)
    return seen


def _kept(*args):
    return _left_over(*args, deallocate_pipeline_outputs=False)


def _shrunk(*args):
    return _left_over(*args, deallocate_pipeline_outputs=True)


@pytest.mark.parametrize("transport", ["posted", "batched", "even_odd", "blocking"])
def test_a_sent_output_is_one_element_when_the_next_action_begins(transport, on_ranks):
    first, last = on_ranks(_shrunk, 2, gpipe, transport)
    assert [sizes for sizes, _ in first] == [[1], [1, 1], [1, 1, 1]]
    assert last == [([WHOLE] * n, [False] * n) for n in (1, 2, 3)]  # not sent: it goes into the loss
    if transport != "posted":  # where the send is over by then
        assert [gone for _, gone in first] == [[True], [True, True], [True, True, True]]


def test_sends_behind_the_computation_hold_the_memory_until_they_must_have_arrived(on_ranks):
    """Under 1F1B the forward of microbatch m follows the gradient of m - 2, which the other rank made of its output."""
    first, _ = on_ranks(_shrunk, 2, one_f_one_b, "posted")
    assert first == [([1], [False]), ([1, 1], [True, False]), ([1, 1, 1], [True, True, False])]


@pytest.mark.parametrize("transport", ["posted", "batched"])
def test_outputs_are_kept_where_that_is_asked_for(transport, on_ranks):
    for seen in on_ranks(_kept, 2, gpipe, transport):
        assert seen == [([WHOLE] * n, [False] * n) for n in (1, 2, 3)]


def test_the_entry_points_keep_outputs_unless_asked(on_ranks):
    whole, one = [[WHOLE] * n for n in (1, 2, 3)], [[1] * n for n in (1, 2, 3)]
    for run, wanted in ((_left_over, whole), (_kept, whole), (_shrunk, one)):
        first, _ = on_ranks(run, 2, None, "posted")
        assert [sizes for sizes, _ in first] == wanted
