"""`labkit data`: clean text, make indexed datasets from it, show them, merge them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from shlex import quote
from types import FrameType
from typing import Any

from labkit.cli.arguments import Action, Arguments, Command, Option
from labkit.cli.command_line import CommandFailedError
from labkit.cli.output import show
from labkit.cli.written_files import output_problems
from labkit.config.errors import counted


def execute(arguments: Arguments) -> int:
    """Check the words and options of the action, and perform it."""
    action, words = arguments.action(COMMAND)
    if "overwrite" in action.options:
        ending = "" if action.do is _clean else ".bin"
        arguments.refuse(output_problems(action.words.split()[-1], words[-1] + ending))
    try:
        return action.do(arguments, words)
    except ModuleNotFoundError as error:
        raise CommandFailedError(str(error)) from error
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        arguments.refuse([str(error)])
        raise


def _prepare(arguments: Arguments, words: Sequence[str]) -> int:
    """Tokenise files of documents into PREFIX.bin and PREFIX.idx."""
    from labkit.data.preparation import Recipe, prepare

    *inputs, prefix = words
    options = arguments.options
    workers = options["workers"] or os.cpu_count() or 1
    recipe = Recipe(options["tokenizer"], options["key"], options["append_eod"], options["sentences"])
    with _bar(inputs, "tokenising") as advance, _sigterm_interrupts():
        done = prepare(inputs, prefix, recipe, workers=workers, overwrite=options["overwrite"], progress=advance)
    empty = f", {done.empty} without a token left out" if done.empty else ""
    show(f"{prefix}: {counted(done.documents, 'document')}, {counted(done.tokens, 'token')}{empty}")
    show(f"to train on it: --data.path {quote(prefix)}")
    return 0


def _clean(arguments: Arguments, words: Sequence[str]) -> int:
    """Write the documents that pass all rules as JSON lines, and say how many did not."""
    from labkit.data.cleaning import OVERLAP, Rules, clean

    *inputs, target = words
    options = arguments.options
    names = ("key", "tokenizer", "min_tokens", "jaccard", "repair_newlines")
    rules = Rules(**{name: options[name] for name in names})
    with _bar(inputs, "cleaning") as advance, _sigterm_interrupts():
        done = clean(inputs, target, rules, tests=options["tests"], overwrite=options["overwrite"], progress=advance)
    show(
        f"{target}: {done.kept:,} of {counted(done.read, 'document')} kept; {done.short:,} short "
        f"(under {counted(options['min_tokens'], 'token')}, --min-tokens), "
        f"{done.evaluation:,} of the test sets, {counted(done.duplicates, 'near-duplicate')}"
    )
    if options["tests"]:
        share = done.overlapping / max(1, done.test_ngrams)
        show(
            f"{OVERLAP}-grams of the test sets in kept documents: "
            f"{done.overlapping:,} of {done.test_ngrams:,} ({share:.1%})"
        )
    return 0


def _show(_arguments: Arguments, words: Sequence[str]) -> int:
    """Print the contents of indexed datasets, after the checks of every reader."""
    from labkit.data.indexed import IndexedDataset

    for prefix in words:
        data = IndexedDataset(prefix)
        longest = int(data.sequence_lengths.max()) if len(data) else 0
        show(
            f"{prefix}: {counted(data.num_documents, 'document')}, {counted(len(data), 'sequence')} of at most "
            f"{counted(longest, 'token')}, {counted(data.num_tokens, 'token')} of {data.dtype.name}"
        )
    return 0


def _merge(arguments: Arguments, words: Sequence[str]) -> int:
    """Join indexed datasets of one type."""
    from labkit.data.indexed import IndexedDataset, IndexedDatasetBuilder

    *inputs, prefix = words
    kind = IndexedDataset(inputs[0]).dtype
    with (
        _sigterm_interrupts(),
        IndexedDatasetBuilder(prefix, kind, overwrite=arguments.options["overwrite"]) as builder,
    ):
        for one in inputs:
            builder.add_index(one)
    return _show(arguments, [prefix])


@contextmanager
def _bar(paths: Sequence[str], words: str) -> Iterator[Callable[[int], Any]]:
    """Show a bar of bytes on a terminal, from its first advance on; yield the function that advances it."""
    from tqdm.auto import tqdm

    from labkit.data.documents import total_bytes

    total = total_bytes(paths)
    with tqdm(total=total, unit="B", unit_scale=True, file=sys.stderr, disable=None, desc=words, delay=1e-3) as bar:
        yield bar.update


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """In the block, let SIGTERM end the command as Ctrl-C does, so that no half-written file is left."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt("ended by SIGTERM; nothing was written")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


ACTIONS: dict[str, Action] = {
    "prepare": Action(
        _prepare,
        "FILE... PREFIX",
        ("tokenizer", "key", "append_eod", "sentences", "workers", "overwrite"),
    ),
    "clean": Action(
        _clean,
        "FILE... OUT.jsonl",
        ("tokenizer", "key", "min_tokens", "jaccard", "tests", "repair_newlines", "overwrite"),
    ),
    "show": Action(_show, "PREFIX..."),
    "merge": Action(_merge, "PREFIX... OUT", ("overwrite",)),
}

COMMAND = Command(
    name="data",
    summary="Indexed datasets in Megatron's format: `prepare FILE... PREFIX` tokenises .txt (one document per file), "
    ".jsonl (one object per line) and .parquet files into PREFIX.bin and PREFIX.idx; `clean FILE... OUT.jsonl` leaves "
    "out short documents, near-duplicates and test documents; `show PREFIX...` checks and counts; "
    "`merge PREFIX... OUT` joins datasets.",
    options=(
        Option(
            "tokenizer",
            "str",
            "a `tokenizers` JSON file, GPT-2's vocab.json (with merges.txt) or BERT's vocab.txt",
            path="any",
            unset="default: the bundled BPE",
        ),
        Option("key", "str", "key of the text in JSON lines, or its column in Parquet", "text"),
        Option(
            "append-eod",
            "bool",
            "end each document with the end token",
            unset="default: true, but false with --sentences",
        ),
        Option("sentences", "bool", "keep each sentence as a sequence, for BERT and T5", False),
        Option("workers", "int", "processes that tokenise", ge=1, unset="default: one per core"),
        Option("min-tokens", "int", "clean: fewest tokens of a document; 0 keeps short ones", 128, ge=0),
        Option(
            "jaccard", "float", "clean: documents with this similarity or more are near-duplicates", 0.7, gt=0, le=1
        ),
        Option(
            "tests",
            "tuple[str, ...]",
            "clean: files of test documents, which are left out of the result",
            (),
            path="any",
        ),
        Option("repair-newlines", "bool", "clean: join the lines of a paragraph", True),
        Option("overwrite", "bool", "replace an existing dataset", False),
    ),
    execute=execute,
    example="labkit data prepare books.jsonl news.jsonl corpus --tokenizer tokenizer.json",
    words="prepare|clean|show|merge WORDS",
    paths=True,
    actions=ACTIONS,
)
