"""Parameter groups and AdamW against its formula, written out in numpy, and against torch."""

import numpy as np
import pytest
import torch
from torch import nn

from labkit.config import OptimConfig
from labkit.parallel.data_parallel.gradients import gradient_statistics
from labkit.parallel.data_parallel.optimizer import named_parameters, parameter_groups
from labkit.parallel.parameters.parameter_record import record_of
from labkit.train.pretraining import build_optimizer

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=dtype)
        self.fc = nn.Linear(4, 6, dtype=dtype)
        self.head = nn.Linear(6, 2, bias=False, dtype=dtype)


def block(dtype: torch.dtype = torch.float32) -> Block:
    torch.manual_seed(0)
    return Block(dtype)


def give_grads(module: nn.Module, step: int, dtype: torch.dtype | None = None) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in module.parameters():
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.main_grad = grad.to(dtype or param.dtype)


def test_biases_and_norms_have_no_decay_by_default():
    groups = parameter_groups([block()])
    assert [(g.weight_decay_factor, g.lr_factor, g.names) for g in groups] == [
        (1.0, 1.0, ["fc.weight", "head.weight"]),
        (0.0, 1.0, ["norm.weight", "norm.bias", "fc.bias"]),
    ]


def test_two_predicates_and_a_factor_make_four_groups():
    groups = parameter_groups(
        [block()],
        no_wd_decay_cond=lambda name, param: name.startswith("fc"),
        scale_lr_cond=lambda name, param: name.endswith("bias") or name == "head.weight",
        lr_mult=0.25,
    )
    assert {(g.weight_decay_factor, g.lr_factor): g.names for g in groups} == {
        (1.0, 1.0): ["norm.weight"],
        (1.0, 0.25): ["norm.bias", "head.weight"],
        (0.0, 1.0): ["fc.weight"],
        (0.0, 0.25): ["fc.bias"],
    }


def test_frozen_parameters_are_left_out_and_shared_ones_come_once():
    module = block()
    module.fc.bias.requires_grad_(False)
    module.again = module.fc
    names = [name for group in parameter_groups([module]) for name in group.names]
    assert names == ["fc.weight", "head.weight", "norm.weight", "norm.bias"]


def test_full_names_win_over_module_paths():
    module = block()
    module.fc.weight.full_name = "layers.3.mlp.fc1.weight"
    assert "layers.3.mlp.fc1.weight" in named_parameters([module])


def test_adamw_formula_in_float64_with_decay_and_scaled_rate():
    module = block(torch.float64)
    optimizer = build_optimizer([module], OPTIM, scale_lr_cond=lambda name, _: name == "head.weight", lr_mult=0.5)
    expected = {name: p.detach().numpy().copy() for name, p in module.named_parameters()}
    m = {name: np.zeros_like(p) for name, p in expected.items()}
    v = {name: np.zeros_like(p) for name, p in expected.items()}
    for step in range(1, 6):
        give_grads(module, step)
        lr = 1e-2 / step
        for name, param in module.named_parameters():
            g = param.main_grad.numpy()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g * g
            rate = lr * (0.5 if name == "head.weight" else 1.0)
            decay = 0.1 if name in ("fc.weight", "head.weight") else 0.0
            update = (m[name] / (1 - 0.9**step)) / (np.sqrt(v[name] / (1 - 0.95**step)) + 1e-8)
            expected[name] = expected[name] * (1 - rate * decay) - rate * update
        optimizer.step(lr)
    for name, param in module.named_parameters():
        np.testing.assert_allclose(param.detach().numpy(), expected[name], rtol=1e-12, atol=1e-14)
        assert param.grad is None


def test_fp32_equals_torch_adamw_with_everything_decayed():
    ours, theirs = block(), block()
    optimizer = build_optimizer([ours], OPTIM, no_wd_decay_cond=lambda name, param: False)
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    for step in range(4):
        give_grads(ours, step)
        give_grads(theirs, step)
        for param in theirs.parameters():
            param.grad = param.main_grad
        optimizer.step(1e-2)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_bf16_weights_follow_an_fp32_master_where_bf16_alone_would_stand_still():
    """Steps of 1e-4 on a weight of 1.0 vanish in bf16 (spacing 2^-8 below 1); the master adds them up."""
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.constant_(module.weight, 1.0)
    optimizer = build_optimizer([module], OptimConfig(weight_decay=0.0, eps=1e-8))
    for _ in range(100):
        module.weight.main_grad = torch.ones(1, 1, dtype=torch.float32)
        optimizer.step(1e-4)
    master = optimizer.masters[0][0]
    assert master.dtype == torch.float32
    assert master.item() == pytest.approx(0.99, abs=1e-5)
    assert module.weight.dtype == torch.bfloat16
    assert module.weight.item() == torch.tensor(0.99).bfloat16().item()


def test_gradients_in_bf16_are_measured_and_clipped_in_fp32():
    """The norm of numbers with 8 bits is no such number, and clipped in bf16 a gradient would be rounded once more."""
    narrow, wide = block(torch.bfloat16), block(torch.bfloat16)
    optimizers = [build_optimizer([module], OPTIM) for module in (narrow, wide)]
    for step in range(3):
        give_grads(narrow, step, torch.bfloat16)
        for ours, theirs in zip(narrow.parameters(), wide.parameters()):
            theirs.main_grad = ours.main_grad.float() / 3
        exact = torch.cat([p.main_grad.double().flatten() for p in narrow.parameters()]).norm().item()
        pieces = optimizers[0].gradient_pieces()
        assert gradient_statistics(pieces, (), (), torch.device("cpu")).norm == pytest.approx(exact, rel=1e-6)
        for optimizer, factor in zip(optimizers, (1 / 3, 1.0)):
            optimizer.step(1e-2, factor)
    for ours, theirs in zip(optimizers[0].masters, optimizers[1].masters):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtype", "grad_dtype", "per_parameter"),
    [
        (torch.float32, torch.float32, {"parameter": 4, "gradient": 4, "master": 0, "moments": 8}),
        (torch.bfloat16, torch.float32, {"parameter": 2, "gradient": 4, "master": 4, "moments": 8}),
        (torch.bfloat16, torch.bfloat16, {"parameter": 2, "gradient": 2, "master": 4, "moments": 8}),
        (torch.float16, torch.float32, {"parameter": 2, "gradient": 4, "master": 4, "moments": 8}),
        (torch.float64, torch.float64, {"parameter": 8, "gradient": 8, "master": 0, "moments": 16}),
    ],
)
def test_bytes_are_those_that_torch_holds(dtype, grad_dtype, per_parameter):
    """16 bytes a parameter in fp32, 18 in bf16 (Megatron's table); the moments are looked up in AdamW's own state."""
    module = block(dtype)
    give_grads(module, 0, grad_dtype)
    optimizer = build_optimizer([module], OPTIM)
    count = sum(p.numel() for p in module.parameters())
    expected = {name: size * count for name, size in per_parameter.items()} | {"padding": 0}
    assert optimizer.state_bytes() == expected
    optimizer.step(1e-3)
    assert optimizer.state_bytes() == expected
    held = [x for state in optimizer.adamw.state.values() for name, x in state.items() if name.startswith("exp_avg")]
    assert sum(x.nbytes for x in held) == expected["moments"]


def test_one_process_counts_every_gradient_but_the_copy_of_a_tied_weight():
    module = block()
    record_of(module.head.weight).shared = True
    give_grads(module, 0)
    optimizer = build_optimizer([module], OPTIM)
    assert [x is module.head.weight.main_grad for x in optimizer.uncounted_pieces()] == [True]
    counted = {id(x) for x in optimizer.gradient_pieces()}
    assert counted == {id(p.main_grad) for p in module.parameters() if p is not module.head.weight}


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_no_parameters_is_an_error(module):
    with pytest.raises(ValueError, match="no parameter"):
        build_optimizer([module], OPTIM)
