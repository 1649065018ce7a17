"""What autograd keeps of a call, storage by storage, with the line that keeps it."""

from __future__ import annotations

import pytest
import torch

from labkit.models import kept_tensors, running_line, storage_of


def square_of_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    total = x + y  # a sum keeps nothing
    return total * total  # a product keeps its factors, here one storage


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_counts_once_and_has_the_line_that_keeps_it(device: str) -> None:
    x, y = (torch.ones(4, 8, device=device, requires_grad=True) for _ in range(2))
    found, result = kept_tensors(square_of_sum, x, y, label=lambda: running_line("square_of_sum"))
    assert list(found.values()) == [("square_of_sum  return total * total", 4 * 8 * 4)]
    assert result.shape == (4, 8) and storage_of(result) not in found
    assert storage_of(x) == storage_of(x.view(8, 4)) != storage_of(y)


def test_a_view_keeps_all_of_its_storage_and_outside_of_the_call_nothing_is_noted() -> None:
    x = torch.ones(4, 8, requires_grad=True)
    found, _ = kept_tensors(lambda x: x[0] * x[1], x)
    assert found == {storage_of(x): ("", 4 * 8 * 4)}
    x.square()
    assert len(found) == 1


def test_a_line_of_no_running_function_is_refused() -> None:
    with pytest.raises(ValueError, match="none of nobody, nothing is running"):
        running_line("nobody", "nothing")
