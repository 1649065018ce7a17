"""The benchmark of data parallelism with one repetition: five kinds train alike, and its shares are what they say."""

from __future__ import annotations

import pytest

from labkit.launch import run

pytestmark = pytest.mark.oracle


def _steps(microbatches: int):
    import data_parallel

    found = data_parallel.measure_steps(microbatches, 1)  # raises where the losses of three steps differ
    return found, data_parallel.beside_peers(found, data_parallel.OURS[0])


@pytest.mark.sweep
def test_torch_ddp_zero_and_fsdp2_train_as_ours_with_the_bytes_of_the_closed_form() -> None:
    for found, beside in run(_steps, 2, 2, timeout=180):
        assert set(found.seconds) == {*beside.seconds, "labkit"}
        state = found.facts["optimizer_bytes"]
        assert state["labkit"] == state["torch DDP"] == 8
        assert state["labkit distributed optimizer"] == 4
        assert "of_best_peer" not in beside.facts, "one repetition is not quoted"


def test_exposed_is_what_communication_adds_beside_all_of_it_at_the_end() -> None:
    import data_parallel
    from harness import Comparison

    seconds = {"labkit": 0.12, data_parallel.LATE: 0.15, data_parallel.SILENT: 0.1, "torch DDP": 0.11}
    seconds[data_parallel.ALONE] = 0.09
    found = Comparison("x", {name: [value] * 15 for name, value in seconds.items()})
    assert data_parallel.exposed(found) == {
        "exposed_share": 0.4,
        "exposed_ms": 20.0,
        "at_the_end_ms": 50.0,
        "torch_ddp_exposed_ms": 20.0,
    }
