"""BERT's and T5's samples from sentences: index, segments, spans, sources, order; and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import DataConfig, RunConfig, presets
from labkit.data import IndexedDataset, IndexedDatasetBuilder, bundled_text, load_tokenizer
from labkit.data.batches import data_iterator
from labkit.data.datasets import build_datasets
from labkit.data.masked.bert_samples import build_bert_datasets, cut, special_tokens
from labkit.data.masked.sentence_index import (
    SHORT,
    TooFewSentencesError,
    build_sentence_index,
    mersenne_twister_64,
    shuffled,
    target_lengths,
)
from labkit.data.masked.sentence_samples import TextSentences
from labkit.data.masked.t5_samples import T5Maker, T5Tokens, build_t5_datasets, t5_sample, t5_tokens
from labkit.data.preparation import Recipe, prepare
from labkit.data.text import BUNDLED, bundled_tokens, located_tokens
from labkit.parallel import single_process_groups

WORD_PIECES = str(BUNDLED / "vocab.txt")
GROUPS = single_process_groups()


def of_bert(**changes: object) -> RunConfig:
    return presets.bert_tiny().override({"steps": 20, **changes})


# ---- index ----


def published_twister(seed: int, count: int) -> list[int]:
    """The numbers by the recurrence of `std::mt19937_64` ([rand.eng.mers], [rand.predef]), one at a time."""
    x, numbers = [seed], []
    for i in range(1, 312):
        x.append((6364136223846793005 * (x[-1] ^ x[-1] >> 62) + i) % 2**64)
    for i in range(count):
        upper_and_lower = (x[i] & ~(2**31 - 1)) | (x[i + 1] & (2**31 - 1))
        x.append(x[i + 156] ^ upper_and_lower >> 1 ^ (upper_and_lower & 1) * 0xB5026F5AA96619E9)
        z = x[-1]
        z ^= z >> 29 & 0x5555555555555555
        z ^= z << 17 & 0x71D67FFFEDA60000
        z ^= z << 37 & 0xFFF7EEE000000000
        numbers.append(z ^ z >> 43)
    return numbers


@pytest.mark.parametrize("seed", [0, 1, 1234, 5489, 2**64 - 1])
def test_the_random_numbers_are_those_of_cpp(seed: int) -> None:
    """The C++ standard names the 10,000th number of a default `std::mt19937_64` ([rand.predef], seed 5489)."""
    for count in (1, 1000):
        assert mersenne_twister_64(seed, count).tolist() == published_twister(seed, count)


def test_the_random_order_is_one_of_all_and_the_standards() -> None:
    assert int(mersenne_twister_64(5489, 10_000)[-1]) == 9981545732273789042 == published_twister(5489, 10_000)[-1]
    order = shuffled(1000, 7)
    assert sorted(order) == list(range(1000)) and order.tolist() != list(range(1000))
    assert shuffled(0, 7).tolist() == [] and shuffled(1, 7).tolist() == [0]


def test_targets_are_the_longest_but_for_a_share() -> None:
    drawn = np.fromiter(target_lengths(62, 3), np.int64, 60_000)
    short = drawn[drawn < 62]
    share = SHORT * 60 / 61  # a random target may be the longest
    assert abs(len(short) / 60_000 - share) < 4 * (share * (1 - share) / 60_000) ** 0.5
    assert short.min() == 2 and len(np.unique(short)) == 60


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 600), max_size=12), min_size=1, max_size=8),
    st.integers(1, 2),
    st.integers(2, 40),
    st.integers(0, 40),
)
def test_samples_are_whole_documents_cut_between_sentences(documents, least, longest, wanted) -> None:
    lengths = np.array([size for document in documents for size in document], dtype=np.int32)
    borders = np.cumsum([0, *map(len, documents)])
    numbers = {"longest": longest, "least": least, "num_samples": wanted, "seed": wanted}
    sound = [
        number for number, sizes in enumerate(documents)
        if len(sizes) >= least and (len(sizes) == 1 or max(sizes) <= 512)
    ]  # fmt: skip
    if not sound:
        with pytest.raises(TooFewSentencesError, match=f"no document has {least} sentences of 512 tokens or fewer"):
            build_sentence_index(lengths, borders, range(len(documents)), **numbers)
        return
    index = build_sentence_index(lengths, borders, range(len(documents)), **numbers).astype(int)
    assert len(index) >= max(1, wanted)
    passes, seen = 0, sorted(map(tuple, index[:, :2].tolist()))
    starts = {int(borders[number]): int(borders[number + 1]) for number in sound}
    for first, last in seen:
        passes += first == min(starts)
        assert last - first >= least and any(begin <= first < last <= end for begin, end in starts.items())
    covered = np.zeros(len(lengths), dtype=int)
    for first, last in seen:
        covered[first:last] += 1
    assert all((covered[begin:end] == passes).all() for begin, end in starts.items())
    assert covered.sum() == passes * sum(end - begin for begin, end in starts.items())


def test_the_example_of_the_index() -> None:
    rows = set()
    for seed in range(5):
        index = build_sentence_index(
            np.array([5, 3, 4, 6, 2]), np.array([0, 5]), range(1), longest=7, least=2, num_samples=1, seed=seed
        )
        rows.add(tuple(sorted(map(tuple, index.tolist()))))
    assert ((0, 2, 7), (2, 5, 7)) in rows


# ---- sources ----


def test_the_bundled_text_has_the_tokens_of_its_entries_and_sentences() -> None:
    ours = TextSentences.of(None, None)
    np.testing.assert_array_equal(ours.tokens, bundled_tokens()[:-1])
    tokenizer, text = load_tokenizer(), bundled_text()
    first, last = ours.document_indices[1:3]
    words = [" ".join(tokenizer.decode(ours[n].tolist()).split()) for n in range(first, last)]
    assert words[0] == "/dev/null /dev·nuhl/, n."
    assert words[1].startswith("[from the Unix null device") and words[-1] == "See {bit bucket}."
    assert 2000 < ours.num_documents < 3000 and text.startswith("(TM)")
    places = located_tokens(None, None)[2]
    np.testing.assert_array_equal(places, [begin for begin, _ in tokenizer.encode(text).offsets])


def test_a_text_and_the_dataset_made_from_it_give_the_same_samples(tmp_path: Path) -> None:
    """With WordPiece, which drops blanks; each document of the text is a line of the JSON file."""
    text = bundled_text()[:30_000].rpartition("\n\n")[0] + "\n"
    (tmp_path / "text.txt").write_text(text)
    source = TextSentences.of(str(tmp_path / "text.txt"), WORD_PIECES)
    entries = [part for part in _documents(text) if part.strip()]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": entry}) + "\n" for entry in entries))
    prepare([tmp_path / "text.jsonl"], tmp_path / "made", Recipe(WORD_PIECES, sentences=True))
    made = IndexedDataset(tmp_path / "made")
    np.testing.assert_array_equal(source.sequence_lengths, made.sequence_lengths)
    np.testing.assert_array_equal(source.document_indices, made.document_indices)
    given = {"seq_length": 32, "data.tokenizer": WORD_PIECES, "data.split": "80,20,0"}
    ours, _, _ = build_datasets(of_bert(**given, **{"data.path": str(tmp_path / "text.txt")}))
    theirs, _, _ = build_datasets(of_bert(**given, **{"data.path": str(tmp_path / "made")}))
    assert len(ours) == len(theirs) > 100
    for position in range(0, len(ours), 7):
        for name, value in ours.ordered(position).items():
            np.testing.assert_array_equal(value, theirs.ordered(position)[name])


def _documents(text: str) -> list[str]:
    """Cut before each line without indentation behind an empty line, line by line."""
    parts, empty = [""], False
    for line in text.splitlines(keepends=True):
        if empty and line.strip() and not line[0].isspace():
            parts.append("")
        parts[-1] += line
        empty = not line.strip()
    return parts


def test_a_blend_of_datasets_with_sentences_and_the_order_of_a_longer_run(tmp_path: Path) -> None:
    for name, low in (("a", 1), ("b", 500)):
        with IndexedDatasetBuilder(tmp_path / name, np.uint16) as builder:
            for document in range(40):
                lengths = [3 + (document + sentence) % 5 for sentence in range(6)]
                builder.add_document(np.arange(low, low + sum(lengths)), lengths)
    paths, given = [str(tmp_path / name) for name in "ab"], {"seq_length": 16, "data.tokenizer": WORD_PIECES}
    blend = of_bert(**given, **{"data.blend": ("1", paths[0], "3", paths[1]), "global_batch_size": 8, "steps": 10})
    mixed, valid, _ = build_datasets(blend.validate())
    assert len(mixed) == 80 and len(valid) == 0
    by_size, _, _ = build_datasets(of_bert(**given, **{"data.blend": tuple(paths)}).validate())
    assert np.bincount(by_size.dataset_index).tolist() == [len(part) for part in by_size.datasets]
    one = {**given, "data.path": paths[0], "global_batch_size": 8}
    short, long = (build_datasets(of_bert(**one, steps=steps))[0] for steps in (2, 4))
    np.testing.assert_array_equal(short.sentence_index, long.sentence_index)
    kept = [build_datasets(of_bert(**one, steps=n, **{"data.num_samples": 999}))[0] for n in (2, 90)]
    np.testing.assert_array_equal(kept[0].sentence_index, kept[1].sentence_index)


@pytest.mark.parametrize("prepared", [False, True])
def test_splits_take_their_shares_of_the_documents_and_share_none(prepared: bool, tmp_path: Path) -> None:
    given = {"data.split": "70,20,10", "data.tokenizer": WORD_PIECES, "eval_steps": 2, "seq_length": 32}
    if prepared:
        with IndexedDatasetBuilder(tmp_path / "made", np.uint16) as builder:
            for document in range(50):
                builder.add_document(np.arange(20) + document, [5] * 4)
        given["data.path"] = str(tmp_path / "made")
    splits = build_datasets(of_bert(**given))
    borders = splits[0].source.document_indices
    for dataset, low, high in zip(splits, (0.0, 0.7, 0.9), (0.7, 0.9, 1.0)):
        first, last = (int(borders[round(share * (len(borders) - 1))]) for share in (low, high))
        assert (dataset.sentence_index[:, 0].min(), dataset.sentence_index[:, 1].max()) == (first, last), dataset.name


def test_batches_are_rows_of_samples_and_go_on_where_a_run_ended() -> None:
    config = of_bert(micro_batch_size=2, global_batch_size=4)
    dataset = build_datasets(config)[0]
    batches = data_iterator(dataset, config, GROUPS)
    first = [next(batches) for _ in range(4)]
    assert {name: tuple(each.shape) for name, each in first[0].items()} == {
        "tokens_BS": (2, 64), "types_BS": (2, 64), "labels_BS": (2, 64), "loss_mask_BS": (2, 64),
        "padding_mask_BS": (2, 64), "is_random_B": (2,),
    }  # fmt: skip
    np.testing.assert_array_equal(first[1]["tokens_BS"][1].numpy(), dataset.ordered(3)["tokens_BS"])
    later = next(data_iterator(dataset, config, GROUPS, consumed_samples=4))
    assert all((later[name] == first[2][name]).all() for name in later)


def test_sources_without_sentences_and_splits_without_documents_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(tmp_path / "plain", np.uint16) as builder:
        for _ in range(20):
            builder.add_document(np.arange(1, 50))
    given = {"data.tokenizer": WORD_PIECES, "data.path": str(tmp_path / "plain")}
    with pytest.raises(ValueError, match=r"train split of .*plain \(18 documents\): no document has 2 sentences .*"
                       r"--sentences true"):  # fmt: skip
        build_datasets(of_bert(**given))
    alone, _, _ = build_datasets(of_bert(**given, **{"model.bert_binary_head": False}))
    assert not alone.ordered(0)["types_BS"].any(), "one sentence is enough without the head of the order"
    (tmp_path / "short.txt").write_text("One. Two.\n")
    with pytest.raises(ValueError, match=r"valid split of .*short.txt \(0 documents\)"):
        build_datasets(of_bert(**{"data.path": str(tmp_path / "short.txt"), "eval_steps": 1}))
    with pytest.raises(IndexError, match=r"sample 10000000 of the train split of the bundled text, which has"):
        build_datasets(of_bert())[0][10_000_000]


# ---- BERT ----


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(2, 60), st.integers(0, 1000))
def test_cutting_takes_tokens_from_the_ends_of_the_longer_segment(first, second, target, seed) -> None:
    given_parts = np.arange(first), np.arange(100, 100 + second)
    parts = cut(*given_parts, target, np.random.RandomState(seed))
    assert len(parts[0]) + len(parts[1]) == min(target, first + second)
    for part, whole in zip(parts, given_parts):
        assert part.tolist() == whole.tolist() or np.all(np.diff(part) == 1)
    if first + second > target and min(first, second) >= target / 2:
        assert abs(len(parts[0]) - len(parts[1])) <= 1


def test_a_bert_sample_holds_its_sentences() -> None:
    dataset = build_bert_datasets(of_bert())[0]
    cls, sep, mask = dataset.maker.special
    cuts = swaps = 0
    for number in range(300):
        sample, (first, last, target) = dataset[number], dataset.sentence_index[number].tolist()
        real = int(sample["padding_mask_BS"].sum())
        restored = np.where(sample["loss_mask_BS"] == 1, sample["labels_BS"], sample["tokens_BS"])
        middle, end = np.flatnonzero(restored == sep)
        assert restored[0] == cls and end == real - 1 and mask not in restored and not restored[real:].any()
        np.testing.assert_array_equal(sample["types_BS"][:real], np.arange(real) > middle)
        assert not sample["padding_mask_BS"][real:].any() and 1 <= sample["loss_mask_BS"].sum() <= max(
            1, 0.15 * real + 1
        )
        parts = [restored[1:middle].tolist(), restored[middle + 1 : end].tolist()]
        parts = parts[::-1] if sample["is_random_B"] else parts
        whole = [token for sentence in range(first, last) for token in dataset.source[sentence].tolist()]
        swaps += int(sample["is_random_B"])
        if len(whole) <= target:
            assert parts[0] + parts[1] == whole
        else:
            cuts += 1
            text, halves = "-".join(map(str, whole)), ["-".join(map(str, part)) for part in parts]
            assert halves[1] in text.partition(halves[0])[2] and real == target + 3
    assert 50 < cuts < 300 and 100 < swaps < 200


@pytest.mark.parametrize("missing", [None, "[CLS]", "[SEP]", "[MASK]"])
def test_berts_tokens_are_the_vocabularys_own_or_all_behind_it(missing: str | None, tmp_path: Path) -> None:
    """A pre-trained BERT knows its own [CLS] at id 101, not a new one."""
    words = [word for word in Path(WORD_PIECES).read_text().splitlines() if word != missing]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    data = DataConfig(tokenizer=str(tmp_path / "vocab.txt"))
    size, own = len(words), [words.index(word) for word in ("[CLS]", "[SEP]", "[MASK]") if word in words]
    assert list(special_tokens(data)) == (own if missing is None else [size, size + 1, size + 2])


def test_whole_words_are_masked_with_word_pieces() -> None:
    dataset = build_datasets(of_bert(**{"data.tokenizer": WORD_PIECES}))[0]
    tokens = load_tokenizer(WORD_PIECES).get_vocab()
    continues = np.zeros(1152, dtype=bool)
    continues[[number for token, number in tokens.items() if token.startswith("##")]] = True
    words = 0
    for number in range(200):
        sample = dataset[number]
        masked = sample["loss_mask_BS"] == 1
        restored = np.where(masked, sample["labels_BS"], sample["tokens_BS"])
        inside = np.flatnonzero(continues[restored])
        inside = inside[~np.isin(restored[inside - 1], dataset.maker.special)]  # a cut may begin inside a word
        assert (masked[inside] == masked[inside - 1]).all()
        words += int(masked[inside].sum())
    assert words > 100


# ---- T5 ----

SPECIAL = T5Tokens(90, 91, (80, 81, 82))


def test_the_example_of_a_t5_sample() -> None:
    text = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9])  # "we choose a few words and hide them", with a token for the end
    sample = t5_sample(text, [[1, 2, 3], [6, 7]], SPECIAL, encoder_length=12, decoder_length=9)
    assert {name: value.tolist() for name, value in sample.items()} == {
        "text_enc": [1, 80, 5, 6, 81, 9, 0, 0, 0, 0, 0, 0],
        "text_dec": [90, 80, 2, 3, 4, 81, 7, 8, 0],
        "labels": [80, 2, 3, 4, 81, 7, 8, 91, 0],
        "loss_mask": [1, 1, 1, 1, 1, 1, 1, 1, 0],
        "enc_mask": [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0],
    }
    tight = t5_sample(text, [[1, 2, 3], [6, 7]], SPECIAL, encoder_length=12, decoder_length=7)
    assert tight["text_enc"].tolist()[:7] == [1, 80, 5, 6, 7, 8, 9], "the second span has no place and stays"
    assert tight["labels"].tolist() == [80, 2, 3, 4, 91, 0, 0]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(2, 40), st.integers(4, 30), st.integers(0, 10**6))
def test_encoder_and_decoder_of_t5_together_hold_the_text(length, target, decoder, seed) -> None:
    maker = T5Maker(42, decoder, SPECIAL, np.arange(80) % 3 == 0)
    text = np.random.default_rng(seed).integers(1, 80, length)
    sample = maker([text[: length // 2], text[length // 2 :]], target, np.random.RandomState(seed))
    encoder = sample["text_enc"][sample["enc_mask"] == 1].tolist()
    labels = sample["labels"][sample["loss_mask"] == 1].tolist()
    assert labels[-1] == SPECIAL.end and sample["text_dec"][: len(labels)].tolist() == [SPECIAL.begin, *labels[:-1]]
    spans: dict[int, list[int]] = {}
    for token in labels[:-1]:
        if token in SPECIAL.sentinels:
            spans[token] = []
        else:
            spans[next(reversed(spans))].append(token)
    back = [token for each in encoder for token in spans.get(each, [each])]
    assert back == text[:target].tolist() and list(spans) == list(SPECIAL.sentinels[: len(spans)])


def test_a_span_without_a_place_in_the_decoder_stays_and_those_behind_it_too() -> None:
    sample = t5_sample(np.arange(10), [[0], [2, 3, 4, 5], [8]], SPECIAL, encoder_length=12, decoder_length=6)
    assert sample["text_enc"].tolist() == [80, *range(1, 10), 0, 0]
    assert sample["labels"].tolist() == [80, 0, 91, 0, 0, 0] and sample["loss_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    full = t5_sample(np.arange(10), [[0], [2]], SPECIAL, encoder_length=12, decoder_length=3)
    assert full["labels"].tolist() == [80, 0, 91], "a span that just fits is taken"


def test_t5_datasets_take_their_tokens_from_the_tokenizer_or_behind_it(tmp_path: Path) -> None:
    dataset, valid, _ = build_t5_datasets(of_bert(), 32)
    assert dataset.maker.special.begin == 1024 and len(dataset.maker.special.sentinels) == 100 and len(valid) == 0
    sample = dataset.ordered(5)
    assert sample["text_enc"].shape == (64,) and sample["text_dec"].shape == (32,) and sample["loss_mask"].any()
    words = [*(BUNDLED / "vocab.txt").read_text().splitlines(), "[BOS]", "[EOS]", "<extra_id_0>", "<extra_id_1>"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    assert t5_tokens(DataConfig(tokenizer=str(tmp_path / "vocab.txt"))) == (1024, 1025, (1026, 1027))
    with pytest.raises(
        ValueError, match=r"model\.vocab_size = 1100: .* 100 sentinels go up to id 1125; set it to 1126"
    ):
        build_t5_datasets(of_bert(vocab_size=1100), 32)
    with pytest.raises(ValueError, match=r"model\.seq_length = 3, 32 for the decoder: T5's encoder needs 4 positions"):
        build_t5_datasets(of_bert(seq_length=3), 32)
    with pytest.raises(ValueError, match=r"data\.tokenizer = None: indexed datasets hold only ids, and T5 needs"):
        build_t5_datasets(of_bert(**{"data.blend": ("prefix",)}), 32)
