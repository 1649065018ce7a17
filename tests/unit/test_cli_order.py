"""`labkit order`: the documents' order table, what is written to files, verdicts, refusals without a traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from labkit.cli import main
from labkit.config import presets
from labkit.config.choices import SCHEDULES
from labkit.schedules import Schedule, ScheduleError, interleaved, one_f_one_b, simulate, zero_bubble_h1
from labkit.train.run_schedule import transport_of

RANK_0 = "1 1 1 1 2 2 2 2 1 1 | 1 -2 1 -2 2 -2 2 -2 2 -1 2 -1 | -1 -1 -2 -2 -2 -2 -1 -1 -1 -1"
"""Rank 0 of pp 4, vpp 2, 8 microbatches in groups of 4: the golden row of the sources."""
LEGEND = "order: c is a forward of model chunk c (counted from 1), -c its backward"
SIZES = ("--pp", "4", "--vpp", "2", "--microbatches", "8")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What the command prints; it must succeed in silence on stderr."""
    code = main(["order", *words])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def row_of(capsys: pytest.CaptureFixture[str], rank: str, *words: str) -> tuple[str, str]:
    """The list that `--rank` prints, and its legend, which is no part of it."""
    assert main(["order", *words, "--rank", rank]) == 0
    return capsys.readouterr()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """Exit code and message; nothing may be printed as an answer."""
    code = main(["order", *words])
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return code, err


def test_the_order_table_of_the_sources(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, *SIZES)
    orders = text.partition("order: ")[2].partition("actions: ")[0].splitlines()[1:5]
    assert " ".join(orders[0].split()[2:]) == RANK_0
    assert "bubble 15.8% of the makespan, 18.8% of the ideal time" in text  # 3 / (8 x 2) of the ideal
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines() if re.match(r"  rank \d   \d \d ", line)]
    assert rows == [
        ["rank 0", "0 4", "10", "11", "11", "9"],
        ["rank 1", "1 5", "8", "9", "9", "9"],
        ["rank 2", "2 6", "6", "7", "7", "9"],
        ["rank 3", "3 7", "4", "5", "5", "9"],
    ]
    actions = text.partition("actions: ")[2].splitlines()[1:5]
    schedule = interleaved(4, 2, 8)
    assert [line.split()[2:] for line in actions] == [list(map(str, schedule.actions(rank))) for rank in range(4)]


def test_one_rank_is_one_list_to_paste(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line, legend = row_of(capsys, "0", *SIZES)
    assert line.count("\n") == 1 and legend == f"rank 0, {LEGEND}\n"
    assert json.loads(line) == [int(word) for word in RANK_0.split() if word != "|"]
    split, legend = row_of(capsys, "1", "--pp", "4", "--microbatches", "8", "--name", "zero_bubble_h1")
    assert json.loads(split) == zero_bubble_h1(4, 8).order(1)
    assert -1.5 in json.loads(split) and legend == f"rank 1, {LEGEND}, -c-0.5 its weight gradient\n"
    assert f"\n{LEGEND}\n" in told(capsys, *SIZES)
    line, said = row_of(capsys, "0", *SIZES, "--csv", str(tmp_path / "z.csv"))
    assert json.loads(line) and said == f"rank 0, {LEGEND}\nwritten: {tmp_path}/z.csv\n"


def test_group_size_changes_the_order(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pp", "2", "--vpp", "2", "--microbatches", "8")
    by_default = json.loads(row_of(capsys, "0", *words)[0])
    wider = json.loads(row_of(capsys, "0", *words, "--microbatch_group_size_per_vp_stage", "4")[0])
    assert (by_default[:3], wider[:5]) == ([1, 1, 2], [1, 1, 1, 1, 2])


def test_all_warmup_runs_every_forward_first(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pp", "2", "--vpp", "2", "--microbatches", "2", "--schedule.all_warmup")
    assert json.loads(row_of(capsys, "1", *words)[0]) == [1, 1, 2, 2, -2, -2, -1, -1]
    assert "  rank 1   1 3      4         4                4                3\n" in told(capsys, *words)


@pytest.mark.parametrize("name", [name for name, row in SCHEDULES.items() if row.chunks is not None])
def test_every_name_is_printed_and_reads_back(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    text = told(capsys, "--pp", "2", "--microbatches", "4", "--name", name, "--csv", str(tmp_path / "s.csv"))
    schedule = Schedule.from_csv((tmp_path / "s.csv").read_text())
    timeline = simulate(schedule)
    assert f"bubble {timeline.bubble_fraction:.1%} of the makespan" in text
    assert ("its weight gradient" in text) == SCHEDULES[name].splits_backward
    assert ("warm-up   " in text) == (name == "1f1b")  # Megatron's number exists for its own schedules alone
    verdicts = [f"{t}: yes, it runs" for t in ("posted", "batched", "even_odd")]
    over = ("--transport", "posted, batched,even_odd")
    named = told(capsys, "--pp", "2", "--microbatches", "4", "--name", name, *over)
    assert named.splitlines()[:3] == verdicts
    again = told(capsys, "--verify", str(tmp_path / "s.csv"), *over)
    assert again.splitlines()[:3] == verdicts
    assert again.partition("actions: ")[2] == text.partition("actions: ")[2].partition("\nwritten")[0]


def test_files_are_written_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, trace = tmp_path / "f.png", tmp_path / "f.json"
    text = told(capsys, *SIZES, "--plot", str(plot), "--trace", str(trace))
    assert text.endswith(f"written: {plot}\nwritten: {trace}\n")
    assert plot.read_bytes()[1:4] == b"PNG"
    slices = [row for row in json.loads(trace.read_text())["traceEvents"] if row["ph"] == "X"]
    assert len(slices) == 2 * 2 * 4 * 8


def test_a_schedule_as_text_is_verified_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text(str(one_f_one_b(2, 3)))
    for words, verdicts in (((), ["posted"]), (("--transport", "batched"), ["batched"])):
        lines = told(capsys, "--verify", str(file), *words).splitlines()
        assert lines[: len(verdicts)] == [f"{transport}: yes, it runs" for transport in verdicts]
        assert lines[len(verdicts)].startswith("training uses posted transfers, and this schedule runs over them; ")
        assert lines[len(verdicts) + 1 :][:2] == ["", f"{file}: 2 ranks, 2 stages, 3 microbatches, 12 actions"]


def test_the_transport_that_is_verified_is_that_of_a_run() -> None:
    for value, transport in ((None, "posted"), (True, "batched"), (False, "even_odd")):
        assert transport_of(presets.tiny().override({"pp": 2, "batch_p2p_comm": value})) == transport


def test_a_deadlock_is_refused_with_its_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    code, message = refused(capsys, "--verify", str(file), "--transport", "all")
    assert code == 1
    assert message.startswith(f"labkit order: {file} cannot run, these wait for each other: rank 0 -> rank 1 -> rank 0")
    assert "[0B0]" in message and message.count("1F1 waits for 0F1") == 1  # said once, not for every transport


def test_one_transport_may_refuse_what_others_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(one_f_one_b(2, 2).to_csv())
    code, message = refused(capsys, "--verify", str(file), "--transport", "all")
    assert code == 1
    verdicts = "posted: yes, it runs\nbatched: yes, it runs\neven_odd: yes, it runs\nblocking: no, "
    assert message.startswith(f"labkit order: {verdicts}{file} stops over blocking transfers")
    assert message.splitlines()[4].startswith("training uses posted transfers, and this schedule runs over them")
    assert message.splitlines()[-1].startswith("[ ] marks where a rank waits; 2F1>3 is the output of 2F1")


def test_validations_are_checked_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses_forwards(schedule: Schedule, transport: Any) -> None:
        if schedule.forward_only and transport == "even_odd":
            raise ScheduleError(f"{schedule.name} stops\nrank 0 |")

    monkeypatch.setattr("labkit.cli.order_command.verify", refuses_forwards)
    file = tmp_path / "mine.csv"
    file.write_text(one_f_one_b(2, 2).to_csv())
    code, message = refused(capsys, "--verify", str(file), "--transport", "batched,even_odd")
    assert code == 1
    assert f"batched: yes, it runs\neven_odd: no, {file}, forward only stops\n" in message


def test_large_schedules_are_told_in_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "--pp", "16", "--microbatches", "512")
    assert "16 ranks, 16 stages, 512 microbatches, 16,384 actions" in text
    assert "--rank R prints one rank's order" in text
    assert "idle 720 over 16 ranks" in text and "makespan 1,581 where B takes 2, any other action 1" in text
    assert len(text) < 2500


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ([], ["any other action 1 (F forward, B backward)", "idle 0 over 1 rank:"]),
        (["--name", "zero_bubble_h1"], ["every action takes 1 (F forward, I input gradient, W weight gradient)"]),
        (["--microbatches", "5000"], ["makespan 15,000 where", "10,000 actions"]),
        (["--costs", "forward=3,latency=1"], ["makespan 40 where forward=3, latency=1, and what is not given"]),
        (["--costs", "forward=3,backward=2.5"], ["makespan 44 where forward=3, backward=2.5, and"]),
    ],
)
def test_the_summary_defines_what_it_counts(
    capsys: pytest.CaptureFixture[str], words: list[str], sentences: list[str]
) -> None:
    given = [] if "--microbatches" in words else ["--microbatches", "8"]
    text = told(capsys, "--pp", "1", *given, *words)
    assert "\nin flight: microbatches whose forward has begun and whose backward has not ended" in text
    assert all(sentence in text for sentence in sentences)


def test_costs_of_stages_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    """One microbatch through two stages: 1 + 3 forwards, 4 + 2 backwards, and two messages of a half."""
    words = ("--pp", "2", "--microbatches", "1", "--costs", "forward=1/3,backward=2/4,latency=0.5")
    text = told(capsys, *words)
    assert "makespan 11 where forward=1/3, backward=2/4, latency=0.5, and" in text
    assert "\n4 of it is imbalance, which no order of these stages removes: rank 1 works 7, rank 0 3\n" in text
    assert "imbalance" not in told(capsys, *words[:4])


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        ([*SIZES, "--costs", "forward=1/2"], ["forward has shape (2,): give one number, or one for each of the 8"]),
        (
            [*SIZES, "--costs", "fwd=1,latency=1/2,forward=x,backward=-1,backward=inf"],
            ["5 problems", "--costs 'fwd=1': write each of forward", "--costs 'backward=inf'"],
        ),
        ([], ["--pp: is missing", "--microbatches: is missing"]),
        (["--pp", "4", "--microbatch", "8"], ["--microbatch: unknown option; did you mean", "--microbatches"]),
        ([*SIZES, "--name", "interleave"], ["--name 'interleave': choose one of", "did you mean", "interleaved"]),
        ([*SIZES, "--rank", "4"], ["--rank 4: the schedule's ranks are 0 to 3"]),
        ([*SIZES, "--plot", "f.jpeg"], ["--plot 'f.jpeg': its name ends with one of .png"]),
        (["--pp", "4", "--vpp", "2", "--microbatches", "6"], ["6 microbatches"]),
        (["--pp", "4", "--vpp", "2", "--microbatches", "1"], ["1 microbatch on", "microbatches to 4, or set vpp to 1"]),
        (["--pp", "4", "--vpp", "2", "--microbatches", "8", "--name", "1f1b"], ["1f1b"]),
        (["--pp", "4", "--microbatches", "3", "--name", "dualpipe_v"], ["raise microbatches to 8, or use zbv"]),
        (["--pp", "64", "--name", "zbv", "--microbatches", "43691"], ["16,777,344 actions: more than"]),
        (["--pp", "20000", "--microbatches", "1"], ["400,000,000 pairs of a rank and a stage: more than"]),
        (
            ["--pp", "-1", "--vpp", "-2", "--microbatches", "-8"],
            ["--pp -1: must be at least 1", "--vpp -2: must", "--microbatches -8: must"],
        ),
        (["--pp", "2", "--microbatches", "8", "--group-size", "4"], ["--group-size 4: has no effect"]),
        ([*SIZES, "--name", "zbv", "--group-size", "4"], ["--group-size 4: has no effect"]),
        (["--pp", "4", "--microbatches", "4", "--all-warmup"], ["--all-warmup: has no effect: only the interleaved"]),
        ([*SIZES, "--all-warmup"], ["all_warmup: 8 microbatches on 4 pipeline ranks; it is a rule of interleaving"]),
        (["--verify", "no.csv"], ["--verify 'no.csv': no such file"]),
        (["--verify", "."], ["--verify '.': is a folder; give a file"]),
        (["--verify", "f.csv", "--name", "zbv", "--vpp", "2"], ["--name: the schedule comes", "--vpp: the schedule"]),
        (["--verify", "f.csv", "--transport", "batch"], ["--transport 'batch': choose from posted", "did you mean"]),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_what_to_do(
    capsys: pytest.CaptureFixture[str], words: list[str], sentences: list[str]
) -> None:
    code, message = refused(capsys, *words)
    assert code == 2
    assert message.startswith("labkit order: ")
    for sentence in sentences:
        assert sentence in message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("0F0,zero,0B0", "rank 0, position 1: 'zero' is not an action"),
        ("", "the text has no rows"),
        ("0F0,0B0\n\n1F0,1B0", "rank 1 has an empty line"),
        ("0F0\n1F0,1B0", "0B0 is missing"),
        ("\x00\xff\n", "not UTF-8 text: save it as CSV UTF-8"),
        ("0F0,0B99999999999", "'0B99999999999' is not an action"),
        ("0F0,0B0,0F999999999", "is it mistyped?"),  # and no table of gigabytes
    ],
)
def test_bad_files_are_named_by_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, sentence: str
) -> None:
    file = tmp_path / "bad.csv"
    file.write_bytes(content.encode("latin-1"))
    code, message = refused(capsys, "--verify", str(file))
    assert code in (1, 2)
    assert sentence in message and str(file) in message


def test_a_file_for_other_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(one_f_one_b(2, 3).to_csv())
    for words, sentence in (
        (["--pp", "4"], "--pp 4: "),
        (["--microbatches", "8"], "--microbatches 8: "),
    ):
        code, message = refused(capsys, "--verify", str(file), *words)
        assert code == 2
        assert sentence in message and "is a schedule of" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pp", "2", "--microbatches", "x"], "--microbatches 'x': must be an integer"),
        (["--pp", "2", "--num_microbatches", "x"], "--num_microbatches 'x': must be an integer"),
        (["--microbatches=", "--parallel.pp", "x"], None),
    ],
)
def test_one_mistake_is_told_once(capsys: pytest.CaptureFixture[str], words: list[str], message: str | None) -> None:
    _, told_them = refused(capsys, *words)
    assert "is missing" not in told_them
    assert message is None or told_them == f"labkit order: {message}\n"


@pytest.mark.parametrize("option", ["csv", "plot", "trace"])
def test_what_cannot_be_written_is_said_instead_of_an_answer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, option: str
) -> None:
    (tmp_path / "taken.svg").mkdir()
    (tmp_path / "file").touch()
    other = "; make the folder, or name another"
    for target, why in (
        ("taken.svg", "Is a directory; give a path that can be written"),
        ("file/new.svg", f"'{tmp_path}/file' is not a folder{other}"),
        ("no/such/new.svg", f"'{tmp_path}/no/such' does not exist{other}"),
    ):
        code, message = refused(capsys, *SIZES, f"--{option}", str(tmp_path / target))
        assert code == 2
        assert message == f"labkit order: --{option} '{tmp_path}/{target}': {why}\n"
    assert not (tmp_path / "no").exists()
    there = tmp_path / "there.svg"
    there.write_text("edited")
    code, message = refused(capsys, *SIZES, f"--{option}", str(there))
    assert (code, message) == (2, f"labkit order: --{option} '{there}': exists; --overwrite replaces it\n")
    assert there.read_text() == "edited"
    assert told(capsys, *SIZES, f"--{option}", str(there), "--overwrite").endswith(f"written: {there}\n")
    assert there.read_text() != "edited"


def test_a_plot_may_have_a_suffix_in_capitals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told(capsys, *SIZES, "--plot", str(tmp_path / "F.PNG"))
    assert (tmp_path / "F.PNG").read_bytes()[1:4] == b"PNG"


def test_too_little_memory_is_one_sentence(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unable(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 74.5 GiB")

    monkeypatch.setattr("labkit.cli.order_command.build_schedule", unable)
    code, message = refused(capsys, *SIZES)
    assert code == 1
    assert message.startswith("labkit order: there is not enough memory for this; take smaller sizes (Unable to")
    assert message.count("\n") == 1


def test_a_file_of_too_many_ranks_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "wide.csv"
    file.write_text("".join(f"{rank}F0\n" for rank in range(4097)))
    code, message = refused(capsys, "--verify", str(file))
    assert (code, "16,785,409 pairs of a rank and a stage" in message) == (2, True)


def test_order_and_its_errors_import_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; from labkit.cli import main; main(['order', '--pp', '4', '--vpp', '2', '--microbatches', '8']);"
        "main(['order', '--pp', '4', '--vp', '2']);"
        "print(sorted({'torch', 'matplotlib', 'labkit.schedules.runtime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_pictures_and_traces_need_no_torch_either(tmp_path: Path) -> None:
    words = ["order", "--pp", "2", "--microbatches", "2", "--plot", str(tmp_path / "f.svg")]
    words += ["--trace", str(tmp_path / "f.json")]
    code = f"import sys; from labkit.cli import main; main({words!r}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["order", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--pp", "--vpp", "--microbatches", "--name", "--group-size", "--all-warmup", "--rank", "--plot",
                   "--trace", "--csv", "--overwrite", "--verify", "--transport"):  # fmt: skip
        assert option in out
    assert main([]) == 0
    assert "order" in capsys.readouterr().out


def test_merged_pairs_are_one_cell(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("--pp", "2", "--microbatches", "4", "--overlap-moe-expert-parallel-comm")
    file = tmp_path / "merged.csv"
    text = told(capsys, *sizes, "--csv", str(file))
    assert "rank 1      1F0 1F1&1B0 1F2&1B1 1F3&1B2     1B3" in text
    assert "idle 6 over 2 ranks" in text
    assert "posted: yes, it runs" in told(capsys, "--verify", str(file))
    assert "'zbv' has no such pairs" in refused(capsys, *sizes, "--name", "zbv")[1]
