"""Samples from indexed datasets: index arrays, their cache, blends, splits and the fields that name them."""

import json
import multiprocessing
import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import ConfigError, DataConfig, ModelConfig, RunConfig, TrainConfig
from labkit.data import (
    BlendedDataset,
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexedGPTDataset,
    build_gpt_datasets,
    sample_index,
)
from labkit.data.index_cache import cached
from labkit.data.sample_index import build_blending_indices, build_indices, build_sample_index, epochs_for


def write(prefix: Path, documents, dtype=np.int32) -> str:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for ids in documents:
            builder.add_document(ids)
    return str(prefix)


def numbered(prefix: Path, lengths) -> str:
    """Documents whose tokens count on: every token of the dataset is another number."""
    ends = np.cumsum([0, *lengths])
    return write(prefix, [np.arange(start, end) for start, end in pairwise(ends)])


def config_of(*, steps=4, batch=4, seq_length=8, eval_steps=0, **data) -> RunConfig:
    return RunConfig(
        model=ModelConfig(seq_length=seq_length),
        data=DataConfig(**data),
        train=TrainConfig(steps=steps, global_batch_size=batch, eval_steps=eval_steps),
    )


# ---- index arrays ----


def test_the_example_of_the_page():
    assert build_sample_index(np.array([3, 4, 5], np.int32), np.array([2, 0, 1]), 4, 2).tolist() == [
        [0, 0],
        [0, 4],
        [2, 0],
    ]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=30), st.integers(1, 20), st.integers(1, 200), st.data())
def test_the_samples_are_the_windows_of_the_shuffled_stream(tmp_path_factory, lengths, seq_length, samples, data):
    """The stream is put together token by token here; no array of ours is used but the order of documents."""
    start = data.draw(st.integers(0, len(lengths) - 1))
    documents = range(start, len(lengths))
    if sum(lengths[start:]) <= seq_length:
        return
    indexed = IndexedDataset(numbered(tmp_path_factory.mktemp("data") / "a", lengths))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_index, "BLOCK", data.draw(st.integers(1, 40)))
        dataset = IndexedGPTDataset(indexed, documents, seq_length=seq_length, num_samples=samples, seed=3)
    stream = np.concatenate([indexed[int(document)] for document in dataset.document_index])
    windows = [stream[at : at + seq_length + 1] for at in range(0, len(stream) - seq_length, seq_length)]
    assert len(dataset) == len(windows) >= samples
    for place, window in zip(np.argsort(dataset.shuffle_index), windows):
        np.testing.assert_array_equal(dataset[int(place)], window)
    np.testing.assert_array_equal(dataset.ordered(len(dataset) + 1 % len(dataset)), dataset[1 % len(dataset)])
    epochs = len(dataset.document_index) // len(documents)
    assert (epochs - 1) * sum(lengths[start:]) < samples * seq_length + 1, "an epoch too many"
    assert np.bincount(dataset.document_index, minlength=len(lengths)).tolist() == [0] * start + [epochs] * len(
        documents
    )


@settings(max_examples=200, deadline=None)
@given(st.integers(10, 500), st.integers(1, 9), st.integers(1, 1000))
def test_the_last_epoch_is_shuffled_by_itself_below_its_share(tokens, seq_length, samples):
    epochs = epochs_for(tokens, seq_length, samples)
    indices = build_indices(
        np.ones(tokens, np.int32), range(tokens), seq_length=seq_length, num_samples=samples, seed=1
    )
    last, first = indices["document_index"][-tokens:], indices["document_index"][:-tokens]
    if epochs.separate_last:
        assert sorted(last) == list(range(tokens)) and set(first) <= set(range(tokens))
        whole = indices["shuffle_index"][: epochs.shuffled_together]
        assert sorted(whole) == list(range(epochs.shuffled_together))
        assert samples - epochs.shuffled_together < 0.8 * ((tokens - 1) // seq_length)
    assert sorted(indices["shuffle_index"]) == list(range(epochs.samples))


def test_a_billion_tokens_need_no_more_rows_than_samples():
    lengths = np.full(1000, 1_000_000, np.int32)
    index = build_sample_index(lengths, np.arange(1000), 1024, (10**9 - 1) // 1024)
    assert index.dtype == np.int32 and index.shape == (976563, 2)
    assert (index[:, 0].astype(np.int64) * 1_000_000 + index[:, 1] == np.arange(976563) * 1024).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=6), st.integers(1, 400))
def test_a_blend_never_strays_far_from_its_weights(weights, size):
    shares = np.array(weights) / sum(weights)
    indices = build_blending_indices(shares.tolist(), size)
    for number, share in enumerate(shares):
        own = indices["dataset_index"] == number
        assert indices["dataset_sample_index"][own].tolist() == list(range(own.sum()))
        assert np.abs(np.cumsum(own) - share * np.arange(1, size + 1)).max() <= len(weights)


# ---- datasets ----


def test_samples_and_types_that_are_not_there_are_refused(tmp_path):
    dataset = IndexedGPTDataset(IndexedDataset(numbered(tmp_path / "a", [20, 20])), seq_length=8)
    for wrong in (-1, len(dataset)):
        with pytest.raises(IndexError, match=rf"sample {wrong} of the train split of .*a, which has 4"):
            dataset[wrong]
    floats = IndexedDataset(write(tmp_path / "f", [[0.5, 1.5]], np.float32))
    with pytest.raises(ValueError, match=r"f\.idx: holds float32; token ids are integers"):
        IndexedGPTDataset(floats, seq_length=1)
    with pytest.raises(ValueError, match=r"the blend takes 10 samples of .*a, which has 4; build more of it"):
        BlendedDataset([dataset, dataset], [1, 1], 20)


def test_a_run_reads_splits_by_documents(tmp_path):
    prefix = numbered(tmp_path / "corpus.v1", [30] * 10)
    train, valid, test = build_gpt_datasets(config_of(path=prefix, split="8,1,1", eval_steps=1).validate())
    rows = [{int(token) for i in range(len(split)) for token in split.ordered(i)} for split in (train, valid, test)]
    assert [min(row) // 30 for row in rows] == [0, 8, 9] and [max(row) // 30 for row in rows] == [7, 8, 9]
    train, valid, test = build_gpt_datasets(config_of(path=prefix, split="8,1,1"))
    assert len(train) >= 16 and len(valid) == len(test) == 0
    with pytest.raises(
        ValueError, match=r"the valid split \(1% of 10 documents\) of .*v1 has 0 tokens, but one sample"
    ):
        build_gpt_datasets(config_of(path=prefix, split="98,1,1", eval_steps=1))


@pytest.mark.parametrize("weights", [("3", "1"), ("7.5e-1", "2.5E-1"), ("+3.", ".1e+1")])
def test_a_blend_is_mixed_by_weight(weights, tmp_path):
    first, second = numbered(tmp_path / "a", [40] * 20), write(tmp_path / "b", [[100_000] * 40] * 20)
    config = config_of(steps=25, blend=(weights[0], first, weights[1], second))
    train, *_ = build_gpt_datasets(config.validate())
    origin = np.array([train.ordered(i)[0] >= 100_000 for i in range(100)])
    assert origin.sum() == 25 and origin.reshape(25, 4).sum(1).tolist() == [1] * 25
    again = [train.ordered(len(train) + i) for i in range(3)]  # behind the last sample the order begins again
    assert np.array_equal(again, [train.ordered(i) for i in range(3)])


def test_more_steps_read_the_same_samples_first(tmp_path):
    """Inside one epoch, or with data.num_samples, a prolonged run goes on in the same order."""
    prefix = numbered(tmp_path / "a", [10] * 40)

    def first_sixteen(**changes):
        train, *_ = build_gpt_datasets(config_of(path=prefix, split="1,0,0", **changes))
        return np.stack([train.ordered(i) for i in range(16)])

    np.testing.assert_array_equal(first_sixteen(steps=4), first_sixteen(steps=10))
    assert not np.array_equal(first_sixteen(steps=4), first_sixteen(steps=100))
    np.testing.assert_array_equal(first_sixteen(steps=50, num_samples=400), first_sixteen(steps=4, num_samples=400))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"path": "{a}.bin"}, "is one of the two files of an indexed dataset; give their prefix"),
        ({"path": "{a}.idx"}, "is one of the two files of an indexed dataset"),
        ({"path": "{a}x"}, "no such file"),
        ({"path": "{a}", "blend": ("1", "{a}")}, "data.blend = .* excludes data.path; leave one of them out"),
        ({"blend": ("1e308", "{a}", "1e308", "{a}")}, "must be weights above 0 and prefixes in turn"),
        ({"blend": ("1", "{a}", "2")}, "must be weights above 0 and prefixes in turn, as in 0.3,books,0.7,news"),
        ({"blend": ("{a}", "1")}, "must be weights above 0"),
        ({"blend": ("0e1", "{a}")}, "must be weights above 0"),
        ({"blend": ("1e999", "{a}")}, "must be weights above 0"),
        ({"blend": ("-1", "{a}")}, "must be weights above 0"),
        ({"blend": ("nan", "{a}")}, r"there is no nan\.idx; give the prefixes of indexed datasets"),
        ({"blend": ("1", "{a}x")}, r"there is no .*ax\.idx; give the prefixes of indexed datasets"),
        ({"cache": "somewhere"}, "data.cache = 'somewhere': has no effect on a text; give an indexed dataset"),
        ({"num_samples": 5}, "data.num_samples = 5: has no effect on a text"),
    ],
)
def test_bad_fields_are_refused(data, said, tmp_path):
    prefix = numbered(tmp_path / "a", [40] * 4)

    def filled(value):
        return tuple(map(filled, value)) if isinstance(value, tuple) else str(value).replace("{a}", prefix)

    changes = {name: value if isinstance(value, int) else filled(value) for name, value in data.items()}
    with pytest.raises(ConfigError, match=said):
        config_of(**changes).validate()


# ---- the cache ----


def test_arrays_are_built_once_and_then_mapped(tmp_path):
    builds = []

    def build():
        builds.append(1)
        return {"a": np.arange(5), "b": np.ones((2, 2), np.int32)}

    made = [cached(tmp_path / "new" / "folder", {"seed": 1}, build) for _ in range(3)]
    assert len(builds) == 1 and all(isinstance(arrays["a"], np.memmap) for arrays in made)
    assert made[2]["a"].tolist() == [0, 1, 2, 3, 4] and made[2]["b"].shape == (2, 2)
    cached(tmp_path / "new" / "folder", {"seed": 2}, build)
    assert len(builds) == 2 and len(list((tmp_path / "new" / "folder").iterdir())) == 2
    assert isinstance(cached(None, {"seed": 1}, build)["a"], np.ndarray) and len(builds) == 3


@pytest.mark.parametrize("damage", ["cut", "gone", "other shape", "no words"])
def test_a_damaged_entry_is_built_again(damage, tmp_path):
    def build():
        return {"a": np.arange(500)}

    cached(tmp_path, {}, build)
    (entry,) = tmp_path.iterdir()
    if damage == "cut":
        os.truncate(entry / "a.npy", 200)
    elif damage == "gone":
        (entry / "a.npy").unlink()
    elif damage == "other shape":
        np.save(entry / "a.npy", np.arange(499))
    else:
        (entry / "description.json").write_text("{")
    assert cached(tmp_path, {}, build)["a"].tolist() == list(range(500))
    assert [path.name for path in tmp_path.iterdir()] == [entry.name]
    assert json.loads((entry / "description.json").read_text())["arrays"] == {"a": ["<i8", 500]}


def _build_together(folder: str, barrier, number: int, results) -> None:
    def build():
        barrier.wait(30)  # no rank writes before all have found nothing
        return {"a": np.arange(100_000)}

    arrays = cached(folder, {"x": 1}, build)
    results.put((number, int(arrays["a"].sum()), isinstance(arrays["a"], np.memmap)))


def test_ranks_may_build_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(4), context.Queue()
    ranks = [context.Process(target=_build_together, args=(str(tmp_path), barrier, n, results)) for n in range(4)]
    for rank in ranks:
        rank.start()
    found = sorted(results.get(timeout=60) for _ in ranks)
    for rank in ranks:
        rank.join()
    assert found == [(n, sum(range(100_000)), True) for n in range(4)]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_key_holds_all_that_the_arrays_depend_on(tmp_path):
    indexed = IndexedDataset(numbered(tmp_path / "a", [10] * 20))
    other = IndexedDataset(numbered(tmp_path / "b", [10] * 19 + [9]))
    base = {"seq_length": 5, "num_samples": 10, "seed": 1}
    cases = [
        (indexed, None, base), (indexed, None, base | {"seq_length": 6}), (indexed, None, base | {"num_samples": 99}),
        (indexed, None, base | {"seed": 2}), (indexed, range(19), base), (other, None, base), (indexed, None, base),
    ]  # fmt: skip
    for dataset, documents, numbers in cases:
        fresh = IndexedGPTDataset(dataset, documents, **numbers)
        kept = IndexedGPTDataset(dataset, documents, cache=tmp_path / "cache", **numbers)
        for name in ("document_index", "sample_index", "shuffle_index"):
            np.testing.assert_array_equal(getattr(fresh, name), getattr(kept, name))
    assert len(list((tmp_path / "cache").iterdir())) == len(cases) - 1


def test_indices_lie_beside_the_data_or_in_the_given_folder(tmp_path):
    (tmp_path / "data").mkdir()
    prefix = numbered(tmp_path / "data" / "a", [40] * 4)
    build_gpt_datasets(config_of(path=prefix))
    assert len(list((tmp_path / "data" / "a.cache").iterdir())) == 1
    build_gpt_datasets(config_of(path=prefix, cache=str(tmp_path / "kept")))
    assert len(list((tmp_path / "kept").iterdir())) == 1
