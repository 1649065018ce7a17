"""Any schedule on real ranks against one process: losses, gradients, order, refusals."""

import random
from itertools import pairwise

import pytest
import torch
from pipeline_stages import SHAPE, Stage, forward_step, forward_step_tokens, microbatches, reference, run_stages

from labkit.config import ParallelConfig
from labkit.launch import RankError, run
from labkit.parallel import CommLedger, initialize_model_parallel
from labkit.schedules import (
    Action,
    PipelineRuntime,
    Schedule,
    ScheduleError,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    zbv,
)
from labkit.schedules.runtime import RECEIVES_AHEAD

LOOPED = Schedule.from_csv("0F0,0F1,2F0,2F1,2B0,0B0,2B1,0B1\n1F0,1F1,3F0,3B0,3F1,1B0,3B1,1B1", "looped by hand")
V_SHAPED = Schedule.from_csv("0F0,0F1,3F0,3B0,0B0,3F1,3B1,0B1\n1F0,2F0,1F1,2B0,1B0,2F1,2B1,1B1", "V by hand")
OUT_OF_ORDER = Schedule.from_csv("0F2,0F0,0F1,0B0,0B2,0B1\n1F2,1F0,1B0,1F1,1B2,1B1", "out of order")
TRANSPORTS = ("posted", "batched", "even_odd", "blocking")


def _same(results, expected, count):
    losses, gradients = expected
    assert [report["loss"] for report in results[-1][0] or results[0][0]] == pytest.approx(losses, rel=1e-12)
    seen = {}
    for _, by_stage, _ in results:
        seen |= by_stage
    assert sorted(seen) == list(range(len(gradients)))
    for stage, wanted in enumerate(gradients):
        for a, b in zip(seen[stage], wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)
    assert sum(bool(reports) for reports, _, _ in results) == 1
    assert count == max(len(reports) for reports, _, _ in results)


def _many(cases):
    return [run_stages(builder(pp, m), transport=transport) for builder, pp, m, transport in cases]


COUNTS = (1, 2, 3, 4, 5, 8)
CASES = [
    (b, m, t) for b in (gpipe, one_f_one_b) for m in COUNTS for t in TRANSPORTS if (b, t) != (one_f_one_b, "blocking")
]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_parity_over_stages_microbatches_and_transports(pp, on_ranks):
    """Fewer microbatches than stages and a single one included (PiPPy issue 1064, torchtitan issue 775)."""
    cases = [(b, pp, m, t) for b, m, t in CASES]
    by_rank = on_ranks(_many, pp, cases)
    for number, (_, _, count, _) in enumerate(cases):
        _same([results[number] for results in by_rank], reference(pp, count), count)


@pytest.mark.parametrize("schedule", [LOOPED, V_SHAPED, OUT_OF_ORDER], ids=lambda s: s.name)
def test_schedules_of_ones_own_run_as_they_are(schedule, on_ranks):
    by_microbatch = reference(schedule.num_stages, schedule.num_microbatches)
    for transport in ("posted", "batched", "even_odd"):
        results = on_ranks(run_stages, 2, schedule, forward_step, None, 1, False, False, transport)
        _same(results, by_microbatch, schedule.num_microbatches)


def _random_schedule(seed, pp, chunks, count, placement):
    """Any legal schedule: again and again a random action that could run now is appended to its rank's row."""
    draw, stages = random.Random(seed), pp * chunks
    rank_of = {s: s % pp if placement == "looped" or s // pp % 2 == 0 else pp - 1 - s % pp for s in range(stages)}
    todo = [Action(s, kind, m) for s in range(stages) for kind in "FB" for m in range(count)]
    done, rows = set(), [[] for _ in range(pp)]
    while todo:
        ready = []
        for a in todo:
            needs = [] if a.kind == "F" else [Action(a.stage, "F", a.microbatch)]
            neighbour = a.stage + (-1 if a.kind == "F" else 1)
            if 0 <= neighbour < stages:
                needs.append(Action(neighbour, a.kind, a.microbatch))
            if done.issuperset(needs):
                ready.append(a)
        chosen = draw.choice(ready)
        todo.remove(chosen)
        done.add(chosen)
        rows[rank_of[chosen.stage]].append(chosen)
    return Schedule(f"random {seed}", stages, count, rows)


def _all(schedules):
    return [run_stages(schedule) for schedule in schedules]


@pytest.mark.parametrize(("pp", "chunks", "placement"), [(2, 1, "looped"), (2, 2, "looped"), (2, 2, "V"), (4, 2, "V")])
def test_random_legal_schedules_neither_hang_nor_differ(pp, chunks, placement, on_ranks):
    schedules = [_random_schedule(seed, pp, chunks, 1 + seed % 5, placement) for seed in range(12)]
    by_rank = on_ranks(_all, pp, schedules)
    for number, schedule in enumerate(schedules):
        count = schedule.num_microbatches
        _same([results[number] for results in by_rank], reference(pp * chunks, count), count)


def _recorded(schedule, transport):
    return run_stages(schedule, transport=transport, record=True)


@pytest.mark.parametrize("transport", TRANSPORTS[:3])
def test_events_are_the_row_in_order(transport, on_ranks):
    schedule = one_f_one_b(4, 6)
    for rank, (_, _, events) in enumerate(on_ranks(_recorded, 4, schedule, transport)):
        computed = [e for e in events if e.kind in ("forward", "backward")]
        assert [e.name for e in computed] == [str(action) for action in schedule.actions(rank)]
        assert all(e.rank == rank and e.chunk == 0 and e.microbatch is not None for e in computed)
        assert all(first.end <= second.start for first, second in pairwise(computed))
        crossing = 6 * ((rank > 0) + (rank < 3))
        assert all(sum(e.kind == kind for e in events) == crossing for kind in ("send", "recv"))


def _twice(schedule):
    first, again = run_stages(schedule), run_stages(schedule, runs=2)
    return (
        all(torch.equal(a, b) for stage in first[1] for a, b in zip(first[1][stage], again[1][stage], strict=True))
        and first[0] == again[0]
    )


def test_the_same_run_twice_is_bit_equal(on_ranks):
    assert all(on_ranks(_twice, 4, one_f_one_b(4, 5)))


def _variants(schedule):
    lengths = [2, 5, 3]
    return {
        "lengths posted": run_stages(schedule, lengths=lengths, tensor_shape=None),
        "lengths batched": run_stages(schedule, lengths=lengths, tensor_shape=None, transport="batched"),
        "lengths even_odd": run_stages(schedule, lengths=lengths, tensor_shape=None, transport="even_odd"),
        "kept outputs": run_stages(schedule, deallocate_pipeline_outputs=False),
        "tokens": run_stages(schedule, forward_step_tokens),
        "scaled": run_stages(schedule, grad_scaler=lambda loss: loss * 8),
    }


@pytest.mark.parametrize("pp", [2, 4])
def test_variants_against_one_process(pp, on_ranks):
    schedule = one_f_one_b(pp, 5)
    by_rank = on_ranks(_variants, pp, schedule)
    lengths = reference(pp, 5, lengths=[2, 5, 3])
    expected = {
        "lengths posted": lengths,
        "lengths batched": lengths,
        "lengths even_odd": lengths,
        "kept outputs": reference(pp, 5),
        "tokens": reference(pp, 5, forward_step_tokens),
        "scaled": reference(pp, 5, scale=8),
    }
    for name, wanted in expected.items():
        _same([variants[name] for variants in by_rank], wanted, 5)


def _lengths(schedules):
    how = {"lengths": [2, 5, 3], "tensor_shape": None}
    return [run_stages(s, transport=transport, **how) for s in schedules for transport in TRANSPORTS[:3]]


@pytest.mark.parametrize("pp", [2, 4])
def test_varying_lengths_under_any_placement(pp, on_ranks):
    schedules = [interleaved(pp, 2, 2 * pp), zbv(pp, 2 * pp), *([LOOPED, V_SHAPED, OUT_OF_ORDER] if pp == 2 else [])]
    by_rank = on_ranks(_lengths, pp, schedules)
    for number in range(3 * len(schedules)):
        schedule = schedules[number // 3]
        wanted = reference(schedule.num_stages, schedule.num_microbatches, lengths=[2, 5, 3])
        results = [found[number] for found in by_rank]
        seen = {stage: grads for _, by_stage, _ in results for stage, grads in by_stage.items()}
        losses = next(reports for reports, _, _ in results if reports)
        assert [report["loss"] for report in losses] == pytest.approx(wanted[0], rel=1e-12)
        for stage, expected in enumerate(wanted[1]):
            for a, b in zip(seen[stage], expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_receives_are_posted_ahead_of_the_action_before(on_ranks):
    """A receive's Event runs from its posting to its arrival: the next ones are open while an action computes."""
    _, _, events = on_ranks(_recorded, 2, gpipe(2, 8), "posted")[1]
    forwards = {e.name: e for e in events if e.kind == "forward"}
    received = sorted((e for e in events if e.kind == "recv"), key=lambda e: e.start)
    assert len(received) == 8
    for microbatch in range(1, 8):
        assert received[microbatch].start < forwards[f"1F{microbatch - 1}"].start
    for event in received:  # but no more than the limit are open, which bounds their memory
        assert sum(other.start <= event.start < other.end for other in received) <= 1 + RECEIVES_AHEAD["gloo"]


def _forward_only(schedule):
    reports, gradients, events = run_stages(schedule, forward_only=True, record=True)
    assert all(g is None for grads in gradients.values() for g in grads)
    assert {e.kind for e in events} <= {"forward", "send", "recv", "wait"}
    groups = initialize_model_parallel(ParallelConfig(pp=schedule.pp))
    runtime = PipelineRuntime(
        schedule, Stage(groups.pp.rank), groups, forward_step_func=forward_step, tensor_shape=SHAPE
    )
    data = [iter(microbatches(schedule.num_microbatches))]
    return reports, runtime.run(data, forward_only=True, collect_non_loss_data=True)


def test_forward_only_gives_losses_and_other_data_and_no_gradients(on_ranks):
    reports, collected = on_ranks(_forward_only, 4, gpipe(4, 3))[-1]
    losses, _ = reference(4, 3)
    assert [r["loss"] for r in reports] == pytest.approx(losses, rel=1e-12)
    assert [list(c) for c in collected] == [["sum"]] * 3


def _memory(schedule):
    """Most tensors that autograd had saved in this rank's stage at once, in units of what one microbatch saves."""
    alive, each, peak = 0, 0, 0

    class Saved:
        def __init__(self, tensor):
            nonlocal alive
            self.tensor = tensor
            alive += 1

        def __del__(self):
            nonlocal alive
            alive -= 1

    def step(data_iterator, model):
        nonlocal each, peak
        before = alive
        with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
            output, loss_func = forward_step(data_iterator, model)
        each = alive - before
        peak = max(peak, alive)
        return output, loss_func

    run_stages(schedule, step)
    return peak / each, alive


@pytest.mark.parametrize("builder", [gpipe, one_f_one_b])
def test_activations_in_flight_are_what_the_simulator_says(builder, on_ranks):
    predicted = simulate(builder(4, 8)).peak_in_flight
    assert on_ranks(_memory, 4, builder(4, 8)) == [(peak, 0) for peak in predicted]


def _sync_log(schedule, with_grad_sync):
    from contextlib import contextmanager

    log = []

    @contextmanager
    def no_sync():
        log.append("off")
        yield
        log.append("on")

    def grad_sync(parameters):
        log.append(f"sync {len(parameters)}")

    def step(data_iterator, model):
        output, loss_func = forward_step(data_iterator, model)
        output.register_hook(lambda gradient: log.append("B"))
        return output, loss_func

    run_stages(schedule, step, no_sync_func=no_sync, grad_sync_func=grad_sync if with_grad_sync else None)
    return log


def test_gradients_are_synchronised_with_the_last_backward_alone(on_ranks):
    hooked = ["off", "B", "B", "B", "B", "on", "B"]
    assert on_ranks(_sync_log, 4, one_f_one_b(4, 5), False) == [hooked] * 4
    asked = ["off", *["B"] * 5, "on", "sync 2"]
    assert on_ranks(_sync_log, 4, one_f_one_b(4, 5), True) == [hooked, asked, asked, asked]


def _refusals():
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    stage, messages = Stage(groups.pp.rank), []
    stuck = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    attempts = [
        lambda: PipelineRuntime(gpipe(4, 2), stage, groups, forward_step_func=forward_step),
        lambda: PipelineRuntime(LOOPED, stage, groups, forward_step_func=forward_step),
        lambda: PipelineRuntime(stuck, stage, groups, forward_step_func=forward_step),
        lambda: PipelineRuntime(gpipe(2, 2), stage, groups, forward_step_func=forward_step, transport="ring"),
        lambda: PipelineRuntime(one_f_one_b(2, 2), stage, groups, forward_step_func=forward_step, transport="blocking"),
        lambda: PipelineRuntime(gpipe(2, 2), stage, groups, forward_step_func=forward_step).run(None, 3),
    ]
    for attempt in attempts:
        try:
            attempt()
            messages.append("accepted")
        except (ValueError, ScheduleError) as error:
            messages.append(str(error))
    return messages


def test_what_does_not_fit_is_refused_before_anything_is_sent(on_ranks):
    needles = ["for 4 pipeline ranks, but", "2 stages on rank", "wait for each other", "transport is 'ring'",
               "over blocking transfers", "num_microbatches is 3"]  # fmt: skip
    for messages in on_ranks(_refusals, 2):
        assert [needle in message for needle, message in zip(needles, messages, strict=True)] == [True] * 6, messages


def _wrong_shape(shapes, transport, variable):
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    how = {"forward_step_func": forward_step, "transport": transport, "variable_seq_lengths": variable}
    runtime = PipelineRuntime(gpipe(2, 1), Stage(groups.pp.rank), groups, tensor_shape=shapes[groups.pp.rank], **how)
    try:
        runtime.run(iter(microbatches(1)))
    except ValueError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_were_given_other_shapes_both_say_so(transport, on_ranks):
    by_rank = on_ranks(_wrong_shape, 2, [SHAPE, (9, 9, 9)], transport, False)
    for message, (mine, other) in zip(by_rank, ("01", "10"), strict=True):
        assert "disagree on tensor_shape of what stage 0 sends" in message
        given = {"0": "(3, 2, 5)", "1": "(9, 9, 9)"}
        assert f"rank {mine} has {given[mine]}, rank {other} has {given[other]}" in message
    by_rank = on_ranks(_wrong_shape, 2, [SHAPE, [SHAPE, SHAPE]], transport, True)
    assert all("1 tensors" in message and "2 tensors" in message for message in by_rank)


def _disagree(what):
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    given = {"schedule": gpipe(2, 2), "transport": "posted", "dtype": torch.float64, "forward_only": False}
    other = {"schedule": gpipe(2, 3), "transport": "batched", "dtype": torch.float32, "forward_only": True}
    mine = given | ({what: other[what]} if groups.pp.rank == 1 else {})
    schedule, forward_only = mine.pop("schedule"), mine.pop("forward_only")
    chunk = Stage(groups.pp.rank)
    runtime = PipelineRuntime(schedule, chunk, groups, forward_step_func=forward_step, tensor_shape=SHAPE, **mine)
    try:
        runtime.run(iter(microbatches(schedule.num_microbatches)), forward_only=forward_only)
    except ValueError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("what", ["schedule", "transport", "dtype", "forward_only"])
def test_ranks_that_were_given_other_arguments_both_say_so(what, on_ranks):
    """They would wait for each other for ever, or read bytes as another type."""
    for rank, message in enumerate(on_ranks(_disagree, 2, what)):
        assert f"the ranks of the pipeline disagree on {'the schedule' if what == 'schedule' else what}" in message
        assert f"rank {rank} has" in message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_that_returns_another_shape_ends_the_run(transport):
    """Rank 1 waits for the message that rank 0 refuses to send: rank 0's error ends both."""
    with pytest.raises(RankError) as caught:
        run(_reraising, 2, transport, timeout=120)
    assert "0F0>1 has shape (3, 2, 5) on rank 0 of the pipeline, rank 1 expects (9, 9, 9)" in str(caught.value)


def _reraising(transport):
    message = _wrong_shape([(9, 9, 9)] * 2, transport, False)
    raise ValueError(message)


def _ledger(schedule):
    with CommLedger() as ledger:
        run_stages(schedule)
    return [(r.operation, r.layer, r.phase, r.bytes) for r in ledger.records]


def test_the_ledger_names_each_message(on_ranks):
    size = 3 * 2 * 5 * 8
    first, second = on_ranks(_ledger, 2, one_f_one_b(2, 1))
    assert sorted(first) == [("recv", "1B0>0", "backward", size), ("send", "0F0>1", "forward", size)]
    assert sorted(second) == [("recv", "0F0>1", "forward", size), ("send", "1B0>0", "backward", size)]
