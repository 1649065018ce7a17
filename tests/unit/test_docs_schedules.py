"""docs/schedules.md against the builders and the simulator: its numbers, formulas, programs, verdicts and example."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from labkit.cli import main
from labkit.config import ScheduleConfig
from labkit.config.choices import SCHEDULES
from labkit.schedules import (
    Costs,
    Schedule,
    ScheduleError,
    Timeline,
    build_schedule,
    lower,
    one_f_one_b,
    simulate,
    split_backward,
    verify,
    zero_bubble_h1,
)

PAGE = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
SIZES = ((2, 4), (3, 6), (4, 8), (4, 12), (5, 10), (8, 16))
"""(p, m) with m >= 2p and a multiple of p, as interleaving asks."""


def table(heading: str) -> list[list[str]]:
    """The cells of the table whose first line begins with `heading`, without its two lines of header."""
    lines = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


NUMBERS = table("| `schedule.name` | stages per rank")
PROGRAMS = table("| `schedule.name` | program of rank r")
VERDICTS = table("| `schedule.name` | posted")


def value(formula: str, **names: int) -> float:
    """A formula of the page, where `3(p-1)` is a product."""
    return eval(re.sub(r"(\d)(?=[(a-z])", r"\1*", formula), {}, names)


def build(name: str, v: int, p: int, m: int) -> Schedule:
    return build_schedule(ScheduleConfig(name=name), pp=p, vpp=v if name == "interleaved" else 1, microbatches=m)


def timed(schedule: Schedule) -> Timeline:
    share = schedule.pp / schedule.num_stages
    return simulate(schedule, Costs(forward=share, input_grad=share, weight_grad=share, activation=share))


def test_every_builder_is_on_the_page() -> None:
    for rows in (NUMBERS, PROGRAMS, VERDICTS):
        assert {row[0] for row in rows} == set(SCHEDULES)


@pytest.mark.parametrize("row", NUMBERS, ids=lambda row: f"{row[0]} v{row[1]}")
def test_numbers_and_formulas(row: list[str]) -> None:
    name, v, idle, in_flight, steps, bubble, kept, _ = row
    shown = timed(build(name, int(v), 4, 8))
    assert (f"{shown.makespan:g}", f"{shown.bubble_fraction:.1%}") == (steps, bubble)
    assert f"{max(shown.peak_memory):g}" == kept
    for p, m in SIZES:
        timeline = timed(build(name, int(v), p, m))
        assert timeline.schedule.num_stages == p * int(v)
        assert timeline.makespan == pytest.approx(3 * m + value(idle, p=p, m=m)), (p, m)
        assert max(timeline.peak_memory) == pytest.approx(value(in_flight, p=p, m=m)), (p, m)
        assert timeline.makespan >= 3 * m + (p - 1) / int(v) - 1e-9, "shorter than the page says is possible"


def letters(program: str, *, p: int, r: int, m: int, v: int) -> str:
    """A program written out: `2*FB` is FBFB."""
    names = {"p": p, "r": r, "m": m, "v": v}
    names["w"] = value("2*(p-1-r)+(v-1)*p", **names)
    phases = [phase.rsplit("*", 1) for phase in program.split()]
    return "".join(word * int(eval(times, {}, names)) for times, word in phases)


@pytest.mark.parametrize("row", PROGRAMS, ids=lambda row: row[0])
def test_programs(row: list[str]) -> None:
    name, program = row[0], row[1].partition("`")[0]
    for p, m in SIZES:
        v = SCHEDULES[name].chunks or 2
        schedule = build(name, v, p, m)
        for r in range(p):
            wanted = letters(program, p=p, r=r, m=m, v=v)
            # Chunks are compared where the program gives them; every kind then counts its own microbatches.
            words = re.findall(r"[FBIW]\d?", wanted)
            found = [(a.kind, a.stage, a.microbatch) for a in schedule.actions(r)]
            assert len(words) == len(found)
            counted: dict[tuple[str, int], int] = {}
            for word, (kind, stage, microbatch) in zip(words, found, strict=True):
                chunk = schedule.chunk(stage)
                assert kind == word[0] and word[1:] in ("", str(chunk)), (p, m, r)
                if name != "interleaved":
                    assert microbatch == counted.get((kind, chunk), 0)
                counted[kind, chunk] = microbatch + 1


@pytest.mark.parametrize("row", VERDICTS, ids=lambda row: row[0])
def test_verdicts_over_transports(row: list[str]) -> None:
    for transport, said in zip(("posted", "batched", "even_odd", "blocking"), row[1:], strict=True):
        for p, m in SIZES[:4]:
            try:
                verify(build(row[0], 2, p, m), transport)
                found = "runs"
            except ScheduleError:
                found = "stops"
            assert found == said, (transport, p, m)


def test_the_printed_program() -> None:
    printed = PAGE.partition("lower(one_f_one_b(2, 3), 0))`:\n\n```\n")[2].partition("\n```")[0]
    assert printed == str(lower(one_f_one_b(2, 3), 0))


@pytest.mark.parametrize("costs", [(1, 1, 1), (1, 1.5, 0.5), (2, 2, 1), (1, 1.25, 1)])
def test_other_durations(costs: tuple[float, float, float]) -> None:
    f, i, w = costs
    for p, m in SIZES:
        work = m * (f + i + w)
        soon = split_backward(build("1f1b", 1, p, m), weight="after")
        for schedule, hop in ((build("zero_bubble_h1", 1, p, m), f + i - w), (build("1f1b", 1, p, m), f + i + w),
                              (soon, f + i)):  # fmt: skip
            found = simulate(schedule, Costs(forward=f, input_grad=i, weight_grad=w)).makespan
            assert found == pytest.approx(work + (p - 1) * hop), (schedule.name, p, m)


OWN = PAGE.partition("```\n0F0")[1][4:] + PAGE.partition("```\n0F0")[2].partition("```")[0]


def test_the_table_of_one_s_own_runs() -> None:
    assert verify(Schedule.from_csv(OWN), memory_limit=2).makespan == 3 * 2 + 1


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine.csv").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    exec(PAGE.partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out.startswith("7.0 [2, 2] 0.14")


@pytest.mark.parametrize("command", re.findall(r"^labkit (.*?)(?:  #.*)?$", PAGE, re.MULTILINE))
def test_commands(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("runs/mine.csv").write_text(OWN)
    if "--csv" not in command:
        Path("runs/zb.csv").write_text(zero_bubble_h1(4, 8).to_csv())
    launches = ["--print_config"] if command.startswith(("train", "parity")) else []
    code = main([*command.split(), *launches])
    said = capsys.readouterr()
    if "--transport all" in command:  # it names the one over which the table stops
        assert code != 0 and "blocking: no" in said.out + said.err
    else:
        assert code == 0 and said.out, said.err
