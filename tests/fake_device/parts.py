"""Runs the parts of the GPU benchmark at their real sizes on the fake device. Every line runs; every number is 1."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from fake_device.audit import Audit
from fake_device.stand_ins import without_numbers

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))
harness = importlib.import_module("harness")

_interleave, _profile = harness.interleave, torch.profiler.profile


def once(case: str, steps: Mapping[str, Callable[[], Any]], **given: Any) -> harness.Comparison:
    """`harness.interleave` with one repetition, on a machine that counts as idle."""
    return replace(_interleave(case, steps, **given | {"repetitions": 1, "warmup": 1}), load=0.0)


def profile_of_the_host(*, activities: Any = None, **given: Any) -> Any:
    """`torch.profiler.profile`, which finds no kernels here."""
    return _profile(activities=[torch.profiler.ProfilerActivity.CPU], **given)


@contextmanager
def quick() -> Iterator[None]:
    """Inside the block nothing is repeated or compiled, and modules move to the device by new parameters."""
    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # a real parameter cannot become a fake one
    try:
        with (
            patch.object(harness, "LEAST", 1),
            patch.object(harness, "interleave", once),
            patch.object(harness, "until_quiet", lambda measure, **_: measure()),
            patch.object(torch.profiler, "profile", profile_of_the_host),
            patch.object(torch, "compile", lambda function=None, **_: function or (lambda it: it)),
        ):
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


def names() -> list[str]:
    """Of all parts, also those that start ranks, which fail here: a fake tensor has no numbers to send by gloo."""
    return list(importlib.import_module("gpu").PARTS)


def run_part(name: str, audit: Audit) -> dict[str, Any]:
    """Run a part; its rows, without their times."""
    with quick(), without_numbers(audit):
        # Inside, since modules of the benchmark import names of the harness.
        gpu, gpu_peers = map(importlib.import_module, ("gpu", "gpu_peers"))
        equal = gpu_peers.difference
        with patch.object(gpu_peers, "difference", lambda found, expected: 0.0 * equal(found, expected)):
            told = ("case", *gpu.USELESS)
            return {"rows": [{key: row[key] for key in told if key in row} for row in gpu.part_rows(name)]}
