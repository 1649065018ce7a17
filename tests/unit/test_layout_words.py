"""Names of layouts in a comparison: what is not as usual, and nothing else."""

import pytest

from labkit.config import presets
from labkit.train.parity.layout_words import layout_name


@pytest.mark.parametrize(
    ("changes", "world_size", "name"),
    [
        ({}, 1, "tp1 pp1 dp1"),
        ({"tp": 2, "pp": 2, "sequence_parallel": True}, 8, "tp2 pp2 dp2 sp"),
        ({"cp": 2, "tp": 2}, 8, "tp2 cp2 pp1 dp2"),
        ({"cp": 4, "cp_comm_type": "all_gather"}, 4, "tp1 cp4 pp1 dp1 all-gather"),
        ({"cp_comm_type": "all_gather"}, 1, "tp1 pp1 dp1"),
        ({"recompute_granularity": "selective"}, 1, "tp1 pp1 dp1 recompute core_attn"),
        (
            {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
            1,
            "tp1 pp1 dp1 recompute mlp+layernorm",
        ),
        ({"recompute_granularity": "full"}, 1, "tp1 pp1 dp1 recompute full"),
        (
            {
                "pp": 2,
                "recompute_granularity": "full",
                "recompute_method": "block",
                "num_microbatches_with_partial_activation_checkpoints": 1,
            },
            2,
            "tp1 pp2 dp1 recompute full block 1 of 1 in flight",
        ),
        ({"optim.data_parallel": "naive"}, 2, "tp1 pp1 dp2 naive"),
        (
            {"bucket_size": 500, "overlap_grad_reduce": False, "average_in_collective": True},
            2,
            "tp1 pp1 dp2 buckets of 500 no overlap average",
        ),
        (
            {"distributed_optimizer": True, "overlap_param_gather": True, "calculate_per_token_loss": True},
            2,
            "tp1 pp1 dp2 per token zero gather ahead",
        ),
        (
            {"distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
            4,
            "tp1 pp1 dp4 zero 2 instances",
        ),
        ({"fp8": "hybrid"}, 2, "tp1 pp1 dp2 fp8 hybrid delayed"),
        ({"pp": 2, "vpp": 2, "schedule.name": "interleaved"}, 2, "tp1 pp2 dp1 vpp2 interleaved"),
        ({"pp": 2, "vpp": 2, "all_warmup": True}, 2, "tp1 pp2 dp1 vpp2 all warm-up"),
        ({"num_experts": 8, "ep": 4}, 8, "tp1 pp1 dp8 ep4"),
        ({"num_experts": 8, "tp": 2, "sequence_parallel": True, "pp": 2}, 4, "tp2 pp2 dp1 sp etp2"),
        (
            {"num_experts": 8, "tp": 2, "sequence_parallel": True, "etp": 1, "ep": 2, "distributed_optimizer": True},
            4,
            "tp2 pp1 dp2 sp ep2 etp1 zero",
        ),
        ({"num_experts": 8, "dispatcher": "allgather", "grouped_gemm": False}, 2, "tp1 pp1 dp2 allgather sequential"),
        ({"num_experts": 8, "capacity_factor": 1.25, "pad_to_capacity": True}, 2, "tp1 pp1 dp2 capacity 1.25 padded"),
        (
            {"num_experts": 8, "shared_expert_ffn_hidden": 64, "shared_expert_overlap": True},
            2,
            "tp1 pp1 dp2 shared overlapped",
        ),
    ],
)
def test_a_name_says_what_is_not_as_usual(changes, world_size, name):
    assert layout_name(presets.tiny().override(changes), world_size) == name
