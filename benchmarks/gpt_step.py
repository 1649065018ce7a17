"""Our training step against megatron-core 0.16.1's on CPU and gloo: one rank, TP 2, PP 2.

    python benchmarks/gpt_step.py            # writes results/gpt_step.json

The same GPT (8 layers, hidden 256, 8 heads, sequence 128, vocabulary 1024), the same weights, the same 8 microbatches
of 2 samples, one thread a rank, both in the same ranks, interleaved. A step is zeroing gradients, forward and backward
of all microbatches, finalising gradients, clipping, AdamW. The losses of both sides are compared before anything is
timed; `megatron_peer.py` says what is theirs in it.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import megatron_peer
import torch
from harness import Comparison, interleave, report

from labkit.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from labkit.launch import run
from labkit.parallel import ParallelGroups
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import initialize, setup_model_and_optimizer
from labkit.train.stepping import train_step

MODEL = ModelConfig(layers=8, hidden=256, heads=8, vocab_size=1024, seq_length=128, activation="gelu")
LAYOUTS = {"one rank": {}, "TP 2": {"tp": 2}, "PP 2": {"pp": 2}}


def run_config(layout: dict[str, int]) -> RunConfig:
    """The configuration of both sides."""
    return RunConfig(
        model=MODEL,
        parallel=ParallelConfig(**layout),
        optim=OptimConfig(lr=1e-4, clip_grad=1.0, eps=1e-5),  # a smaller one makes noise of rounding into weights
        train=TrainConfig(micro_batch_size=2, global_batch_size=16, record_events=False),
    )


def batches(config: RunConfig) -> Any:
    """The same 8 microbatches over and over."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, config.train.micro_batch_size, config.model.seq_length + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    mask = torch.ones(shape[1], shape[2] - 1)
    made = [
        {"tokens_BS": t[:, :-1].contiguous(), "labels_BS": t[:, 1:].contiguous(), "loss_mask_BS": mask} for t in tokens
    ]
    return itertools.cycle(made)


def our_step(config: RunConfig) -> tuple[Any, ParallelGroups, Any]:
    """(a function that does one step and returns the loss, the groups, this rank's model chunk)."""
    begun = initialize(config)
    chunks, optimizer, _ = setup_model_and_optimizer(begun)
    pipeline = Pipeline(config, begun.groups, chunks, gpt_forward_step, begun.schedule)
    data, count = batches(config), itertools.count()

    def step() -> float:
        done = train_step(
            pipeline,
            optimizer,
            begun.timers,
            data,
            step=next(count),
            lr=config.optim.lr,
            clip_grad=config.optim.clip_grad,
        )
        return done.loss

    return step, begun.groups, chunks[0].module


def measure(name: str, layout: dict[str, int], repetitions: int) -> Comparison:
    """Both sides in this rank; refuses to time steps that do not compute the same."""
    config = run_config(layout)
    ours, groups, model = our_step(config)
    theirs, _ = megatron_peer.make_step(config, groups, batches(config), model)
    for _ in range(3):
        our_loss, their_loss = ours(), theirs()
        if their_loss is not None and abs(our_loss - their_loss) > 1e-4:
            raise AssertionError(f"{name}: losses {our_loss} and {their_loss} differ, so the steps are not the same")
    steps = {"labkit": ours, "megatron-core 0.16.1": theirs}
    return interleave(name, steps, repetitions=repetitions, across_ranks=True)


def main() -> None:
    """Measure all layouts and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--dry", action="store_true", help="print only, write no result")
    options = parser.parse_args()
    comparisons = []
    for name in options.layouts:
        layout = LAYOUTS[name]
        world_size = layout.get("tp", 1) * layout.get("pp", 1)
        comparisons.append(run(measure, world_size, name, layout, options.repetitions, timeout=1200)[0])
    report(
        "gpt_step",
        comparisons,
        title="GPT training step against megatron-core 0.16.1 (CPU, gloo, one thread per rank)",
        notes=[
            "8 layers, hidden 256, 8 heads, sequence 128, vocabulary 1024, micro batch 2, 8 microbatches, fp32.",
            "megatron-core runs its model (local spec, no fusions), DDP, schedule and finalisation of gradients.",
            "Both sides use labkit's gradient norm, clipping and fused AdamW, because megatron-core's need CUDA.",
            "Before anything is timed, the losses of three steps from the same weights must agree to 1e-4.",
        ],
        write=not options.dry,
    )


if __name__ == "__main__":
    main()
