"""Where a run ends, its graphs end: ahead of the communicators that they may hold, after an exception too."""

from __future__ import annotations

import pytest
from graph_training import FULL, GRAPHS, Training, small

from labkit.graphs.emulated.emulated_backend import EmulatedGraph
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline
from labkit.train.reporting.report import Report


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[EmulatedGraph]:
    """All that are made."""
    made: list[EmulatedGraph] = []
    make = EmulatedGraph.__init__

    def noted(self: EmulatedGraph, *args: object) -> None:
        make(self, *args)  # type: ignore[arg-type]
        made.append(self)

    monkeypatch.setattr(EmulatedGraph, "__init__", noted)
    return made


@pytest.mark.parametrize("scope", [{}, FULL], ids=["layers", "iteration"])
@pytest.mark.parametrize("fails", [False, True], ids=["to the end", "exception"])
def test_a_run_lets_its_graphs_go(
    graphs: list[EmulatedGraph], monkeypatch: pytest.MonkeyPatch, scope: dict[str, object], fails: bool
) -> None:
    alive: list[bool] = []

    def step(self: Report, step: int, *more: object) -> None:
        alive.append(any(graph.num_operations for graph in graphs))
        if fails and step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(Report, "step", step)
    config = small(**GRAPHS | scope, **{"train.steps": 3})
    if fails:
        with pytest.raises(KeyboardInterrupt):
            pretrain(config)
    else:
        pretrain(config)
    assert alive == [False, True, True]
    assert not any(graph.num_operations for graph in graphs)


def test_a_pipeline_that_ends_leaves_the_graphs_of_the_next(graphs: list[EmulatedGraph]) -> None:
    training = Training(small(**GRAPHS))
    training.losses(2)
    first = training.pipeline
    training.pipeline = Pipeline(first.config, first.groups, first.chunks, gpt_forward_step, first.schedule)
    training.losses(2)
    first.graphs.close()
    assert training.helper.graphs_created() and all(layer.cuda_graphs for layer in training.helper.layers)
    training.pipeline.graphs.close()
    assert not any(graph.num_operations for graph in graphs)
