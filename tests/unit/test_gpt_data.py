"""Samples, splits, shuffles, and the rule that gives every layout the same global batch."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from labkit.data import GPTDataset, build_gpt_datasets, data_iterator, load_tokenizer, unigram_entropy
from labkit.data.batches import microbatch_positions
from labkit.data.text import BUNDLED, encode
from labkit.parallel import ParallelGroups, single_process_groups


def config_of(seq_length=16, vocab_size=1024, *, micro=1, batch=16, seed=1234, **data) -> RunConfig:
    return RunConfig(
        model=ModelConfig(vocab_size=vocab_size, seq_length=seq_length),
        data=DataConfig(**data),
        train=TrainConfig(micro_batch_size=micro, global_batch_size=batch, seed=seed),
    )


def groups_of(dp=1, dp_rank=0) -> ParallelGroups:
    """The groups of one of dp ranks, seen without starting any process."""
    alone = single_process_groups()
    return replace(alone, dp=replace(alone.dp, ranks=tuple(range(dp)), rank=dp_rank))


def take(iterator, count):
    return [next(iterator) for _ in range(count)]


# ---- samples ----


def test_samples_overlap_by_one_token_so_that_every_other_token_is_a_label_once():
    dataset = GPTDataset(np.arange(31, dtype=np.uint16), seq_length=6)
    assert len(dataset) == 5
    labels = np.concatenate([dataset[i][1:] for i in range(5)])
    np.testing.assert_array_equal(labels, np.arange(1, 31))
    assert all(len(dataset[i]) == 7 for i in range(5))
    with pytest.raises(IndexError, match="sample 5 of the train split, which has 5"):
        dataset[5]


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 300), st.integers(1, 40), st.integers(0, 2**31), st.integers(0, 5))
def test_each_epoch_visits_every_sample_once_in_its_own_order(tokens, seq_length, seed, epoch):
    dataset = GPTDataset(np.arange(tokens), seq_length, seed=seed, shuffle=True)
    order = dataset.order(epoch)
    np.testing.assert_array_equal(np.sort(order), np.arange(len(dataset)))
    np.testing.assert_array_equal(order, dataset.order(epoch))
    for place, index in enumerate(order):
        np.testing.assert_array_equal(dataset.ordered(epoch * len(dataset) + place), dataset[int(index)])


def test_shuffle_depends_on_seed_and_epoch():
    orders = [
        tuple(GPTDataset(np.arange(1000), 1, seed=seed, shuffle=True).order(epoch))
        for seed in (1, 2)
        for epoch in (0, 1)
    ]
    assert len(set(orders)) == 4


def test_shuffle_is_the_same_on_every_machine():
    """Sorted by the first raw outputs of PCG64(SeedSequence([1234, 0])), which numpy's policy fixes for good."""
    keys = [int(key) for key in np.random.PCG64(np.random.SeedSequence([1234, 0])).random_raw(8)]
    dataset = GPTDataset(np.arange(9), 1, seed=1234, shuffle=True)
    assert dataset.order(0).tolist() == sorted(range(8), key=keys.__getitem__)


# ---- splits ----


def test_splits_are_consecutive_parts_of_the_text_by_their_shares():
    train, valid, test = build_gpt_datasets(config_of(split="80,15,5"))
    whole = np.concatenate([train.tokens, valid.tokens, test.tokens])
    text = load_tokenizer().decode(whole[:50].tolist())
    assert text.startswith("(TM)")
    shares = [len(split.tokens) / len(whole) for split in (train, valid, test)]
    assert shares == pytest.approx([0.80, 0.15, 0.05], abs=1e-5)
    assert (train.shuffle, valid.shuffle, test.shuffle) == (True, False, False)


def test_own_text_and_own_tokenizer(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 100)
    load_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = config_of(path=str(tmp_path / "text.txt"), tokenizer=str(tmp_path / "tokenizer.json"), split="1,0,0")
    train, valid, test = build_gpt_datasets(config)
    np.testing.assert_array_equal(train.tokens, encode(load_tokenizer(), "the quick brown fox " * 100))
    assert len(valid) == len(test) == 0
    with pytest.raises(ValueError, match=r"the valid split is empty"):
        data_iterator(valid, config, groups_of())


WRONG = [
    "",
    "90,5",
    "90,5,5,0",
    "a,b,c",
    "0,0,0",
    "100,-1,1",
    "nan,1,1",
    "inf,1,1",
    "1e308,1e308,1",
    "1_0,5,5",
    "٩٠,5,5",
]


@pytest.mark.parametrize("split", WRONG)
def test_bad_split_is_refused(split):
    with pytest.raises(ValueError, match=r"data\.split: .* is not three shares"):
        _ = DataConfig(split=split).shares


def test_text_too_short_for_one_sample(tmp_path):
    (tmp_path / "text.txt").write_text("too short")
    with pytest.raises(ValueError, match=r"the train split .* one sample needs model\.seq_length \+ 1 = 65"):
        build_gpt_datasets(config_of(64, path=str(tmp_path / "text.txt")))


def test_empty_text(tmp_path):
    (tmp_path / "text.txt").write_text("")
    with pytest.raises(ValueError, match=r"one sample needs"):
        build_gpt_datasets(config_of(path=str(tmp_path / "text.txt")))


def test_tokenizer_larger_than_the_model_names_both_sizes():
    with pytest.raises(
        ValueError, match=r"tokenizer mismatch: the bundled tokenizer has 1024 tokens.*vocab_size is 512"
    ):
        build_gpt_datasets(config_of(vocab_size=512))


def test_a_vocabulary_that_the_bundled_tokenizer_cannot_train_is_refused():
    said = r"model\.vocab_size = 50257: .* 49233 rows of the embedding would see no token; give data\.tokenizer a file"
    with pytest.raises(ValueError, match=said):
        build_gpt_datasets(config_of(vocab_size=50257))
    assert len(build_gpt_datasets(config_of(vocab_size=2048))[0]) > 0, "room for tokens of one's own"
    named = str(BUNDLED / "vocab.json")
    assert len(build_gpt_datasets(config_of(vocab_size=50257, tokenizer=named))[0]) > 0


# ---- the global batch ----

LAYOUTS = st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 4), st.integers(1, 4), st.integers(0, 30))


@settings(max_examples=100, deadline=None)
@given(LAYOUTS)
def test_every_layout_gathers_to_the_same_microbatches(layout):
    """Microbatch j of dp rank d is microbatch j dp + d of one process: same samples, same rows, whatever dp is."""
    dp, micro, per_rank, step = layout
    config = config_of(micro=micro, batch=dp * micro * per_rank)
    alone = microbatch_positions(config, dp=1, dp_rank=0, step=step)
    ranks = [microbatch_positions(config, dp=dp, dp_rank=rank, step=step) for rank in range(dp)]
    gathered = np.stack(ranks, axis=1).reshape(alone.shape)
    np.testing.assert_array_equal(gathered, alone)
    np.testing.assert_array_equal(
        np.sort(gathered, axis=None), step * config.train.global_batch_size + np.arange(alone.size)
    )


@pytest.mark.parametrize(("dp", "micro"), [(1, 2), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_iterators_of_all_ranks_give_the_batches_of_one_process(dp, micro):
    batch, steps = 16, 3
    config = config_of(micro=micro, batch=batch)
    train, _, _ = build_gpt_datasets(config)
    alone = take(data_iterator(train, config, groups_of()), steps * batch // micro)
    for rank in range(dp):
        mine = take(data_iterator(train, config, groups_of(dp, rank)), steps * batch // micro // dp)
        for j, microbatch in enumerate(mine):
            for name, tensor in microbatch.items():
                assert torch.equal(tensor, alone[j * dp + rank][name])


def test_batch_holds_inputs_labels_and_mask():
    config = config_of(micro=2, batch=4)
    train, _, _ = build_gpt_datasets(config)
    batch = next(data_iterator(train, config, groups_of()))
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == {
        "tokens_BS": ((2, 16), torch.int64),
        "labels_BS": ((2, 16), torch.int64),
        "loss_mask_BS": ((2, 16), torch.float32),
    }
    assert torch.equal(batch["tokens_BS"][:, 1:], batch["labels_BS"][:, :-1])
    assert torch.equal(batch["tokens_BS"][0], torch.from_numpy(train.ordered(0)[:-1]))
    assert bool((batch["loss_mask_BS"] == 1).all())


def test_consumed_samples_resume_where_the_stream_was():
    config = config_of(micro=2, batch=8)
    train, _, _ = build_gpt_datasets(config)
    whole = take(data_iterator(train, config, groups_of(2, 1)), 10)
    resumed = take(
        data_iterator(train, config, groups_of(2, 1), consumed_samples=3 * config.train.global_batch_size), 4
    )
    for a, b in zip(whole[6:], resumed):
        assert torch.equal(a["tokens_BS"], b["tokens_BS"])


def test_stream_goes_on_into_the_next_epoch():
    config = config_of(4, micro=1, batch=2)
    dataset = GPTDataset(np.arange(13), 4, seed=3, shuffle=True)  # 3 samples: epoch 1 starts inside step 1
    seen = [int(batch["tokens_BS"][0, 0]) for batch in take(data_iterator(dataset, config, groups_of()), 6)]
    assert sorted(seen[:3]) == sorted(seen[3:]) == [0, 4, 8]


def test_batch_that_does_not_divide_is_refused_at_once():
    config = config_of(micro=2, batch=10)
    train, _, _ = build_gpt_datasets(config)
    with pytest.raises(ValueError, match=r"global_batch_size 10 is not a multiple of train\.micro_batch_size 2 x dp 2"):
        data_iterator(train, config, groups_of(2, 0))


# ---- entropy ----


def test_unigram_entropy_of_known_frequencies():
    assert unigram_entropy([3] * 10) == 0.0
    assert unigram_entropy(np.arange(8).repeat(3)) == pytest.approx(math.log(8))
    assert unigram_entropy(torch.tensor([[0, 0, 0, 1]])) == pytest.approx(
        -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    )
    with pytest.raises(ValueError, match="no tokens"):
        unigram_entropy([])
