"""`pretrain` reads indexed datasets: the same batches at every data-parallel size, and after a resume."""

import json
from pathlib import Path

import numpy as np
import pytest

from labkit.cli import main
from labkit.config import RunConfig, presets
from labkit.data import IndexedDatasetBuilder, bundled_text, load_tokenizer
from labkit.data.preparation import Recipe, prepare
from labkit.data.text import BUNDLED, encode
from labkit.launch import run
from labkit.train import pretrain

SMALL = {
    "hidden": 32,
    "heads": 4,
    "seq_length": 16,
    "global_batch_size": 8,
    "layers": 2,
    "vocab_size": 1024,
    "steps": 6,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Two datasets of entries of the bundled text."""
    folder, tokenizer = tmp_path_factory.mktemp("corpus"), load_tokenizer()
    entries = bundled_text()[:60_000].split("\n\n")
    for name, part in (("a", entries[::2]), ("b", entries[1::2])):
        with IndexedDatasetBuilder(folder / name, np.uint16) as builder:
            for entry in part:
                builder.add_document(encode(tokenizer, entry))
    return str(folder / "a"), str(folder / "b")


def blended(corpus: tuple[str, str], **changes: object) -> RunConfig:
    blend = ("0.3", corpus[0], "0.7", corpus[1])
    return presets.tiny().override(SMALL | {"data.blend": blend, "eval_steps": 1} | changes)


def test_losses_agree_at_every_data_parallel_size(corpus: tuple[str, str]) -> None:
    config = blended(corpus, **{"optim.precision": "fp64"})
    alone, *others = [run(pretrain, ranks, config, device="cpu")[0] for ranks in (1, 2, 4)]
    assert len(set(alone.losses)) == 6 and alone.losses[-1] < alone.losses[0]
    for result in others:
        np.testing.assert_allclose(result.losses, alone.losses, rtol=1e-10)
        np.testing.assert_allclose(result.series("validation_loss"), alone.series("validation_loss"), rtol=1e-10)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_where_its_checkpoint_ended(ranks: int, corpus: tuple[str, str], tmp_path: Path) -> None:
    """Bit for bit under the same layout; another number of ranks reads the same samples."""
    saved = {"checkpoint.dir": str(tmp_path / "run"), "checkpoint.interval": 3}
    whole = run(pretrain, 2, blended(corpus, **saved), device="cpu")[0].losses
    (third,) = (tmp_path / "run").glob("*3")
    rest = run(pretrain, ranks, blended(corpus, **{"checkpoint.load": str(third)}), device="cpu")[0]
    assert rest.resumed_after == 3 and len(rest.losses) == 3
    if ranks == 2:
        assert rest.losses == whole[3:]
    else:
        np.testing.assert_allclose(rest.losses, whole[3:], rtol=1e-5)


def test_a_bert_reads_the_same_sentences_at_every_data_parallel_size_and_after_a_stop(tmp_path: Path) -> None:
    """From a blend by size of two datasets with sentences: the losses of words and order, and the validation."""
    vocabulary, entries = str(BUNDLED / "vocab.txt"), bundled_text()[:60_000].split("\n\n")
    for name, part in (("a", entries[::2]), ("b", entries[1::2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": entry}) + "\n" for entry in part))
        prepare([tmp_path / f"{name}.jsonl"], tmp_path / name, Recipe(vocabulary, sentences=True))
    given = {
        "data.blend": (str(tmp_path / "a"), str(tmp_path / "b")),
        "data.tokenizer": vocabulary,
        "optim.precision": "fp64",
        "eval_steps": 1,
    }
    config = presets.bert_tiny().override(SMALL | {"vocab_size": 1152} | given)
    alone = run(pretrain, 1, config, device="cpu")[0]
    saved = config.override({"checkpoint.dir": str(tmp_path / "run"), "checkpoint.interval": 3})
    two = run(pretrain, 2, saved, device="cpu")[0]
    (third,) = (tmp_path / "run").glob("*3")
    rest = run(pretrain, 4, config.override({"checkpoint.load": str(third)}), device="cpu")[0]
    assert len(set(alone.losses)) == 6 and rest.resumed_after == 3
    for name in ("loss", "lm_loss", "sop_loss", "validation_lm_loss", "validation_perplexity"):
        expected = np.array(alone.series(name))
        np.testing.assert_allclose(two.series(name), expected, rtol=1e-10)
        np.testing.assert_allclose(rest.series(name), expected[expected[:, 0] > 3], rtol=1e-10)


def test_the_command_trains_from_a_prefix(corpus: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--preset", "tiny", "--nproc", "2", "--device", "cpu", "--train.steps", "2"]
    assert main([*words, "--data.path", corpus[0]]) == 0
    assert "step 2 of 2: training loss" in capsys.readouterr().out
    index = Path(f"{corpus[0]}.idx")
    content = index.read_bytes()
    try:
        index.write_bytes(content[:-1])
        assert main([*words, "--data.path", corpus[0]]) == 2
    finally:
        index.write_bytes(content)
    assert "a.idx: has " in capsys.readouterr().err
