"""The files of four tasks as their authors publish them, read into examples.

| task    | files in the folder                                                     | columns or keys          |
|---------|-------------------------------------------------------------------------|--------------------------|
| `mnli`  | `train.tsv`, `dev_matched.tsv`, `dev_mismatched.tsv` (GLUE's), or        | `sentence1` `sentence2`  |
|         | `multinli_1.0_train.txt`, `.._dev_matched.txt`, `.._dev_mismatched.txt` | `gold_label`             |
| `qqp`   | `train.tsv`, `dev.tsv` (GLUE's)                                         | `question1` `question2`  |
|         |                                                                         | `is_duplicate`           |
| `race`  | `train`, `dev` and `test`, in each `middle` and `high` with `*.txt`     | `article` `questions`    |
|         |                                                                         | `options` `answers`      |
| `squad` | `train-v1.1.json`, `dev-v1.1.json`, or the two of v2.0                  | `context` `qas` `id` ... |

MNLI and QQP choose a class for a pair of texts, and RACE chooses one of four pairs; an example of either is a `Choice`.
SQuAD asks for a part of a text; its example is a `Passage`.

A file without a required column or key is rejected with an error that names it. QQP's file has a few rows with too few
columns, and some answers may not be in their text where the file says. Such rows are left out and counted, but a file
with more than 1% of them is rejected.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.config.errors import counted, shown
from labkit.data.text import parse_json, whole_characters

TASKS = ("mnli", "qqp", "race", "squad")
"""The words that name a task."""
MOST_LEFT_OUT = 0.01
"""Largest share of rows that may be left out."""
MNLI_CLASSES = ("contradiction", "entailment", "neutral")
"""MNLI's classes, in the order of the logits."""
LETTERS = "ABCD"
"""RACE's names of the four options."""
LEVELS = ("middle", "high")
"""RACE's two levels of schools."""
VERSIONS = ("1.1", "2.0")
"""Versions of SQuAD."""


@dataclass(frozen=True)
class Choice:
    """Pairs of texts and the right answer: a class of the only pair, or the right one of several pairs."""

    pairs: tuple[tuple[str, str], ...]
    """(first text, second text) of each pair."""
    label: int
    """Class, or number of the right pair."""
    level: str = ""
    """For RACE `middle` or `high`; empty for other tasks."""


@dataclass(frozen=True)
class Passage:
    """A question about a text."""

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...]
    """(text, first character in `context`) of each right answer; empty where there is none."""


@dataclass
class TaskFiles:
    """Everything that was read from the files of a task."""

    row: str
    """Name in Table 6: the task, for SQuAD with its version."""
    train: Sequence[Any] = ()
    """The examples to learn."""
    splits: dict[str, Sequence[Any]] = field(default_factory=dict)
    """Name -> examples to predict. The names are `m` and `mm` for MNLI, else `dev`, and for RACE also `test`."""
    files: list[Path] = field(default_factory=list)
    """Files that were read."""
    left_out: int = 0
    """Rows that could not be used."""

    @property
    def outputs(self) -> int | None:
        """Scores that the head gives one pair of texts; None if it gives each token two, for the ends of a span."""
        return {"mnli": len(MNLI_CLASSES), "qqp": 2, "race": 1}.get(self.row)

    @property
    def digest(self) -> str:
        """First 16 digits of the SHA-256 of all files' SHA-256."""
        sums = hashlib.sha256()
        for path in self.files:
            sums.update(hashlib.sha256(path.read_bytes()).digest())
        return sums.hexdigest()[:16]


def read_task(task: str, folder: str | Path, version: str | None = None) -> TaskFiles:
    """Read the files of a task.

    version: version of SQuAD; None takes the one whose files are in the folder.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file has another form; the message names the file and the place, and what is wrong there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give the one with the files of {task}")
    readers = {"mnli": _read_mnli, "qqp": _read_qqp, "race": _read_race}
    found = readers[task](folder) if task in readers else _read_squad(folder, version)
    for name, examples in {"training": found.train, **found.splits}.items():
        if not examples:
            raise ValueError(f"{folder}: there are no {name} examples of {task}; the files have only headers")
    return found


def _there(paths: Iterable[Path], task: str) -> None:
    if missing := [path for path in paths if not path.is_file()]:
        names = ", ".join(path.name for path in missing)
        raise FileNotFoundError(f"{missing[0].parent} has no file {names}; give {task} as it is published")


# ---- MNLI and QQP: tables with tabs between columns ----


def _read_mnli(folder: Path) -> TaskFiles:
    def example(row: dict[str, str]) -> Choice | None:
        if row["gold_label"] == "-":  # the annotators did not agree; the authors leave these out
            return None
        return Choice(((row["sentence1"], row["sentence2"]),), MNLI_CLASSES.index(row["gold_label"]))

    glue = (folder / "train.tsv").is_file() or not (folder / "multinli_1.0_train.txt").is_file()
    names = {"train": "train", "m": "dev_matched", "mm": "dev_mismatched"}
    paths = {part: folder / (f"{name}.tsv" if glue else f"multinli_1.0_{name}.txt") for part, name in names.items()}
    return _tables("mnli", paths, ("sentence1", "sentence2", "gold_label"), example)


def _read_qqp(folder: Path) -> TaskFiles:
    def example(row: dict[str, str]) -> Choice:
        return Choice(((row["question1"], row["question2"]),), ("0", "1").index(row["is_duplicate"]))

    paths = {part: folder / f"{part}.tsv" for part in ("train", "dev")}
    return _tables("qqp", paths, ("question1", "question2", "is_duplicate"), example)


def _tables(
    row: str, paths: dict[str, Path], columns: Sequence[str], example: Callable[[dict[str, str]], Choice | None]
) -> TaskFiles:
    """Return the examples of several tables. columns: names of the columns of the two texts and of the label."""
    _there(paths.values(), row)
    found, parts = TaskFiles(row, files=list(paths.values())), dict[str, list[Choice]]()
    for part, path in paths.items():
        parts[part], rows, left_out = [], 0, 0
        for number, cells in _rows(path, columns):
            rows += 1
            if cells is None or not (cells[columns[0]] and cells[columns[1]]):
                left_out += 1
                continue
            try:
                made = example(cells)
            except ValueError:
                raise ValueError(
                    f"{path}, line {number}: {columns[2]} is {cells[columns[2]]!r}, which is not a class of {row}"
                ) from None
            parts[part] += [] if made is None else [made]
        _few(path, left_out, rows)
        found.left_out += left_out
    found.train, found.splits = parts.pop("train"), dict(parts)
    return found


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str] | None]]:
    """Yield (number, required cells by column) of each line of a table; None for a line whose number of cells is not
    the header's."""
    with _published(path), path.open(encoding="utf-8-sig", newline="\n") as file:
        header = file.readline().strip("\r\n").split("\t")
        counts = [(header.count(column), column) for column in columns]
        if wrong := [f"{count or 'no'} column{'s' * (count > 1)} {column}" for count, column in counts if count != 1]:
            raise ValueError(
                f"{path} has {', '.join(wrong)}; its first line must name each column once, with tabs between them, "
                f"and it names {', '.join(header[:20])}"
            )
        for number, line in enumerate(file, 2):
            cells = line.strip("\r\n").split("\t")
            whole = dict(zip(header, cells)) if len(cells) == len(header) else None
            yield number, whole and {column: " ".join(whole[column].split()) for column in columns}


def _few(path: Path, left_out: int, rows: int) -> None:
    if left_out > MOST_LEFT_OUT * rows:
        raise ValueError(
            f"{path}: {left_out:,} of {counted(rows, 'row')} cannot be used, and 1% may be; each row needs its "
            "texts and as many cells as the header, and each answer must be where the file says it is in the text"
        )


# ---- RACE and SQuAD: JSON ----


def _read_race(folder: Path) -> TaskFiles:
    found, parts = TaskFiles("race"), dict[str, list[Choice]]()
    for part in ("train", "dev", "test"):
        files = [(level, path) for level in LEVELS for path in sorted((folder / part / level).glob("*.txt"))]
        if not files and part != "test":
            raise FileNotFoundError(f"{folder / part} has no {' or '.join(LEVELS)} with *.txt, as RACE has them")
        _there((path for _, path in files), "RACE")
        found.files += [path for _, path in files]
        parts[part] = [choice for level, path in files for choice in _race_file(path, level)]
    found.train = parts.pop("train")
    found.splits = {part: examples for part, examples in parts.items() if examples}
    return found


def _race_file(path: Path, level: str) -> Iterator[Choice]:
    """Yield the questions of one article. An option fills the gap of its question, or follows it if it has no gap."""
    read = _json(path)
    article = " ".join(read["article"].get("text").split())
    asked = [list(read[key]) for key in ("questions", "options", "answers")]
    if len({len(values) for values in asked}) > 1:
        raise ValueError(f"{path}: questions, options and answers differ in number")
    for question, options, answer in zip(*asked):
        text, letter = question.get("text"), answer.get("a letter from A to D")
        filled = [text.replace("_", o) if "_" in text else f"{text} {o}" for o in options.get("four texts")]
        yield Choice(tuple((" ".join(each.split()), article) for each in filled), LETTERS.index(letter), level)


def _read_squad(folder: Path, version: str | None) -> TaskFiles:
    there = [v for v in VERSIONS if (folder / f"train-v{v}.json").is_file()]
    if version is None and len(there) > 1:
        raise ValueError(f"{folder} has SQuAD {' and '.join(there)}; choose one with --squad-version")
    version = version or (there[0] if there else VERSIONS[0])
    paths = {part: folder / f"{part}-v{version}.json" for part in ("train", "dev")}
    _there(paths.values(), f"SQuAD {version}")
    found = TaskFiles(f"squad{version}", files=list(paths.values()))
    parts = {part: list(_squad_file(path)) for part, path in paths.items()}
    right = [p for p in parts["train"] if all(p.context[at : at + len(text)] == text for text, at in p.answers)]
    found.left_out = len(parts["train"]) - len(right)
    _few(found.files[0], found.left_out, len(parts["train"]))
    found.train, found.splits = right, {"dev": parts["dev"]}
    return found


def _squad_file(path: Path) -> Iterator[Passage]:
    names = set[str]()
    for paragraph in (paragraph for article in _json(path)["data"] for paragraph in article["paragraphs"]):
        for asked in paragraph["qas"]:
            name, impossible = asked["id"].get("text"), asked.get("an object").get("is_impossible", False)
            answers = [
                (each["text"].get("text that is not empty"), each["answer_start"].get("an integer, 0 or more"))
                for each in asked["answers"]
            ]
            if _Value(f"{asked.place}, is_impossible", impossible).get("true or false") == bool(answers):
                words = "an answer, and is" if answers else "no answer, and is not"
                raise ValueError(f"{path}: question {name} has {words} marked is_impossible")
            if name in names:
                raise ValueError(f"{path} has two questions with the id {shown(name)}; give each its own")
            names.add(name)
            yield Passage(name, asked["question"].get("text"), paragraph["context"].get("text"), tuple(answers))


_KINDS: dict[str, Callable[[Any], bool]] = {
    "an object": lambda found: isinstance(found, dict),
    "a list": lambda found: isinstance(found, list),
    "text": lambda found: isinstance(found, str),
    "text that is not empty": lambda found: isinstance(found, str) and found != "",
    "four texts": lambda found: isinstance(found, list) and [*map(type, found)] == [str] * len(LETTERS),
    "a letter from A to D": lambda found: found in tuple(LETTERS),
    "an integer, 0 or more": lambda found: type(found) is int and found >= 0,
    "true or false": lambda found: isinstance(found, bool),
}
"""Words for a kind of value -> function that says whether a value is of this kind."""


@dataclass(frozen=True)
class _Value:
    """A value of a JSON file. Every access says of which kind it must be, and raises ValueError if it is of another."""

    place: str
    """The file, and the path to the value in it."""
    found: Any

    def get(self, kind: str) -> Any:
        """Return the value itself. kind: one of `_KINDS`."""
        if not _KINDS[kind](self.found):
            raise ValueError(f"{self.place} is {shown(self.found)}, and must be {kind}, as in the published file")
        return self.found

    def __getitem__(self, key: str) -> _Value:
        if key not in self.get("an object"):
            raise ValueError(f"{self.place} has no key {key!r}; give the file as its authors publish it")
        return _Value(f"{self.place}, {key}", self.found[key])

    def __iter__(self) -> Iterator[_Value]:
        return (_Value(f"{self.place}[{at}]", each) for at, each in enumerate(self.get("a list")))


def _json(path: Path) -> _Value:
    with _published(path):
        content = path.read_bytes()
    try:
        read = parse_json(content)
        text = json.dumps(read, ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    try:
        whole_characters(text)
    except ValueError:
        raise ValueError(f"{path} has half a surrogate pair in a text, which is not a character; correct it") from None
    return _Value(str(path), read)


@contextmanager
def _published(path: Path) -> Iterator[None]:
    """In the block, turn the error of a file that cannot be read into a ValueError that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
