"""What does not fit, cannot be captured or cannot be written is refused before any process starts."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.cli import main
from labkit.config import ConfigError, presets
from labkit.launch import Ranks, available_memory, forkserver, machine, run
from labkit.launch import rank_pool as pool
from labkit.launch.available_memory import GIB, Memory
from labkit.plan.memory_need import CUDA_BYTES, TORCH_BYTES
from labkit.schedules import Schedule, gpipe
from labkit.train import compare, pretrain, run_schedule
from labkit.train.device_rules import attention_problem, graph_problem
from labkit.train.preflight import memory_problem, problems


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(forkserver, "ensure_running", started)
    monkeypatch.setattr(pool.LaunchFolder, "__init__", started)


ASYNCHRONOUS = {"checkpoint.dir": "saved", "checkpoint.asynchronous": True}


def available(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(available_memory, "host_memory", lambda: Memory(size, size, False))


@pytest.mark.parametrize("name", presets.names())
def test_presets_on_a_laptop(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Tiny ones run on 8 ranks in 2 GiB. The papers' models do not fit 24 GiB, with four exceptions.

    A batch of 8 of GPT-2 small fits (dropout on a CPU keeps three maps of probabilities a layer). So do the smallest
    models of tables 2 and 4 and that of figure 7, which recompute. The sum comes at once, also for 8.3B."""
    config = presets.get(name)
    small = config.model.hidden == 64
    available(monkeypatch, 2 * GIB if small else 24 * GIB)
    start = time.process_time()
    said = memory_problem(config, 8 if small else config.parallel.smallest_world_size, "cpu")
    assert time.process_time() - start < 5.0
    assert bool(said) == (not small and name not in ("gpt2_124m", "table2_355m", "table4_336m", "figure7_752m"))


def test_the_sum_adds_up_and_names_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 22 * GIB)
    config = presets.mixtral_8x7b()
    said = memory_problem(config, 32, "cpu")
    words = said.replace(",", "").replace("(", "").replace(")", "").replace(";", "").split()
    parts = [
        float(words[words.index(p) + 1])
        for p in ("weights", "gradients", "optimizer", "activations", "workspaces", "torch")
    ]
    total = float(words[words.index("need") + 1])
    assert sum(parts) == pytest.approx(total, abs=0.3) and said.startswith("32 ranks need ")
    assert "this machine has 22.0 GiB available" in said and "--allow-oversubscription" in said
    assert parts[-1] == pytest.approx(32 * TORCH_BYTES / GIB, abs=0.05)
    assert memory_problem(config.override({"allow_oversubscription": True}), 32, "cpu") == ""


@pytest.mark.parametrize(
    ("changes", "ranks", "advice"),
    [
        ({}, 8, "take fewer ranks"),
        ({"micro_batch_size": 16, "seq_length": 1024}, 1, "smaller train.micro_batch_size, model.recompute_gran"),
        ({"hidden": 2048}, 1, "take a smaller model, or --allow"),
        ({"hidden": 2048}, 2, "take a smaller model, optim.distributed_optimizer true"),
        ({"hidden": 2048, "distributed_optimizer": True}, 2, "take a smaller model, or --allow"),
        ({"hidden": 2048, **ASYNCHRONOUS}, 1, "take a smaller model, checkpoint.asynchronous false, or --allow"),
    ],
)
def test_advice_goes_by_the_largest_part(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], ranks: int, advice: str
) -> None:
    available(monkeypatch, GIB // 4)
    assert advice in memory_problem(presets.tiny().override(changes), ranks, "cpu")


def test_the_copy_of_an_asynchronous_save_is_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """12 bytes a parameter. On a GPU all tensors of a save pass through the host, also without `asynchronous`."""
    available(monkeypatch, GIB // 4)
    config = presets.tiny().override({"hidden": 512, "checkpoint.dir": "saved"})
    parameters = 1024 * 512 + 64 * 512 + 8 * (12 * 512**2 + 13 * 512) + 2 * 512
    copy = f"checkpoint {12 * parameters / GIB:.1f}, "
    assert "checkpoint" not in memory_problem(config, 1, "cpu").partition(";")[0]
    assert copy in memory_problem(config.override(ASYNCHRONOUS), 1, "cpu")
    monkeypatch.setattr(available_memory, "free_gpu_memory", lambda: [80 * GIB])
    assert copy in memory_problem(config, 1, "cuda")


def test_ranks_that_share_a_gpu_are_summed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank r is on GPU r % count, and each process has a CUDA context there."""
    available(monkeypatch, 24 * GIB)
    tiny, small = presets.tiny(), 90 << 20  # two workspaces of cuBLAS and the tensors
    for free, fits in (([3 * (CUDA_BYTES + small)], False), ([4 * (CUDA_BYTES + small)], True), ([], True)):
        monkeypatch.setattr(available_memory, "free_gpu_memory", lambda free=free: free)
        assert (memory_problem(tiny, 4, "cuda") == "") == fits
    monkeypatch.setattr(available_memory, "free_gpu_memory", lambda: [10 * GIB, CUDA_BYTES])
    assert "2 ranks need" in memory_problem(tiny, 4, "cuda") and "; GPU 1 has 0.5 GiB" in memory_problem(
        tiny, 4, "cuda"
    )
    available(monkeypatch, 4 * TORCH_BYTES - 1)  # of the host
    assert "; this machine has" in memory_problem(tiny, 4, "cuda")


@pytest.mark.parametrize(
    ("impl", "device", "expected"),
    [
        ("none", "cpu", ""),
        ("emulated", "cpu", ""),
        ("local", "cpu", "it captures on cuda, but this run is on cpu; set it to emulated or none"),
        ("transformer_engine", "cpu", "it captures on cuda, but this run is on cpu; set it to emulated or none"),
        ("emulated", "cuda", "it captures on cpu, but this run is on cuda; set it to local or none"),
        ("local", "cuda", ""),
        ("full_iteration", "cuda", ""),
        ("full_iteration", "cpu", ""),
        (
            "transformer_engine",
            "cuda",
            "Transformer Engine is not installed, and "
            + ("no GPU is visible" if torch.version.cuda else "this torch is the CPU build"),
        ),
    ],
)
def test_graphs(impl: str, device: str, expected: str) -> None:
    said = graph_problem(presets.tiny().override({"graph.cuda_graph_impl": impl}), device)
    assert said.startswith(f"graph.cuda_graph_impl = {impl}: {expected}") if expected else said == ""


@pytest.mark.parametrize(
    ("device", "changes", "expected"),
    [
        *[("cpu", {"attention_backend": kernel}, "a CPU has no such kernel") for kernel in ("cudnn", "efficient")],
        ("cpu", {"attention_backend": "flash", "attention_dropout": 0.1}, "takes neither attention dropout"),
        ("cpu", {"attention_backend": "flash", "family": "t5", "position": "relative"}, "nor relative biases"),
        ("cuda", {"attention_backend": "flash", "precision": "bf16", "family": "bert"}, "takes no padding mask"),
        ("cuda", {"attention_backend": "flash"}, "takes bf16 and fp16, but optim.precision is fp32"),
        *[("cpu", {"attention_backend": kernel}, "") for kernel in ("auto", "flash", "math", "local")],
        *[("cuda", {"attention_backend": k, "precision": "bf16"}, "") for k in ("flash", "cudnn", "efficient", "math")],
    ],
)
def test_kernels_that_a_device_lacks(device: str, changes: dict[str, Any], expected: str) -> None:
    said = attention_problem(presets.tiny().override(changes), device)
    assert (said.startswith("model.attention_backend = ") and expected in said) if expected else said == ""


def test_a_named_schedule_is_verified_before_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new builder may be wrong."""
    waiting = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
    monkeypatch.setattr(run_schedule, "configured_schedule", lambda config, world_size: waiting)
    [said] = problems(presets.tiny().override({"pp": 2, "global_batch_size": 4, "micro_batch_size": 2}), 2, "cpu")
    assert said.startswith("schedule.name = 'auto': csv cannot run, these wait for each other: rank 0 -> rank 1")


def test_everything_is_said_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    available(monkeypatch, GIB)
    (tmp_path / "file").write_text("")
    changes = {"hidden": 4096, "graph.cuda_graph_impl": "local", "output_dir": str(tmp_path / "file/run")}
    said = problems(presets.tiny().override(changes), 4, "cpu")
    assert [any(part in p for p in said) for part in ("captures on cuda", "cannot be written", "4 ranks need")] == [
        True, True, True,
    ]  # fmt: skip


def test_run_looks_before_it_launches(monkeypatch: pytest.MonkeyPatch, no_process: None) -> None:
    available(monkeypatch, 22 * GIB)
    large = presets.mixtral_8x7b()
    calls = (
        lambda: run(pretrain, 32, large, device="cpu"),
        lambda: run(partial(pretrain, large), 32, device="cpu"),
        lambda: Ranks(32, device="cpu").run(pretrain, large),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"32 ranks need .* GiB available"):
            call()
    with pytest.raises(ConfigError, match=r"model.heads = 8: must be a multiple of parallel.tp = 3"):
        run(pretrain, 3, presets.tiny().override({"tp": 3}))
    with pytest.raises(ConfigError, match="GPipe is for 2 pipeline ranks"):
        run(partial(pretrain, presets.tiny(), schedule=gpipe(2, 16)), 1, device="cpu")
    with pytest.raises(ConfigError, match=r"is for 1 microbatch, but .* 16 makes 16 on each .*; set it to 1$"):
        run(partial(pretrain, presets.tiny(), schedule=gpipe(1, 1)), 1, device="cpu")
    with pytest.raises(AssertionError, match="a process was started"):
        run(partial(pretrain, model_provider=lambda *_, **__: None), 32, large, device="cpu")  # nobody knows that model


def test_a_plain_call_looks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    available(monkeypatch, 1 << 20)
    with pytest.raises(ConfigError, match=r"1 rank needs .* this machine has 0\.0 GiB"):
        pretrain(presets.tiny())


def test_a_comparison_is_refused_before_its_first_run(monkeypatch: pytest.MonkeyPatch, no_process: None) -> None:
    available(monkeypatch, 300 << 20)
    with pytest.raises(ConfigError, match=r"layout tp2.*: 2 ranks need"):
        compare(presets.tiny(), [{"tp": 2, "model.seq_length": 1024}], device="cpu")


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_process: None
) -> None:
    """As a laptop of 24 GiB found it: 32 ranks of a 46.7B model were started, and the kernel killed them."""
    available(monkeypatch, 22 * GIB)
    words = ["train", "--preset", "mixtral_8x7b", "--device", "cpu", "--model.vocab_size", "1024"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("labkit train: 32 ranks need ") and err.count("\n") == 1
    with pytest.raises(AssertionError, match="a process was started"):
        main([*words, "--allow-oversubscription"])
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    with pytest.raises(AssertionError, match="a process was started"):
        main([*words, "--allow-oversubscription"])
    assert "labkit: 32 ranks share 2 cores" in capsys.readouterr().err
