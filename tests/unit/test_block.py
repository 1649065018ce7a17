"""The picture of a cut layer says what the records say."""

from __future__ import annotations

import numpy as np
import pytest

from labkit.comm.ledger import CommRecord
from labkit.viz import cut_matrices, gradient_table, split_sequence, tensor_parallel_block, weight_parts


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


@pytest.mark.parametrize("t", [2, 8])
def test_a_split_sequence_is_drawn_in_shares_that_add_up_to_whole_tensors(t: int) -> None:
    between, inside = f"[{64 // t}, 2, 32]", f"[64, 2, {128 // t}]"
    plain, split = (split_sequence(64, 2, 32, 128, t, sequence_parallel=cut) for cut in (False, True))
    said = f"A sublayer over tp {t}: between the regions a rank holds "
    assert repr(plain) == f"{said}[64, 2, 32] with f and g; inside {inside}."
    assert repr(split) == f"{said}{between} with f_s and g_s; inside {inside}."
    shapes = [[text.get_text() for text in figure.fig.axes[0].texts] for figure in (plain, split)]
    assert [each.count(between) for each in shapes] == [0, 4] and [each.count(inside) for each in shapes] == [2, 2]
    patches = split.fig.axes[0].patches
    held = [patch for patch in patches if patch.get_height() == pytest.approx(0.8 / t)]
    assert len(held) == 4 * min(t, 4), "x, norm, dropout and sum of each rank that is drawn"


def test_records_without_that_layer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no communication of 'layers\.2' among 8 records"):
        tensor_parallel_block(records(2), "layers.2")


# ---- cut matrices ----


@pytest.mark.parametrize(("part", "first"), [("mlp", (64, 4 * 64)), ("attention", (64, 3 * 64))])
@pytest.mark.parametrize("ranks", [2, 8])
def test_cut_matrices_have_the_shapes_of_a_rank_s_weights(part: str, first: tuple[int, int], ranks: int) -> None:
    figure = cut_matrices(part, 32, 64, ranks)
    inner = 4 * 64 if part == "mlp" else 64
    labels = texts(figure)
    assert f"[64, {first[1]}]\nper rank: [64, {first[1] // ranks}]" in labels, "cut by columns"
    assert f"[{inner}, 64]\nper rank: [{inner // ranks}, 64]" in labels, "cut by rows"
    assert f"a rank has {first[1] // ranks} of {first[1]} columns" in repr(figure)
    boxes = [patch.get_extents() for patch in figure.fig.axes[0].patches]
    assert len(boxes) == 2 + ranks * 4, "X and the sum are whole; two matrices, the inner result and the sheets are cut"


def test_backward_cuts_the_transposed_matrices_and_ends_at_f() -> None:
    figure = cut_matrices("mlp", 32, 64, 2, backward=True)
    written = {text.get_text(): text.get_position()[0] for text in figure.fig.axes[0].texts}
    assert {"dY", "Bᵀ", "Aᵀ", "g", "f"} <= set(written) and written["g"] < written["Bᵀ"] < written["f"]
    assert written["Aᵀ"] < written["f"], "the sum of dX is at the end"
    assert "[64, 256]\nper rank: [64, 128]" in written, "the transpose of B [256, 64], cut by columns"
    with pytest.raises(ValueError, match=r"no part 'attention' of a layer; choose mlp$"):
        cut_matrices("attention", 32, 64, 2, backward=True)


def test_cut_matrices_refuses_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match="3 ranks do not divide 64 columns"):
        cut_matrices("mlp", 32, 64, 3)
    with pytest.raises(ValueError, match="choose mlp or attention"):
        cut_matrices("norm", 32, 64, 2)


# ---- gradients and weights ----


def test_a_table_of_gradients_has_the_order_of_forward_and_counts_what_is_wrong() -> None:
    names = ("attention.qkv.weight", "mlp.fc1.weight", "mlp.norm.weight")
    figure = gradient_table({"x": 0.25} | {f"{layer}.{name}": 0.0 for layer in (0, 1) for name in names} | {
        "0.mlp.norm.weight": 0.5, "1.mlp.fc1.weight": 1e-12,
    })  # fmt: skip
    assert figure.sentence == "2 of 7 gradients are wrong, most of all 0.mlp.norm.weight, by 50%."
    written = {text.get_text(): text.get_position()[0] for text in figure.fig.axes[0].texts}
    assert written["norm\nweight"] < written["fc1\nweight"], "the norm comes before the MLP"
    assert written["50%"] == written["norm\nweight"]
    with pytest.raises(ValueError, match="no gradients of numbered layers among x"):
        gradient_table({"x": 1.0})


def test_parts_of_weights_are_compared_with_the_formula() -> None:
    def columns(fc1: np.ndarray, fc2: np.ndarray, rank: int, t: int) -> list[np.ndarray]:
        return [np.split(fc1, t)[rank], np.split(fc2, t)[rank]]

    figure = weight_parts(columns, 2)
    assert figure.sentence == "2 ranks: A as it should be, B otherwise."
    assert {len(axes.patches) for axes in figure.fig.axes} == {2 * 8}, "A [2, 8] and B [8, 2], twice"
