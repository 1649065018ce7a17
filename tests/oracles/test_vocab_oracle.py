"""Our cross-entropy and mappings beside megatron-core's, on one and on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from labkit.launch import run
from labkit.parallel import Group
from labkit.parallel import mappings as ours
from labkit.parallel.vocab.cross_entropy import vocab_parallel_cross_entropy

pytestmark = pytest.mark.oracle

VOCABULARY = 64


def megatron(world_size: int) -> Any:
    """megatron-core's tensor_parallel package with all ranks in one tensor-parallel group."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.tensor_parallel import cross_entropy

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    return tensor_parallel, cross_entropy


def problem() -> tuple[Group, Tensor, Tensor, Tensor]:
    """The group, the whole logits, labels and a weight per token."""
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 2, VOCABULARY, generator=generator)
    labels = torch.randint(0, VOCABULARY, (6, 2), generator=generator)
    weights = torch.rand(6, 2, generator=generator)
    return Group("tp", tuple(range(size)), rank, torch.distributed.group.WORLD), logits, labels, weights


def losses(alpha: float) -> dict[str, Tensor]:
    """Loss and this rank's logit gradient by both, and torch's on the whole vocabulary."""
    group, logits, labels, weights = problem()
    _, cross_entropy = megatron(group.size)
    smoothing = alpha * VOCABULARY / (VOCABULARY - 1)
    whole = logits.clone().requires_grad_()
    torchs = F.cross_entropy(whole.permute(0, 2, 1), labels, reduction="none", label_smoothing=smoothing)
    (torchs * weights).sum().backward()
    results = {"torch": torchs.detach(), "torch grad": whole.grad.chunk(group.size, -1)[group.rank].clone()}
    for name in ("ours", "megatron"):
        mine = logits.chunk(group.size, -1)[group.rank].clone().requires_grad_()
        if name == "ours":
            loss = vocab_parallel_cross_entropy(mine, labels, group, vocab_size=VOCABULARY, label_smoothing=alpha)
        else:
            # It subtracts in place, so it gets a copy that is no leaf.
            loss = cross_entropy.vocab_parallel_cross_entropy(mine * 1.0, labels, alpha)
        (loss * weights).sum().backward()
        results |= {name: loss.detach(), f"{name} grad": mine.grad}
    return results


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_smoothing_both_give_torchs_loss_and_gradient(world_size: int) -> None:
    for result in run(losses, world_size, 0.0):
        for name in ("ours", "megatron"):
            torch.testing.assert_close(result[name], result["torch"])
            torch.testing.assert_close(result[f"{name} grad"], result["torch grad"])


def test_with_smoothing_megatron_uses_the_shards_vocabulary_and_we_the_whole_one() -> None:
    """A known defect there (issue 7464): K and the mean are those of the rank's shard, so tp changes the loss."""
    (alone,) = run(losses, 1, 0.1)
    torch.testing.assert_close(alone["ours"], alone["torch"])
    torch.testing.assert_close(alone["megatron"], alone["torch"])
    split = run(losses, 2, 0.1)
    for result in split:
        torch.testing.assert_close(result["ours"], result["torch"])
        torch.testing.assert_close(result["ours grad"], result["torch grad"])
        assert (result["megatron"] - result["torch"]).abs().max() > 1e-3
    assert not torch.equal(split[0]["megatron"], split[1]["megatron"]), "there the ranks even disagree about the loss"


MAPPINGS = (
    "copy_to_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "scatter_to_sequence_parallel_region",
    "gather_from_sequence_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
)


def mapped() -> None:
    group, whole, *_ = problem()
    tensor_parallel, _ = megatron(group.size)
    for name in MAPPINGS:
        outputs = []
        for module, arguments in ((ours, (group,)), (tensor_parallel, ())):
            x = (whole + group.rank).requires_grad_()
            y = getattr(module, name)(x * 1.0, *arguments)
            weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(group.rank))
            (y * weights).sum().backward()
            outputs.append((y.detach(), x.grad))
        (our_y, our_grad), (their_y, their_grad) = outputs
        assert torch.equal(our_y, their_y), name
        torch.testing.assert_close(our_grad, their_grad, msg=lambda m, name=name: f"{name}: {m}")


def test_mappings_give_megatrons_values_and_gradients() -> None:
    run(mapped, 2)
