"""Our data against megatron-core's: the same files, the same indices, the same samples."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from labkit.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from labkit.data import IndexedDataset, IndexedDatasetBuilder, build_gpt_datasets, bundled_text, load_tokenizer
from labkit.data.indexed import DTYPES
from labkit.data.masking import mask_ngrams, words_of
from labkit.data.sample_index import build_blending_indices, epochs_for, normalized

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


@pytest.mark.parametrize("dtype", DTYPES.values())
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
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=seed, sequence_length=seq_length, blend=blend, split=split, tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
        path_to_cache=str(Path(blend[0][0]).parent / "their_cache"), num_dataset_builder_threads=1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:  # a cache is written by rank 0 of torch.distributed alone
        patch.setattr(torch.distributed, "get_rank", lambda: 0)
        return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


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
    for here, there in zip(ours, theirs):
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


def test_tokenizers_of_a_path_are_those_of_transformers(tmp_path: Path) -> None:
    """GPT-2's two files and BERT's one, loaded by both; the vocabularies are trained on the text."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    text = bundled_text()[:200_000]
    entries = [*text.split("\n\n"), "naïve café, ÜBER 3.14 東京 don't\tstop  \n", "x" * 150]
    load_tokenizer().model.save(str(tmp_path))
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer, pieces.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=1000, special_tokens=special, show_progress=False)
    pieces.train_from_iterator(entries, trainer)
    (tmp_path / "bert").mkdir()
    pieces.model.save(str(tmp_path / "bert"))
    bert = tmp_path / "bert" / "vocab.txt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = [
            (
                tmp_path / "vocab.json",
                transformers.GPT2TokenizerFast(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")),
            ),
            (bert, transformers.BertTokenizerFast(str(bert))),
        ]
    for path, theirs_of_path in pairs:
        ours = load_tokenizer(path)
        for entry in entries:
            expected = theirs_of_path(entry, add_special_tokens=False)["input_ids"]
            assert ours.encode(entry, add_special_tokens=False).ids == expected


# ---- masking for BERT ----


def test_masked_tokens_are_megatrons_choice_for_choice(tmp_path: Path) -> None:
    """A hundred samples of 62 to 509 tokens, from the same random state: the same ids, positions and n-grams."""
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
    ngrams = set()
    for seed in range(100):
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
    assert {1, 2, 3, 4} <= ngrams
