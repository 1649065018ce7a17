"""What a device cannot do for a run: the GPUs, layers, kernels, graphs and profiles that a configuration asks for."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from labkit.config import RunConfig
from labkit.launch import info
from labkit.launch.transformer_engine import why_no_transformer_engine


def machine_problems(config: RunConfig, world_size: int, device: str) -> list[str]:
    """Return why this machine has not the devices or the layers of the run, or its devices cannot do what is asked.

    Empty sentences count for nothing.
    """
    return [no_such_device(config, world_size, device), layer_problem(config), *device_problems(config, device)]


def device_problems(config: RunConfig, device: str) -> list[str]:
    """Return why ranks on `device` cannot do what the configuration asks; empty sentences count for nothing."""
    return [problem(config, device) for problem in DEVICE_RULES]


def compile_problem(config: RunConfig, device: str) -> str:
    """Return what torch.compile lacks on this machine, or an empty string."""
    if config.model.compile == "none":
        return ""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")  # the one that torch calls
    missing = ""
    if shutil.which(compiler) is None:
        missing = f"it needs a C++ compiler, and there is no {compiler}; install it (sudo apt install g++)"
    elif not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        missing = "it needs Python's header files; install them (sudo apt install python3-dev)"
    elif info.device_kind(device) == "cuda" and find_spec("triton") is None:
        missing = "on a GPU it needs Triton; install it (pip install triton)"
    return f"model.compile = {config.model.compile}: {missing}, or set it to none" if missing else ""


def no_such_device(config: RunConfig, world_size: int, device: str) -> str:
    """Return why ranks of this machine cannot have the GPUs that the user asks for, or an empty string.

    Ranks of torchrun may be on several machines, so each rank checks its own GPU.
    """
    backend = config.parallel.distributed_backend
    if (device != "cuda" and backend != "nccl") or info.under_torchrun():
        return ""
    try:
        chosen = info.choose_device(device, 0, 0)
    except ValueError as error:
        return str(error)
    try:
        info.choose_backend(backend, chosen, world_size)
    except ValueError as error:
        return f"parallel.distributed_{error}"  # the error begins with `backend = nccl: `
    return ""


def layer_problem(config: RunConfig) -> str:
    """Return why the chosen layers cannot run here, or an empty string."""
    if config.model.transformer_impl == "local":
        return ""
    missing = why_no_transformer_engine()
    return f"model.transformer_impl = 'transformer_engine': {missing}; or set it to local" if missing else ""


def attention_problem(config: RunConfig, device: str) -> str:
    """Return why `device` has no kernel such as `model.attention_backend` demands, or an empty string.

    Limits of a GPU's model and of shapes show at the first call (`attention_by_kernel`).
    """
    model, kind, backend = config.model, info.device_kind(device), config.model.attention_backend
    found = ""
    if kind == "cpu" and backend in ("cudnn", "efficient"):
        found = "a CPU has no such kernel, only flash and math"
    elif kind == "cpu" and backend == "flash" and (model.attention_dropout or model.position == "relative"):
        found = "a CPU's flash kernel takes neither attention dropout nor relative biases"
    elif kind == "cuda" and backend == "flash" and model.family in ("bert", "t5"):
        found = "a GPU's flash kernel takes no padding mask, which BERT and T5 need"
    elif kind == "cuda" and backend == "flash" and config.optim.precision in ("fp32", "fp64"):
        found = f"a GPU's flash kernel takes bf16 and fp16, but optim.precision is {config.optim.precision}"
    return f"model.attention_backend = {backend}: {found}; set it to fused, and torch chooses a kernel" if found else ""


def profile_problem(config: RunConfig, device: str) -> str:
    """Return why the run cannot be profiled on `device`, or an empty string."""
    if config.train.profile != "nsys" or info.device_kind(device) == "cuda":
        return ""
    return "train.profile = nsys: it marks work on a GPU, but this run is on the CPU; set it to pytorch"


def graph_problem(config: RunConfig, device: str) -> str:
    """Return why the chosen CUDA graphs cannot be captured on `device`, or an empty string."""
    impl = config.graph.cuda_graph_impl
    if impl in ("none", "full_iteration"):  # an iteration is captured, or emulated, on any device
        return ""
    kind, needed = info.device_kind(device), "cpu" if impl == "emulated" else "cuda"
    missing = why_no_transformer_engine() if impl == "transformer_engine" and kind == "cuda" else None
    if kind != needed:
        fitting = "local" if kind == "cuda" else "emulated"
        missing = f"it captures on {needed}, but this run is on {kind}; set it to {fitting} or none"
    return f"graph.cuda_graph_impl = {impl}: {missing}" if missing is not None else ""


DEVICE_RULES = (attention_problem, compile_problem, graph_problem, profile_problem)
"""Functions of a configuration and a device that return what is missing, or an empty string."""
