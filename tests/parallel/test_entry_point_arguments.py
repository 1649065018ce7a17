"""What single arguments of the entry points do: autocast, scales of the loss, divided sequences, data that ends."""

from contextlib import contextmanager

import pytest
import torch
from pipeline_stages import SHAPE, B, H, S, Stage, forward_step, forward_step_tokens, microbatches, reference

from labkit.config import ParallelConfig
from labkit.parallel import initialize_model_parallel, single_process_groups
from labkit.schedules import PipelineRuntime, Schedule, get_forward_backward_func, one_f_one_b

COUNT = 4


def _run(groups, chunk, step=forward_step, data=None, **arguments):
    """One step of the 1F1B entry point; (reports, gradients of this stage)."""
    reports = get_forward_backward_func(groups=groups)(
        forward_step_func=step,
        data_iterator=iter(microbatches(COUNT) if data is None else data),
        model=chunk,
        num_microbatches=COUNT,
        groups=groups,
        **arguments,
    )
    return reports, [p.grad for p in chunk.parameters()]


def _equal(mine, wanted, factor=1):
    return all(torch.equal(a, b * factor) for a, b in zip(mine, wanted, strict=True))


# ---- autocast ----


class _Narrow(Stage):
    """A float32 stage that notes the dtypes of what comes in: "in" forward, "gradient" backward."""

    def __init__(self, index):
        super().__init__(index)
        self.float()
        self.seen = set()

    def set_input_tensor(self, x):
        self.seen.add(("in", x.dtype))
        super().set_input_tensor(x)

    def forward(self, x=None):
        y = super().forward(x)
        y.register_hook(lambda gradient: self.seen.add(("gradient", gradient.dtype)))
        return y


def _autocast_step(seen):
    """Notes whether the forward and the loss function run under autocast; autocast would square in bfloat16."""

    def step(data_iterator, model):
        x, target = (tensor.float() for tensor in next(data_iterator))
        output = model(x)
        seen.add(("forward", torch.is_autocast_enabled("cpu")))

        def loss_func(result):
            seen.add(("loss", torch.is_autocast_enabled("cpu")))
            weights = torch.eye(H)
            loss = ((result.float() - target) @ weights).square().mean()
            return loss, {"dtype": loss.dtype, "loss": loss.item()}

        return output, loss_func

    return step


def _autocast(pp):
    groups = initialize_model_parallel(ParallelConfig(pp=pp))
    found = []
    for enable in (True, False):
        chunk, seen = _Narrow(groups.pp.rank), set()
        sizes = {"tensor_shape": SHAPE, "dtype": torch.bfloat16 if enable else torch.float32}
        result = _run(groups, chunk, _autocast_step(seen), enable_autocast=enable, **sizes)
        found.append((chunk.seen, seen, *result))
    return found


def _autocast_reference():
    model = [_Narrow(0), _Narrow(1)]
    step, losses = _autocast_step(set()), []
    for item in microbatches(COUNT):
        with torch.autocast("cpu", torch.bfloat16):
            output, loss_func = step(iter([item]), torch.nn.Sequential(*model))
        loss, report = loss_func(output)
        (loss / COUNT).backward()
        losses.append(report["loss"])
    return losses, [[p.grad for p in stage.parameters()] for stage in model]


def test_autocast_covers_the_forward_and_the_messages_but_not_the_loss(on_ranks):
    (first, plain_first), (last, plain_last) = on_ranks(_autocast, 2, 2)
    narrow, wide = torch.bfloat16, torch.float32
    assert first[0] == {("gradient", narrow)}
    assert last[0] == {("in", narrow), ("gradient", narrow)}
    assert (plain_first[0], plain_last[0]) == ({("gradient", wide)}, {("in", wide), ("gradient", wide)})
    assert first[1] == {("forward", True)}
    assert last[1] == {("forward", True), ("loss", False)}
    assert plain_last[1] == {("forward", False), ("loss", False)}
    losses, gradients = _autocast_reference()
    assert [report["loss"] for report in last[2]] == losses
    assert {report["dtype"] for report in last[2]} == {wide}
    assert _equal(first[3], gradients[0]) and _equal(last[3], gradients[1])


# ---- scales ----


def _scaled():
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    seen = []

    def scale(loss):
        seen.append(loss.item())
        return loss * 8

    def result(step, **arguments):
        return _run(groups, Stage(groups.pp.rank), step, tensor_shape=SHAPE, **arguments)

    found = {
        "plain": result(forward_step),
        "scaled": result(forward_step, grad_scaler=scale),
        "by microbatch": result(forward_step_tokens),
        "by token": result(forward_step_tokens, calculate_per_token_loss=True),
    }
    return found, seen


def test_the_grad_scaler_multiplies_gradients_and_nothing_else(on_ranks):
    by_rank = on_ranks(_scaled, 2)
    for found, _ in by_rank:
        assert _equal(found["scaled"][1], found["plain"][1], 8)  # a power of two: exactly
        assert found["scaled"][0] == found["plain"][0]
    (_, nothing), (_, losses) = by_rank
    assert nothing == []
    assert losses == [report["loss"] / COUNT for report in by_rank[1][0]["plain"][0]]


def _summed_gradients():
    """Of the sum over microbatches of their sums of losses."""
    model = [Stage(0), Stage(1)]
    for item in microbatches(COUNT):
        output, loss_func = forward_step_tokens(iter([item]), torch.nn.Sequential(*model))
        loss_func(output)[0].backward()
    return [[p.grad for p in stage.parameters()] for stage in model]


def test_per_token_loss_is_left_as_a_sum(on_ranks):
    sums, means = _summed_gradients(), reference(2, COUNT, forward_step_tokens)[1]
    for stage, (found, _) in enumerate(on_ranks(_scaled, 2)):
        for name, wanted in (("by token", sums), ("by microbatch", means)):
            for a, b in zip(found[name][1], wanted[stage], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def _num_tokens():
    groups = initialize_model_parallel(ParallelConfig(pp=2))
    how = {"forward_step_func": forward_step_tokens, "tensor_shape": SHAPE, "calculate_per_token_loss": True}
    runtime = PipelineRuntime(one_f_one_b(2, COUNT), Stage(groups.pp.rank), groups, **how)
    found = []
    for _ in range(2):
        reports = runtime.run(iter(microbatches(COUNT)))
        found.append((int(runtime.num_tokens), [report["tokens"] for report in reports]))
    return found


def test_tokens_are_counted_on_the_last_stage_anew_every_step(on_ranks):
    first, last = on_ranks(_num_tokens, 2)
    assert first == [(0, [])] * 2
    tokens = [int(target[0, 0, 0].abs() * 1e6) % 5 for _, target in microbatches(COUNT)]
    assert sum(tokens) > 0
    assert last == [(sum(tokens), tokens)] * 2


# ---- divided sequences ----


def _divided(layout, arguments, parts):
    """One step with this rank's part of every sequence; shapes of what came in, reports."""
    groups = initialize_model_parallel(ParallelConfig(**layout))
    part = groups.tp.rank if layout.get("tp") else groups.cp.rank
    chunk, shapes = Stage(groups.pp.rank), set()
    take = chunk.set_input_tensor

    def set_input_tensor(x):
        shapes.add(tuple(x.shape))
        take(x)

    chunk.set_input_tensor = set_input_tensor
    data = [tuple(x.chunk(parts)[part % parts] for x in item) for item in microbatches(COUNT, [2 * S])]
    reports, _ = _run(groups, chunk, data=data, **arguments)
    return groups.pp.rank, part % parts, shapes, [report["loss"] for report in reports]


WHOLE = {"seq_length": 2 * S, "micro_batch_size": B, "hidden_size": H}


@pytest.mark.parametrize(
    ("layout", "arguments", "parts"),
    [
        ({"pp": 2, "tp": 2}, WHOLE | {"sequence_parallel": True}, 2),
        ({"pp": 2, "tp": 2}, {"tensor_shape": (2 * S, B, H), "sequence_parallel": True}, 2),
        ({"pp": 2, "tp": 2}, WHOLE, 1),
        ({"pp": 2, "cp": 2}, WHOLE, 2),
    ],
    ids=["sequence parallel", "sequence parallel, tensor_shape", "tensor parallel", "context parallel"],
)
def test_messages_carry_the_ranks_part_of_the_sequence(layout, arguments, parts, on_ranks):
    model = torch.nn.Sequential(Stage(0), Stage(1))
    ended = set()
    for stage, part, shapes, losses in on_ranks(_divided, 4, layout, arguments, parts):
        if stage == 0:
            assert (shapes, losses) == (set(), [])
            continue
        assert shapes == {(2 * S // parts, B, H)}
        wanted = [
            (model(x.chunk(parts)[part]) - target.chunk(parts)[part]).square().mean().item()
            for x, target in microbatches(COUNT, [2 * S])
        ]
        assert losses == pytest.approx(wanted, rel=1e-12)
        ended.add(part)
    assert ended == set(range(parts))


# ---- one stage ----


def test_at_pp_1_gradients_are_left_to_the_hooks_of_the_last_backward():
    log = []

    @contextmanager
    def no_sync():
        log.append("hold")
        yield
        log.append("go")

    def step(data_iterator, model):
        output, loss_func = forward_step(data_iterator, model)
        output.register_hook(lambda gradient: log.append("B"))
        return output, loss_func

    _run(single_process_groups(), Stage(0), step, no_sync_func=no_sync, grad_sync_func=lambda _: log.append("sync"))
    assert log == ["hold", *["B"] * (COUNT - 1), "go", "B"]


def test_data_that_ends_too_early_is_said():
    with pytest.raises(ValueError, match="stage 0") as caught:
        _run(single_process_groups(), Stage(0), data=microbatches(COUNT - 1))
    message = str(caught.value)
    assert "stage 0 (chunk 0 of its rank) found no data for microbatch 3" in message
    assert "had enough for 3 of the 4 microbatches" in message
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize(
    ("schedule", "items", "needle"),
    [
        ("0F2,0F0,0F1,0B0,0B2,0B1", [2], r"stage 0 \(chunk 0 .* for microbatch 2: .* enough for 2 of the 3 microb"),
        ("0F0,1F0,0F1,1F1,1B1,0B1,1B0,0B0", [2, 1], r"stage 1 \(chunk 1 .* for microbatch 1: .* for 1 of the 2 microb"),
    ],
    ids=["out of order", "second chunk"],
)
def test_data_that_ends_too_early_under_a_schedule_of_ones_own(schedule, items, needle):
    schedule, chunks = Schedule.from_csv(schedule), [Stage(stage) for stage in range(len(items))]
    runtime = PipelineRuntime(schedule, chunks, single_process_groups(), forward_step_func=forward_step)
    with pytest.raises(ValueError, match=needle):
        runtime.run([iter(microbatches(count)) for count in items])
