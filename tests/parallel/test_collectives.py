"""Collectives over real gloo ranks: what they compute, what they record, what they refuse."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inputs import whole_world

from labkit.comm import collectives as c
from labkit.events import recording
from labkit.launch import RankError, Ranks, run
from labkit.parallel import CommLedger, Group, comm_scope, delayed, dropped


def check_definitions() -> None:
    group = whole_world()
    size, rank = group.size, group.rank
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        everyone = [torch.arange(6).view(2, 3).to(dtype) * (i + 1) for i in range(size)]
        for op, expected in (("sum", sum(everyone)), ("max", everyone[-1])):
            x = everyone[rank].clone()
            assert c.all_reduce(x, group, op) is x
            assert torch.equal(x, expected)
            x = everyone[rank].clone()
            assert torch.equal(c.all_reduce(x, group, op, in_place=False), expected)
            assert torch.equal(x, everyone[rank])
            transposed = everyone[rank].t().clone(memory_format=torch.contiguous_format).t()
            assert torch.equal(c.all_reduce(transposed, group, op), expected)
        assert torch.equal(c.all_gather(everyone[rank], group), torch.cat(everyone))
        assert torch.equal(c.all_gather(everyone[rank], group, dim=1), torch.cat(everyone, dim=1))
        assert torch.equal(c.all_gather(everyone[rank][0, 0], group), torch.stack([x[0, 0] for x in everyone]))
        rows = torch.arange(4 * size).view(2 * size, 2).to(dtype)
        total = rows * (size * (size + 1) // 2)
        assert torch.equal(c.reduce_scatter(rows * (rank + 1), group), total[2 * rank : 2 * rank + 2])
        columns = (rows * (rank + 1)).t().contiguous()
        assert torch.equal(c.reduce_scatter(columns, group, dim=1), total.t()[:, 2 * rank : 2 * rank + 2])
        check_results_in_place(rows * (rank + 1), group, total)
        assert torch.equal(c.broadcast(everyone[rank].clone(), group, src=1), everyone[1])
        sent = torch.arange(size).to(dtype) + 10 * rank
        assert torch.equal(c.all_to_all(sent, group), torch.arange(size).to(dtype) * 10 + rank)
    x = torch.full((3,), float(rank))
    assert torch.equal(c.all_reduce(x.clone(), group, "avg"), torch.full((3,), (size - 1) / 2))
    assert torch.equal(c.reduce_scatter(x[:1].repeat(size), group, op="avg"), torch.tensor([(size - 1) / 2]))
    # Rank r sends i rows to rank i, so it receives r rows from each; rank 0 receives nothing at all.
    uneven = c.all_to_all(torch.full((sum(range(size)), 2), rank), group, [rank] * size, list(range(size)))
    assert uneven[:, 0].tolist() == [source for source in range(size) for _ in range(rank)]
    assert c.gather_objects({"rank": rank}, group) == [{"rank": i} for i in range(size)]
    c.barrier(group)


def check_results_in_place(rows: torch.Tensor, group: Group, total: torch.Tensor) -> None:
    """The forms of the distributed optimizer: a rank's part of a bucket is reduced, and gathered, where it lies."""
    mine = slice(2 * group.rank, 2 * group.rank + 2)
    elsewhere = torch.empty_like(rows[mine])
    assert c.reduce_scatter_async(rows, group, out=elsewhere).wait().data_ptr() == elsewhere.data_ptr()
    assert torch.equal(elsewhere, total[mine])
    before = rows.clone()
    assert c.reduce_scatter_async(rows, group, out=rows[mine]).wait().data_ptr() == rows[mine].data_ptr()
    before[mine] = total[mine]
    assert torch.equal(rows, before), "nothing but the own part has changed"
    assert c.all_gather_async(rows[mine], group, out=rows).wait() is rows
    assert torch.equal(rows, total)
    fresh = torch.empty_like(rows)
    c.all_gather_async(elsewhere, group, out=fresh).wait()
    assert torch.equal(fresh, total)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_each_operation_computes_its_definition(on_ranks, world_size: int) -> None:
    on_ranks(check_definitions, world_size)


def test_the_checked_collectives_of_the_debug_switch_compute_the_same() -> None:
    run(check_definitions, 2, debug=True)


def sums_of_random_numbers() -> list[bytes]:
    group = whole_world()
    generator = torch.Generator().manual_seed(group.rank)
    results = []
    for _ in range(2):
        generator.manual_seed(group.rank)
        for numbers in (7, 4096, 1_200_000):  # the last exceeds the size of a piece
            x = torch.randn(numbers, generator=generator)
            y = c.reduce_scatter(x[: numbers // group.size * group.size], group)
            results += [c.all_reduce(x, group).numpy().tobytes(), c.all_gather(y, group).numpy().tobytes()]
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_are_bit_equal_on_all_ranks_and_when_repeated(on_ranks, world_size: int) -> None:
    by_rank = on_ranks(sums_of_random_numbers, world_size)
    assert all(results == by_rank[0] for results in by_rank)
    half = len(by_rank[0]) // 2
    assert by_rank[0][:half] == by_rank[0][half:]


def round_once() -> None:
    group = whole_world()
    everyone = [torch.randn(257, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(group.size)]
    in_float32 = torch.stack([x.float() for x in everyone]).sum(0).bfloat16()
    one_by_one = everyone[0] + everyone[1]
    for x in everyone[2:]:
        one_by_one = one_by_one + x
    assert not torch.equal(in_float32, one_by_one), "the numbers do not tell the two ways of rounding apart"
    assert torch.equal(c.all_reduce(everyone[group.rank].clone(), group), in_float32)
    padded = torch.cat([everyone[group.rank], torch.zeros(3).bfloat16()])
    assert torch.equal(c.all_gather(c.reduce_scatter(padded, group), group)[:257], in_float32)


def test_half_precision_sums_are_rounded_once(on_ranks) -> None:
    on_ranks(round_once, 4)


def conjugate_properties() -> None:
    from hypothesis import Phase, given, settings  # here: its objects do not travel to the ranks
    from hypothesis import strategies as st

    group = whole_world()

    # Derandomised, every rank draws the same examples in the same order, so that they meet in the same collectives.
    @settings(derandomize=True, database=None, deadline=None, max_examples=15, phases=[Phase.generate])
    @given(rows=st.integers(1, 5), columns=st.integers(1, 7), dim=st.integers(0, 1), seed=st.integers(0, 1000))
    def check(rows: int, columns: int, dim: int, seed: int) -> None:
        shape = [rows, columns]
        shape[dim] *= group.size
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed * 10 + group.rank), dtype=torch.float64)
        scattered = c.reduce_scatter(x, group, dim)
        reduced = c.all_reduce(x, group, in_place=False)
        torch.testing.assert_close(c.all_gather(scattered, group, dim), reduced, rtol=1e-14, atol=1e-14)
        there = c.all_to_all(x if dim == 0 else x.t().contiguous(), group)
        assert torch.equal(c.all_to_all(there, group), x if dim == 0 else x.t())

    check()


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_is_reduce_scatter_then_all_gather_and_all_to_all_is_its_own_inverse(
    on_ranks, world_size: int
) -> None:
    on_ranks(conjugate_properties, world_size)


def messages_beside_collectives() -> None:
    group = whole_world()
    peer = 1 - group.rank
    received = [torch.zeros(1000) for _ in range(3)]
    sends = [c.isend(torch.full((1000,), 10.0 * group.rank + i), group, peer) for i in range(3)]
    reducing = c.all_reduce_async(torch.ones(1000), group)
    pending = c.batch([c.Message("recv", x, group, peer) for x in received])
    assert torch.equal(reducing.wait(), torch.full((1000,), 2.0))
    for i, transfer in enumerate(pending):
        assert torch.equal(transfer.wait(), torch.full((1000,), 10.0 * peer + i)), "messages changed their order"
    for transfer in sends:
        transfer.wait()


def test_messages_keep_their_order_and_never_mix_with_collectives_of_the_same_two_ranks(on_ranks) -> None:
    on_ranks(messages_beside_collectives, 2)


def recorded() -> tuple[list[tuple], str]:
    group = whole_world()
    alone = Group("cp", (group.ranks[group.rank],), 0)
    with CommLedger() as ledger:
        with comm_scope(layer="layers.3.mlp", phase="forward"):
            c.all_reduce(torch.zeros(4, 2), group)
            c.all_reduce(torch.zeros(5), alone)
            with comm_scope(layer="layers.3.mlp.fc2", phase="backward"):
                c.all_gather_async(torch.zeros(3, dtype=torch.float64), group).wait()
        c.barrier(group)
    assert ledger.count() == 3
    assert ledger.count(layer="layers.3.mlp") == 2
    assert ledger.count(layer="layers.3") == 2
    assert ledger.count(layer="layers.3.m") == 0
    assert ledger.count(phase="backward", operation="all_gather", group="tp") == 1
    assert ledger.bytes(layer="layers.3") == 32 + 24
    assert "layers.3.mlp.fc2" in ledger.table()
    records = [(r.operation, r.group, r.group_size, r.bytes, r.dtype, r.layer, r.phase) for r in ledger.records]
    return records, ledger.table()


def test_the_ledger_books_each_call_once_under_its_scope_and_nothing_for_a_group_of_one(on_ranks) -> None:
    for records, table in on_ranks(recorded, 2):
        assert records == [
            ("all_reduce", "tp", 2, 32, "float32", "layers.3.mlp", "forward"),
            ("all_gather", "tp", 2, 24, "float64", "layers.3.mlp.fc2", "backward"),
            ("barrier", "tp", 2, 0, "none", None, None),
        ]
        assert table.splitlines()[0].split() == ["operation", "group", "phase", "layer", "calls", "bytes"]


def with_hooks() -> float:
    group = whole_world()
    with dropped(operation="all_reduce", group="tp", phase="forward", layer="layers.1.mlp"):
        with CommLedger() as ledger:
            for layer, phase, expected in (
                ("layers.1.mlp.fc2", "forward", 1.0),
                ("layers.1.mlp.fc2", "backward", 2.0),
                ("layers.11.mlp", "forward", 2.0),
            ):
                with comm_scope(layer=layer, phase=phase):
                    assert c.all_reduce(torch.ones(1), group).item() == expected
        assert ledger.count() == 2
    assert c.all_reduce(torch.ones(1), group).item() == 2.0
    c.barrier(group)
    with delayed(0.05, operation="all_reduce"):
        started = time.perf_counter()
        pending = c.all_reduce_async(torch.ones(1), group)
        issued = time.perf_counter() - started
        pending.wait()
    assert time.perf_counter() - started >= 0.05
    return issued


def test_hooks_drop_or_delay_the_calls_they_name_and_no_other(on_ranks) -> None:
    assert max(on_ranks(with_hooks, 2)) < 0.05


def late_messages() -> list[float]:
    """On each rank the times at which two messages were sent (rank 0) or had come (rank 1), which waits long before."""
    group = whole_world()
    c.barrier(group)
    times = []
    with delayed(0.1, operation="send"):
        for value in (1.0, 2.0):
            if group.rank:
                assert c.irecv(torch.zeros(1), group, 0).wait().item() == value
                times.append(time.perf_counter())
            else:
                time.sleep(0.05)
                times.append(time.perf_counter())
                pending = c.isend(torch.full((1,), value), group, 1)
                assert time.perf_counter() - times[-1] < 0.1, "the sender goes on computing"
                pending.wait()
    return times


def test_a_delayed_message_arrives_late_even_if_its_receiver_waits_already(on_ranks) -> None:
    sent, came = on_ranks(late_messages, 2)
    assert all(there - left >= 0.1 for left, there in zip(sent, came, strict=True))


def events_of_calls() -> None:
    group = whole_world()
    with recording(group.rank) as recorder:
        c.all_reduce(torch.zeros(8), group)
        pending = c.all_gather_async(torch.zeros(4), group)
        time.sleep(0.02)
        pending.wait()
        pending.wait()
    kinds = [(event.kind, event.name, event.bytes) for event in recorder.events]
    assert kinds == [
        ("collective", "all_reduce tp", 32),
        ("wait", "wait all_gather tp", None),
        ("collective", "all_gather tp", 16),
    ]
    waited, gathered = recorder.events[1:]
    assert gathered.start <= waited.start - 0.02
    assert gathered.end == waited.end


def test_events_run_from_issue_to_completion_and_waits_only_while_blocked(on_ranks) -> None:
    on_ranks(events_of_calls, 2)


def functions_to_torch() -> list[str]:
    """The functions of labkit on the stack when `dist.all_reduce` is called, the outermost first."""
    group, found = whole_world(), []

    def watch(frame: Any, event: str, _: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and (Path(file).stem, name) == ("distributed_c10d", "all_reduce"):
            while (frame := frame.f_back) is not None:
                if "/labkit/comm/" in frame.f_code.co_filename:
                    found.insert(0, frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        c.all_reduce(torch.zeros(1 << 19), group)
    finally:
        sys.setprofile(None)
    return found


def test_while_nobody_watches_an_all_reduce_goes_straight_to_torch(on_ranks) -> None:
    straight = ["all_reduce", "all_reduce_async", "issue", "all_reduce", "_whole_all_reduce"]
    assert on_ranks(functions_to_torch, 2) == [straight, straight]


def test_a_group_of_size_one_is_the_identity() -> None:
    alone, x, out = Group("tp", (0,), 0), torch.arange(4.0), torch.zeros(4)
    assert c.reduce_scatter_async(x, alone, out=out).wait() is out and torch.equal(out, x)
    assert c.all_gather_async(x, alone, out=x).wait() is x
    alone = Group("tp", (5,), 0)
    x = torch.arange(4.0)
    for result in (
        c.all_reduce(x, alone),
        c.all_gather(x, alone),
        c.reduce_scatter(x, alone),
        c.all_to_all(x, alone),
        c.broadcast(x, alone),
        c.all_reduce_async(x, alone).wait(),
    ):
        assert result is x
    c.barrier(alone)
    assert c.gather_objects("x", alone) == ["x"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, g: c.all_reduce(x, g, "mean"), "'mean' is unknown; choose one of sum, avg, max"),
        (lambda x, g: c.reduce_scatter(x, g), "5 must be a multiple of 2"),
        (lambda x, g: c.all_to_all(x, g), "5 rows of x must be a multiple of the 2 ranks"),
        (lambda x, g: c.all_to_all(x, g, [1, 2], [1, 2]), "input_splits add up to 3; x has 5 rows"),
        (lambda x, g: c.all_to_all(x, g, [1, 2, 2], [3, 2]), "output_splits has 3 entries; group tp has 2 ranks"),
        (lambda x, g: c.broadcast(x, g, src=2), "src is a position in group tp of 2 ranks, got 2"),
        (lambda x, g: c.isend(x, g, 6), "rank 4 cannot exchange messages with rank 6: group tp has ranks [4, 5]"),
        (lambda x, g: c.irecv(x, g, 4), "rank 4 cannot exchange messages with rank 4"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(call, message: str) -> None:
    group = Group("tp", (4, 5), 0)  # without a process group: any attempt to communicate would fail otherwise
    with pytest.raises(ValueError) as refusal:
        call(torch.zeros(5), group)
    assert message in str(refusal.value)


def other_shape() -> None:
    group = whole_world()
    c.all_reduce(torch.zeros(4 + group.rank), group)


def other_dtype() -> None:
    group = whole_world()
    c.all_reduce(torch.zeros(4, dtype=torch.float64 if group.rank else torch.float32), group)


def other_operation() -> None:
    group = whole_world()
    (c.all_reduce if group.rank else c.all_gather)(torch.zeros(4), group)


def message_of(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rank 0 sends four float32; rank 1 expects something else."""
    group = whole_world()
    if group.rank == 0:
        c.isend(torch.zeros(4), group, 1).wait()
    else:
        c.irecv(torch.zeros(shape, dtype=dtype), group, 0).wait()


MISMATCHES = {
    "shape": (other_shape, (), "a collective: rank 0 called ALLREDUCE [4] Float, rank 1 called ALLREDUCE [5] Float"),
    "dtype": (other_dtype, (), "a collective: rank 0 called ALLREDUCE [4] Float, rank 1 called ALLREDUCE [4] Double"),
    "operation": (
        other_operation,
        (),
        "a collective: rank 0 called _ALLGATHER_BASE [4] Float, rank 1 called ALLREDUCE [4] Float",
    ),
    "message too short": (message_of, ((5,), torch.float32), "(4,) float32, rank 1 expects (5,) float32"),
    "message too long": (message_of, ((3,), torch.float32), "(4,) float32, rank 1 expects (3,) float32"),
    "message shape": (message_of, ((2, 2), torch.float32), "(4,) float32, rank 1 expects (2, 2) float32"),
    "message dtype": (message_of, ((4,), torch.float64), "(4,) float32, rank 1 expects (4,) float64"),
}


@pytest.fixture(scope="module")
def debugged() -> Iterator[Ranks]:
    with Ranks(2, debug=True, device="cpu", backend="gloo", timeout=30.0) as ranks:
        yield ranks


@pytest.mark.parametrize("fault", MISMATCHES)
def test_in_debug_mode_a_mismatch_is_named_and_does_not_hang(debugged: Ranks, fault: str) -> None:
    fn, args, words = MISMATCHES[fault]
    debugged.run(whole_world_size)  # the ranks have started
    with pytest.raises(RankError) as failure:
        debugged.run(fn, *args)
    assert failure.value.kind == "raised", "not hung until the time limit"
    assert "the ranks disagree on a" in failure.value.summary
    assert failure.value.summary.endswith(words)
    assert debugged.run(whole_world_size) == [2, 2], "the caller goes on"


def whole_world_size() -> int:
    return whole_world().size


@pytest.mark.parametrize("fault", MISMATCHES)
def test_without_debug_the_caller_survives_a_mismatch(fault: str) -> None:
    """gloo hangs, aborts the rank or mixes up data; whatever it does, it does not do it to the caller."""
    fn, args, _ = MISMATCHES[fault]
    with contextlib.suppress(RankError):
        run(fn, 2, *args, timeout=1.5)
    assert run(whole_world_size, 2) == [2, 2]


def messages_crossing() -> None:
    group = whole_world()
    peer = 1 - group.rank
    x, y = torch.full((3, 2), float(group.rank)), torch.full((5,), 10 + group.rank)
    sends = [c.isend(x, group, peer), c.isend(y, group, peer)]
    first, second = torch.empty(3, 2), torch.empty(5, dtype=torch.int64)
    arrivals = [c.irecv(first, group, peer), c.irecv(second, group, peer)]
    for send in sends:  # both wait to send while no rank waits to receive
        send.wait()
    c.barrier(group)
    for arrival in reversed(arrivals):
        arrival.wait()
    assert torch.equal(first, torch.full((3, 2), float(peer)))
    assert torch.equal(second, torch.full((5,), 10 + peer))


def test_checked_messages_arrive_like_others_in_whatever_order_they_are_waited_for(debugged: Ranks) -> None:
    debugged.run(messages_crossing)
    debugged.run(messages_crossing)
