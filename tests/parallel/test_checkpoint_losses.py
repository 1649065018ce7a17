"""Checkpoints judged by what a run does with them: every family trains under one layout after the other.

Files alone cannot judge: a rank that writes another rank's experts and reads them back alike passes every comparison
of what was saved with what was loaded. Here each layout takes a step from the checkpoint of the one before it. Its
loss and the norm of its gradients are those of one process that never stopped, and so is each tensor that it saves.
"""

import runpy
from pathlib import Path

import numpy as np
import pytest
from test_checkpoint_resume import EXPERTS, LLAMA, PLAIN, ZERO, stored

from labkit.config import RunConfig
from labkit.models.chunks import build_model_chunks
from labkit.parallel import single_process_groups
from labkit.train import pretrain
from labkit.train.checkpoint.rank_state import RankWeights
from labkit.train.checkpoint.shard_files import Reader

MATRIX = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "parity_matrix.py"))
SP = {"sequence_parallel": True}
DECODER = {"pp": 4, "split_rank": 2}
"""Both halves have two stages: copies of words, of positions and of relative biases are on ranks of their own."""
T5 = [DECODER, {"tp": 2, "pp": 2, "split_rank": 1, **SP, **ZERO}, {**DECODER, **ZERO}, {"tp": 4}]

CHAINS = {
    "gpt": (
        PLAIN,
        [
            {"tp": 2, "pp": 2},
            {"cp": 2, **ZERO},
            {"tp": 4, **SP},
            {"pp": 2, "vpp": 2, **ZERO, "optim.bucket_size": 1000},
            {"pp": 2, "schedule.name": "zbv"},
        ],
    ),
    "grouped heads, swiglu, padding": (LLAMA, [{"tp": 4}, {"tp": 2, "pp": 2, **ZERO}, {"tp": 4, **SP, **ZERO}]),
    "experts": (
        EXPERTS,
        [
            {"ep": 2, "etp": 2},
            {"tp": 2, "ep": 2, "etp": 1, **SP, **ZERO},
            {"pp": 2, "ep": 2},
            {"tp": 2, "pp": 2, "etp": 2, **SP},
            {"ep": 4},
            {"tp": 2, "ep": 2, "etp": 2, **SP, **ZERO},
            {"cp": 2, "ep": 4, "etp": 1},
        ],
    ),
    "bert": (MATRIX["masked"]("post"), [{"tp": 2, "pp": 2, **SP, **ZERO}, {"pp": 2, "vpp": 2}, ZERO]),
    "t5, positions": (MATRIX["encoder_decoder"]("learned"), T5),
    "t5, relative biases": (MATRIX["encoder_decoder"]("relative"), T5),
    "mamba": (MATRIX["scanned"]("MM*-"), [{"tp": 2, **SP}, {"pp": 2, **ZERO}, {"tp": 4}]),
}
"""Name -> (model, layouts of four ranks). The first cuts what it can: a permutation of columns that is loaded and saved
alike changes no loss, and is in the file of a run that began with it."""


def trained(configs: list[RunConfig]) -> list[tuple[list[float], list[tuple[int, float]]]]:
    """`pretrain` of each in its turn: losses and norms."""
    results = [pretrain(config) for config in configs]
    return [(result.losses, result.series("grad_norm")) for result in results]


def state(step: Path) -> dict[str, np.ndarray]:
    """Parameters, moments and buffers of a checkpoint."""
    return {name: values for name, values in stored(step).items() if not name.startswith("rng.")}


@pytest.mark.parametrize("name", CHAINS)
def test_losses_norms_and_tensors_are_those_of_one_process_whatever_the_layouts(name, tmp_path, on_ranks, one_thread):
    config, layouts = CHAINS[name]
    steps = len(layouts) + 1
    config = config.override({"precision": "fp64", "eps": 1e-5, "decay_steps": 9, "interval": 1, "keep": 9})
    alone = pretrain(config.override({"steps": steps, "checkpoint.dir": str(tmp_path / "alone")}))
    config = config.override({"checkpoint.dir": str(tmp_path / "chain")})
    chain = [config.override({**layout, "steps": step}) for step, layout in enumerate(layouts, start=1)]
    results = on_ranks(trained, 4, chain)[0] + trained([config.override({"steps": steps})])
    for step, (losses, norms) in enumerate(results, start=1):
        assert losses == pytest.approx([alone.losses[step - 1]], rel=1e-11), step
        assert norms == [pytest.approx(alone.series("grad_norm")[step - 1], rel=1e-9)], step
        expected, found = (state(tmp_path / run / f"step_{step:08d}") for run in ("alone", "chain"))
        assert found.keys() == expected.keys()
        off = [n for n, values in found.items() if not np.allclose(values, expected[n], rtol=1e-9, atol=1e-9)]
        assert off == [], step


def test_moments_have_torchs_names(tmp_path, one_thread):
    """After one step the mean of squares is (1 - beta2) g^2, where the mean is (1 - beta1) g."""
    config = PLAIN.override({"precision": "fp64", "steps": 1, "checkpoint.dir": str(tmp_path)})
    pretrain(config)
    found, optim = state(tmp_path / "step_00000001"), config.optim
    for name in [n.removeprefix("exp_avg.") for n in found if n.startswith("exp_avg.")]:
        gradient = found[f"exp_avg.{name}"] / (1 - optim.beta1)
        np.testing.assert_allclose(found[f"exp_avg_sq.{name}"], (1 - optim.beta2) * gradient**2, rtol=1e-12, atol=1e-30)


def test_weights_without_a_run_bring_the_biases_of_experts(tmp_path, one_thread):
    """An evaluation loads no optimizer, which reads the buffers of a run that goes on."""
    config = EXPERTS.override({"steps": 1, "checkpoint.dir": str(tmp_path)})
    pretrain(config)
    groups = single_process_groups()
    chunks = build_model_chunks(config, groups)
    RankWeights(chunks, groups).load_weights(Reader(tmp_path / "step_00000001"))
    found = {name: buffer for name, buffer in chunks[0].named_buffers() if name.endswith("expert_bias")}
    saved = state(tmp_path / "step_00000001")
    assert len(found) == 2
    for name, buffer in found.items():
        assert buffer.any() and np.array_equal(buffer.numpy(), saved[name])
