"""Functions of one's own that return what `pretrain` cannot use: one sentence each, never a bare error."""

import pytest
import torch
from torch import nn

from labkit.config import presets
from labkit.train import pretrain
from labkit.train.forward_step import gpt_forward_step
from labkit.train.loss_form import FORMS, checked_forward_step

CONFIG = presets.tiny().override(
    {"layers": 2, "hidden": 32, "heads": 4, "seq_length": 16, "global_batch_size": 2, "steps": 1}
)


def good(loss):
    return {"loss_sum": loss.sum().detach(), "tokens": loss.numel(), "lm loss": loss.mean().detach()}


def step_with(loss_func):
    return lambda batches, model: (gpt_forward_step(batches, model)[0], loss_func)


@pytest.mark.parametrize(
    ("loss_func", "returned"),
    [
        (lambda loss: (loss.mean(), {"lm loss": 1.0}), "(a tensor of shape (), a dict with lm loss: 1.0)"),
        (lambda loss: (loss.sum(), 16, {"loss_sum": 1.0}), "(a tensor of shape (), 16, a dict with loss_sum: 1.0)"),
        (lambda loss: (loss.mean(), None), "(a tensor of shape (), None)"),
        (lambda loss: (loss.mean(), {"loss_sum": 1.0, "tokens": loss}), "tokens: a tensor of shape (1, 16))"),
        (lambda loss: loss.mean(), "a tensor of shape ()"),
        (lambda loss: (loss.mean(), 1, 2, {}), "(a tensor of shape (), 1, 2, a dict with no keys)"),
        (lambda loss: (loss, good(loss)), "(a tensor of shape (1, 16), a dict"),
        (lambda loss: (1.0, good(loss)), "(1.0, a dict"),
    ],
)
def test_a_loss_function_of_the_wrong_form_is_one_sentence_that_shows_what_came_and_what_must(loss_func, returned):
    with pytest.raises(ValueError) as refused:
        pretrain(CONFIG, forward_step=step_with(loss_func))
    assert returned in str(refused.value) and FORMS in str(refused.value)


@pytest.mark.parametrize(
    ("forward_step", "message"),
    [
        (step_with(None), "None as its loss function on the last stage"),
        (lambda batches, model: gpt_forward_step(batches, model)[0], r"returned a tensor.*\(output, loss function\)"),
    ],
)
def test_a_forward_step_of_the_wrong_form_is_one_sentence(forward_step, message):
    with pytest.raises(ValueError, match=message):
        pretrain(CONFIG, forward_step=forward_step)


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
