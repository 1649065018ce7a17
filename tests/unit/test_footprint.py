"""Footprint: operations and kept bytes, moment by moment, with a limit, also on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labkit.models import Footprint, SavedTensors

MODEL = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


def step(device: str = "cpu") -> None:
    MODEL.to(device)(torch.ones(4, 8, device=device, requires_grad=True)).sum().backward()


def test_operations_are_those_of_torchs_counter_and_bytes_rise_and_fall() -> None:
    with FlopCounterMode(display=False) as counter:
        step()
    with Footprint(MODEL) as run:
        step()
    assert run.operations == counter.get_total_flops() == run.moments[-1][0]
    # the input of the first layer, of GELU and of the second layer, in float32; nothing is left
    assert (run.peak, run.moments[-1][1], run.kept) == (4 * (8 + 16 + 16) * 4, 0, 0)


def test_a_full_memory_names_the_module_and_leaves_no_hook_behind() -> None:
    with pytest.raises(MemoryError, match=r"out of memory in 2: 640 bytes are kept .* room for 500"), \
            Footprint(MODEL, limit=500):  # fmt: skip
        MODEL(torch.ones(4, 8)).relu()
    with SavedTensors(MODEL) as saved:
        MODEL(torch.ones(4, 8))
    assert not MODEL._forward_hooks and saved.inside == ""


def test_on_the_meta_device_it_counts_the_same() -> None:
    global MODEL
    with Footprint(MODEL) as run:
        step()
    real, MODEL = MODEL, torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    with Footprint(MODEL.to("meta")) as meta:
        step("meta")
    MODEL = real
    assert (meta.peak, meta.operations) == (run.peak, run.operations)
