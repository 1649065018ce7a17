"""Planted faults: mistakes that people make in a training stack like this one, and what finds each.

Every entry is one change of the source (`planting.py` says how it is made and found). The list grows with every part of
labkit; `make sweep` runs all of it, `make test` a subset, and docs/faults.md is its table.

What the microscope must name follows from the fault, by the order of a training step: outputs of blocks, the loss,
gradients from the output back to the input, updated parameters. A gradient that arrives wrong at the top of a block
spoils what lies below it; a wrong norm or update spoils the first parameter, the word embedding.
"""

from __future__ import annotations

from planting import Comparison, Fault

TP = {"tp": 2}
PP = {"pp": 2}
DP = {"world_size": 2}
SP = {"tp": 2, "sequence_parallel": True}
CP = {"cp": 2}
ZERO = {"distributed_optimizer": True, "bucket_size": 10_000}
EMBEDDING = "embedding.word.weight"

TENSOR_PARALLEL = [
    Fault(
        "g averages the partial outputs instead of adding them",
        "parallel/layers.py",
        "y = reduce(partial, plan.group)",
        'y = reduce(partial, plan.group, op="avg")',
        Comparison(TP, "layers.0.attention output"),
    ),
    Fault(
        "f averages the gradients of a column layer's input",
        "parallel/layers.py",
        "pending = start(grad_x, plan.group)",
        'pending = start(grad_x, plan.group, op="avg")',
        Comparison(TP, "layers.3.mlp.norm.bias gradient"),
    ),
    Fault(
        "every rank adds the bias of a row layer",
        "parallel/layers.py",
        "y.add_(bias)",
        "y.add_(bias, alpha=plan.group.size)",
        Comparison(TP, "loss of step 1", steps=2),
    ),
    Fault(
        "rows of ids that belong to other ranks are not zeroed",
        "parallel/vocab.py",
        "own = own.masked_fill(foreign.unsqueeze(-1), 0.0)",
        "pass",
        Comparison(TP, "embedding output"),
    ),
    Fault(
        "sums of exponentials are added without a common maximum",
        "parallel/cross_entropy.py",
        "sums[0] *= rescale",
        "pass",
        Comparison(TP, "loss"),
    ),
    Fault(
        "label smoothing divides by the columns of one rank",
        "parallel/cross_entropy.py",
        "mean_log_probability = sums[2] / shard.vocab_size - log_sum",
        "mean_log_probability = sums[2] / shard.columns - log_sum",
        Comparison(TP, "loss", changes={"label_smoothing": 0.1}),
    ),
    Fault(
        "padding columns of the vocabulary enter the loss",
        "parallel/cross_entropy.py",
        "columns = min(max(vocab_size - first, 0), width)",
        "columns = width",
        Comparison(TP, "loss", changes={"make_vocab_size_divisible_by": 96}),
    ),
    Fault(
        "a rank's slice ignores that gate and up are stacked",
        "parallel/weights.py",
        "torch.cat(chunks[rank::size], dim=dim)",
        "torch.cat(chunks[rank * stride : (rank + 1) * stride], dim=dim)",
        Comparison(TP, "layers.0.mlp output", preset="llama_tiny"),
    ),
    Fault(
        "the first id beyond the vocabulary is let through",
        "parallel/vocab.py",
        "if lowest >= 0 and highest < vocab_size:",
        "if lowest >= 0 and highest <= vocab_size:",
        "tests/parallel/test_vocab.py -k ids_out_of_range",
    ),
]

GRADIENTS = [
    Fault(
        "the two copies of the word embedding keep their own gradients",
        "parallel/gradients.py",
        'if getattr(parameter, "shared_embedding", False):',
        "if False:",
        Comparison(PP, f"{EMBEDDING} gradient"),
    ),
    Fault(
        "the norm counts parameters that all ranks of tp hold once a rank",
        "parallel/gradients.py",
        'getattr(parameter, "tensor_model_parallel", False) or tensor_parallel.rank == 0',
        "True",
        Comparison(TP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "the norm counts the copy of the tied weight",
        "parallel/gradients.py",
        'if getattr(parameter, "shared", False):',
        "if False:",
        Comparison(PP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "gradients are clipped where the norm is below the limit",
        "parallel/gradients.py",
        "return factor if factor < 1.0 and",
        "return factor if factor > 1.0 and",
        Comparison(DP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "gradients of the step before are not cleared",
        "train/stepping.py",
        "chunk.zero_grad_buffer()",
        "pass",
        Comparison(TP, "final_norm.bias gradient of step 1", steps=2),
    ),
    Fault(
        "norms and biases decay",
        "parallel/parameter_groups.py",
        'return param.ndim == 1 or name.endswith(".bias")',
        "return False",
        Comparison(TP, "layers.0.attention.norm.weight parameter"),
    ),
    Fault(
        "replicas report their own loss",
        "train/stepping.py",
        "all_reduce(totals, groups.dp_cp)",
        "pass",
        Comparison(DP, "loss"),
    ),
    Fault(
        "every replica reads the same samples",
        "data/gpt_data.py",
        "dp_rank=groups.dp.rank, step=step)",
        "dp_rank=0, step=step)",
        Comparison(DP, "loss"),
    ),
]

PIPELINE = [
    Fault(
        "the loss is not divided by the number of microbatches",
        "schedules/runtime.py",
        "self._mean(loss, tokens) / count",
        "self._mean(loss, tokens)",
        Comparison(PP, "final_norm.bias gradient"),
    ),
    Fault(
        "warm-up of interleaving counts the distance to the last rank once",
        "schedules/tables.py",
        "warmup = 2 * (pp_size - pp_rank - 1)",
        "warmup = (pp_size - pp_rank - 1)",
        "tests/unit/test_schedules_tables.py -k sources",
    ),
    Fault(
        "backward passes the chunks in the order of forward",
        "schedules/tables.py",
        "backward = [chunk - num_model_chunks for chunk in chunks]",
        "backward = [-chunk - 1 for chunk in chunks]",
        "tests/unit/test_schedules_tables.py -k sources",
    ),
    Fault(
        "a sent output keeps its memory",
        "parallel/deallocation.py",
        "output.data = torch.empty(1, dtype=output.dtype, device=output.device)",
        "pass",
        "tests/parallel/test_activation_release.py -k one_element",
    ),
    Fault(
        "odd ranks issue their transfers in the order of even ones",
        "schedules/lowering.py",
        "_MEGATRON[t.operation, t.message.kind] ^ (rank % 2)",
        "_MEGATRON[t.operation, t.message.kind]",
        "tests/unit/test_schedules_transfers.py",
    ),
]

RANDOM_STATES_AND_GROUPS = [
    Fault(
        "all ranks of tp drop the same elements inside a region",
        "parallel/random.py",
        "own + 2718 + groups.tp.rank",
        "own + 2718",
        "tests/parallel/test_random.py -k masks",
    ),
    Fault(
        "a random state starts again with every region",
        "parallel/random.py",
        "            self._states[name] = self._current_state()\n            self._switch_to(outer)",
        "            self._switch_to(outer)",
        "tests/parallel/test_random.py -k forked",
    ),
    Fault(
        "axes are laid out from the right of the order string",
        "parallel/rank_generator.py",
        "dict(zip(self.axes, prefix_product(self.ordered_size)))",
        "dict(zip(self.axes[::-1], prefix_product(self.ordered_size[::-1])))",
        "tests/unit/test_rank_generator.py -k one_ranks_group",
    ),
]

SEQUENCE_PARALLEL = [
    Fault(
        "nobody adds up the gradients of norms over tp",
        "parallel/gradients.py",
        "grads = [main_grad(p) for p in _parameters(chunks) if",
        "grads = [main_grad(p) for p in () if",
        Comparison(SP, "final_norm.bias gradient"),
    ),
    Fault(
        "every rank adds the vectors of the first positions",
        "models/build.py",
        "first = self.group.rank * part if",
        "first = 0 if",
        Comparison(SP, "embedding output"),
    ),
    Fault(
        "the loss averages the gradients of its hidden states",
        "parallel/cross_entropy.py",
        "start(partial_NH, group)",
        'start(partial_NH, group, op="avg")',
        Comparison(SP, "final_norm.bias gradient"),
    ),
    Fault(
        "all ranks drop the same of their different positions",
        "models/build.py",
        'with self.rng.fork("model-parallel-rng"):',
        "if True:",
        "tests/parallel/test_sequence_parallel.py -k drops",
    ),
]

CONTEXT_PARALLEL = [
    Fault(
        "every rank takes the positions of the first",
        "models/gpt.py",
        "self.cp.size, self.cp.rank, device=device)",
        "self.cp.size, 0, device=device)",
        Comparison(CP, "embedding output"),
    ),
    Fault(
        "every rank rotates by the positions of the first",
        "models/gpt.py",
        "self.cp.size, self.cp.rank, device=device)",
        "self.cp.size, 0, device=device)",
        Comparison(CP, "layers.0.attention output", preset="llama_tiny"),
    ),
    Fault(
        "the ranks cut the batch plainly, and attention takes it for zigzag",
        "parallel/context.py",
        'return split_sequence(x, cp, rank, dim, "zigzag")',
        'return split_sequence(x, cp, rank, dim, "contiguous")',
        Comparison(CP, "embedding output"),
    ),
    Fault(
        "blocks are joined without rescaling what was summed before",
        "parallel/attention_block.py",
        "out.mul_((lse - total).exp()[..., None])",
        "out",
        Comparison(CP, "layers.0.attention output"),
    ),
    Fault(
        "queries see the second half of the keys of lower ranks",
        "parallel/context_plan.py",
        "return Block(BOTH, (0, 1)) if source < rank",
        "return Block(BOTH, BOTH) if source < rank",
        Comparison(CP, "layers.0.attention output"),
    ),
    Fault(
        "keys go round the ring the other way than the plan says",
        "parallel/ring_attention.py",
        "for way in (1, -1)",
        "for way in (-1, 1)",
        Comparison({"cp": 4}, "layers.0.attention output"),
    ),
    Fault(
        "gradients of keys stay where they were computed",
        "parallel/ring_attention.py",
        "own += sums.held",
        "pass",
        Comparison(CP, "layers.3.attention.qkv.bias gradient"),
    ),
    Fault(
        "gathered keys are taken in the order of ranks",
        "parallel/ring_attention.py",
        "return join_sequence(gathered.chunk(group.size, dim=3), 3, layout)",
        "return gathered",
        Comparison({**CP, "cp_comm_type": "all_gather"}, "layers.0.attention output"),
    ),
    Fault(
        "the loss is not multiplied by cp, over which it will be averaged",
        "schedules/runtime.py",
        "return loss_sum * cp.size / tokens.clamp(min=1)",
        "return loss_sum / tokens.clamp(min=1)",
        Comparison(CP, "final_norm.bias gradient"),
    ),
    Fault(
        "each rank of cp divides by the tokens that it counts itself",
        "schedules/runtime.py",
        "tokens = all_reduce(tokens, cp, in_place=False)",
        "tokens = tokens * cp.size",
        "tests/parallel/test_context_parallel.py -k unequal",
    ),
]

DATA_PARALLEL = [
    Fault(
        "gradients are summed over replicas, not averaged",
        "parallel/distributed_data_parallel.py",
        'return 1.0 / replicas, "sum"',
        'return 1.0, "sum"',
        Comparison(DP, "final_norm.bias gradient"),
    ),
    Fault(
        "the collective averages what was scaled already",
        "parallel/distributed_data_parallel.py",
        "is_expert else 1.0)",
        "is_expert else 1.0 / replicas)",
        Comparison({**DP, "average_in_collective": True}, "final_norm.bias gradient"),
    ),
    Fault(
        "gradients of experts are divided by the ranks that hold them",
        "parallel/distributed_data_parallel.py",
        'return 1.0 / replicas, "sum"',
        'return 1.0 / (groups.edp.size if is_expert else replicas), "sum"',
        Comparison({**SP, "etp": 1, "world_size": 4}, "layers.3.mlp.fc2.bias gradient", experts=True),
    ),
    Fault(
        "gradients of experts are reduced over the dense replicas",
        "parallel/distributed_data_parallel.py",
        "groups.edp if is_expert else groups.dp_cp",
        "groups.dp_cp",
        Comparison({**SP, "etp": 1, "world_size": 4}, "layers.3.mlp.fc2.bias gradient", experts=True),
    ),
    Fault(
        "the last bucket is never reduced",
        "parallel/distributed_data_parallel.py",
        "under_way = self.buckets\n",
        "under_way = self.buckets[:-1]\n",
        Comparison({**DP, "bucket_size": 10_000}, f"{EMBEDDING} gradient"),
    ),
    Fault(
        "a tied weight is sent before the other stage has added to it",
        "parallel/distributed_data_parallel.py",
        "bucket.waits_for_other_chunk |= any(",
        "bucket.waits_for_other_chunk |= bool(()) and any(",
        "tests/parallel/test_distributed_data_parallel.py -k two_chunks",
    ),
    Fault(
        "a bucket leaves before those ahead of it",
        "parallel/distributed_data_parallel.py",
        "            if not bucket.is_complete:\n                return\n",
        "            if not bucket.is_complete:\n                continue\n",
        "tests/parallel/test_distributed_data_parallel.py -k one_order",
    ),
    Fault(
        "each replica divides by its own tokens",
        "parallel/gradients.py",
        "collectives.all_reduce(count, groups.dp_cp)",
        "pass",
        Comparison({**DP, "calculate_per_token_loss": True}, "final_norm.bias gradient"),
    ),
]

DISTRIBUTED_OPTIMIZER = [
    Fault(
        "updated parameters are not gathered",
        "parallel/distributed_optimizer.py",
        "gather.updated()",
        "pass",
        Comparison({**DP, **ZERO}, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "the norm counts every instance",
        "parallel/distributed_optimizer.py",
        "first_instance and counts_once",
        "counts_once",
        Comparison({"world_size": 4, **ZERO, "num_distributed_optimizer_instances": 2}, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "instances keep their own gradients",
        "parallel/grad_buffers.py",
        "yield all_reduce_async(part, self.across, self.op)",
        "pass",
        Comparison({"world_size": 4, **ZERO, "num_distributed_optimizer_instances": 2}, "final_norm.bias gradient"),
    ),
    Fault(
        "the tied embedding shares a bucket, which the two stages cut differently",
        "parallel/bucket_plan.py",
        "alone = parameter.shared_embedding and distributed_optimizer",
        "alone = False",
        Comparison({**PP, "world_size": 4, "distributed_optimizer": True}, f"{EMBEDDING} gradient"),
    ),
    Fault(
        "a forward does not wait for the parameters that it reads",
        "parallel/param_gather.py",
        "for place in places:",
        "for place in places[:0]:",
        "tests/parallel/test_distributed_optimizer.py",
    ),
    Fault(
        "buckets are not padded to a multiple of the ranks",
        "parallel/bucket_plan.py",
        "math.lcm(dp, BUCKET_ALIGNMENT, pad)",
        "math.lcm(BUCKET_ALIGNMENT, pad)",
        "tests/unit/test_bucket_plan.py",
    ),
    Fault(
        "a piece forgets where in its parameter it begins",
        "parallel/shard_map.py",
        "yield Piece(rank, number, name, at, stop, at - start)",
        "yield Piece(rank, number, name, at, stop, 0)",
        "tests/unit/test_shard_map.py",
    ),
]

RECOMPUTATION = [
    Fault(
        "a layer draws other random numbers the second time",
        "parallel/recompute.py",
        "        self.restore(rng)\n        try:",
        "        try:",
        "tests/unit/test_recompute.py -k without_recomputation",
    ),
    Fault(
        "random states are left where the second forward ended",
        "parallel/recompute.py",
        "            before.restore(rng)",
        "            pass",
        "tests/unit/test_recompute.py",
    ),
    Fault(
        "the output of a norm is made again and not dropped",
        "parallel/recompute.py",
        "self._output.untyped_storage().resize_(0)",
        "pass",
        "tests/unit/test_activation_bytes.py tests/unit/test_recompute.py",
    ),
    Fault(
        "a group of recomputed layers loses its last one",
        "models/recomputation.py",
        "[(i, min(i + self._count, layers), True) for",
        "[(i, min(i + self._count, layers - 1), True) for",
        Comparison({"recompute_granularity": "full", "recompute_num_layers": 2}, "layers.3.attention output"),
    ),
]

PRECISION = [
    Fault(
        "the loss scale is lowered one overflow too late",
        "train/loss_scaler.py",
        "if self.hysteresis_left <= 0:",
        "if self.hysteresis_left < 0:",
        "tests/unit/test_train_loss_scaler.py",
    ),
    Fault(
        "patience comes back with every good step",
        "train/loss_scaler.py",
        "        self.good_steps += 1\n",
        "        self.good_steps += 1\n        self.hysteresis_left = self.hysteresis\n",
        "tests/unit/test_train_loss_scaler.py",
    ),
    Fault(
        "a rank skips a step by itself",
        "parallel/gradients.py",
        "return GradientStatistics(math.sqrt(squares), math.isfinite(squares) and math.isfinite(others))",
        "return GradientStatistics(math.sqrt(squares), bool(_sum_of_squares(counted, device).isfinite()))",
        "tests/parallel/test_numerical_faults.py -k planted",
    ),
    Fault(
        "scaled gradients reach the optimizer",
        "train/stepping.py",
        "factor = clip_factor(norm, clip_grad or math.inf) / scale",
        "factor = clip_factor(norm, clip_grad or math.inf)",
        "tests/parallel/test_numerical_faults.py -k fp16_finds",
    ),
    Fault(
        "16-bit weights are updated without a master",
        "train/optimizer.py",
        "return param.detach().float() if param.dtype in LOW_PRECISION else param",
        "return param.detach().clone() if param.dtype in LOW_PRECISION else param",
        "tests/unit/test_train_optimizer.py -k bf16",
    ),
    Fault(
        "gradients in fp8 are cast to e4m3",
        "parallel/fp8.py",
        'return E5M2 if self.hybrid and kind == "grad" else E4M3',
        "return E4M3",
        "tests/unit/test_fp8.py -k hybrid",
    ),
    Fault(
        "fp8 values beyond the format become NaN",
        "parallel/fp8.py",
        "return (wide * scale).clamp(-limit, limit).to(dtype)",
        "return (wide * scale).to(dtype)",
        "tests/unit/test_fp8.py -k saturates",
    ),
]

FAULTS = [
    *TENSOR_PARALLEL,
    *SEQUENCE_PARALLEL,
    *CONTEXT_PARALLEL,
    *GRADIENTS,
    *DATA_PARALLEL,
    *DISTRIBUTED_OPTIMIZER,
    *RECOMPUTATION,
    *PRECISION,
    *PIPELINE,
    *RANDOM_STATES_AND_GROUPS,
]
