"""Functions of one's own that return what `pretrain` cannot use: one sentence each, never a bare error."""

import pytest
import torch
from torch import nn

from labkit.config import presets
from labkit.train import pretrain
from labkit.train.forward_step import checked_forward_step, gpt_forward_step

CONFIG = presets.tiny().override(
    {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 2, "steps": 1}
)


def good(loss):
    return {"loss_sum": loss.sum().detach(), "tokens": loss.numel(), "lm loss": loss.mean().detach()}


def step_with(loss_func):
    return lambda batches, model: (gpt_forward_step(batches, model)[0], loss_func)


@pytest.mark.parametrize(
    ("loss_func", "message"),
    [
        (lambda loss: (loss.mean(), {"lm loss": 1.0}), "metrics have lm loss, and not loss_sum and tokens"),
        (lambda loss: (loss.sum(), loss.numel(), {"loss_sum": 1.0}), "metrics have loss_sum, and not tokens"),
        (lambda loss: (loss.mean(), None), "None as its metrics"),
        (lambda loss: (loss.mean(), {**good(loss), "tokens": loss}), r"shape \(1, 16\) as tokens"),
        (lambda loss: loss.mean(), r"returned a tensor of shape \(\); it must return \(loss, metrics\) or"),
        (lambda loss: (loss.mean(), 1, 2, {}), "returned 4 items"),
        (lambda loss: (loss, good(loss)), r"shape \(1, 16\) as its loss"),
        (None, "None as its loss function on the last stage"),
    ],
)
def test_a_loss_function_of_the_wrong_form_is_one_sentence(loss_func, message):
    with pytest.raises(ValueError, match=message):
        pretrain(CONFIG, forward_step=step_with(loss_func))


def test_a_forward_step_that_returns_no_pair_is_one_sentence():
    with pytest.raises(ValueError, match=r"forward_step returned a tensor.*must return two things"):
        pretrain(CONFIG, forward_step=lambda batches, model: gpt_forward_step(batches, model)[0])


def test_both_forms_train_alike():
    two = pretrain(CONFIG, forward_step=step_with(lambda loss: (loss.mean(), good(loss))))
    three = pretrain(CONFIG, forward_step=step_with(lambda loss: (loss.sum(), loss.numel(), good(loss))))
    assert two.losses == pytest.approx(three.losses, rel=1e-6)
    assert two.metrics[0]["grad_norm"] == pytest.approx(three.metrics[0]["grad_norm"], rel=1e-5)


def test_two_items_are_refused_under_context_parallelism_and_three_are_not():
    losses = torch.ones(1, 4)

    def returned(cp, *items):
        step = checked_forward_step(lambda batches, model: (losses, lambda _: items), cp=cp)
        return step(iter(()), nn.Identity())[1](losses)

    returned(1, losses.mean(), good(losses))
    returned(2, losses.sum(), 4, good(losses))
    with pytest.raises(ValueError, match=r"parallel.cp = 2 .*return \(sum of losses, number of tokens, metrics\)"):
        returned(2, losses.mean(), good(losses))


@pytest.mark.parametrize("built", [None, [None], ["model"]])
def test_a_provider_that_returns_no_module_is_one_sentence(built):
    with pytest.raises(ValueError, match=r"model_provider returned .* where a torch.nn.Module must be"):
        pretrain(CONFIG, model_provider=lambda config, groups, **_: built)


@pytest.mark.parametrize(
    "provider",
    [lambda config, groups: None, lambda config, groups, *, pre_process, post_process, vp_stage: None, int, "model"],
)
def test_a_provider_of_another_form_is_one_sentence(provider):
    with pytest.raises(ValueError, match=r"model_provider\(config, groups, \*, pre_process, post_process, chunk\)"):
        pretrain(CONFIG, model_provider=provider)
