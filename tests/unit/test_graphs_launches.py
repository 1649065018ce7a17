"""Operation log, refusals with their line, and launches: against lists and times worked out by hand."""

import linecache

import pytest
import torch
from torch import nn

from labkit.graphs import GraphCaptureError, make_graphed_callables
from labkit.graphs.backend import get_backend
from labkit.graphs.study.launches import WAIT, predict_launches, run_program
from labkit.graphs.study.operation_log import Memory, OperationLog, memory_of
from labkit.graphs.study.refusal import Refusal, refused

# ---- operation log ----


def test_a_log_lists_what_computes_and_where():
    """The view and the empty tensor compute nothing; add_ writes what it reads; cat reads a list."""
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    with OperationLog() as log:
        y = torch.mm(x, w.t())
        x.add_(1)
        z = torch.cat([x, x])
        e = torch.empty(2, 4)
        torch.mul(y, y, out=e)
    a, b, c, d = log.operations
    assert [operation.name for operation in log.operations] == ["mm", "add_", "cat", "mul"]
    assert (a.reads, a.writes) == ((memory_of(x), memory_of(w)), (memory_of(y),))
    assert b.writes == (memory_of(x),)
    assert (c.reads, c.writes) == ((memory_of(x),), (memory_of(z),))
    assert d.writes == (memory_of(e),)


def test_a_log_keeps_no_memory_so_captured_blocks_are_taken_again():
    backend = get_backend("emulated")
    pool, x = backend.new_pool(), torch.ones(1000)
    with backend.capturing(pool, "chain") as graph, OperationLog() as log:
        y = ((x + 1) + 1) + 1
    written = [operation.writes[0] for operation in log.operations]
    assert graph.num_operations == len(log.operations) == 3
    assert written[2] == written[0] == memory_of(y), "the third sum lies where the first, dead by then, lay"
    assert not written[1].overlaps(written[0])


def test_backward_is_listed_too():
    linear, x = nn.Linear(3, 2, bias=False), torch.ones(4, 3)
    y = linear(x)
    with OperationLog() as log:
        y.sum().backward()
    made = {place for operation in log.operations for place in operation.writes}
    assert linear.weight.grad is not None and memory_of(linear.weight.grad) in made


def test_memory_overlaps_where_a_byte_is_shared():
    assert Memory(0, 8).overlaps(Memory(7, 1)) and Memory(7, 1).overlaps(Memory(0, 8))
    assert not Memory(0, 8).overlaps(Memory(8, 8))


# ---- refusals ----


def test_a_refusal_names_the_users_line_without_its_file():
    def asks(x):
        return x / x.norm().item()

    found = refused(make_graphed_callables, asks, (torch.ones(3),), impl="emulated")
    assert found.line == "return x / x.norm().item()"
    assert found.reason.startswith("reading a number of a tensor (.item()")
    assert __file__ not in repr(found) and repr(found).startswith(found.line)


def test_a_refusal_in_backward_names_the_line_there():
    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * dy.sum().item()

    sample = (torch.ones(3, requires_grad=True),)
    assert refused(make_graphed_callables, Asks.apply, sample).line == "return dy * dy.sum().item()"


def test_the_line_is_that_of_the_error_behind_the_message():
    """On a GPU CUDA's own error is put into words, and knows the line."""

    def fails():
        raise RuntimeError("operation not permitted when stream is capturing")

    try:
        try:
            fails()
        except RuntimeError as error:
            raise GraphCaptureError("some/file.py:3 (in fails): forward cannot be captured") from error
    except GraphCaptureError as error:
        found = Refusal.of(error)
    assert found.line == 'raise RuntimeError("operation not permitted when stream is capturing")'
    assert found.reason == "forward cannot be captured"


def test_what_is_not_refused_is_no_refusal():
    with pytest.raises(ValueError, match="ran, but was expected to be rejected"):
        refused(lambda: None)
    with pytest.raises(ZeroDivisionError):
        refused(lambda: 1 / 0)
    assert linecache.getline(__file__, 1)


# ---- launches ----


def test_a_device_waits_for_launches_that_take_longer():
    """4 operations of 3, launches of 8: each starts at its launch's end, so the end is 4 x 8 + 3."""
    found = predict_launches([3.0] * 4, 8.0)
    assert [run.start for run in found.device] == [8, 16, 24, 32]
    assert found.end == 35 and found.busy == 12 / 35
    assert [(run.start, run.end) for run in found.host] == [(0, 8), (8, 16), (16, 24), (24, 32)]


def test_a_host_that_is_ahead_costs_one_launch():
    """Longer operations hide their launches: 8 + 4 x 12, as in a graph."""
    one_by_one, graph = predict_launches([12.0] * 4, 8.0), predict_launches([12.0] * 4, 8.0, graph=True)
    assert one_by_one.device == graph.device and one_by_one.end == graph.end == 56
    assert len(graph.host) == 1


def test_a_short_operation_behind_a_long_one_waits_for_it():
    found = predict_launches([20.0, 1.0, 1.0], 5.0)
    assert [(run.start, run.end) for run in found.device] == [(5, 25), (25, 26), (26, 27)]


def test_times_below_zero_are_refused():
    with pytest.raises(ValueError, match="0 or more"):
        predict_launches([1.0], -1.0)
    assert predict_launches([], 1.0).end == 0 == predict_launches([], 1.0).busy


def test_a_program_without_waits_and_graphs_is_a_list_of_launches():
    for durations in ([3.0] * 4, [12.0] * 4, [20.0, 1.0, 1.0]):
        one_by_one, graph = run_program(durations, 8.0), run_program([durations], 8.0)
        assert [(run.start, run.end) for run in one_by_one.device] == [
            (run.start, run.end) for run in predict_launches(durations, 8.0).device
        ]
        assert graph.end == predict_launches(durations, 8.0, graph=True).end and len(graph.host) == 1


def test_a_host_that_waits_launches_when_the_device_has_ended():
    """Launches end at 8 and 16, the device at 19; from there 8 for a launch and 5 of work."""
    found = run_program([3.0, 3.0, WAIT, 5.0], 8.0)
    assert [(run.start, run.end) for run in found.host] == [(0, 8), (8, 16), (19, 27)]
    assert [(run.start, run.end) for run in found.device] == [(8, 11), (16, 19), (27, 32)]
    assert run_program([WAIT, 5.0], 8.0).end == 13, "nothing to wait for"
    with pytest.raises(ValueError, match="'pause' is no entry of a program"):
        run_program(["pause"], 8.0)
    with pytest.raises(ValueError, match="0 or more, got launch 8 and -1"):
        run_program([-1.0], 8.0)
