"""Cleaning: short documents, near-duplicates of known similarity, test documents, overlap and newlines."""

import json
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.cli import main
from labkit.data import bundled_text
from labkit.data.cleaning import Cleaner, Rules, clean, jaccard, ngrams, repaired
from labkit.data.documents import DocumentError

ROOT = Path(__file__).resolve().parents[2]
WORDS = sorted(set(re.findall(r"[a-z]{3,}", bundled_text()[:300_000])))
EVERYTHING = Rules(min_tokens=0)


def shingles(text: str) -> set[tuple[str, ...]]:
    """The 5-grams of a text of plain words, as tuples."""
    words = text.split()
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}


def similarity(a: str, b: str) -> float:
    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """Documents of 200 to 400 words, and copies of which 1 to 20 words are others."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(200, 400))
        copy = list(words)
        for place in draw.sample(range(len(words)), draw.randint(1, 20)):
            copy[place] = draw.choice(WORDS)
        made.append((" ".join(words), " ".join(copy)))
    return made


def measured() -> list[tuple[str, int, int]]:
    """(range of similarity, pairs, copies that were left out) of 600 generated pairs."""
    cleaner, made = Cleaner(EVERYTHING, []), pairs(600, seed=1)
    removed = [cleaner(text) is None for pair in made for text in pair]
    assert not any(removed[::2])
    bands = [(0.0, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.0)]
    found = []
    for low, high in bands:
        inside = [n for n, pair in enumerate(made) if low <= similarity(*pair) < high]
        found.append((f"{low} to {high}", len(inside), sum(removed[2 * n + 1] for n in inside)))
    return found


def test_near_duplicates_of_known_similarity_and_the_table_of_the_page() -> None:
    """No pair below the threshold is touched, and LSH misses at most 2% of those above."""
    rows = measured()
    assert all(count >= 25 for _, count, _ in rows)
    assert [removed for _, _, removed in rows[:2]] == [0, 0]
    above = [sum(column) for column in zip(*[row[1:] for row in rows[2:]])]
    assert above[1] / above[0] >= 0.98
    page = (ROOT / "docs" / "data.md").read_text()
    for band, count, removed in rows:
        assert f"| {band} | {count} | {removed} |" in page
    assert f"Recall is {above[1]} of {above[0]}, and precision {above[1]} of {above[1]}." in page


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12), st.integers(1, 5))
def test_hashes_have_the_similarity_of_the_words(one, other, n):
    def grams(words):
        n_here = max(1, min(n, len(words)))
        return {tuple(words[at : at + n_here]) for at in range(len(words) - n_here + 1)} if words else set()

    sets = [np.unique(ngrams(" ".join(words), n)) for words in (one, other)]
    assert [len(found) for found in sets] == [len(grams(one)), len(grams(other))]
    both = len(grams(one) & grams(other))
    expected = both / max(1, len(grams(one) | grams(other)))
    if len(one) >= n and len(other) >= n:  # n-grams of different n are never compared
        assert jaccard(*sets) == expected


@pytest.mark.parametrize("start", range(0, 200, 20))
def test_documents_exactly_as_similar_as_the_threshold_are_the_same(start):
    """The 7 5-grams of 11 words are 7 of the 10 of 14 words; of equal documents all are the same."""
    words = WORDS[start : start + 14]
    whole, part = " ".join(words), " ".join(words[:11])
    for threshold, second in ((0.7, part), (1.0, whole)):
        cleaner = Cleaner(Rules(min_tokens=0, jaccard=threshold), [])
        assert similarity(whole, second) == threshold
        assert (cleaner(whole), cleaner(second)) == (whole, None)
    assert Cleaner(Rules(min_tokens=0, jaccard=0.7), [part])(whole) is None
    for threshold, second in ((0.71, part), (1.0, " ".join(words[:13]))):
        cleaner = Cleaner(Rules(min_tokens=0, jaccard=threshold), [])
        assert (cleaner(whole), cleaner(second)) == (whole, second)


def test_a_document_that_is_left_out_removes_no_later_one():
    """Neither a short one, nor a duplicate, nor one of the test sets; and none of them counts as overlap."""
    draw = random.Random(8)
    words = draw.choices(WORDS, k=100)
    first, longer, longest = (" ".join(words[:count]) for count in (56, 76, 100))
    from labkit.data import load_tokenizer

    fewest = len(load_tokenizer().encode(longer, add_special_tokens=False).ids)
    assert similarity(first, longer) >= 0.7 > similarity(first, longest) and similarity(longer, longest) >= 0.7
    cleaner = Cleaner(Rules(min_tokens=fewest), [])
    assert [cleaner(text) for text in (first, longer)] == [None, longer], "the first is short"
    for tests, read, reason in ([], [first, longer, longest], "duplicate"), ([first], [longer, longest], "evaluation"):
        cleaner = Cleaner(EVERYTHING, tests)
        assert [cleaner(text) for text in read] == [None if text == longer else text for text in read]
        assert cleaner.report.removed == [(read.index(longer), reason)]
    other = " ".join(draw.choices(WORDS, k=30))
    for rules in (Rules(min_tokens=10_000), EVERYTHING):
        cleaner = Cleaner(rules, [first])
        assert cleaner(first) is None and (rules is not EVERYTHING or cleaner(other) == other)
        assert cleaner.finished().overlapping == 0


def test_case_and_punctuation_make_no_difference():
    cleaner = Cleaner(EVERYTHING, [])
    text = "The quick brown fox, it jumps over the lazy dog."
    assert cleaner(text) == text
    assert cleaner("the QUICK brown fox (it) jumps... over the lazy dog") is None
    assert cleaner("") == "" and cleaner("...") == "..."
    assert cleaner.report.removed == [(1, "duplicate")]


def test_short_documents_are_left_out():
    cleaner = Cleaner(Rules(min_tokens=10), [])
    from labkit.data import load_tokenizer

    text = "a b c d e f g h i j k l"
    tokens = load_tokenizer().encode(text, add_special_tokens=False)
    cut = text[: tokens.offsets[9][0]]
    assert cleaner(cut) is None and cleaner(text) == text
    assert (cleaner.report.short, cleaner.report.read) == (1, 2)


def test_test_documents_are_left_out_and_their_overlap_is_counted(tmp_path):
    draw = random.Random(3)
    test, other = (" ".join(draw.choices(WORDS, k=100)) for _ in range(2))
    quoting = " ".join([*draw.choices(WORDS, k=100), *test.split()[:20]])
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (test, quoting, other)))
    (tmp_path / "test.txt").write_text(test)
    report = clean([tmp_path / "a.jsonl"], tmp_path / "out.jsonl", EVERYTHING, tests=[tmp_path / "test.txt"])
    assert report.removed == [(0, "evaluation")] and report.kept == 2
    assert (report.test_ngrams, report.overlapping) == (93, 13)
    kept = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert kept == [quoting, other]


def test_single_newlines_are_repaired():
    assert repaired("one\ntwo  \n three\n\nfour\n \nfive\n") == "one two three\n\nfour\n \nfive\n"
    assert Cleaner(EVERYTHING, [])("a\nb") == "a b"
    assert Cleaner(Rules(min_tokens=0, repair_newlines=False), [])("a\nb") == "a\nb"


def test_the_command_cleans(tmp_path, capsys):
    entries = [entry for entry in bundled_text()[:100_000].split("\n\n") if entry.strip()]
    source, target = tmp_path / "a.jsonl", tmp_path / "clean.jsonl"
    source.write_text("".join(json.dumps({"body": text}) + "\n" for text in [*entries, *entries]))
    words = ["data", "clean", str(source), str(target), "--key", "body", "--min-tokens", "64"]
    assert main([*words, "--tests", str(source)]) == 0
    assert re.search(r"0 of \d+ documents kept; .*\n8-grams of the test sets .* \(0\.0%\)", capsys.readouterr().out)
    assert main(words) == 2 and "exists; overwrite it" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
    short = r"(\d+) short \(under 64 tokens, --min-tokens\)"
    said = re.search(rf"(\d+) of (\d+) documents kept; {short}, 0 of the .* (\d+) near", capsys.readouterr().out)
    kept, read, short, duplicates = map(int, said.groups())
    assert read == 2 * len(entries) == kept + short + duplicates and 0 < kept <= duplicates
    assert len(target.read_text().splitlines()) == kept
    assert main(["data", "prepare", str(target), str(tmp_path / "out"), "--key", "body", "--workers", "1"]) == 0


def test_progress_counts_every_byte_of_the_files_once(tmp_path):
    lines, text = tmp_path / "a.jsonl", tmp_path / "b.txt"
    lines.write_text("".join(json.dumps({"text": f"document {number} " * 40}) + "\n" for number in range(300)))
    text.write_text("one text\n" * 50)
    for path in (lines, text):
        sizes: list[int] = []
        clean([path], tmp_path / f"{path.name}.clean", progress=sizes.append)
        assert sum(sizes) == path.stat().st_size


def test_the_target_of_a_link_is_replaced(tmp_path):
    source, target, link = tmp_path / "a.txt", tmp_path / "far.jsonl", tmp_path / "out.jsonl"
    source.write_text("a text")
    link.symlink_to(target)
    for content in (None, "old"):
        if content is not None:
            target.write_text(content)
            with pytest.raises(FileExistsError, match=r"out\.jsonl: exists; overwrite it"):
                clean([source], link, EVERYTHING)
        clean([source], link, EVERYTHING, overwrite=content is not None)
        assert link.is_symlink() and target.read_text() == '{"text": "a text"}\n'


def test_the_command_replaces_nothing_but_files(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "link").symlink_to("none/out.jsonl")
    os.mkfifo(tmp_path / "pipe")
    for name, words in (
        ("link", "none: there is no such folder"),
        ("pipe", "pipe': is not a regular file; choose another"),
    ):
        line = ["data", "clean", str(tmp_path / "a.txt"), str(tmp_path / name), "--overwrite", "--min-tokens", "0"]
        assert main(line) == 2 and words in capsys.readouterr().err


def test_a_bad_file_leaves_nothing_behind(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": "\\ud800"}\n')
    with pytest.raises(DocumentError, match=r"a\.jsonl: line 2 has half a surrogate pair, U\+D800 at character 0"):
        clean([tmp_path / "a.jsonl"], tmp_path / "out.jsonl", EVERYTHING)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
