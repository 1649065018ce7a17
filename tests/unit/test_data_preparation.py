"""From text files to indexed datasets: tokenizers by path, files of documents, workers, and what is refused."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from labkit.cli import main
from labkit.data import IndexedDataset, bundled_text, load_tokenizer
from labkit.data.documents import DocumentError, pieces_of, sentences_of
from labkit.data.preparation import Recipe, prepare
from labkit.data.text import BUNDLED, END_OF_TEXT, end_token

ENTRIES = [entry for entry in bundled_text()[:120_000].split("\n\n") if entry.strip()]


SAMPLE = str(resources.files("labkit.data") / "bundled" / "sample.jsonl")


def jsonl(path: Path, texts, key="text") -> Path:
    path.write_text("".join(json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)))
    return path


@pytest.fixture(scope="module")
def word_pieces() -> Path:
    """The bundled vocab.txt."""
    return BUNDLED / "vocab.txt"


# ---- tokenizers by path ----


def test_vocab_json_and_merges_give_the_same_ids_as_the_json_they_came_from(tmp_path):
    whole = load_tokenizer()
    whole.model.save(str(tmp_path), "gpt2")
    parts = load_tokenizer(tmp_path / "gpt2-vocab.json")
    for entry in ENTRIES[:200]:
        ids = parts.encode(entry, add_special_tokens=False).ids
        assert ids == whole.encode(entry, add_special_tokens=False).ids and parts.decode(ids) == entry
    assert end_token(parts) == end_token(whole) == 0
    assert parts.encode(END_OF_TEXT).ids == [0]


def test_a_word_piece_vocabulary_marks_the_parts_that_continue_a_word(word_pieces):
    tokenizer = load_tokenizer(word_pieces)
    encoded = tokenizer.encode("Unbelievably hackish", add_special_tokens=False)
    words = "".join(token.removeprefix("##") if token.startswith("##") else f" {token}" for token in encoded.tokens)
    assert words == " unbelievably hackish" and len(encoded.tokens) > 2
    assert tokenizer.get_vocab_size() == len(word_pieces.read_text().splitlines())
    assert end_token(tokenizer) == tokenizer.token_to_id("[SEP]")


def test_capitals_in_a_vocabulary_keep_the_case(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]\nParis\nparis\n")
    assert load_tokenizer(tmp_path / "vocab.txt").encode("Paris paris").ids == [1, 2]
    (tmp_path / "vocab.txt").write_text("[UNK]\nparis\n[unused0]\n[X]\n")
    assert load_tokenizer(tmp_path / "vocab.txt").encode("Paris paris").ids == [1, 1]


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({"vocab.json": "{}"}, FileNotFoundError, r"vocab\.json' needs merges\.txt next to it, which is missing"),
        ({"a-vocab.json": "{}", "merges.txt": ""}, FileNotFoundError, r"needs a-merges\.txt next to it"),
        ({"vocab.json": "[1]", "merges.txt": ""}, ValueError, "are not a vocabulary and merges of GPT-2"),
        ({"vocab.json": "[]", "merges.txt": ""}, ValueError, "has no token"),
        ({"vocab.json": '{"\\ud800": 0}', "merges.txt": ""}, ValueError, "GPT-2: has half a surrogate pair"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a a a"}, ValueError, "are not a vocabulary and merges of GPT-2"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "x y\n"}, ValueError, "are not a vocabulary and merges of GPT-2"),
        ({"vocab.txt": "a\nb\n"}, ValueError, r"vocab\.txt' has no \[UNK\]; a WordPiece vocabulary has one token per"),
        ({"vocab.txt": "[UNK]\nb\nb\n"}, ValueError, "has a token twice"),
        ({"vocab.txt": b"\xff"}, ValueError, "is not UTF-8"),
    ],
)
def test_files_that_are_no_vocabulary_are_refused(files, error, said, tmp_path):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(error, match=said):
        load_tokenizer(tmp_path / next(iter(files)))


# ---- preparation ----


def ids_of(texts, tokenizer=None, *, eod=True):
    made = load_tokenizer(tokenizer)
    end = [end_token(made)] if eod else []
    return [made.encode(text, add_special_tokens=False).ids + end for text in texts]


def test_every_kind_of_file_gives_the_same_documents(tmp_path):
    texts = ENTRIES[:40]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_bytes(b"\xef\xbb\xbf" * (number % 2) + text.encode())
    jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=7)
    for name, files in (
        ("lines", [tmp_path / "a.jsonl"]),
        ("marked lines", [tmp_path / "b.jsonl"]),
        ("rows", [tmp_path / "a.parquet"]),
        ("files", sorted(tmp_path.glob("*.txt"))),
    ):
        done = prepare(files, tmp_path / name)
        dataset = IndexedDataset(tmp_path / name)
        assert [one.tolist() for one in dataset] == ids_of(texts)
        assert done == (40, dataset.num_tokens, 0) and dataset.dtype == np.uint16 and dataset.num_documents == 40


def test_the_number_of_workers_changes_no_byte(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl", ENTRIES * 30)
    sizes: dict[int, list[int]] = {1: [], 3: []}
    for workers in sizes:
        prepare([source, source], tmp_path / str(workers), workers=workers, progress=sizes[workers].append)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"1.{ending}").read_bytes() == (tmp_path / f"3.{ending}").read_bytes()
    assert sizes[1] == sizes[3] and len(sizes[1]) >= 6 and sum(sizes[1]) == 2 * source.stat().st_size


def test_a_recipe_chooses_tokenizer_key_end_and_sentences(word_pieces, tmp_path):
    texts = ["One is here. Two is there.", "", "Three!"]
    source = jsonl(tmp_path / "a.json", texts, key="body")
    recipe = Recipe(str(word_pieces), "body", sentences=True)
    assert prepare([source], tmp_path / "a", recipe) == (2, IndexedDataset(tmp_path / "a").num_tokens, 1)
    dataset = IndexedDataset(tmp_path / "a")
    sentences = ids_of(["One is here.", "Two is there.", "Three!"], word_pieces, eod=False)
    assert [one.tolist() for one in dataset] == sentences
    assert dataset.document_indices.tolist() == [0, 2, 3]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="aA .!?\n\"'()1"))
def test_sentences_keep_every_character_but_blanks(text):
    parts = sentences_of(text)
    assert all(part == part.strip() and part for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())


def test_sentences_end_before_a_capital():
    text = 'He left. She (the boss) said "No." Then 3.5 things, e.g. this one! (Really?) Yes\n\nnew paragraph'
    assert sentences_of(text) == [
        "He left.", 'She (the boss) said "No."', "Then 3.5 things, e.g. this one!", "(Really?)", "Yes", "new paragraph",
    ]  # fmt: skip


BAD = {
    "not JSON": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": \n',
        r"a\.jsonl: line 2 is not JSON \(.*\); each line must be one",
    ),
    "one key twice": ("a.jsonl", b'{"text": "a", "text": "b"}', r"a\.jsonl: line 1 is not JSON \(has the field"),
    "deep JSON": ("a.jsonl", b"[" * 100_000, r"a\.jsonl: line 1 is not JSON"),
    "no key": ("a.jsonl", b'\n{"body": "a", "id": 1}\n', "line 2 has no text under 'text', it has 'body', 'id'; name"),
    "no object": ("a.jsonl", b"[1]\n", "line 1 has no text under 'text', it has a list"),
    "number": ("a.jsonl", b'{"text": 5}\n', "line 1 has no text under 'text', it has 'text'"),
    "not UTF-8": ("a.txt", b"fine\nline\nb\xffd", r"a\.txt: line 3 is not UTF-8 \(byte 0xff\)"),
    "line not UTF-8": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"a\.jsonl: line 2 is not UTF-8"),
    "kind": ("a.csv", b"a,b", r"a\.csv: labkit reads \.txt, \.jsonl, \.json, \.parquet files"),
    "half a pair": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": "b\\ud800"}',
        r"a\.jsonl: line 2 has half a surrogate pair, U\+D800",
    ),
    "UTF-16": ("a.jsonl", '{"text": "a"}'.encode("utf-16-le"), r"a\.jsonl: line 1 is not UTF-8 \(byte 0x00\)"),
    "text of UTF-16": ("a.txt", "text".encode("utf-16-le"), r"a\.txt: line 1 is not UTF-8 \(byte 0x00\)"),
    "long number": ("a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", r"a\.jsonl: line 1 is not JSON"),
    "no Parquet": ("a.parquet", b"PAR1 and then nothing", r"a\.parquet: is not a Parquet file, or it is damaged"),
    "empty": ("a.txt", b"", "no document has a token; there is nothing to write"),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named_and_leave_nothing_behind(name, workers, tmp_path):
    file, content, said = BAD[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DocumentError, match=said):
        prepare([tmp_path / file], tmp_path / "out", workers=workers)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_columns_of_parquet_are_named(tmp_path):
    parquet.write_table(pyarrow.table({"body": ["a", None], "n": [1, 2]}), tmp_path / "a.parquet")
    with pytest.raises(DocumentError, match=r"has no column 'text', it has 'body', 'n'; name the right one with --key"):
        list(pieces_of(tmp_path / "a.parquet", "text"))
    with pytest.raises(DocumentError, match="row 2 has a NoneType under 'body', not text"):
        list(pieces_of(tmp_path / "a.parquet", "body"))
    bad = pyarrow.array([b"fine", b"b\xff"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "c.parquet")
    with pytest.raises(DocumentError, match=r"c\.parquet: a text after row 0 is not UTF-8 \(byte 0xff\)"):
        list(pieces_of(tmp_path / "c.parquet", "text"))
    with pytest.raises(DocumentError, match=r"b\.txt: no such file"):
        list(pieces_of(tmp_path / "b.txt", "text"))


# ---- the command ----


def test_the_command_prepares_shows_and_merges(tmp_path, capsys):
    source = jsonl(tmp_path / "a.jsonl", ENTRIES[:30])
    prefix = str(tmp_path / "a")
    assert main(["data", "prepare", str(source), prefix, "--workers", "1"]) == 0
    tokens = IndexedDataset(prefix).num_tokens
    assert capsys.readouterr().out == (
        f"{prefix}: 30 documents, {tokens:,} tokens\nto train on it: --data.path {prefix}\n"
    )
    assert main(["data", "merge", prefix, prefix, str(tmp_path / "b")]) == 0
    longest = IndexedDataset(prefix).sequence_lengths.max()
    shown = f"60 documents, 60 sequences of at most {longest} tokens, {2 * tokens:,} tokens of uint16"
    assert capsys.readouterr().out == f"{tmp_path / 'b'}: {shown}\n"
    assert main(["data", "show", prefix, str(tmp_path / "b")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no action named; give one of prepare, clean, show, merge"),
        (["prepar", "a"], 'there is no such action; .* did you mean "prepare"'),
        (["prepare", "a.txt"], r"prepare takes FILE... PREFIX, got 1 word$"),
        (["show", "a", "--key", "b"], "--key: show does not read it; leave it out"),
        (["show", "nowhere"], r"nowhere\.idx: there is no such file"),
        (["prepare", "nowhere.txt", "x", "--workers", "1"], r"nowhere\.txt: no such file"),
        (["prepare", ".", "x", "--workers", "1"], r"\.: is a folder; give a file; labkit reads \.txt"),
        (["prepare", SAMPLE, "x", "--tokenizer", "nowhere.json"], "'nowhere.json': no such file"),
        (["prepare", "a.txt", "x", "--workers", "0"], "must be at least 1"),
    ],
)
def test_the_command_refuses(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["data", *words]) == 2
    assert re.search(said, capsys.readouterr().err, re.M) and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [["a.txt", "there"], ["a.txt", "nowhere.txt", "x"], ["a.txt", "a.pdf", "x"], ["clean", "a.jsonl", "x"]]
)
def test_what_is_refused_draws_no_bar_and_reads_no_file(words, tmp_path, monkeypatch):
    """The bar of a terminal; the first file of several is not tokenised for nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.pdf", "there.bin", "there.idx"):
        (tmp_path / name).write_text("The hound. " * 9)
    monkeypatch.setattr("labkit.data.documents.Piece.texts", lambda *_: pytest.fail("a file was read"))
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as stream, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", stream)
        assert main(["data", *([] if words[0] == "clean" else ["prepare"]), *words]) == 2
    said = os.read(reader, 65536).decode()
    os.close(reader)
    assert said.startswith("labkit data: ") and "%" not in said, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(number, tmp_path):
    """The signal reaches the whole group, as Ctrl-C in a terminal does, while workers tokenise."""
    jsonl(tmp_path / "a.jsonl", ENTRIES * 400)
    words = ["-m", "labkit", "data", "prepare", "a.jsonl", "out", "--workers", "2"]
    started = subprocess.Popen(
        [sys.executable, *words], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not any(path.stat().st_size for path in tmp_path.glob("out.bin.*.partial")):
        assert started.poll() is None and time.monotonic() < deadline, started.communicate()
        time.sleep(0.02)
    (os.killpg if number == signal.SIGINT else os.kill)(started.pid, number)
    out, err = started.communicate(timeout=60)
    assert started.returncode == 130 and out == "" and "Traceback" not in err, err
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    while any_left(started.pid):
        assert time.monotonic() < deadline + 60, "a worker outlives the command"
        time.sleep(0.02)


def any_left(group: int) -> bool:
    """True while a process of the group lives."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
