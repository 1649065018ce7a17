"""Our data against megatron-core's: the same files, the same indices, the same samples."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from labkit.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from labkit.data import IndexedDataset, IndexedDatasetBuilder, build_gpt_datasets, bundled_text, load_tokenizer
from labkit.data.masked.bert_samples import BertMaker, SpecialTokens
from labkit.data.masked.masking import LEAST_TARGET, mask_ngrams, words_of
from labkit.data.masked.sentence_index import build_sentence_index
from labkit.data.masked.sentence_samples import SentenceSamples
from labkit.data.masked.t5_samples import T5Maker, T5Tokens
from labkit.data.sample_index import build_blending_indices, epochs_for, normalized
from labkit.data.text import BUNDLED

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core says which optional packages are missing
    theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="needs megatron-core")
pytestmark = pytest.mark.oracle


def sentences(seed: int, dtype: str) -> list[list[np.ndarray]]:
    """Documents of sentences with ids over the whole range of a type."""
    random, kind = np.random.default_rng(seed), np.dtype(dtype)
    documents = [[random.integers(0, 8) for _ in range(random.integers(0, 4))] for _ in range(12)]
    if kind.kind == "f":
        return [[random.normal(size=size).astype(kind) for size in document] for document in documents]
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    return [
        [random.integers(low, high, size, kind.newbyteorder("="), endpoint=True) for size in document]
        for document in documents
    ]


def ours_written(prefix: Path, documents: list[list[np.ndarray]], dtype: str) -> None:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            flat = np.concatenate([np.empty(0, dtype), *document])
            builder.add_document(flat.astype(dtype), [len(sentence) for sentence in document])


def theirs_written(prefix: Path, documents: list[list[np.ndarray]], dtype: str) -> None:
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in documents:
        for sentence in document:
            builder.add_item(torch.from_numpy(sentence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", [np.dtype(theirs.DType.dtype_from_code(kind.value)).str for kind in theirs.DType])
def test_indexed_datasets_are_the_same_bits_both_ways(dtype: str, tmp_path: Path) -> None:
    documents = sentences(1, dtype)
    ours_written(tmp_path / "ours", documents, dtype)
    if dtype == "<u2":  # add_item takes tensors, and not every torch has uint16
        documents = [[sentence.astype(np.int32) for sentence in document] for document in documents]
    theirs_written(tmp_path / "theirs", documents, dtype)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
    here, there = IndexedDataset(tmp_path / "theirs"), theirs.IndexedDataset(str(tmp_path / "ours"))
    assert len(here) == len(there) > 10 and here.dtype == np.dtype(there.index.dtype)
    for index in range(len(here)):
        np.testing.assert_array_equal(here[index], there[index])
        half = int(here.sequence_lengths[index]) // 2
        np.testing.assert_array_equal(here.get(index, half), there.get(index, half))
    np.testing.assert_array_equal(here.document_indices, there.document_indices)
    np.testing.assert_array_equal(here.sequence_lengths, there.sequence_lengths)


def test_joined_datasets_are_the_same_bits(tmp_path: Path) -> None:
    for name, seed in (("a", 2), ("b", 3)):
        ours_written(tmp_path / name, sentences(seed, "<i4"), "<i4")
    with IndexedDatasetBuilder(tmp_path / "ours", "<i4") as builder:
        for name in "ab":
            builder.add_index(tmp_path / name)
    peer = theirs.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    for name in "ab":
        peer.add_index(str(tmp_path / name))
    peer.finalize(str(tmp_path / "theirs.idx"))
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()


# ---- samples for GPT ----


class Tokenizer:
    """As much of a tokenizer as megatron-core's datasets ask for."""

    unique_identifiers: ClassVar[dict[str, str]] = {"class": "Tokenizer"}
    vocab_size = 1000
    eod = 0
    pad = -1


def corpus(prefix: Path, *, seed: int, documents: int, longest: int = 60) -> Path:
    """Random documents, empty ones among them."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            builder.add_document(random.integers(1, 1000, random.integers(0, longest)))
    return prefix


def their_splits(sizes: list[int], *, seq_length: int, seed: int, split: str, blend: tuple[Any, Any]) -> list[Any]:
    """Training, validation and test dataset of megatron-core."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, blend=blend, split=split, tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        path_to_cache=str(Path(blend[0][0]).parent / "their_cache"), num_dataset_builder_threads=1,
    )  # fmt: skip
    return built(GPTDataset, sizes, config)


def built(kind: Any, sizes: list[int], config: Any) -> list[Any]:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    with pytest.MonkeyPatch.context() as patch:  # a cache is written by rank 0 of torch.distributed alone
        patch.setattr(torch.distributed, "get_rank", lambda: 0)
        return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()


def our_splits(steps: int, *, eval_steps: int = 0, seq_length: int, seed: int, split: str, **data: Any) -> list[Any]:
    config = RunConfig(
        model=ModelConfig(seq_length=seq_length),
        data=DataConfig(split=split, **data),
        train=TrainConfig(steps=steps, global_batch_size=4, eval_steps=eval_steps, seed=seed),
    )
    return list(build_gpt_datasets(config.validate()))


def same_samples(ours: Any, theirs: Any) -> None:
    assert len(ours) == len(theirs)
    for index in range(len(ours)):
        sample = theirs[index]
        np.testing.assert_array_equal(ours[index][:-1], sample["tokens"])
        np.testing.assert_array_equal(ours[index][1:], sample["labels"])


@pytest.mark.parametrize("samples", [4, 200, 396, 400, 640, 720, 760, 800, 4000])
@pytest.mark.parametrize(("seq_length", "documents"), [(7, 100), (7, 1001), (64, 100), (500, 100)])
def test_index_arrays_are_megatrons(samples: int, seq_length: int, documents: int, tmp_path: Path) -> None:
    """One epoch or many, the last of them shuffled with the others or by itself."""
    prefix = str(corpus(tmp_path / "corpus", seed=documents, documents=documents))
    settings = {"seq_length": seq_length, "seed": samples, "split": "80,10,10"}
    peer, *_ = their_splits([samples, 0, 0], blend=([prefix], None), **settings)
    ours, *_ = our_splits(samples // 4, path=prefix, **settings)
    for name in ("document_index", "sample_index", "shuffle_index"):
        here, there = getattr(ours, name), getattr(peer, name)
        assert here.dtype == there.dtype
        np.testing.assert_array_equal(here, there)
    if samples <= 400:
        same_samples(ours, peer)


def test_both_forms_of_the_last_epoch_were_seen() -> None:
    """The cases above have the last epoch shuffled by itself, and with the others."""
    forms = {epochs_for(2900, 7, samples).separate_last for samples in (640, 720, 760, 800)}
    assert forms == {True, False}


@pytest.mark.parametrize("split", ["969,30,1", "90,5,5", "1,1,1", "3,1,0", "98,1,1"])
def test_splits_and_a_blend_are_megatrons(split: str, tmp_path: Path) -> None:
    prefixes = [str(corpus(tmp_path / f"c{n}", seed=n, documents=2000 + 500 * n)) for n in range(3)]
    weights = [0.5, 3.0, 0.2]
    sizes = [400, 40, 40]
    settings = {"seq_length": 32, "seed": 7, "split": split}
    theirs = their_splits(sizes, blend=(prefixes, weights), **settings)
    words = tuple(word for pair in zip(map(str, weights), prefixes) for word in pair)
    ours = our_splits(100, eval_steps=10, blend=words, **settings)
    by_size = their_splits(sizes, blend=(prefixes, None), **settings)
    ours_by_size = our_splits(100, eval_steps=10, blend=tuple(prefixes), **settings)
    for here, there in zip([*ours, *ours_by_size], [*theirs, *by_size]):
        if there is None:
            assert len(here) == 0
            continue
        np.testing.assert_array_equal(here.dataset_index, there.dataset_index)
        np.testing.assert_array_equal(here.dataset_sample_index, there.dataset_sample_index)
        same_samples(here, there)


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.1, 0.2, 0.7], [1 / 3] * 3, [5, 1, 1, 1, 1, 1], [1e-6, 1]])
def test_blending_indices_are_megatrons(weights: list[float]) -> None:
    from megatron.core.datasets import helpers

    size, shares = 20_000, normalized(weights)
    dataset, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(dataset, sample, shares, len(shares), size, False)
    ours = build_blending_indices(shares, size)
    np.testing.assert_array_equal(ours["dataset_index"], dataset)
    np.testing.assert_array_equal(ours["dataset_sample_index"], sample)


# ---- tokenizers by path ----


def test_tokenizers_of_a_path_are_those_of_transformers() -> None:
    """GPT-2's two files and BERT's one, loaded by both; the vocabularies are the bundled ones."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    text = bundled_text()[:200_000]
    entries = [*text.split("\n\n"), "naïve café, ÜBER 3.14 東京 don't\tstop  \n", "x" * 150]
    bert, gpt2 = BUNDLED / "vocab.txt", BUNDLED / "vocab.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = [
            (
                gpt2,
                transformers.GPT2TokenizerFast(str(gpt2), str(gpt2.with_name("merges.txt"))),
            ),
            (bert, transformers.BertTokenizerFast(str(bert))),
        ]
    for path, theirs_of_path in pairs:
        ours = load_tokenizer(path)
        for entry in entries:
            expected = theirs_of_path(entry, add_special_tokens=False)["input_ids"]
            assert ours.encode(entry, add_special_tokens=False).ids == expected


def test_options_beside_a_vocabulary_are_those_of_berts_tokenizer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "naive", "naïve", "NAIVE", "NAÏVE", "東京", "東", "京"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    text, seen = "naïve NAÏVE naive NAIVE 東京", set()
    for lowers, strips, chinese in itertools.product((True, False), (True, False, None), (True, False)):
        options = {"do_lower_case": lowers, "strip_accents": strips, "tokenize_chinese_chars": chinese}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
        theirs = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"), **options)
        ours = load_tokenizer(tmp_path / "vocab.txt").encode(text).ids
        assert ours == theirs(text, add_special_tokens=False)["input_ids"], options
        seen.add(tuple(ours))
    assert len(seen) == 8, "each option matters; None strips as lowers says"


# ---- masking for BERT ----


@pytest.mark.parametrize(("samples", "least"), [(100, 25_000), pytest.param(3600, 10**6, marks=pytest.mark.sweep)])
def test_masked_tokens_are_megatrons_choice_for_choice(samples: int, least: int) -> None:
    """Samples of 62 to 509 tokens, from the same random state: the same ids, positions and n-grams."""
    from types import SimpleNamespace

    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset

    vocabulary = {n: f"##{n}" if n % 3 == 0 else str(n) for n in range(1000)} | {1000: "[CLS]", 1001: "[SEP]"}
    tokenizer = SimpleNamespace(cls=1000, sep=1001, mask=1002, inv_vocab=vocabulary)
    peer = SimpleNamespace(
        config=SimpleNamespace(
            tokenizer=tokenizer, masking_probability=0.15, masking_max_ngram=3, masking_do_full_word=True,
            masking_do_permutation=False, masking_use_longer_ngrams=False, masking_use_geometric_distribution=False,
        ),
        token_lookup=list(vocabulary),
    )  # fmt: skip
    peer._get_token_mask = lambda state: BERTMaskedWordPieceDataset._get_token_mask(peer, state)
    continues = np.arange(1000) % 3 == 0
    ngrams, seen = set(), 0
    for seed in range(samples):
        draw = np.random.default_rng(seed)
        length = int(draw.integers(60, 508))
        body = draw.integers(0, 1000, length)
        tokens = [1000, *body[: length // 2].tolist(), 1001, *body[length // 2 :].tolist(), 1001]
        theirs_masked, positions, _, _, spans = BERTMaskedWordPieceDataset._create_masked_lm_predictions(
            peer, tokens, length, np.random.RandomState(seed)
        )
        words = words_of(tokens, continues, (1000, 1001))
        ours = mask_ngrams(
            np.array(tokens), words, np.random.RandomState(seed), target_length=length, mask=1002, vocabulary=1002
        )
        assert ours.tokens.tolist() == theirs_masked and ours.positions == positions
        assert ours.spans == [indices for indices, _ in spans]
        ngrams |= {len(span) for span in ours.spans}
        seen += len(tokens)
    assert {1, 2, 3, 4} <= ngrams and seen > least


# ---- samples of sentences ----

VOCABULARY = {n: f"##{n}" if n % 3 == 0 else str(n) for n in range(1000)} | {1000: "[CLS]", 1001: "[SEP]", 1002: "[M]"}


class WordPieces:
    """As much of a tokenizer as megatron-core's datasets for BERT and T5 ask for; padding is no token of a text."""

    unique_identifiers: ClassVar[dict[str, str]] = {"class": "WordPieces"}
    vocab_size = 1003
    inv_vocab = VOCABULARY
    cls, sep, mask, pad, bos, eos = 1000, 1001, 1002, -1, 1003, 1004
    additional_special_tokens_ids = tuple(range(1005, 1105))


CONTINUES = np.arange(1000) % 3 == 0


def with_sentences(prefix: Path, *, documents: int, seed: int) -> str:
    """Documents of sentences of many lengths, some of them empty, alone, or too long."""
    random = np.random.default_rng(seed)
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for _ in range(documents):
            lengths = random.integers(1, 30, random.integers(0, 14)).tolist()
            if lengths and random.random() < 0.1:
                lengths[0] = 600
            builder.add_document(random.integers(0, 1000, sum(lengths)), lengths)
    return str(prefix)


def their_sentences(kind: str, prefix: str, samples: int, *, seq_length: int, seed: int, **more: Any) -> Any:
    from megatron.core.datasets import bert_dataset, t5_dataset

    module = bert_dataset if kind == "BERT" else t5_dataset
    config = getattr(module, f"{kind}MaskedWordPieceDatasetConfig")(
        random_seed=seed, sequence_length=seq_length, blend=([prefix], None), split="70,30,0", tokenizer=WordPieces(),
        path_to_cache=f"{prefix}.theirs", num_dataset_builder_threads=1, masking_probability=0.15,
        short_sequence_probability=0.1, masking_do_full_word=True, masking_do_permutation=False,
        masking_use_longer_ngrams=False, **more,
    )  # fmt: skip
    return built(getattr(module, f"{kind}MaskedWordPieceDataset"), [samples, 0, 0], config)[0]


@pytest.mark.parametrize(("samples", "seed"), [(100, 1), (2000, 77)])
@pytest.mark.parametrize("two_segments", [True, False])
def test_bert_samples_are_megatrons(samples: int, seed: int, two_segments: bool, tmp_path: Path) -> None:
    """One epoch and several; the same sentences, segments, types, masks and order, token for token."""
    prefix = with_sentences(tmp_path / "corpus", documents=150, seed=seed)
    peer = their_sentences(
        "BERT", prefix, samples, seq_length=48, seed=seed, classification_head=two_segments, masking_max_ngram=3,
        masking_use_geometric_distribution=False,
    )  # fmt: skip
    maker = BertMaker(48, SpecialTokens(1000, 1001, 1002), len(VOCABULARY), CONTINUES, two_segments)
    ours = SentenceSamples(IndexedDataset(prefix), range(105), maker, num_samples=samples, seed=seed)
    np.testing.assert_array_equal(ours.sentence_index, peer.sample_index)
    swapped = 0
    for number in range(min(len(ours), 400)):
        here, there = ours[number], peer[number]
        real = here["padding_mask_BS"] == 1
        np.testing.assert_array_equal(real, there["padding_mask"] == 1)
        np.testing.assert_array_equal(here["types_BS"][real], there["types"][real])
        assert here["is_random_B"] == there["is_random"]
        swapped += int(here["is_random_B"])
        if ours.sentence_index[number, 2] >= LEAST_TARGET:
            for name, other in (("tokens_BS", "text"), ("labels_BS", "labels"), ("loss_mask_BS", "loss_mask")):
                np.testing.assert_array_equal(here[name], there[other])
        else:
            assert here["loss_mask_BS"].sum() <= 1 and there["loss_mask"].sum() == 0
    assert (swapped > 0) == two_segments and len(ours) > samples


def test_t5_samples_are_megatrons(tmp_path: Path) -> None:
    prefix = with_sentences(tmp_path / "corpus", documents=150, seed=5)
    peer = their_sentences(
        "T5", prefix, 300, seq_length=64, seed=5, sequence_length_decoder=32, masking_max_ngram=10,
        masking_use_geometric_distribution=True,
    )  # fmt: skip
    maker = T5Maker(64, 32, T5Tokens(1003, 1004, WordPieces.additional_special_tokens_ids), CONTINUES)
    ours = SentenceSamples(IndexedDataset(prefix), range(105), maker, num_samples=300, seed=5)
    np.testing.assert_array_equal(ours.sentence_index, peer.sample_index)
    spans = set()
    for number in range(300):
        here, there = ours[number], peer[number]
        if ours.sentence_index[number, 2] >= LEAST_TARGET:
            for name in ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask"):
                np.testing.assert_array_equal(here[name], there[name], err_msg=name)
            spans.add(int(np.isin(here["text_enc"], maker.special.sentinels).sum()))
    assert {1, 2, 3} <= spans


def test_the_sentence_index_is_megatrons_for_many_shapes() -> None:
    from megatron.core.datasets import helpers

    for case in range(40):
        random = np.random.default_rng(case)
        sentences = random.integers(0, 9, 60)
        lengths = random.integers(0, [600, 40][case % 2], int(sentences.sum())).astype(np.int32)
        borders = np.concatenate([[0], np.cumsum(sentences)])
        longest, least, samples = int(random.integers(2, 200)), 1 + case % 2, int(random.integers(1, 500))
        theirs_rows = helpers.build_mapping(
            borders[10:51], lengths, 2**31 - 2, samples, longest, 0.1, case + 1, False, least
        )
        ours = build_sentence_index(
            lengths, borders, range(10, 50), longest=longest, least=least, num_samples=samples, seed=case + 1
        )
        assert ours.dtype == theirs_rows.dtype
        np.testing.assert_array_equal(ours, theirs_rows)
