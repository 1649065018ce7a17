"""Values before and after a change."""

import pytest

from labkit.viz import moved_values


def test_a_line_goes_from_each_value_to_the_one_after_the_change():
    figure = moved_values({"a": [(0.1, 0.5), (0.2, 0.2)], "b": [(0.3, 0.4)]}, ("free", "limited"), x="loss")
    (axes,) = figure.fig.axes
    moves = [tuple(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2]
    assert moves == [(0.1, 0.5), (0.2, 0.2), (0.3, 0.4)] and axes.get_xlim()[0] == 0
    assert figure.sentence == "loss, from free to limited: a 0.100 to 0.500, 0.200 to 0.200; b 0.300 to 0.400."
    with pytest.raises(ValueError, match="a try in each"):
        moved_values({"a": []}, ("free", "limited"), x="loss")
