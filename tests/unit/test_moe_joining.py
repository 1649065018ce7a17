"""Experts' tensors put together from hand-made shards: cut over ep along dim 0, over etp inside, replicas over edp.

Shapes: E experts, F' width of fc1's output (gate and up), H hidden.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from labkit.comm.group_plan import groups_of_rank
from labkit.train.parity.assemble import assemble
from labkit.train.parity.snapshots import Shard, Snapshot

AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp")
LAYOUTS: list[tuple[dict[str, int], int]] = [
    ({"ep": 2}, 2),
    ({"ep": 4, "tp": 2, "etp": 1}, 4),
    ({"ep": 2, "etp": 2, "tp": 1}, 8),
    ({"ep": 2, "tp": 2, "cp": 2}, 8),
    ({"ep": 8, "cp": 2}, 8),
    ({"ep": 2, "etp": 2, "tp": 2, "pp": 2}, 8),
]
E, F, H = 8, 8, 3
FULL_EFH = torch.arange(float(E * F * H)).view(E, F, H)
"""Every element another number; a stage's weights are these plus 1000 times its number."""


def name(stage: int) -> str:
    return f"layers.{stage}.mlp.experts.fc1.weight"


def part(full_EFH: Tensor, ep: int, ep_size: int, etp: int, etp_size: int) -> Tensor:
    """A rank's experts, and of each the rows of gate and of up that are its own: written out, not by labkit's cut."""
    experts = full_EFH[ep * E // ep_size : (ep + 1) * E // ep_size]
    half, width = F // 2, F // 2 // etp_size
    return torch.cat([experts[:, half * block + etp * width :][:, :width] for block in (0, 1)], dim=1)


def snapshot(rank: int, sizes: dict[str, int], world_size: int, *, sharded: bool) -> Snapshot:
    """What one rank holds. If `sharded`, it speaks for its own piece of the flat tensor alone, and the rest is -1."""
    plan = groups_of_rank(rank, sizes, world_size)
    at = {axis: plan[axis].tolist().index(rank) for axis in AXES}
    tensor = part(FULL_EFH + 1000 * at["pp"], at["ep"], len(plan["ep"]), at["etp"], len(plan["etp"])).clone()
    owned = None
    if sharded:
        share = -(-tensor.numel() // len(plan["edp"]))
        start, end = at["edp"] * share, min((at["edp"] + 1) * share, tensor.numel())
        owned = ((start, end),)
        tensor.view(-1)[:start], tensor.view(-1)[end:] = -1.0, -1.0
    shard = Shard(tensor, 1 if len(plan["etp"]) > 1 else None, 2, E, False, owned, expert=True, expert_parallel=True)
    return Snapshot(**at, gradients={0: {name(at["pp"]): shard}})


def snapshots(sizes: dict[str, int], world_size: int, *, sharded: bool = False) -> list[Snapshot]:
    return [snapshot(rank, sizes, world_size, sharded=sharded) for rank in range(world_size)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("sizes", "world_size"), LAYOUTS, ids=lambda value: str(value))
def test_experts_are_whole_again_under_every_fold(sizes, world_size, sharded):
    joined = assemble(snapshots(sizes, world_size, sharded=sharded))
    assert joined.disagreements == []
    assert list(joined.gradients[0]) == [name(stage) for stage in range(sizes.get("pp", 1))]
    for stage in range(sizes.get("pp", 1)):
        assert torch.equal(joined.gradients[0][name(stage)], FULL_EFH + 1000 * stage)


@given(st.randoms(use_true_random=False), st.sampled_from(LAYOUTS))
def test_the_order_of_ranks_does_not_matter(random, layout):
    ranks = snapshots(*layout)
    random.shuffle(ranks)
    assert torch.equal(assemble(ranks).gradients[0][name(0)], FULL_EFH)


def test_experts_on_the_wrong_rank_are_no_disagreement_but_another_tensor():
    """Nobody else holds them, so only the comparison with one process can see it."""
    ranks = snapshots({"ep": 2}, 2)
    ranks[0].gradients, ranks[1].gradients = ranks[1].gradients, ranks[0].gradients
    joined = assemble(ranks)
    assert joined.disagreements == []
    assert torch.equal(joined.gradients[0][name(0)], FULL_EFH.roll(E // 2, 0))


def test_replicas_over_edp_must_agree_bit_for_bit():
    ranks = snapshots({"ep": 2}, 4)
    twin = next(s for s in ranks if s.ep == 1 and s.edp == 1)
    twin.gradients[0][name(0)].tensor[0, 0, 0] += 1e-3
    assert assemble(ranks).disagreements == [f"{name(0)} gradient (edp replicas)"]


def test_different_experts_on_ranks_of_one_dense_replica_are_no_disagreement():
    """tp 2 with etp 1 and ep 2: both ranks hold the same dense weights and other experts."""
    ranks = snapshots({"tp": 2, "etp": 1, "ep": 2}, 2)
    for s in ranks:
        s.gradients[0]["layers.0.mlp.router.weight"] = Shard(torch.ones(E, H), None, 1, E, False)
    assert assemble(ranks).disagreements == []
    ranks[1].gradients[0]["layers.0.mlp.router.weight"].tensor[0] = 2.0
    assert assemble(ranks).disagreements == ["layers.0.mlp.router.weight gradient (tp replicas)"]


def test_what_experts_hold_alike_is_compared_over_ep_and_etp():
    """A parameter of experts that no axis cuts (none has one now, a scale would be one)."""
    for axis, sizes in (("ep", {"ep": 2}), ("etp", {"ep": 1, "etp": 2})):
        ranks = snapshots(sizes, 2)
        for s in ranks:
            s.gradients[0] = {"scale": Shard(torch.ones(3), None, 1, 3, False, expert=True)}
        assert assemble(ranks).disagreements == []
        ranks[1].gradients[0]["scale"].tensor[0] = 2.0
        assert assemble(ranks).disagreements == [f"scale gradient ({axis} replicas)"]


def test_an_element_that_no_rank_of_edp_owns_is_not_a_number():
    ranks = snapshots({"ep": 2}, 4, sharded=True)
    ranks[-1].gradients[0][name(0)] = Shard(torch.zeros(E // 2, F, H), None, 2, E, False, (), True, True)
    assert assemble(ranks).gradients[0][name(0)].isnan().any()
