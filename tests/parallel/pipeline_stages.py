"""A tiny stack of linear + gelu stages, and one process that runs all of them, for the tests of schedules."""

import torch
from torch import nn

from labkit.config import ParallelConfig
from labkit.parallel import initialize_model_parallel
from labkit.schedules import PipelineRuntime

S, B, H = 3, 2, 5
SHAPE = (S, B, H)


class Stage(nn.Module):
    """gelu(linear(x)); the first stage reads its x from the data."""

    def __init__(self, index: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100 + index)
        self.linear = nn.Linear(H, H, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / H**0.5)
        self.x = None

    def set_input_tensor(self, x):
        self.x = x

    def forward(self, x=None):
        taken, self.x = self.x, None
        return nn.functional.gelu(self.linear(x if taken is None else taken))


def microbatches(count, lengths=None):
    """(x, target) of each microbatch; `lengths` gives each its own S."""
    generator = torch.Generator().manual_seed(7)
    shapes = [(S if lengths is None else lengths[m % len(lengths)], B, H) for m in range(count)]
    return [tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)) for shape in shapes]


def forward_step(data_iterator, model):
    """Two-item loss: mean squared error."""
    x, target = next(data_iterator)
    output = model(x)

    def loss_func(result, non_loss_data=False):
        if non_loss_data:
            return {"sum": result.sum().item()}
        loss = (result - target).square().mean()
        return loss, {"loss": loss.item()}

    return output, loss_func


def forward_step_tokens(data_iterator, model):
    """Three-item loss: sum of squared errors and the number of positions that count (m + 1 of them in microbatch m)."""
    x, target = next(data_iterator)
    output = model(x)

    def loss_func(result):
        tokens = torch.tensor(int(target[0, 0, 0].abs() * 1e6) % 5)
        loss = (result - target).square().sum()
        return loss, tokens, {"loss": loss.item(), "tokens": tokens.item()}

    return output, loss_func


def reference(stages, count, step=forward_step, lengths=None, scale=None):
    """Losses and gradients by plain autograd over all stages in one process."""
    model = [Stage(index) for index in range(stages)]
    whole = nn.Sequential(*model)
    losses = []
    for item in microbatches(count, lengths):
        output, loss_func = step(iter([item]), whole)
        returned = loss_func(output)
        loss = returned[0] / count if len(returned) == 2 else returned[0] / returned[1].clamp(min=1) / count
        (loss if scale is None else loss * scale).backward()
        losses.append(returned[-1]["loss"])
    return losses, [[p.grad for p in stage.parameters()] for stage in model]


def run_stages(
    schedule, step=forward_step, lengths=None, runs=1, forward_only=False, record=False, transport="posted", **options
):
    """Inside a rank: run a schedule on this rank's stages; returns (reports, gradients by stage, events)."""
    from labkit.events import recording

    groups = initialize_model_parallel(ParallelConfig(pp=schedule.pp))
    chunks = {stage: Stage(stage) for stage in schedule.stages_of(groups.pp.rank)}
    options.setdefault("tensor_shape", SHAPE)
    runtime = PipelineRuntime(
        schedule, list(chunks.values()), groups, forward_step_func=step, transport=transport, **options
    )
    reports, events = [], []
    for _ in range(runs):
        for chunk in chunks.values():
            chunk.zero_grad()
        iterators = [iter(microbatches(schedule.num_microbatches, lengths)) for _ in chunks]
        with recording(groups.rank) as recorder:
            reports = runtime.run(iterators, schedule.num_microbatches, forward_only)
        events = recorder.events
    gradients = {stage: [p.grad for p in chunk.parameters()] for stage, chunk in chunks.items()}
    assert groups.pp.size > 1 or not any(e.kind in ("send", "recv") for e in events)
    return reports, gradients, events if record else None
