"""The picture of a cut layer says what the records say."""

from __future__ import annotations

import pytest

from labkit.parallel.ledger import CommRecord
from labkit.viz import tensor_parallel_block


def records(size: int) -> list[CommRecord]:
    calls = [
        ("attention.proj", "forward"),
        ("mlp.fc2", "forward"),
        ("mlp.fc1", "backward"),
        ("attention.qkv", "backward"),
    ]
    return [
        CommRecord("all_reduce", "tp", size, 4096, "float32", f"layers.{layer}.{name}", phase)
        for layer in (1, 11)
        for name, phase in calls
    ]


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.fig.axes[0].texts]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_sentence_and_the_labels_count_what_the_ledger_saw_of_that_layer_alone(size: int) -> None:
    figure = tensor_parallel_block(records(size), "layers.1")
    assert repr(figure) == (
        f"layers.1 over tp {size}: all-reduces 2 forward (g) of 4,096 bytes each, 2 backward (f) of 4,096 bytes each."
    )
    assert texts(figure).count("forward\n1 x all_reduce\n4,096 B") == 2
    assert texts(figure).count("backward\nidentity") == 2
    assert f"qkv {size - 1}" in texts(figure), "the last rank is drawn"
    assert len([text for text in texts(figure) if text.startswith("fc1")]) == min(size, 4)


def test_a_missing_all_reduce_shows_as_identity() -> None:
    without_f = [r for r in records(2) if r.phase == "forward"]
    figure = tensor_parallel_block(without_f, "layers.1")
    assert "0 backward (f)" in repr(figure)
    assert texts(figure).count("backward\nidentity") == 4


def test_under_sequence_parallelism_each_operator_talks_in_both_directions() -> None:
    calls = [(part, "forward", "all_gather") for part in ("attention.qkv", "mlp.fc1")]
    calls += [(part, "forward", "reduce_scatter") for part in ("attention.proj", "mlp.fc2")]
    calls += [(part, "backward", "all_gather") for part in ("attention.qkv", "mlp.fc1", "attention.proj", "mlp.fc2")]
    calls += [(part, "backward", "reduce_scatter") for part in ("attention.qkv", "mlp.fc1")]
    split = [CommRecord(kind, "tp", 2, 100, "float32", f"layers.0.{part}", phase) for part, phase, kind in calls]
    figure = tensor_parallel_block(split)
    assert repr(figure) == (
        "layers.0 over tp 2, sequence parallel: forward 2 all-gathers and 2 reduce-scatters, "
        "backward 4 all-gathers and 2 reduce-scatters."
    )
    shown = texts(figure)
    assert shown.count("$f_s$") == shown.count("$g_s$") == 2
    assert shown.count("forward\n1 x all_gather\n100 B") == shown.count("forward\n1 x reduce_scatter\n100 B") == 2
    assert shown.count("backward\n1 x reduce_scatter\n1 x all_gather\n200 B") == 2


def test_records_without_that_layer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no communication of 'layers\.2' among 8 records"):
        tensor_parallel_block(records(2), "layers.2")
