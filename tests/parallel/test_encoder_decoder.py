"""An encoder-decoder over stages: decoder stages hand on two tensors, and the encoder's output collects gradients from
all of them. Held against the same layers in one process."""

import pytest
import torch
from pipeline_stages import forward_step as plain_step
from torch import nn

from labkit.config import ParallelConfig
from labkit.events import recording
from labkit.parallel import initialize_model_parallel
from labkit.schedules import (
    PipelineRuntime,
    forward_backward_pipelining_with_interleaving,
    get_forward_backward_func,
    gpipe,
    interleaved,
    one_f_one_b,
)

B, H = 2, 4
ENCODER_S, DECODER_S = 5, 3


def _seeded(module, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / H**0.5)
    return module


class EncoderLayer(nn.Module):
    """gelu(linear(x)); the first takes its x from the data."""

    def __init__(self, stage):
        super().__init__()
        self.linear = nn.Linear(H, H, dtype=torch.float64)
        self.x = None
        _seeded(self, stage)

    def set_input_tensor(self, x):
        assert isinstance(x, torch.Tensor)
        self.x = x

    def forward(self, source, target):
        x, self.x = source if self.x is None else self.x, None
        return nn.functional.gelu(self.linear(x))


class DecoderLayer(nn.Module):
    """Attention of the decoder's positions to the encoder's; returns (decoder hidden, encoder output)."""

    def __init__(self, stage, last):
        super().__init__()
        self.query, self.key = (nn.Linear(H, H, dtype=torch.float64) for _ in range(2))
        self.last, self.given = last, None
        _seeded(self, stage)

    def set_input_tensor(self, given):
        self.given = given

    def forward(self, source, target):
        # The first decoder stage is given one tensor, the encoder's output, and starts from its own data.
        x, encoded = (target, self.given) if isinstance(self.given, torch.Tensor) else self.given
        scores = torch.einsum("sbh,tbh->bst", self.query(x), self.key(encoded)) / H**0.5
        x = x + torch.einsum("bst,tbh->sbh", scores.softmax(-1), encoded)
        return x if self.last else (x, encoded)


def _layer(stage, stages, split):
    return EncoderLayer(stage) if stage < split else DecoderLayer(stage, stage == stages - 1)


def _data(count, lengths=None):
    generator = torch.Generator().manual_seed(3)
    sizes = [(ENCODER_S, DECODER_S) if lengths is None else lengths[m % len(lengths)] for m in range(count)]
    return [tuple(torch.randn(s, B, H, generator=generator, dtype=torch.float64) for s in pair) for pair in sizes]


def _loss(output):
    loss = output.square().mean()
    return loss, {"loss": loss.item()}


def _forward_step(iterator, model):
    return model(*next(iterator)), _loss


def _reference(stages, split, count, lengths=None):
    layers, losses = [_layer(stage, stages, split) for stage in range(stages)], []
    for item in _data(count, lengths):
        handed_on = None
        for layer in layers:
            if handed_on is not None:
                layer.set_input_tensor(handed_on)
            handed_on = layer(*item)
        loss, report = _loss(handed_on)
        (loss / count).backward()
        losses.append(report["loss"])
    return losses, [[p.grad for p in layer.parameters()] for layer in layers]


def _steps(split, count, variants):
    """Each variant: (losses, gradients of the own stage, shapes of what was sent by stage)."""
    pp = torch.distributed.get_world_size()
    groups = initialize_model_parallel(ParallelConfig(pp=pp, split_rank=split))
    found = []
    for variant in variants:
        layer = _layer(groups.pp.rank, pp, split)
        with recording(groups.rank) as recorder:
            reports = get_forward_backward_func(groups=groups)(
                forward_step_func=_forward_step,
                data_iterator=iter(_data(count, variant.pop("lengths", None))),
                model=layer,
                num_microbatches=count,
                groups=groups,
                dtype=torch.float64,
                **variant,
            )
        sent = sum(event.bytes for event in recorder.events if event.kind == "send")
        found.append(([r["loss"] for r in reports], [p.grad for p in layer.parameters()], sent))
    return found


SIZES = {"seq_length": ENCODER_S, "decoder_seq_length": DECODER_S, "micro_batch_size": B, "hidden_size": H}
VARYING = {"variable_seq_lengths": True, "lengths": [(5, 3), (2, 6), (4, 4)]}
VARIANTS = [
    SIZES,
    SIZES | {"batch_p2p_comm": True, "deallocate_pipeline_outputs": True},
    SIZES | {"batch_p2p_comm": False},
    VARYING | {"deallocate_pipeline_outputs": True},
    VARYING | {"batch_p2p_comm": True},
    VARYING | {"batch_p2p_comm": False},
]


@pytest.mark.parametrize(("pp", "split"), [(2, 1), (4, 1), (4, 2), (4, 3)])
def test_losses_and_gradients_equal_one_process(pp, split, on_ranks):
    count = 5
    by_rank = on_ranks(_steps, pp, split, count, VARIANTS)
    for number, variant in enumerate(VARIANTS):
        losses, gradients = _reference(pp, split, count, variant.get("lengths"))
        assert by_rank[-1][number][0] == pytest.approx(losses, rel=1e-12)
        for rank, steps in enumerate(by_rank):
            for a, b in zip(steps[number][1], gradients[rank], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_what_each_stage_sends(on_ranks):
    """Encoder stages send one tensor, decoder stages two; gradients the same way back."""
    count, encoder, decoder = 5, ENCODER_S * B * H * 8, DECODER_S * B * H * 8
    border = [encoder, encoder, encoder + decoder, 0]  # after stages 0 to 3, the split before stage 2
    sent = [steps[0][2] for steps in on_ranks(_steps, 4, 2, count, VARIANTS[:1])]
    assert sent == [count * (border[rank] + (border[rank - 1] if rank else 0)) for rank in range(4)]


def _evaluate(split, count):
    pp = torch.distributed.get_world_size()
    groups = initialize_model_parallel(ParallelConfig(pp=pp, split_rank=split))
    shapes = lambda stage: [(ENCODER_S, B, H)] if stage < split else [(DECODER_S, B, H), (ENCODER_S, B, H)]  # noqa: E731
    layer = _layer(groups.pp.rank, pp, split)
    how = {"forward_step_func": _forward_step, "tensor_shape": shapes, "dtype": torch.float64}
    runtimes = [PipelineRuntime(builder(pp, count), layer, groups, **how) for builder in (gpipe, one_f_one_b)]
    losses = [runtime.run(iter(_data(count)), forward_only=True) for runtime in runtimes]
    try:
        PipelineRuntime(interleaved(pp, 2, pp), [layer, layer], groups, **how)
    except ValueError as error:
        return losses, str(error)
    return losses, "accepted"


def test_forward_only_and_several_stages_a_rank_refused(on_ranks):
    results = on_ranks(_evaluate, 4, 2, 3)
    expected = _reference(4, 2, 3)[0]
    assert [[r["loss"] for r in reports] for reports in results[-1][0]] == [pytest.approx(expected, rel=1e-12)] * 2
    assert all("several stages on a rank" in message for _, message in results)


def _too_few(split):
    """Rank 2 is an encoder-decoder's decoder stage that forgets to hand on the encoder's output."""
    groups = initialize_model_parallel(ParallelConfig(pp=4, split_rank=split))
    layer = _layer(groups.pp.rank, 4, split)

    def forgetful(iterator, model):
        output, loss = _forward_step(iterator, model)
        return (output[0] if groups.pp.rank == 2 else output), loss

    shapes = lambda stage: [(ENCODER_S, B, H)] if stage < split else [(DECODER_S, B, H), (ENCODER_S, B, H)]  # noqa: E731
    runtime = PipelineRuntime(gpipe(4, 1), layer, groups, forward_step_func=forgetful, tensor_shape=shapes)
    runtime.run(iter(_data(1)))


def test_a_stage_that_sends_too_few_tensors_is_named():
    from labkit.launch import RankError, run

    with pytest.raises(RankError, match=r"rank 2 of the pipeline sends 2F0>3 as 1 tensors .*rank 3 expects 2"):
        run(_too_few, 4, 2, timeout=120)


def test_interleaving_is_refused():
    from labkit.parallel import single_process_groups

    with pytest.raises(ValueError, match="encoder-decoder cannot be interleaved"):
        forward_backward_pipelining_with_interleaving(
            forward_step_func=plain_step,
            data_iterator=[None, None],
            model=[EncoderLayer(0), EncoderLayer(1)],
            num_microbatches=2,
            groups=single_process_groups(),
            decoder_seq_length=3,
        )
