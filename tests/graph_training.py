"""A small training run of one process, step by step, with or without emulated CUDA graphs."""

from __future__ import annotations

from labkit.config import RunConfig, presets
from labkit.graphs import CudaGraphHelper
from labkit.train.forward_step import gpt_forward_step
from labkit.train.pipeline import Pipeline
from labkit.train.pretraining import build_data_iterators, initialize, setup_model_and_optimizer
from labkit.train.stepping import train_step

LAYERS, MICROBATCHES, STEPS = 2, 4, 5
GRAPHS = {"graph.cuda_graph_impl": "emulated", "graph.cuda_graph_warmup_steps": 1}
FULL = {"graph.cuda_graph_impl": "full_iteration"}
DROPOUT = {"model.hidden_dropout": 0.1, "model.attention_dropout": 0.1, "model.embedding_dropout": 0.1}


def small(**changes) -> RunConfig:
    shape = {
        "model.layers": LAYERS, "model.hidden": 32, "model.heads": 4, "model.seq_length": 16,
        "train.global_batch_size": MICROBATCHES, "train.steps": STEPS,
    }  # fmt: skip
    return presets.tiny().override(shape).override(changes)


class Training:
    """`pretrain` step by step."""

    def __init__(self, config: RunConfig, forward_step=gpt_forward_step) -> None:
        run = initialize(config)
        chunks, self.optimizer, self.lr = setup_model_and_optimizer(run)
        self.timers, self.batches = run.timers, build_data_iterators(run).train(0)
        self.pipeline = Pipeline(config, run.groups, chunks, forward_step, run.schedule)
        self.step = 0

    @property
    def helper(self) -> CudaGraphHelper:
        """Captures its layers."""
        assert self.pipeline.graphs.helper is not None
        return self.pipeline.graphs.helper

    def losses(self, steps: int, batches=None) -> list[float]:
        """Of the next steps."""
        made = []
        for _ in range(steps):
            result = train_step(
                self.pipeline, self.optimizer, self.timers, batches or self.batches,
                step=self.step, lr=1e-3, clip_grad=1.0,
            )  # fmt: skip
            self.step += 1
            made.append(result.loss)
        return made
