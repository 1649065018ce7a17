"""Profiles of steps: the trace of torch.profiler has labkit's names, and the ranges of NVTX balance."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from labkit.config import RunConfig, presets
from labkit.launch import run
from labkit.train import pretrain
from labkit.train.device_rules import profile_problem
from labkit.train.forward_step import gpt_forward_step
from labkit.train.reporting.profiling import Profile

SMALL = {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 2, "steps": 4}


def profiled(kind: str, folder: Any, **changes: Any) -> RunConfig:
    steps = {"profile_step_start": 1, "profile_step_end": 3}
    return presets.tiny().override({**SMALL, "profile": kind, "output_dir": str(folder), **steps, **changes})


def ranges_of(path: Any) -> list[str]:
    """Names of the annotations in a trace, in the order of their start."""
    events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(found, key=lambda event: event["ts"])]


@pytest.mark.parametrize("level", [0, 1])
def test_a_trace_has_the_phases_and_actions_of_the_chosen_steps(tmp_path, level):
    without = pretrain(presets.tiny().override(SMALL)).losses
    result = pretrain(profiled("pytorch", tmp_path, timing_log_level=level, record_events=bool(level)))
    assert result.losses == without
    names = ranges_of(tmp_path / "profile-rank0.json")
    for once in ("step", "forward-backward", "finalize-grads", "optimizer", "0F0", "0F1", "0B0", "0B1"):
        assert names.count(once) == 2, f"{once}: steps 2 and 3 of 4"
    assert names.count("layers.0.mlp.fc1 weight_grad") == 4
    assert names.index("step") < names.index("forward-backward") < names.index("0F0") < names.index("0B0")


def test_ranks_write_their_own_traces_with_their_transfers(tmp_path):
    config = profiled("pytorch", tmp_path, **{"parallel.tp": 2, "parallel.pp": 2}, profile_ranks=(1, 2))
    run(pretrain, 4, config)
    assert sorted(path.name for path in tmp_path.glob("profile*")) == ["profile-rank1.json", "profile-rank2.json"]
    first, last = (set(ranges_of(tmp_path / f"profile-rank{rank}.json")) for rank in (1, 2))
    assert {"0F0", "0B1", "all_reduce tp", "wait all_reduce tp", "send pp", "wait recv pp"} <= first
    assert {"1F0", "1B1", "all_reduce tp", "send pp"} <= last and "0F0" not in last


def test_a_run_that_fails_writes_the_steps_that_it_has_done(tmp_path):
    def forward_step(data_iterator: Any, model: Any) -> Any:
        calls.append(model)
        if len(calls) == 2 * 2 + 2:
            raise RuntimeError("bad sample")
        return gpt_forward_step(data_iterator, model)

    calls: list[Any] = []
    with pytest.raises(RuntimeError, match="bad sample"):
        pretrain(profiled("pytorch", tmp_path), forward_step=forward_step)
    names = ranges_of(tmp_path / "profile-rank0.json")
    assert names.count("step") == 2 and names.count("optimizer") == 1


def test_layers_are_captured_in_a_profiled_step_and_a_profile_ends_with_the_last_step(tmp_path, capfd):
    graphs = {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_warmup_steps": 2}
    without = pretrain(presets.tiny().override({**SMALL, **graphs})).losses
    result = pretrain(profiled("pytorch", tmp_path, **graphs, profile_step_end=5, eval_steps=1))
    assert result.losses == without
    names = ranges_of(tmp_path / "profile-rank0.json")
    assert names.count("capture of layers") == 1 and any(name.endswith(" backward") for name in names), "replays"
    assert names.count("step") == 3 and "validation" not in names, "steps 2 to 4 of 4"
    assert "USDT" not in capfd.readouterr().err


def test_a_profiler_that_cannot_start_is_the_error_and_leaves_no_trace(tmp_path, monkeypatch):
    def start(_: Any) -> None:
        raise RuntimeError("another profiler runs")

    monkeypatch.setattr(torch.profiler.profile, "start", start)
    with pytest.raises(RuntimeError, match="another profiler runs"):
        pretrain(profiled("pytorch", tmp_path))
    assert not list(tmp_path.glob("profile*"))


@pytest.fixture
def nvtx(monkeypatch) -> list[str]:
    """What NVTX and the CUDA profiler are told."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("pop"))
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: told.append("cudaProfilerStart"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: told.append("cudaProfilerStop"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda record_shapes: nullcontext())
    monkeypatch.setattr("labkit.train.preflight.device_problems", lambda *_: [])
    return told


@pytest.mark.parametrize("fails", [False, True])
def test_ranges_of_nvtx_balance_between_start_and_stop_of_the_profiler(nvtx, tmp_path, fails):
    def forward_step(data_iterator: Any, model: Any) -> Any:
        output, loss = gpt_forward_step(data_iterator, model)
        if fails and "1F0" not in nvtx and nvtx.count("step") == 2:
            model.module.layers["1"].register_forward_hook(lambda *_: 1 / 0)
        return output, loss

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        pretrain(profiled("nsys", tmp_path), forward_step=forward_step)
    assert nvtx[0] == "cudaProfilerStart" and nvtx[-1] == "cudaProfilerStop"
    depth = 0
    for word in nvtx[1:-1]:
        depth += -1 if word == "pop" else 1
        assert depth >= 0
    assert depth == 0 and nvtx.count("step") == 2 and "layers.0.mlp.fc1 weight_grad" in nvtx
    assert nvtx.count("optimizer") == (1 if fails else 2)


def test_other_ranks_and_steps_cost_nothing(nvtx, tmp_path):
    config = profiled("nsys", tmp_path)
    for rank, steps in ((1, range(1, 5)), (0, (1, 4))):
        with Profile(config.train, rank, torch.device("cpu")) as profile:
            for step in steps:
                with profile.step(step):
                    pass
    assert nvtx == []


def test_nsys_needs_a_gpu(tmp_path):
    config = profiled("nsys", tmp_path)
    assert "train.profile = nsys" in profile_problem(config, "cpu") and profile_problem(config, "cuda") == ""
    assert profile_problem(profiled("pytorch", tmp_path), "cpu") == ""
