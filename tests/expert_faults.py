"""Planted faults of a mixture of experts: who has which tokens, weights, gradients and losses (see `faults.py`).

`tiny_moe` has experts in layers 0 and 2 of 4, `deepseek_tiny`, with a shared expert and biases, in layers 1 and 3.
"""

from __future__ import annotations

from typing import Any

from planting import Comparison, Fault

EP: dict[str, Any] = {"ep": 2}
REPLICAS: dict[str, Any] = {"ep": 2, "world_size": 4}
ETP: dict[str, Any] = {"ep": 2, "etp": 2}
SP: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "etp": 1, "ep": 2}
CP: dict[str, Any] = {"cp": 2, "ep": 2}
LAST_ROUTER = "layers.2.mlp.router.weight gradient"
LAST_EXPERTS = "layers.2.mlp.experts.fc2.weight gradient"


def tiny(layout: dict[str, Any], names: str, **changes: Any) -> Comparison:
    return Comparison(layout, names, preset="tiny_moe", changes=changes)


def deepseek(layout: dict[str, Any], names: str, *, steps: int = 1, **changes: Any) -> Comparison:
    return Comparison(layout, names, preset="deepseek_tiny", changes=changes, steps=steps)


ROUTING = [
    Fault(
        "the load-balancing loss is not divided by the microbatches",
        "aux_loss_scale",
        "loss_scale * cp / num_microbatches",
        "loss_scale * cp",
        tiny(EP, LAST_ROUTER),
    ),
    Fault(
        "the load-balancing loss forgets that its gradients are averaged over cp",
        "aux_loss_scale",
        "loss_scale * cp",
        "loss_scale",
        tiny(CP, LAST_ROUTER),
    ),
    Fault(
        "each rank counts the load of its own tokens",
        "TopKRouter._with_balance_loss",
        "all_reduce(counted_TE.sum(dim=0), scope)",
        "counted_TE.sum(dim=0) * scope.size",
        tiny(CP, LAST_ROUTER),
    ),
    Fault(
        "every rank adds the whole z loss",
        "TopKRouter._with_z_loss",
        "1.0 / self.groups.tp_cp.size",
        "1.0",
        tiny(SP, LAST_ROUTER),
    ),
    Fault(
        "the router's gradients are not summed over tp",
        "TopKRouter.__init__",
        "sequence_parallel and groups.tp.size > 1",
        "False",
        tiny(SP, LAST_ROUTER),
    ),
    Fault(
        "the expert bias enters the weights",
        "topk_routing",
        "combine_weights(logits_TE, map_TE, top_k, score_function=score_function, pre_softmax=pre_softmax)",
        "combine_weights(logits_TE if expert_bias is None else logits_TE + expert_bias, map_TE, top_k, "
        "score_function=score_function, pre_softmax=pre_softmax)",
        deepseek(EP, "loss of step 2", steps=2),
    ),
    Fault(
        "expert biases follow the load of one rank",
        "finish_router_step",
        "all_reduce(torch.stack(loads), groups.tp_dp_cp)",
        "torch.stack(loads)",
        deepseek(EP, "layers.1.mlp.router.expert_bias parameter"),
    ),
    Fault(
        "the capacity is one token too small",
        "get_capacity",
        "math.ceil(num_tokens * top_k / num_experts * capacity_factor)",
        "math.floor(num_tokens * top_k / num_experts * capacity_factor)",
        tiny(EP, "layers.0.mlp.router output", capacity_factor=0.7),
    ),
    Fault(
        "a full expert keeps the tokens with the smallest weights",
        "apply_capacity",
        "wish_ET.argsort(dim=1, descending=True, stable=True)",
        "wish_ET.argsort(dim=1, descending=False, stable=True)",
        tiny(EP, "layers.0.mlp.router output", capacity_factor=0.7),
    ),
]

EXPERTS = [
    Fault(
        "experts are initialised by their local index",
        "make_expert_parameter",
        'f"{name}.{expert}.{part}"',
        'f"{name}.{expert % local}.{part}"',
        tiny(EP, "layers.0.mlp output"),
    ),
    Fault(
        "the weight of a row is applied before the activation",
        "GroupedExperts.compute",
        "self.weighted_activation(self.fc1(tokens_NH, segments), probs_N)",
        "self.activation(self.fc1(tokens_NH, segments) * probs_N.unsqueeze(-1))",
        tiny(EP, "layers.0.mlp output"),
    ),
    Fault(
        "the weight of a row is applied after the second projection",
        "GroupedExperts.compute",
        "self.fc2(self.weighted_activation(self.fc1(tokens_NH, segments), probs_N), segments)",
        "self.fc2(self.activation(self.fc1(tokens_NH, segments)), segments) * probs_N.unsqueeze(-1)",
        "tests/unit/test_moe_weight_of_rows.py",
    ),
    Fault(
        "gradients of an expert are divided by its own replicas only",
        "_averaging",
        "1.0 / replicas",
        "1.0 / (groups.edp.size if is_expert else replicas)",
        tiny(REPLICAS, LAST_EXPERTS),
    ),
    Fault(
        "gradients of different experts are added up",
        "build_buffers",
        "groups.edp if is_expert else groups.dp_cp",
        "groups.dp_cp",
        tiny(REPLICAS, LAST_EXPERTS),
    ),
    Fault(
        "an averaging collective ignores that few ranks hold an expert",
        "_averaging",
        "groups.edp.size / replicas if is_expert else 1.0",
        "1.0",
        tiny({**REPLICAS, "average_in_collective": True}, LAST_EXPERTS),
    ),
    Fault(
        "the shared experts' gate keeps its own gradients under sequence parallelism",
        "SharedExpertGate.__init__",
        "record_of(self.weight).sequence_parallel = sequence_parallel",
        "record_of(self.weight).sequence_parallel = False",
        deepseek(SP, "layers.3.mlp.shared_experts.gate.weight gradient", shared_expert_gate=True),
    ),
    Fault(
        "overlapped shared experts don't sum their partial results",
        "SharedExpertMLP.post_forward_comm",
        "leave(stage.cached_stage, self.group)",
        "stage.cached_stage.chunk(self.group.size)[self.group.rank]",
        deepseek({**SP, "shared_expert_overlap": True}, "layers.1.mlp output"),
    ),
]

FLOAT8 = [
    Fault(
        "the first step in fp8 casts the rows of experts by their own magnitudes",
        "Float8Scaling.calibrates",
        'self.recipe.name == "delayed" and not self._steps',
        "False",
        tiny(EP, "layers.0.mlp output", fp8="hybrid"),
    ),
    Fault(
        "weights in fp8 take the scales of another rank's experts",
        "Float8Scaling.grouped_gemms",
        "range(first + 1 + mine.start, first + 1 + mine.stop)",
        "range(first + 1, first + 1 + len(mine))",
        Comparison(EP, "loss of step 2", preset="tiny_moe", changes={"fp8": "hybrid"}, steps=2),
    ),
    Fault(
        "one scale of fp8 serves the weights of all experts",
        "GroupedFloat8Gemms._cast",
        "zip(self._experts, x, strict=True)",
        "zip([self._index] * len(x), x, strict=True)",
        "tests/unit/test_fp8_experts.py -k cast_operands",
    ),
    Fault(
        "a block of fp8 holds rows of two experts",
        "GroupedBlockwiseGemms.wgrad",
        "t.split(segments.counts)",
        "(t,)",
        "tests/unit/test_fp8_experts.py -k cast_operands",
    ),
    Fault(
        "the rows of an expert are not filled up for fp8 tensor cores",
        "GroupedFloat8Gemms._filled",
        "segments.aligned() if has_tensor_cores(x.device) else segments",
        "segments",
        "tests/unit/test_fp8_experts.py -k tensor_cores",
    ),
    Fault(
        "the fp8 gradient of an expert without rows is what the memory held",
        "grouped_scaled_weight_gradient",
        "made.masked_fill_(segments.empty(made.device)[:, None, None], 0)",
        "made",
        "tests/unit/test_fp8_experts.py -k tensor_cores",
    ),
]

DISPATCH = [
    Fault(
        "results are returned in the order in which the rows arrived",
        "MoEAlltoAllTokenDispatcher.combine_preprocess",
        "sort_chunks_by_idxs(output_NH, by_expert, self.restore_output_by_local_experts)",
        "sort_chunks_by_idxs(output_NH, by_expert, self.sort_input_by_local_experts)",
        tiny(EP, "layers.0.mlp output"),
    ),
    Fault(
        "a rank of etp keeps its partial sum",
        "MoEAlltoAllTokenDispatcher.combine_preprocess",
        "mappings.reduce_scatter_to_sequence_parallel_region(output_NH, self.etp, "
        "input_split_sizes=splits.output_splits_tp)",
        "output_NH.split(splits.output_splits_tp)[self.etp.rank]",
        tiny(ETP, "layers.0.mlp output"),
    ),
    Fault(
        "the table of counts is read with ep and etp swapped",
        "MoEAlltoAllTokenDispatcher._by_axes",
        "table.view(self.ep.size, self.etp.size, self.num_experts).transpose(0, 1)",
        "table.view(self.etp.size, self.ep.size, self.num_experts)",
        "tests/parallel/test_moe_dispatchers.py -k computes_the_layer",
    ),
    Fault(
        "results are returned with input and output splits swapped",
        "MoEAlltoAllTokenDispatcher.token_combine",
        "all_to_all_start(hidden, self.ep, splits.input_splits, splits.output_splits)",
        "all_to_all_start(hidden, self.ep, splits.output_splits, splits.input_splits)",
        "tests/parallel/test_moe_dispatchers.py -k computes_the_layer",
    ),
    Fault(
        "every rank selects gathered tokens for the experts of the first rank",
        "MoETokenDispatcher.__init__",
        "groups.ep.rank * self.num_local_experts",
        "0",
        tiny({**EP, "dispatcher": "allgather"}, "layers.0.mlp output"),
    ),
    Fault(
        "a token's rows overwrite each other instead of being added",
        "_sum_rows",
        "rows_NH.new_zeros(num_tokens, rows_NH.shape[1]).index_add_(0, index_N, rows_NH)",
        "rows_NH.new_zeros(num_tokens, rows_NH.shape[1]).index_copy_(0, index_N, rows_NH)",
        tiny(EP, "layers.0.mlp output"),
    ),
]
