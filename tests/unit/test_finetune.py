"""Fine-tuning in one process: files and their refusals, windows, scores, learning, rows, and the command."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_folders import write_task

from labkit.cli import main
from labkit.config import presets
from labkit.evaluate import Records
from labkit.finetune import Settings, finetune, read_task
from labkit.finetune.finetuning import configuration, prepare
from labkit.finetune.repeated_runs import MAIN, summary
from labkit.finetune.scores import answers, best_span, exact_match, f1, scores_of, squad_scores
from labkit.finetune.starting_weights import load_weights
from labkit.finetune.table6 import TABLE_6, rows_of, size_of
from labkit.finetune.task_files import Passage, TaskFiles
from labkit.finetune.task_model import task_provider
from labkit.finetune.task_samples import Packer, TaskSamples, Windows
from labkit.models.chunks import build_model_chunks
from labkit.parallel import single_process_groups
from labkit.parallel.data_parallel.optimizer import named_parameters
from labkit.train import pretrain
from labkit.train.checkpoint.exchange import STATE
from labkit.train.checkpoint.manifest import CheckpointError
from labkit.train.checkpoint.shard_files import Reader
from labkit.train.interruption import EXIT_CODE

SMALL = presets.bert_tiny().override(
    {"layers": 1, "hidden": 32, "heads": 2, "seq_length": 80, "global_batch_size": 1, "steps": 1}
)
LEARNS = {"batch": 16, "lr": 4e-3, "dropout": 0.0, "seq_length": 80}
CHANCE = {"mnli": 1 / 3, "qqp": 1 / 2, "race": 1 / 4, "squad1.1": 1 / 8, "squad2.0": 1 / 2}
"""Score of a guess: of SQuAD 1.1 a word of the passage, of 2.0 always no answer."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT that has learned nothing."""
    folder = tmp_path_factory.mktemp("bert")
    pretrain(SMALL.override({"checkpoint.dir": str(folder)}))
    return str(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    def write(row: str, **options: Any) -> Path:
        version = row.removeprefix("squad") or "1.1"
        task = "squad" if row.startswith("squad") else row
        return write_task(task, tmp_path / row, **{"version": version} if task == "squad" else {}, **options)

    return write


# ---- files ----


def test_byte_order_marks_and_line_ends_change_no_example(folder: Any) -> None:
    for task in ("mnli", "qqp", "race", "squad1.1"):
        path = folder(task)
        for table in path.rglob("*.tsv"):  # a needed column first, as in MultiNLI's own files
            rows = [line.split("\t")[::-1] for line in table.read_text().split("\n")]
            table.write_text("\n".join(map("\t".join, rows)))
        before = read_task(task.removesuffix("1.1"), path)
        for file in (file for file in path.rglob("*") if file.is_file()):
            file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
        after = read_task(task.removesuffix("1.1"), path)
        assert (after.train, after.splits, after.left_out) == (before.train, before.splits, before.left_out)


def test_table_6_is_the_papers() -> None:
    """As printed in appendix A, task by task, the three sizes in turn."""
    printed = {
        "mnli": [(128, 1e-5, 10)] * 3,
        "qqp": [(128, 5e-5, 12), (128, 3e-5, 12), (256, 4e-5, 12)],
        "squad1.1": [(64, 3e-5, 2), (48, 3e-5, 2), (48, 1e-5, 2)],
        "squad2.0": [(48, 3e-5, 2), (64, 3e-5, 2), (48, 1e-5, 2)],
        "race": [(32, 2e-5, 3), (16, 1e-5, 3), (32, 2e-5, 3)],
    }
    assert {task: [tuple(row) for row in rows.values()] for task, rows in TABLE_6.items()} == printed
    assert [len(rows_of(task)) for task in TABLE_6] == [1, 3, 3, 3, 2]
    assert [size_of(presets.table4(size).model) for size in ("336M", "1.3B", "3.9B")] == ["336M", "1.3B", "3.9B"]
    assert size_of(SMALL.model) == "336M"


def test_files_become_examples(folder: Any) -> None:
    mnli = read_task("mnli", folder("mnli", train=5, dev=2))
    assert {name: len(examples) for name, examples in mnli.splits.items()} == {"m": 2, "mm": 2}
    assert len(mnli.train) == 5 and all(len(example.pairs) == 1 for example in mnli.train)
    race = read_task("race", folder("race", train=8, dev=4))
    assert [len(race.splits[split]) for split in ("dev", "test")] == [4, 4]
    plain, gap = race.train[:2]
    assert plain.pairs[0][0].startswith("which is ") and gap.pairs[1][0].endswith(" now") and "_" not in gap.pairs[1][0]
    assert {example.level for example in race.train} == {"middle", "high"} and "right" in gap.pairs[gap.label][0]
    squad = read_task("squad", folder("squad2.0", train=20, dev=4))
    assert squad.row == "squad2.0" and {bool(passage.answers) for passage in squad.train} == {True, False}
    assert squad.outputs is None and race.outputs == 1 and mnli.outputs == 3


def test_rows_that_cannot_be_used_are_left_out_and_counted(folder: Any) -> None:
    path = folder("qqp", train=300) / "train.tsv"
    with path.open("a") as file:
        file.write("broken by a tab\tand short\n1\t\tno first question\t1\n")
    found = read_task("qqp", path.parent)
    assert (found.left_out, len(found.train)) == (2, 300)
    path = folder("mnli") / "train.tsv"
    path.write_text(path.read_text() + "1\ta\tb\t-\n")
    assert (read_task("mnli", path.parent).left_out, len(read_task("mnli", path.parent).train)) == (0, 48)


def edited(change: Any) -> Any:
    """A function that rewrites a JSON file."""

    def edit(path: Path) -> None:
        read = json.loads(path.read_text())
        change(read)
        path.write_text(json.dumps(read))

    return edit


def paragraph(read: Any) -> Any:
    return read["data"][0]["paragraphs"][0]


def question(**values: Any) -> Any:
    """A function that gives the first question of SQuAD's file these values."""
    return edited(lambda read: paragraph(read)["qas"][0].update(values))


def answer(**values: Any) -> Any:
    """As `question`, of its first answer."""
    return edited(lambda read: paragraph(read)["qas"][0]["answers"][0].update(values))


BROKEN: dict[str, tuple[str, str, Any, str]] = {
    "no column": ("mnli", "dev_matched.tsv", lambda p: p.write_text(p.read_text().replace("gold_label", "label")),
                  "dev_matched.tsv has no column gold_label"),
    "no class": ("mnli", "train.tsv", lambda p: p.write_text(p.read_text() + "1\ta\tb\tmaybe\n"),
                 "train.tsv, line 50: gold_label is 'maybe'"),
    "short rows": ("qqp", "train.tsv", lambda p: p.write_text(p.read_text() + "1\ta\n"), "1 of 49 rows cannot be used"),
    "only a header": ("qqp", "dev.tsv", lambda p: p.write_text("id\tquestion1\tquestion2\tis_duplicate\n"),
                      "there are no dev examples of qqp"),
    "no file": ("qqp", "dev.tsv", Path.unlink, "dev.tsv"),
    "no options": ("race", "dev/high/0.txt", edited(lambda read: read.pop("options")), "no key 'options'"),
    "answer E": ("race", "train/middle/0.txt", edited(lambda read: read.update(answers=["E", "A"])), "from A to D"),
    "an answer less": ("race", "dev/middle/0.txt", edited(lambda read: read.update(answers=["A"])), "differ in number"),
    "no JSON": ("race", "test/high/0.txt", lambda p: p.write_text("{"), "0.txt is not JSON"),
    "no context": ("squad1.1", "dev-v1.1.json", edited(lambda read: paragraph(read).pop("context")), "key 'context'"),
    "a list": ("squad1.1", "train-v1.1.json", lambda p: p.write_text("[]"), "json is \\[\\], and must be an object"),
    "elsewhere": ("squad1.1", "train-v1.1.json",
                  edited(lambda read: paragraph(read)["qas"][0]["answers"][0].update(answer_start=1)),
                  "1 of 48 rows cannot be used"),
    "no answer": ("squad1.1", "dev-v1.1.json", edited(lambda read: paragraph(read)["qas"][0].update(answers=[])),
                  "question q0 has no answer, and is not marked is_impossible"),
    "no UTF-8": ("mnli", "train.tsv", lambda p: p.write_bytes(p.read_bytes() + b"caf\xe9"),
                 "train.tsv is not UTF-8 text"),
    "half a pair": ("squad1.1", "dev-v1.1.json", edited(lambda read: paragraph(read).update(context="a\ud800")),
                    "dev-v1.1.json has half a surrogate pair"),
    "half a pair in RACE": ("race", "dev/high/0.txt", edited(lambda read: read.update(article="\udc00")),
                            "0.txt has half a surrogate pair"),
    "a word as place": ("squad1.1", "train-v1.1.json",
                        answer(answer_start="1"), "\\[0\\], answer_start is '1', and must be an integer, 0 or more"),
    "a place before the text": ("squad1.1", "dev-v1.1.json", answer(answer_start=-3), "answer_start is -3, and must"),
    "a place that is true": ("squad1.1", "train-v1.1.json", answer(answer_start=True), "answer_start is True, and"),
    "an empty answer": ("squad1.1", "train-v1.1.json", answer(text=""), "text is '', and must be text that is not"),
    "a number as answer": ("squad1.1", "dev-v1.1.json", answer(text=5), "answers\\[0\\], text is 5, and must be text"),
    "no question": ("squad1.1", "train-v1.1.json", question(question=None),
                    "train-v1.1.json, data\\[0\\], paragraphs\\[0\\], qas\\[0\\], question is None, and must be text"),
    "a list as id": ("squad1.1", "dev-v1.1.json", question(id=["a"]), "id is \\['a'\\], and must be text"),
    "null as context": ("squad1.1", "dev-v1.1.json", edited(lambda read: paragraph(read).update(context=None)),
                        "paragraphs\\[0\\], context is None, and must be text"),
    "a word for false": ("squad2.0", "train-v2.0.json", question(is_impossible="false"),
                         "is_impossible is 'false', and must be true or false"),
    "impossible with an answer": ("squad1.1", "dev-v1.1.json", question(is_impossible=True),
                                  "question q0 has an answer, and is marked is_impossible"),
    "one id twice": ("squad1.1", "dev-v1.1.json", edited(lambda read: read["data"].append(read["data"][0])),
                     "dev-v1.1.json has two questions with the id 'q0'"),
    "one key twice": ("squad1.1", "dev-v1.1.json",
                      lambda p: p.write_text(p.read_text().replace('"question":', '"question": "who", "question":', 1)),
                      "dev-v1.1.json is not JSON: has the field 'question' twice, as 'who' and as 'how many'"),
    "one column twice": ("mnli", "train.tsv", lambda p: p.write_text(p.read_text().replace("index", "sentence1", 1)),
                         "train.tsv has 2 columns sentence1"),
    "options as text": ("race", "dev/high/0.txt", edited(lambda read: read.update(options=["abcd"] * 2)),
                        "0.txt, options\\[0\\] is 'abcd', and must be four texts"),
    "numbers as options": ("race", "dev/high/0.txt", edited(lambda read: read["options"][1].__setitem__(2, 3)),
                           "0.txt, options\\[1\\] is .*, and must be four texts"),
    "a list as question": ("race", "dev/high/0.txt", edited(lambda read: read.update(questions=["why", ["_"]])),
                           "0.txt, questions\\[1\\] is \\['_'\\], and must be text"),
    "a folder": ("race", "dev/high/own.txt", Path.mkdir, "dev/high has no file own.txt; give RACE as it is pub"),
    "a link to nothing": ("race", "train/middle/link.txt", lambda p: p.symlink_to("nothing"), "has no file link.txt"),
    "unreadable": ("race", "dev/high/own.txt", lambda p: p.symlink_to("/proc/self/mem"), "own.txt cannot be read: Inp"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_files_of_another_form_are_refused_by_name(fault: str, folder: Any) -> None:
    row, file, damage, words = BROKEN[fault]
    path = folder(row)
    damage(path / file)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        read_task("squad" if row.startswith("squad") else row, path)


def test_a_folder_with_both_versions_of_squad_needs_the_version(folder: Any, tmp_path: Path) -> None:
    for version in ("1.1", "2.0"):
        write_task("squad", tmp_path / "both", version=version)
    with pytest.raises(ValueError, match="--squad-version"):
        read_task("squad", tmp_path / "both")
    assert read_task("squad", tmp_path / "both", "2.0").row == "squad2.0"


# ---- samples ----


def test_a_pair_is_packed_and_its_end_is_cut() -> None:
    packer = Packer(None, 10, 1152)
    tokens, types, mask = packer.packed(np.arange(3), np.arange(50, 60))
    assert tokens.tolist() == [packer.cls, 0, 1, 2, packer.sep, 50, 51, 52, 53, packer.sep]
    assert types.tolist() == [0] * 5 + [1] * 5 and mask.tolist() == [1] * 10
    tokens, types, mask = packer.packed(np.arange(2), np.arange(50, 51))
    assert tokens.tolist() == [packer.cls, 0, 1, packer.sep, 50, packer.sep, 0, 0, 0, 0]
    assert mask.tolist() == [1] * 6 + [0] * 4 and types.tolist() == [0] * 4 + [1] * 2 + [0] * 4
    assert len(packer.packed(np.arange(40), np.arange(5))[0]) == 10
    with pytest.raises(ValueError, match="need 1026 ids, and the checkpoint's model has 1000"):
        Packer(None, 10, 1000)


def test_a_model_needs_a_row_for_each_id_of_the_tokenizer_and_no_more(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    names = ["[UNK]", "[MASK]", "[SEP]", "[CLS]"]
    model = tokenizers.models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    path = str(tmp_path / "tokenizer.json")
    tokenizers.Tokenizer(model).save(path)
    assert Packer(path, 10, 4).cls == 3
    with pytest.raises(ValueError, match="need 4 ids, and the checkpoint's model has 3"):
        Packer(path, 10, 3)


def test_windows_hold_each_token_and_point_at_the_answer() -> None:
    draw, packer = random.Random(3), Packer(None, 80, 1152)
    passages = []
    for number in range(30):
        words = [draw.choice(["bug", "hacker", "metasyntactic", "code"]) for _ in range(draw.choice([3, 40, 200]))]
        at = draw.randrange(len(words))
        begin = len(" ".join([*words[:at], ""]))
        passages.append(Passage(str(number), "how many", " ".join(words), ((words[at], begin),)))
    windows = Windows(passages, packer, 64)
    assert len(windows.places) > len(passages)
    found = dict.fromkeys(range(len(passages)), 0)
    for index, place in enumerate(windows.places):
        first, last = windows.sample(index)["labels_BL"].tolist()
        assert windows.sample(index)["padding_mask_BCS"].sum() == place.at + place.end - place.start + 1
        if (first, last) != (0, 0):
            found[place.passage] += 1
            assert windows.text(index, first - place.at, last - place.at) == passages[place.passage].answers[0][0]
    assert all(found.values()), "each answer stands in a window"
    for number, passage in enumerate(passages):
        covered = {n for place in windows.places if place.passage == number for n in range(place.start, place.end)}
        assert covered == set(range(len(packer.ids(passage.context))))
    with pytest.raises(ValueError, match="raise --seq-length to 68"):
        Windows(passages, Packer(None, 67, 1152), 64)


def test_every_epoch_visits_each_sample_once_in_an_order_of_its_own() -> None:
    samples = TaskSamples("train", 11, lambda index: {"index_B": np.array(index)}, seed=4)
    epochs = [[int(samples.ordered(11 * epoch + place)["index_B"]) for place in range(11)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(11)) and epochs[0] != epochs[1] != list(range(11))


# ---- scores; the oracle is in tests/oracles ----


def test_answers_by_hand() -> None:
    assert exact_match("The  Bug!", "a bug") == 1 and exact_match("bugs", "bug") == 0
    assert f1("the big red bug", "a red bug") == pytest.approx(2 * 2 / (3 + 2))
    assert f1("bug bug", "bug") == pytest.approx(2 / 3)
    assert f1("", "") == exact_match("", "") == 1 and f1("", "bug") == f1("bug", "") == 0
    passages = [Passage("a", "q", "c", (("red bug", 0), ("bug", 4))), Passage("b", "q", "c", ())]
    found = squad_scores(passages, {"a": "bug", "b": "bug"})
    assert found["f1"] == found["exact_match"] == 0.5
    assert found["answerable_f1"] == 1 and found["unanswerable_exact_match"] == 0


def test_the_best_span_is_the_best_of_all() -> None:
    random_numbers = np.random.default_rng(5)
    for size in (1, 5, 50):
        first, last = random_numbers.normal(size=(2, size))
        pairs = [(first[i] + last[j], i, j) for i in range(size) for j in range(i, min(size, i + 30))]
        assert best_span(first, last) == pytest.approx(max(pairs))
    assert best_span(*np.full((2, 5), -np.inf)) == (-np.inf, 0, 0), "where nothing may be an answer, the first token"


def test_the_longest_answer_has_30_tokens() -> None:
    """As `max_answer_length` of BERT's run_squad.py."""
    for distance, found in ((29, (12.0, 0, 29)), (30, (7.0, 30, 30))):
        first, last = np.zeros((2, 31))
        first[0], last[distance] = 5.0, 7.0
        assert best_span(first, last) == found


def test_no_answer_wins_where_cls_scores_above_every_span() -> None:
    passages, packer = [Passage("a", "how many", "the bug", ())], Packer(None, 80, 1152)
    windows = Windows(passages, packer, 64)
    logits = np.full((1, 2, 80), -9.0)
    at, cls = windows.places[0].at, logits[0, :, 0]
    logits[0, :, at] = 1.0
    cls[:] = 0.9
    assert answers(passages, windows, logits, may_refuse=True) == {"a": windows.text(0, 0, 0)} != {"a": ""}
    cls[:] = 1.1
    assert answers(passages, windows, logits, may_refuse=True) == {"a": ""}
    assert answers(passages, windows, logits, may_refuse=False) != {"a": ""}


def test_a_question_without_a_passage_has_no_answer_and_spoils_no_other() -> None:
    passages = [Passage("a", "how many", "", ()), Passage("b", "how many", "the bug", ())]
    windows = Windows(passages, Packer(None, 80, 1152), 64)
    logits = np.zeros((len(windows.places), 2, 80))
    for may_refuse in (False, True):
        assert answers(passages, windows, logits - logits[:, :, :1], may_refuse=may_refuse)["a"] == ""
        logits[:, :, 0] = -1.0
        assert answers(passages, windows, logits, may_refuse=may_refuse)["b"] != ""


def test_only_a_split_with_questions_without_answer_may_be_refused() -> None:
    """SQuAD 1.1 has none, so that each of its questions gets a span, however sure the model is of [CLS]."""
    context, packer = "the bug is here", Packer(None, 80, 1152)
    right = Passage("a", "what", context, (("the bug", 0),))
    for passages, expected in (([right], 1.0), ([right, Passage("b", "who", context, ())], 0.5)):
        windows = Windows(passages, packer, 64)
        found, at = TaskFiles("squad", splits={"dev": passages}), windows.places[0].at
        logits = np.zeros((len(passages), 2, 80))
        logits[:, 0, at] = logits[:, 1, at + len(packer.ids("the bug")) - 1] = 2.0
        logits[:, :, 0] = 9.0
        assert scores_of(found, "dev", logits, windows)["dev_exact_match"] == expected
        logits[0, 0, 0] = np.nan
        with pytest.raises(ValueError, match="dev: the logits are not finite"):
            scores_of(found, "dev", logits, windows)


def test_no_answer_scores_as_in_the_window_where_it_is_lowest() -> None:
    """One window that rules it out is enough, whichever it is; and each question has its own."""
    context = "the bug " * 60
    passages = [Passage(name, "how many", context, ()) for name in "ab"]
    windows = Windows(passages, Packer(None, 80, 1152), 64)
    of_a = [index for index, place in enumerate(windows.places) if place.passage == 0]
    assert 2 < len(of_a) < len(windows.places)
    for lowest in (of_a[0], of_a[1], of_a[-1]):
        logits = np.zeros((len(windows.places), 2, 80))
        logits[:, :, 0] = 3.0
        logits[lowest, :, 0] = -1.0, 0.5
        found = answers(passages, windows, logits, may_refuse=True)
        assert found["a"] != "" and found["b"] == ""


def test_the_median_run_gives_the_test_scores() -> None:
    common = {"task": "race", "checkpoint": "c", "batch": 1, "lr": 1.0, "epochs": 1}
    dev, test = [0.5, 0.9, 0.7, 0.6, 0.8], [0.1, 0.2, 0.3, 0.4, 0.5]
    rows = [
        {**common, "seed": seed, "scores": {"dev_accuracy": d, "test_accuracy": t}}
        for seed, (d, t) in enumerate(zip(dev, test))
    ]
    found = summary("race", rows)
    assert found["median_seed"] == 2 and found["median"] == {"dev_accuracy": 0.7, "test_accuracy": 0.3}
    assert summary("race", rows[:2])["median"]["dev_accuracy"] == 0.5, "of two the lower"


# ---- learning ----

EPOCHS = {"mnli": 16, "qqp": 8, "race": 8, "squad1.1": 12, "squad2.0": 12}


@pytest.mark.parametrize("row", EPOCHS)
def test_each_task_beats_chance(row: str, folder: Any, checkpoint: str, one_thread: None) -> None:
    task = "squad" if row.startswith("squad") else row
    path = str(folder(row, train=96, dev=48))
    settings = Settings(task=task, path=path, checkpoint=checkpoint, epochs=EPOCHS[row], **LEARNS)
    [result, last] = finetune(settings, seeds=(5,))
    score, n = result["scores"][MAIN[task]], 48
    chance = CHANCE[row]
    assert score > chance + 4 * (chance * (1 - chance) / n) ** 0.5, result["scores"]
    assert last["median"] == result["scores"] and result["last_loss"] < result["first_loss"]


def test_a_sweep_an_ensemble_and_rows_that_are_read(
    folder: Any, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(folder("qqp", train=16, dev=8))
    settings = Settings(task="qqp", path=path, checkpoint=checkpoint, epochs=1, batch=8, seq_length=32)
    out = tmp_path / "rows.jsonl"
    rows = finetune(settings, seeds=(1, 2), sweep=True, ensemble=True, records=Records(out))
    assert [(row["lr"], row["seed"]) for row in rows[:3]] == [(5e-5, 1), (3e-5, 1), (4e-5, 1)]
    assert len(rows) == 5 and "ensemble" in rows[-1] and rows[-1]["seeds"] == [1, 2]
    assert [json.loads(line) for line in out.read_text().splitlines()] == rows
    monkeypatch.setattr("labkit.finetune.repeated_runs.train_and_predict", lambda *_: pytest.fail("trained again"))
    again = finetune(settings, seeds=(1, 2), sweep=True, records=Records(out))
    assert again[:4] == rows[:4]
    assert finetune(settings, seeds=(1,), records=Records(out))[0] == rows[0], "without a sweep the first row alone"
    assert len(finetune(settings, seeds=(1,), records=Records(out))) == 2
    monkeypatch.undo()
    finetune(replace(settings, lr=1e-3), seeds=(1,), records=Records(out))
    finetune(replace(settings, lr=2e-3), seeds=(1,), records=Records(out))
    summaries = [row for row in Records(out).rows if "median" in row]
    assert [row["lr"] for row in summaries[-2:]] == [1e-3, 2e-3], "a summary of other numbers is another row"


def test_saved_weights_are_a_checkpoint(
    folder: Any, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"finetune qqp --path {folder('qqp', train=16, dev=4)} --batch 8 --epochs 1 --seq-length 32 --json"
    first = [*line.split(), "--checkpoint", checkpoint, "--save", str(tmp_path / "tuned"), "--seed", "7"]
    assert main([*first, "--out", str(tmp_path / "rows.jsonl")]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[0])
    assert row["saved"] == str(tmp_path / "tuned" / "seed_7-batch_8-lr_5e-05-epochs_1") and row["key"]["ranks"] == 1
    assert [path.name for path in Path(row["saved"]).glob("step_*")] == ["step_00000002"]
    assert main(["checkpoint", "verify", row["saved"]]) == 0
    assert main([*first, "--out", str(tmp_path / "rows.jsonl")]) == 0, "the row is there, so nothing is trained"
    capsys.readouterr()
    assert main(first) == 1
    assert "seed_7-batch_8-lr_5e-05-epochs_1 holds the checkpoints of another" in capsys.readouterr().err
    assert main([*line.split(), "--checkpoint", row["saved"]]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[0])
    assert again["saved"] is None and again["first_loss"] != row["first_loss"]
    assert main(["checkpoint", "export", row["saved"], str(tmp_path / "hf")]) == 1
    assert "has no tensor" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["mnli", "squad"])
def test_every_pretrained_weight_is_loaded(task: str, folder: Any, checkpoint: str) -> None:
    path = str(folder({"squad": "squad1.1"}.get(task, task)))
    prepared = prepare(Settings(task=task, path=path, checkpoint=checkpoint))
    groups, provider = single_process_groups(), task_provider(prepared.files.outputs)
    chunks = build_model_chunks(configuration(prepared, prepared.row, 99, 1), groups, model_provider=provider)
    load_weights([*chunks], groups, prepared.weights)
    reader, names = Reader(prepared.weights.source), set()
    for name, parameter in named_parameters(chunks).items():
        if not name.startswith("task_head."):
            stored = reader.read_whole(name)
            assert torch.equal(parameter[: len(stored)], stored), name
            names.add(name)
    heads = {name for name in weight_names(reader) if name.startswith(("lm_head.", "binary_head."))}
    pooler = {f"binary_head.pooler.{part}" for part in ("weight", "bias")} if task == "mnli" else set()
    assert names == weight_names(reader) - heads | pooler


def test_weights_that_do_not_fit_are_named(folder: Any, checkpoint: str) -> None:
    prepared = prepare(Settings(task="mnli", path=str(folder("mnli")), checkpoint=checkpoint))
    groups, provider = single_process_groups(), task_provider(prepared.files.outputs)
    chunks = build_model_chunks(configuration(prepared, prepared.row, 99, 1), groups, model_provider=provider)
    prepared.weights.shapes["layers.0.mlp.fc1.weight"] = (1, 2)
    del prepared.weights.shapes["embedding.position.weight"]
    with pytest.raises(CheckpointError) as raised:
        load_weights([*chunks], groups, prepared.weights)
    for words in (
        "embedding.position.weight is missing, not (80, 32)",
        "layers.0.mlp.fc1.weight is (1, 2), not (128, 32)",
    ):
        assert words in str(raised.value)


def weight_names(reader: Reader) -> set[str]:
    """Names of the stored weights."""
    return {name for name in reader.manifest.tensors if not name.startswith(STATE)}


def test_a_model_of_hugging_face_gives_the_numbers_of_its_checkpoint(
    folder: Any, checkpoint: str, tmp_path: Path, one_thread: None
) -> None:
    exported = tmp_path / "megatron-bert"
    assert main(["checkpoint", "export", checkpoint, str(exported)]) == 0
    common: dict[str, Any] = {"task": "mnli", "path": str(folder("mnli", train=16, dev=4)), "epochs": 1, "batch": 8}
    ours, theirs = (
        finetune(Settings(checkpoint=path, seq_length=32, dropout=0.0, **common))[0]
        for path in (checkpoint, str(exported))
    )
    assert {**ours, "checkpoint": ""} == {**theirs, "checkpoint": ""}
    lacks_one = tmp_path / "other"
    pretrain(SMALL.override({"checkpoint.dir": str(lacks_one), "bert_binary_head": False}))
    assert finetune(Settings(checkpoint=str(lacks_one), seq_length=32, **common))[0]["steps"] == 2, "a new pooler"


# ---- the command ----


def test_the_command_trains_and_prints(folder: Any, checkpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"finetune race --path {folder('race', train=8, dev=4)} --checkpoint {checkpoint} --epochs 0.5 --batch 4"
    assert main([*line.split(), "--seq-length", "40", "--json"]) == 0
    row, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["lr"], row["batch"], row["steps"]) == (2e-5, 4, 1), "what is not given is Table 6's"
    assert set(row["scores"]) == {
        f"{split}_{level}accuracy" for split in ("dev", "test") for level in ("", "middle_", "high_")
    }
    assert last["median"] == row["scores"]
    assert main([*line.split(), "--seq-length", "40", "--seeds", "2", "--ensemble", "--nproc", "2"]) == 0
    first, second, median, ensemble = capsys.readouterr().out.splitlines()
    assert first.startswith("race, seed 1234, batch 4, lr 2e-05, 0.5 epochs: dev accuracy ") and "seed 1235" in second
    assert median.startswith("race, median of 2, batch 4") and ensemble.startswith("race, ensemble of 2: dev accuracy ")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, EXIT_CODE)])
def test_signals_leave_finished_runs_and_nothing_else(
    number: int, code: int, folder: Any, checkpoint: str, tmp_path: Path
) -> None:
    line = f"finetune qqp --path {folder('qqp')} --checkpoint {checkpoint} --batch 16 --seq-length 32 --epochs 60"
    out, tuned = tmp_path / "rows.jsonl", tmp_path / "tuned"
    words = [sys.executable, "-m", "labkit", *line.split(), "--seeds", "2", "--out", str(out), "--save", str(tuned)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as command:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("tuned/seed_1235*")) and command.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        command.send_signal(number)
        _, error = command.communicate(timeout=60)
    assert command.returncode == code, error
    assert [json.loads(row)["seed"] for row in out.read_text().splitlines()] == [1234]
    assert [path.name[:9] for path in tuned.iterdir() if any(path.glob("step_*"))] == ["seed_1234"]
    assert code == 130 or len(list(tuned.iterdir())) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--path HERE --checkpoint RUN", "no task named: give one of mnli, qqp, race, squad"),
        ("mnly --path HERE --checkpoint RUN", 'did you mean "mnli"?'),
        ("mnli --checkpoint RUN", "--path: give the folder with the task's files"),
        ("mnli --path nowhere --checkpoint RUN", "--path 'nowhere': no such folder"),
        ("mnli --path HERE", "--checkpoint: give the folder"),
        ("mnli --path HERE --checkpoint RUN --size 2B", "--size '2B': must be one of 336M, 1.3B, 3.9B"),
        ("mnli --path HERE --checkpoint RUN --squad-version 2.0", "only squad reads it"),
        ("mnli --path HERE --checkpoint RUN --ensemble", "needs the runs of several seeds"),
        ("mnli --path HERE --checkpoint RUN --nproc 3 --tp 2", "--nproc 3: must be a multiple of tp 2 x pp 1"),
        ("mnli --path HERE --checkpoint EXPORT", "names no tokenizer"),
        (
            "mnli --path HERE --checkpoint RUN --out nowhere/o.jsonl",
            "--out 'nowhere/o.jsonl': there is no folder 'nowhere'",
        ),
    ],
)
def test_bad_requests_are_refused_before_any_rank_starts(
    line: str, words: str, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("labkit.launch.run", lambda *_, **__: pytest.fail("ranks were started"))
    (tmp_path / "config.json").write_text("{}")
    given = {"HERE": str(tmp_path), "EXPORT": str(tmp_path), "RUN": checkpoint}
    assert main(["finetune", *(given.get(word, word) for word in line.split())]) == 2
    assert words in capsys.readouterr().err


def test_what_the_ranks_see_is_refused_in_one_sentence(
    folder: Any, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpt = tmp_path / "gpt"
    pretrain(presets.tiny().override({"layers": 1, "steps": 1, "global_batch_size": 1, "checkpoint.dir": str(gpt)}))
    path = folder("qqp", train=8, dev=4)
    assert main(["finetune", "qqp", "--path", str(path), "--checkpoint", str(gpt)]) == 2
    assert "holds a gpt; fine-tuning needs a BERT\n" in capsys.readouterr().err
    (path / "dev.tsv").unlink()
    assert main(["finetune", "qqp", "--path", str(path), "--checkpoint", checkpoint]) == 2
    error = capsys.readouterr().err
    assert "dev.tsv" in error and "Traceback" not in error
