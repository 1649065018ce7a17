"""The distributed optimizer over real ranks: the same parameters as without it, a share of its state on each rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from labkit.comm.groups import ParallelGroups, single_process_groups
from labkit.config import OptimConfig, ParallelConfig, presets
from labkit.models.gpt import GPTModel
from labkit.parallel import CommLedger, initialize_model_parallel
from labkit.parallel.data_parallel.distributed_data_parallel import DistributedDataParallel
from labkit.parallel.data_parallel.distributed_optimizer import DistributedOptimizer
from labkit.parallel.data_parallel.gradients import gradient_statistics
from labkit.parallel.data_parallel.optimizer import Optimizer, parameter_groups
from labkit.plan.zero_stages import bytes_per_parameter
from labkit.train import pretrain

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, eps=1e-5)
LR_MULT = 0.25
"""Of the learning rate of `scaled`."""
STEPS, BATCH, WIDTH = 4, 24, 24
BUCKET = 200
"""Elements: the model below fills five buckets: last; middle; unused; norm and first; table."""


class Net(nn.Module):
    """Sizes that no alignment likes; a parameter used twice, one that another module reads, a module never called."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.table = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(7, dtype=dtype))})
        self.first = nn.Linear(WIDTH, 31, dtype=dtype)
        self.norm = nn.LayerNorm(31, dtype=dtype)
        self.unused = nn.Linear(20, 20, dtype=dtype)
        self.middle = nn.Linear(31, 31, dtype=dtype)
        self.last = nn.Linear(31, 7, bias=False, dtype=dtype)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.middle(torch.tanh(self.middle(x))))) + self.table["bias"]


def batch_of(step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return draw(BATCH, WIDTH).to(dtype), draw(BATCH, 7).to(dtype)


def grad_dtype_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def train(chunk: Any, optimizer: Any, groups: ParallelGroups, dtype: torch.dtype) -> tuple[list[float], list[Tensor]]:
    """Norms by step and the parameters at the end; each replica takes its rows of the batch in two microbatches."""
    dp, norms = groups.dp_cp, []
    for step in range(STEPS):
        chunk.zero_grad_buffer()
        x, y = (part.chunk(dp.size)[dp.rank] for part in batch_of(step, dtype))
        halves = list(zip(x.chunk(2), y.chunk(2)))
        with chunk.no_sync():
            loss(chunk, *halves[0]).backward()
        loss(chunk, *halves[1]).backward()
        chunk.finish_grad_sync()
        norms.append(
            gradient_statistics(
                optimizer.gradient_pieces(), optimizer.uncounted_pieces(), optimizer.norm_groups, groups.device
            ).norm
        )
        optimizer.step(OPTIM.lr)
    chunk.finish_param_sync()
    return norms, [parameter.detach().clone() for parameter in chunk.module.parameters()]


def loss(chunk: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Half of the mean, since two microbatches make a step; in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (chunk(x).to(wide) - y.to(wide)).square().mean() / 2


def scaled(name: str, _: nn.Parameter) -> bool:
    """One parameter of each pair of groups: with decay and without."""
    return name.endswith(("first.weight", "norm.bias"))


def build(
    groups: ParallelGroups, dtype: torch.dtype, *, zero: bool, net: type[Net] = Net, **wrapping: Any
) -> tuple[Any, Any]:
    wrapping = {"grad_dtype": grad_dtype_of(dtype), "bucket_size": BUCKET, **wrapping}
    chunk = DistributedDataParallel(net(dtype), groups, distributed_optimizer=zero, **wrapping)
    of = parameter_groups([chunk], scale_lr_cond=scaled, lr_mult=LR_MULT)
    assert sorted((g.weight_decay_factor, g.lr_factor) for g in of) == [(0, LR_MULT), (0, 1), (1, LR_MULT), (1, 1)]
    return chunk, DistributedOptimizer(of, [chunk], groups, OPTIM) if zero else Optimizer(of, OPTIM, layout=groups)


def trained(dtype: torch.dtype, zero: bool, wrapping: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    groups = initialize_model_parallel(ParallelConfig())
    return train(*build(groups, dtype, zero=zero, **wrapping), groups, dtype)


WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_param_gather": True},
    {"overlap_grad_reduce": False, "overlap_param_gather": True, "average_in_collective": True},
)
INSTANCES = {"num_distributed_optimizer_instances": 2, "overlap_param_gather": True}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_parameters_and_norms_are_those_of_one_process(on_ranks, world_size: int) -> None:
    alone = single_process_groups()
    expected_norms, expected = train(*build(alone, torch.float64, zero=False), alone, torch.float64)
    for way in WAYS if world_size < 4 else (INSTANCES, WAYS[1]):
        for norms, parameters in on_ranks(trained, world_size, torch.float64, True, way):
            assert norms == pytest.approx(expected_norms, rel=1e-12)
            for mine, theirs in zip(parameters, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)


def test_the_same_layout_twice_is_bit_equal_and_so_are_its_ranks(on_ranks) -> None:
    first, second = (on_ranks(trained, 4, torch.float32, True, INSTANCES) for _ in range(2))
    for norms, parameters in (*first, *second):
        assert norms == first[0][0]
        assert all(torch.equal(a, b) for a, b in zip(parameters, first[0][1], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_have_the_bits_of_the_whole_optimizer(on_ranks, dtype: torch.dtype) -> None:
    """Both add two gradients, so a share of the state changes not a bit; and neither does the second time."""
    whole = on_ranks(trained, 2, dtype, False, {})
    for way in (*WAYS[:2], WAYS[1]):
        for (_, mine), (_, theirs) in zip(on_ranks(trained, 2, dtype, True, way), whole):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(whole[0][1], Net(dtype).parameters())), "something was learnt"


class WithExpert(Net):
    """`middle` belongs to an expert: other weights on each rank of ep, replicas on those of edp alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        for parameter in self.middle.parameters():
            parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]


def with_experts(zero: bool) -> tuple[list[float], list[Tensor], set[str]]:
    groups = initialize_model_parallel(ParallelConfig(ep=2))
    chunk, optimizer = build(groups, torch.float64, zero=zero, net=WithExpert)
    return *train(chunk, optimizer, groups, torch.float64), {buffer.group.name for buffer in chunk.buffers}


def test_experts_are_sharded_over_their_own_replicas(on_ranks) -> None:
    sharded, whole = (on_ranks(with_experts, 4, zero) for zero in (True, False))
    for (norms, parameters, groups), (expected_norms, expected, _) in zip(sharded, whole):
        assert groups == {"dp_cp", "edp"}
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        for mine, theirs in zip(parameters, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13)
    experts = [parameters[list(dict(Net(torch.float64).named_parameters())).index("middle.weight")]
               for _, parameters, _ in sharded]  # fmt: skip
    assert torch.equal(experts[0], experts[2]) and not torch.equal(experts[0], experts[1])


def sizes_of_state(dtype: torch.dtype, grad_dtype: torch.dtype, instances: int) -> tuple[dict[str, int], int, int]:
    groups = initialize_model_parallel(ParallelConfig())
    chunk, optimizer = build(
        groups, dtype, zero=True, grad_dtype=grad_dtype, num_distributed_optimizer_instances=instances
    )
    padding = sum(buffer.plan.padding for buffer in chunk.buffers)
    said = optimizer.state_bytes()
    train_one_step(chunk, optimizer, dtype)
    held = [value for state in optimizer.adamw.state.values() for value in (state["exp_avg"], state["exp_avg_sq"])]
    assert said["moments"] == sum(value.nbytes for value in held), "what torch's AdamW really keeps"
    return said, sum(p.numel() for p in chunk.module.parameters()), padding


def train_one_step(chunk: Any, optimizer: Any, dtype: torch.dtype) -> None:
    chunk.zero_grad_buffer()
    loss(chunk, *batch_of(0, dtype)).backward()
    chunk.finish_grad_sync()
    optimizer.step(OPTIM.lr)
    chunk.finish_param_sync()


@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype", "instances"), [("bf16", "fp32", 1), ("fp32", "fp32", 2), ("bf16", "bf16", 1)]
)
def test_bytes_are_those_of_the_closed_form(on_ranks, param_dtype: str, grad_dtype: str, instances: int) -> None:
    """Summed over the ranks of an instance, to the byte: weights and gradients on each rank, the rest once."""
    dp, kinds = 4 // instances, {"bf16": torch.bfloat16, "fp32": torch.float32}
    results = on_ranks(sizes_of_state, 4, kinds[param_dtype], kinds[grad_dtype], instances)
    form = bytes_per_parameter(param_dtype=param_dtype, grad_dtype=grad_dtype, dp=dp, stage=1)
    _, count, padding = results[0]
    for name, each in (("parameter", form.weight), ("gradient", form.gradient)):
        assert {said[name] for said, _, _ in results} == {each * count}
    for name, share in (("master", form.master), ("moments", form.moments)):
        for first in range(0, 4, dp):
            assert sum(said[name] for said, _, _ in results[first : first + dp]) == share * dp * count
    replicated = padding * (form.weight + form.gradient)
    assert sum(said["padding"] for said, _, _ in results[:dp]) == dp * replicated + padding * dp * form.master


def communication(overlap: bool, instances: int) -> tuple[list[tuple[str, str, str, int]], int, list[str]]:
    """(what one step sends, elements of the buffer, phases between the update and the last layer)."""
    groups = initialize_model_parallel(ParallelConfig())
    wrapping = {"overlap_param_gather": overlap, "num_distributed_optimizer_instances": instances}
    chunk, optimizer = build(groups, torch.float32, zero=True, **wrapping)
    train_one_step(chunk, optimizer, torch.float32)
    order: list[str] = []
    with CommLedger() as ledger:
        chunk.zero_grad_buffer()
        loss(chunk, *batch_of(1, torch.float32)).backward()
        chunk.finish_grad_sync()
        optimizer.step(OPTIM.lr)
        order.append(f"step: {ledger.count(operation='all_gather')}")
        for name in ("first", "last"):
            module = getattr(chunk.module, name)
            module.register_forward_pre_hook(
                lambda *_, name=name: order.append(f"{name}: {ledger.count(operation='all_gather')}")
            )
        chunk(batch_of(2, torch.float32)[0])
    records = [(r.operation, r.group, r.phase or "", r.bytes) for r in ledger.records]
    return records, chunk.buffers[0].plan.numel, order


@pytest.mark.parametrize(("overlap", "instances"), [(False, 1), (True, 1), (True, 2)])
def test_a_step_reduce_scatters_gradients_and_gathers_parameters(on_ranks, overlap: bool, instances: int) -> None:
    records, numel, order = on_ranks(communication, 4, overlap, instances)[0]
    moved: dict[tuple[str, str], int] = {}
    for operation, group, phase, size in records:
        assert phase == ("parameters" if operation == "all_gather" else "gradients")
        moved[operation, group] = moved.get((operation, group), 0) + size
    inside = "dp_cp" if instances == 1 else "dp_cp_within"
    part = 4 * numel * instances // 4  # of the rank, in bytes
    expected = {("reduce_scatter", inside): 4 * numel, ("all_gather", inside): part}
    if instances > 1:
        expected["all_reduce", "dp_cp_across"] = part
    assert moved == expected
    buckets = sum(operation == "reduce_scatter" for operation, *_ in records)
    assert buckets == 5
    if not overlap:
        assert order == [f"step: {buckets}", f"first: {buckets}", f"last: {buckets}"]
    else:  # one ahead: `table` starts after the update, each further bucket when the one before is there
        assert order == ["step: 1", "first: 3", "last: 5"]


def tied_bytes(zero: bool) -> int:
    """Bytes summed over embd in a step."""
    config = presets.tiny().override(
        {
            "parallel.pp": 2,
            "model.layers": 2,
            "train.steps": 1,
            "train.global_batch_size": 4,
            "optim.distributed_optimizer": zero,
        }
    )
    with CommLedger() as ledger:
        pretrain(config)
    return ledger.bytes(operation="all_reduce", group="embd")


def test_of_a_tied_weight_only_the_own_shard_travels_between_the_stages(on_ranks) -> None:
    size = 4 * presets.tiny().model.vocab_size * presets.tiny().model.hidden
    assert on_ranks(tied_bytes, 4, False) == [size] * 4
    assert on_ranks(tied_bytes, 4, True) == [size // 2] * 4


class ReadsItself(Net):
    """Computes with `middle.weight` without calling `middle`."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.first.weight.t() @ self.middle.weight.t()


def use_before_it_is_gathered() -> str:
    groups = initialize_model_parallel(ParallelConfig())
    chunk = DistributedDataParallel(
        ReadsItself(torch.float32), groups, bucket_size=BUCKET, distributed_optimizer=True, overlap_param_gather=True
    )
    optimizer = DistributedOptimizer(parameter_groups([chunk]), [chunk], groups, OPTIM)
    optimizer.step(0.0)
    with pytest.raises(RuntimeError) as caught:
        chunk(torch.randn(3, WIDTH)).sum().backward()
    chunk.finish_param_sync()
    return str(caught.value)


def test_a_parameter_read_behind_the_back_of_its_module_is_refused(on_ranks) -> None:
    for message in on_ranks(use_before_it_is_gathered, 2):
        assert "was used before its update was gathered" in message and "optim.overlap_param_gather" in message


@pytest.mark.parametrize("untied", [False, True])
def test_no_layer_of_a_gpt_waits_for_the_parameters_of_another(untied: bool) -> None:
    """The model as a whole has no hook: whatever its own forward reads, it gets by calling a layer."""
    groups = single_process_groups()
    config = presets.tiny().override({"model.untie_embeddings_and_output_weights": untied, "model.position": "learned"})
    model = GPTModel(config.model, groups, layers=range(2), seed=1)
    chunk = DistributedDataParallel(
        model, groups, bucket_size=BUCKET, distributed_optimizer=True, overlap_param_gather=True
    )
    optimizer = DistributedOptimizer(parameter_groups([chunk]), [chunk], groups, OPTIM)
    assert len(chunk.buckets) > 10 and not model._forward_pre_hooks
    optimizer.step(0.0)
    tokens = torch.arange(config.model.seq_length)[None]
    chunk(tokens, labels_BS=tokens).sum().backward()
    assert chunk.param_gather is not None and chunk.param_gather.is_ready


def losses_of(precision: str, optim: dict[str, Any]) -> list[Any]:
    config = presets.tiny().override(
        {
            "model.layers": 2,
            "train.steps": 3,
            "train.global_batch_size": 4,
            "train.eval_interval": 2,
            "train.eval_steps": 1,
            "optim.clip_grad": 0.0,  # the norm differs in its last bits, since squares are summed in another order
            "optim.precision": precision,
            "optim.bucket_size": 20_000,
            **optim,
        }
    )
    result = pretrain(config)
    return [result.losses, result.series("validation_loss"), result.series("test_loss"), result.series("grad_norm")]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_with_validations_is_bit_equal_to_one_with_the_whole_optimizer(on_ranks, precision: str) -> None:
    """A validation follows the update, and so does the test: they wait for the parameters, too."""
    whole = on_ranks(losses_of, 2, precision, {})
    assert whole[0][0][-1] < whole[0][0][0] and len(whole[0][1]) == 2
    zero = on_ranks(losses_of, 2, precision, {"optim.distributed_optimizer": True, "optim.overlap_param_gather": True})
    for (*losses, norms), (*expected, expected_norms) in zip(zero, whole):
        assert losses == expected
        assert [n for _, n in norms] == pytest.approx([n for _, n in expected_norms], rel=1e-6)


def test_chunks_without_reduce_scatter_and_foreign_parameters_are_refused() -> None:
    groups = single_process_groups()
    plain = DistributedDataParallel(Net(torch.float32), groups)
    with pytest.raises(ValueError, match=r"wrap each chunk in .*distributed_optimizer=True"):
        DistributedOptimizer(parameter_groups([plain]), [plain], groups, OPTIM)
    sharded = DistributedDataParallel(Net(torch.float32), groups, distributed_optimizer=True)
    with pytest.raises(ValueError, match=r"first.weight is in none of the gradient buffers"):
        DistributedOptimizer(parameter_groups([plain]), [sharded], groups, OPTIM)
