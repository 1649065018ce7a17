"""Bytes that a routing has to move, held against counting row by row and against all possible routings."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.moe import (
    all_to_all_bytes,
    dedup_factor,
    expected_destinations,
    extra_bytes,
    send_matrix,
    send_matrix_without_copies,
)


def random_maps(ranks: int, tokens: int, experts: int, k: int, seed: int) -> np.ndarray:
    scores = np.random.default_rng(seed).random((ranks, tokens, experts))
    return scores.argsort(axis=2).argsort(axis=2) < k


@given(st.sampled_from([1, 2, 4]), st.integers(0, 9), st.integers(1, 8), st.integers(0, 2**31))
def test_the_matrix_is_what_counting_row_by_row_gives(ep: int, tokens: int, k: int, seed: int) -> None:
    maps = random_maps(ep, tokens, 8, k, seed)
    by_hand = np.zeros((ep, ep), dtype=int)
    once = np.zeros((ep, ep), dtype=int)
    for rank in range(ep):
        for token in range(tokens):
            places = [expert // (8 // ep) for expert in np.flatnonzero(maps[rank, token])]
            for place in places:
                by_hand[rank, place] += 1
            for place in set(places):
                once[rank, place] += 1
    counts = maps.sum(axis=1)
    assert np.array_equal(send_matrix(counts, ep), by_hand)
    assert send_matrix(counts, ep).sum() == ep * tokens * k
    assert np.array_equal(send_matrix_without_copies(maps, ep), once)
    moved = all_to_all_bytes(counts, ep, hidden=16, element_size=2)
    away = by_hand * (1 - np.eye(ep, dtype=int))
    assert moved.dispatch.tolist() == (away.sum(axis=1) * 32).tolist()
    assert moved.combine.tolist() == (away.sum(axis=0) * 32).tolist()
    assert moved.forward.sum() == 2 * moved.dispatch.sum()


def test_what_goes_with_the_rows_is_a_weight_each_and_one_table() -> None:
    counts = [[3, 1], [0, 4]]  # rank 0 sends 1 row, rank 1 none
    assert extra_bytes(counts, 2).tolist() == [4 + 2 * 4, 0 + 2 * 4]
    assert extra_bytes(counts, 2, etp=2, weight_size=8).tolist() == [8 + 2 * 4 * 3, 2 * 4 * 3]


def test_dedup_factors_of_two_published_layouts() -> None:
    assert dedup_factor(64, 8, 8) == pytest.approx(0.679, abs=5e-4)
    assert dedup_factor(8, 2, 2) == pytest.approx(0.786, abs=5e-4)


@pytest.mark.parametrize(("experts", "places", "k"), [(8, 2, 2), (8, 4, 3), (6, 3, 4), (4, 4, 4), (5, 1, 2)])
def test_the_closed_form_is_the_mean_over_all_choices(experts: int, places: int, k: int) -> None:
    choices = list(combinations(range(experts), k))
    maps = np.zeros((1, len(choices), experts), dtype=bool)
    for row, choice in enumerate(choices):
        maps[0, row, list(choice)] = True
    mean = send_matrix_without_copies(maps, places).sum() / len(choices)
    assert expected_destinations(experts, places, k) == pytest.approx(mean)
    # every place is as likely as any other, so what holds for all rows holds for those that leave a rank
    assert len(set(send_matrix_without_copies(maps, places)[0])) == 1


def test_numbers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one row for each of the 4 ranks"):
        send_matrix([[1, 2], [3, 4]], 4)
    with pytest.raises(ValueError, match="3 experts cannot be split over 2 ranks"):
        send_matrix([[1, 2, 3], [3, 4, 5]], 2)
    with pytest.raises(ValueError, match="top_k is 9; a token goes to 1 to 8"):
        dedup_factor(8, 2, 9)
