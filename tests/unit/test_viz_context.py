"""Figures of context parallelism: sentences computed by hand, bars where the plan puts them, refusals."""

import numpy as np
import pytest

from labkit.events import Event
from labkit.viz import context_mask, measured_ring, ring_box, ring_timeline


def test_the_mask_says_who_computes_how_much():
    """S 16, cp 2: 136 pairs; plain: 8 9/2 = 36 and 36 + 64 = 100; zigzag half of them each."""
    figure = context_mask(16, 2)
    assert figure.sentence == (
        "Causal mask of 16 positions over cp 2, 136 pairs: plain cut 36 pairs for rank 0 and 100 for rank 1, "
        "zigzag 68 for every rank."
    )
    plain, zigzag = figure.fig.axes
    assert [len(axes.patches) for axes in (plain, zigzag)] == [10, 10], "the cells on and below the diagonal of 4 x 4"
    steps = [text.get_text() for text in zigzag.texts]
    assert steps == ["0", "1", "0", "1", "0", "0", "0", "1", "1", "0"], (
        "row by row: rank (0, 1, 1, 0) minus rank, mod 2"
    )


PLAIN = [list(range(8)), list(range(8, 16))]
ZIGZAG = [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))]


def test_the_timeline_is_as_long_as_the_slowest_blocks():
    """L = 8: plain 36 + 64 = 100, busy 136/200; zigzag 36 + 32 = 68, busy always."""
    figure = ring_timeline({"plain cut": PLAIN, "zigzag": ZIGZAG})
    assert figure.sentence == (
        "Ring over cp 2, 16 positions: plain cut 100 pairs of time, ranks busy 68.0%; zigzag 68 pairs of time, ranks "
        "busy 100.0%."
    )
    strips, panels = figure.fig.axes[::2], figure.fig.axes[1::2]
    assert [len(strip.patches) for strip in strips] == [2, 3], "runs of positions with one rank"
    assert [[text.get_text() for text in axes.texts] for axes in panels] == [
        ["kv 0", "kv 1", "kv 0"],
        ["kv 0", "kv 1", "kv 1", "kv 0"],
    ]
    assert [round(bar.get_x() + bar.get_width()) for bar in panels[1].patches] == [36, 36, 68, 68]


def test_many_ranks_carry_no_letters():
    sixteen = [[rank, 31 - rank] for rank in range(16)]
    assert [text.get_text() for axes in ring_timeline({"a": sixteen}).fig.axes for text in axes.texts] == []
    assert context_mask(64, 16).png


def test_measured_blocks_begin_at_zero():
    events = {
        "plain cut": [Event(0, "kv 0", "forward", 5.0, 6.0), Event(1, "wait recv cp", "wait", 4.0, 9.0)],
        "zigzag": [Event(0, "kv 0", "forward", 2.0, 2.5), Event(1, "kv 1", "forward", 2.1, 2.5)],
    }
    figure = measured_ring(events, 2, {"plain cut": 1.5, "zigzag": 0.5})
    assert figure.sentence == "Ring over cp 2, measured: plain cut 1 block, zigzag 2 blocks; zigzag ended first."
    first, second = figure.fig.axes
    assert [(bar.get_x(), bar.get_width()) for bar in first.patches] == [(0.0, 1.0)]
    assert second.patches[1].get_x() == pytest.approx(0.1)
    assert list(first.lines[0].get_xdata()) == [1.5, 1.5], "the predicted end"


def test_a_box_of_the_ring_names_the_owner_and_who_has_added():
    """dv of rank r's shares is in column r; the owner is found by the sum that fits."""
    numbers = np.random.default_rng(0)
    kvs = numbers.normal(size=(3, 2, 4, 5))
    shares = numbers.normal(size=(3, 3, 2, 4, 5))
    for rank in range(3):
        shares[rank, :, 1] *= np.arange(5) == rank
    assert ring_box(kvs[2], kvs, shares)[1][:2] == ("kv 2", [2])
    slot, held = ring_box(shares[0, 1] + shares[2, 1], kvs, shares)
    assert (slot, held.text, held.colors) == ("dkv", "dkv 1", [0, 2])
    assert ring_box(0 * kvs[0], kvs, shares)[1][:2] == ("0", ())
