"""Data in motion: the messages of real ranks become arrows between the right slots, on one clock."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.patches import ConnectionPatch

from labkit.comm import all_reduce_in_motion, collectives
from labkit.comm.motion import Moment
from labkit.comm.motion_clock import movement
from labkit.config import ParallelConfig
from labkit.launch import Ranks
from labkit.parallel import CommLedger, Held, Motion, initialize_model_parallel, irecv, isend
from labkit.schedules import Costs, Schedule, one_f_one_b, simulate
from labkit.viz import in_motion
from labkit.viz.motion import motion_frames
from labkit.viz.style import nth_style

RANKS = 4


@pytest.fixture(scope="module")
def ranks():
    with Ranks(RANKS, device="cpu", backend="gloo") as started:
        yield started


def ring():
    """A ring all-reduce: chunk c of a rank holds as many ones as ranks that are in it."""
    group = initialize_model_parallel(ParallelConfig()).world
    r, chunks = group.rank, list(torch.ones(RANKS, 5))
    with Motion() as motion, CommLedger() as ledger:
        for step in range(2 * (RANKS - 1) + 1):
            motion.holds({f"{c}": Held(f"{chunk[0]:g}", (c,), chunk) for c, chunk in enumerate(chunks)})
            if step < 2 * (RANKS - 1):
                out, into = (r - step - 1) % RANKS, (r - step - 2) % RANKS
                received = torch.empty(5)
                sending = isend(chunks[out], group, (r + 1) % RANKS)
                irecv(received, group, (r - 1) % RANKS).wait()
                sending.wait()
                chunks[into] = chunks[into] + received if step < RANKS - 1 else received
    return motion, ledger.bytes(operation="send")


def test_a_ring_passes_the_chunk_of_its_rule_to_the_next_rank_in_each_step(ranks):
    motions, sent = zip(*ranks.run(ring))
    seen = movement(motions)
    expected = {
        (r, (r + 1) % RANKS, step, step + 1, (f"{(r - step - 1) % RANKS}",))
        for r in range(RANKS)
        for step in range(2 * (RANKS - 1))
    }
    assert {(a.source, a.target, a.start, a.end, a.leaves) for a in seen.arrows} == expected
    assert all(a.arrives == a.leaves for a in seen.arrows), (
        "received into a temporary tensor: the slot of the same name"
    )
    assert [sum(a.bytes for a in seen.arrows if a.source == r) for r in range(RANKS)] == list(sent)
    assert all(held.text == "4" for r in range(RANKS) for held in seen.held(r, 6).slots.values())
    picture = in_motion(motions, what="Ring", first=3)
    assert (
        picture.sentence == "Ring: 4 ranks, 6 steps, 24 messages, bytes sent 120 from each rank; shown: steps 3 to 5."
    )
    staged = in_motion(motions, unit="stage")
    assert staged.sentence.startswith("4 stages, 6 steps, 24 messages, bytes sent 120 from each stage")
    assert "stage 3" in [text.get_text() for text in staged.fig.axes[0].texts]


def test_arrows_have_the_colour_of_the_rank_that_sends_or_of_what_they_carry(ranks):
    seen = movement([motion for motion, _ in ranks.run(ring)])
    for arrows, number in (("sender", lambda a: a.source), ("content", lambda a: int(a.leaves[0]))):
        (axes,) = motion_frames(seen, count=1, arrows=arrows).fig.axes
        drawn = [to_hex(each.get_edgecolor()) for each in axes.patches if isinstance(each, ConnectionPatch)]
        assert drawn == [nth_style(number(a))[0].lower() for a in seen.arrows if a.end == 1], arrows


def by_collective():
    """Recordings of one call each. Slot j of a rank is its row j."""
    group = initialize_model_parallel(ParallelConfig()).world
    r, found = group.rank, {}

    def rows(x):
        return {f"{j}": Held(f"{j}", (), row) for j, row in enumerate(x)}

    def record(name, before, call, after):
        with Motion() as motion:
            motion.holds(before)
            motion.holds(after(call()))
        found[name] = motion

    x, own = torch.arange(RANKS * 2.0).view(RANKS, 2), torch.ones(1, 2)
    record("all_gather", {f"{r}": Held("own", (), own)}, lambda: collectives.all_gather(own, group), rows)
    record("reduce_scatter", rows(x), lambda: collectives.reduce_scatter(x, group),
           lambda y: {f"{r}": Held("sum", (), y)})  # fmt: skip
    whole = torch.ones(2)
    record("all_reduce", {"x": Held("x", (), whole)}, lambda: collectives.all_reduce(whole, group),
           lambda y: {"x": Held("sum", (), y)})  # fmt: skip
    record("broadcast", {"x": Held("x", (), whole)}, lambda: collectives.broadcast(whole, group, src=2),
           lambda y: {"x": Held("x of 2", (), y)})  # fmt: skip
    tokens = torch.ones(3, 2)  # rank r sends all three to rank 0, and nothing to others
    splits = [3, 0, 0, 0]
    record("all_to_all", rows(tokens), lambda: collectives.all_to_all(tokens, group, [3 * (r == 0)] * 4, splits), rows)
    return found


def test_the_shares_of_a_collective_go_from_slot_to_slot(ranks):
    recorded = ranks.run(by_collective)
    arrows = {name: movement([each[name] for each in recorded]).arrows for name in recorded[0]}
    others = [(a, b) for a in range(RANKS) for b in range(RANKS) if a != b]

    def drawn(name: str) -> list[tuple[int, int, tuple[str, ...], tuple[str, ...], int]]:
        return sorted((a.source, a.target, a.leaves, a.arrives, a.bytes) for a in arrows[name])

    assert drawn("all_gather") == [(a, b, (f"{a}",), (f"{a}",), 8) for a, b in others]
    assert drawn("reduce_scatter") == [(a, b, (f"{b}",), (f"{b}",), 8) for a, b in others]
    assert drawn("all_reduce") == [(a, b, ("x",), ("x",), 8) for a, b in others]
    assert drawn("broadcast") == [(2, b, ("x",), ("x",), 8) for b in range(RANKS) if b != 2]
    three = ("0", "1", "2")
    places = {a: tuple(f"{3 * a + i}" for i in range(3)) for a in range(RANKS)}
    assert drawn("all_to_all") == [(a, 0, three, places[a], 24) for a in (1, 2, 3)]


def walk(schedule: Schedule):
    """Run a rank's row with real messages: an action holds its result, then sends it."""
    groups = initialize_model_parallel(ParallelConfig(pp=RANKS))
    rank, last, sent = groups.rank, RANKS - 1, []
    with Motion() as motion:
        motion.holds({})
        for action in schedule.actions(rank):
            way = 1 if action.kind == "F" else -1
            group = groups.pp if way == 1 else groups.world
            if 0 <= rank - way <= last:
                irecv(torch.empty(1), group, rank - way).wait()
            made = torch.ones(1)
            motion.holds({"runs": Held(str(action), (), made)})
            if 0 <= rank + way <= last:
                sent.append(isend(made, group, rank + way))
        for each in sent:
            each.wait()
    return motion


def test_an_order_table_walks_as_the_simulator_says(ranks):
    schedule = one_f_one_b(RANKS, 6)
    seen = movement(ranks.run(walk, schedule))
    ends = {
        e.name: round(e.end) for e in simulate(schedule, Costs(forward=1.0, input_grad=0.5, weight_grad=0.5)).events
    }
    found = {moment.slots["runs"].text: time for state in seen.states for time, moment in state.items() if moment.slots}
    assert found == ends
    assert Counter((a.source, a.target) for a in seen.arrows) == {
        (r, s): 6 for r in range(4) for s in (r - 1, r + 1) if 0 <= s < 4
    }
    assert all(arrow.end > arrow.start for arrow in seen.arrows)


def test_recordings_that_do_not_belong_together_are_refused(ranks):
    motions = [motion for motion, _ in ranks.run(ring)]
    with pytest.raises(ValueError, match="a message of rank 0 has no other side: record every rank"):
        in_motion(motions[:3])
    with pytest.raises(ValueError, match="step 6 is not there: this recording has the steps 0 to 5"):
        in_motion(motions, first=6)
    with pytest.raises(ValueError, match="no rank said what it holds"):
        in_motion([Motion()])


def test_rows_are_held_in_the_slots_of_their_numbers():
    x, motion = torch.arange(6.0).view(2, 3), Motion()
    motion.holds_rows("sums", x, [3, 1], Held("sum", [0, 1]))
    (moment,) = motion.entries
    assert isinstance(moment, Moment)
    assert moment.title == "sums"
    assert moment.slots == {"positions 3": Held("sum", [0, 1]), "positions 1": Held("sum", [0, 1])}
    assert motion._slots_in(x[1:]) == ("positions 1",), "its memory finds it"
    with pytest.raises(ValueError):
        motion.holds_rows("sums", x, [0], Held("sum"))


def test_a_live_notebook_gets_a_slider(ranks, monkeypatch):
    monkeypatch.setenv("JPY_SESSION_NAME", "chapter")
    controls, picture, words = in_motion([motion for motion, _ in ranks.run(ring)]).children
    _, slider = controls.children
    before = picture.value
    slider.value = slider.max
    assert slider.max == 5 and picture.value != before and "shown: step 5" in words.value


def a_sum() -> tuple[torch.Tensor, Motion]:
    group = initialize_model_parallel(ParallelConfig()).world
    return all_reduce_in_motion(torch.full((3,), 2.0**group.rank), group)


def test_an_all_reduce_in_motion_returns_the_sum_and_shows_a_term_from_every_rank_to_every_other(ranks):
    totals, motions = zip(*ranks.run(a_sum))
    assert all(total.tolist() == [15.0] * 3 for total in totals)
    seen = movement(motions)
    assert {(a.source, a.target) for a in seen.arrows} == {(a, b) for a in range(RANKS) for b in range(RANKS) if a != b}
    first, last = (seen.held(2, moment).slots["x"] for moment in (0, 1))
    assert (first.text, first.partial, list(first.colors)) == ("term 2", True, [2])
    assert (last.text, last.partial, list(last.colors)) == ("sum", False, list(range(RANKS)))
