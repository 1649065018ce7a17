"""Sublayers and cut MLPs on ranks are those of one process, and `errors_by_name` tells when they aren't."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from labkit.config import presets
from labkit.events import Event
from labkit.launch import Ranks
from labkit.parallel import mappings
from labkit.train import earliest_events, errors_by_name, run_cut_mlp, run_sublayer

SMALL = presets.tiny().override({"model.hidden": 16, "model.heads": 4})
X = torch.linspace(-1, 1, 6 * 16, dtype=torch.float64).reshape(6, 16)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(2, device="cpu", backend="gloo") as started:
        yield started


def whole_mlp() -> tuple[torch.Tensor, torch.Tensor]:
    """Y and dX of one process, with the weights of `run_cut_mlp`."""
    draws = torch.Generator().manual_seed(0)
    fc1, fc2 = (torch.randn(shape, generator=draws, dtype=torch.float64) for shape in ((64, 16), (16, 64)))
    x = X.clone().requires_grad_()
    y = F.gelu(x @ fc1.T) @ fc2.T
    (dx,) = torch.autograd.grad(y.sum(), x)
    return y.detach(), dx


@pytest.mark.parametrize(
    ("way", "slots", "sent"),
    [
        (("column", "row"), (["f"], [], [], ["g"]), {"all_reduce": 2}),
        (("row", "row"), (["split"], ["g_split"], [], ["g"]),
         {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}),
        (("column", "column"), (["f"], [], ["gather_f"], ["gather"]),
         {"all_gather": 2, "reduce_scatter": 1, "all_reduce": 1}),
        (("row", "column"), (["split"], ["g"], ["f"], ["gather"]), {"all_gather": 2, "all_reduce": 2}),
    ],
)  # fmt: skip
def test_every_cut_of_an_mlp_is_the_mlp_of_one_process(ranks, way, slots, sent) -> None:
    for y, dx, records in ranks.run(run_cut_mlp, SMALL, way, slots, X):
        for found, right in zip((y, dx), whole_mlp(), strict=True):
            torch.testing.assert_close(found, right)
        assert Counter(record.operation for record in records) == sent


def test_a_sublayer_without_f_has_wrong_gradients_only_before_it(ranks) -> None:
    x = X.reshape(3, 2, 16)
    with Ranks(1, device="cpu", backend="gloo") as one:
        (whole,) = one.run(run_sublayer, SMALL, "mlp", x, x)
    assert max(errors_by_name(ranks.run(run_sublayer, SMALL, "mlp", x, x), whole).values()) < 1e-12
    errors = errors_by_name(ranks.run(run_sublayer, SMALL, "mlp", x, x, mlp_without_f), whole)
    assert {name for name, error in errors.items() if error > 1e-12} == {"x"}


def mlp_without_f(x, part, group):
    inner = F.gelu(F.linear(x, part.fc1.weight, part.fc1.bias), approximate="tanh")
    return mappings.reduce_from_tensor_model_parallel_region(F.linear(inner, part.fc2.weight), group) + part.fc2.bias


def test_the_earliest_events_are_those_of_the_round_with_the_least_delay() -> None:
    late = iter((3.0, 1.0, 2.0))

    class Rounds:
        """Ranks that do not exist: every call runs here, once in each round."""

        def run(self, call):
            return [call()]

    def events() -> list[Event]:
        """A message, and a product that ends 3, 1 and 2 seconds after its start in three rounds."""
        return [Event(0, "f", "collective", 10.0, 20.0), Event(0, "dA", "weight_grad", 10.0, 10.0 + next(late))]

    made: Any = Rounds()
    (found,) = earliest_events(made, {"one": events}, rounds=3).values()
    assert [event.end for event in found] == [20.0, 11.0]
