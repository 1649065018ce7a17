"""Token ids on a GPU: no microbatch waits for a look at them, and a bad one leaves the device alive."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from host_waits import no_waiting
from torch import Tensor

from labkit.config import RunConfig, presets
from labkit.parallel import TokenIdError, token_ids_checked_late
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import build_data_iterators, initialize, setup_model_and_optimizer
from labkit.train.reporting.metrics import Timers
from labkit.train.stepping import train_step

pytestmark = pytest.mark.gpu

MICROBATCHES = 3
FULL = {"graph.cuda_graph_impl": "full_iteration"}


def made(**changes: Any) -> tuple[Pipeline, Any, Iterator[dict[str, Tensor]]]:
    shape = {
        "model.layers": 2, "model.hidden": 64, "model.heads": 4, "model.seq_length": 64,
        "train.global_batch_size": MICROBATCHES, "train.micro_batch_size": 1, "optim.precision": "bf16",
    }  # fmt: skip
    config: RunConfig = presets.tiny().override(shape).override(changes)
    run = initialize(config)
    assert run.groups.device.type == "cuda"
    chunks, optimizer, _ = setup_model_and_optimizer(run)
    pipeline = Pipeline(config, run.groups, chunks, gpt_forward_step, run.schedule)
    return pipeline, optimizer, build_data_iterators(run).train(0)


@pytest.mark.parametrize("changes", [{}, FULL], ids=["eager", "full iteration"])
def test_no_microbatch_makes_the_host_wait(changes: dict[str, Any]) -> None:
    """The data iterator's copies included."""
    pipeline, optimizer, batches = made(**changes)
    for step in range(5):  # what is made lazily; with graphs three eager steps, a capture and a replay
        train_step(pipeline, optimizer, Timers(0), batches, step=step, lr=1e-3, clip_grad=1.0)
    for chunk in pipeline.chunks:
        chunk.zero_grad_buffer()
    with token_ids_checked_late("cuda") as ids, no_waiting():
        pipeline.forward_backward(batches)
        pipeline.finalize_grads()
    ids.look()
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"), no_waiting():
        torch.ones(1, device="cuda").item()  # the mode sees what it is to see
    if not changes:
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"), no_waiting():
            pipeline.forward_backward(batches)  # outside the block every check waits


@pytest.mark.parametrize("changes", [{}, FULL], ids=["eager", "full iteration"])
@pytest.mark.parametrize(("key", "value"), [("tokens_BS", 10**9), ("tokens_BS", -7), ("labels_BS", 1 << 40)])
def test_a_bad_id_ends_the_step_by_name_and_the_device_survives(changes: dict[str, Any], key: str, value: int) -> None:
    pipeline, optimizer, batches = made(**changes)
    good = [{name: x.clone() for name, x in batch.items()} for batch in islice(batches, MICROBATCHES)]
    bad = [{name: x.clone() for name, x in batch.items()} for batch in good]
    bad[1][key][0, 5] = value
    weights = [p for chunk in pipeline.chunks for p in chunk.parameters()]
    for step in range(5):
        train_step(pipeline, optimizer, Timers(0), cycle(good), step=step, lr=1e-3, clip_grad=1.0)
    before = [p.detach().clone() for p in weights]
    what = "token" if key == "tokens_BS" else "label"
    with pytest.raises(TokenIdError, match=rf"{what} id {value} at position \(0, 5\) of \(1, 64\)"):
        train_step(pipeline, optimizer, Timers(0), cycle(bad), step=5, lr=1e-3, clip_grad=1.0)
    assert all(map(torch.equal, before, weights)), "no weight has changed"
    result = train_step(pipeline, optimizer, Timers(0), cycle(good), step=5, lr=1e-3, clip_grad=1.0)
    torch.cuda.synchronize()  # a failed assertion on the device would be told here, and ever after
    assert 0 < result.loss < 20
