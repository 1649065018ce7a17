"""One pass that scales a buffer and notes whether it was finite."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit.parallel.data_parallel.finite import scale_and_check_finite

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


@given(
    values=st.lists(st.floats(-100, 100, width=16), max_size=12),
    factor=st.sampled_from([1.0, 0.5, 1 / 3, 1 / 7]),
    dtype=st.sampled_from(DTYPES),
)
def test_finite_values_are_scaled_as_mul_does(values: list[float], factor: float, dtype: torch.dtype):
    x = torch.tensor(values, dtype=dtype)
    expected = x.clone().mul_(factor)
    assert scale_and_check_finite(x, factor).tolist() == [0.0]
    assert torch.equal(x, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_value_is_noted_and_the_others_are_scaled_all_the_same(bad, factor, dtype):
    x = torch.ones(100, dtype=dtype)
    x[37] = bad
    assert scale_and_check_finite(x, factor).item() > 0
    assert (x[:37] == factor).all() and (x[38:] == factor).all() and not x[37].isfinite()
