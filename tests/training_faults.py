"""Planted faults of what happens around the layers: gradients, updates, schedules, states (see `faults.py`)."""

from __future__ import annotations

from planting import Comparison, Fault

TP = {"tp": 2}
PP = {"pp": 2}
DP = {"world_size": 2}
ZERO = {"distributed_optimizer": True, "bucket_size": 10_000}
EMBEDDING = "embedding.word.weight"

GRADIENTS = [
    Fault(
        "the two copies of the word embedding keep their own gradients",
        "parallel/data_parallel/gradients.py",
        "if record.shared_embedding:",
        "if False:",
        Comparison(PP, f"{EMBEDDING} gradient"),
    ),
    Fault(
        "the copies of a key/value head keep their own gradients",
        "parallel/data_parallel/gradients.py",
        "_sum_replicated_rows(chunks, groups)\n        _sum_tied",
        "_sum_tied",
        Comparison(TP, "layers.3.attention.qkv.bias gradient", changes={"kv_heads": 1}),
    ),
    Fault(
        "the norm counts every copy of a key/value head",
        "parallel/data_parallel/gradients.py",
        "if replicated is None or tensor_parallel.rank % replicated.ranks == 0:",
        "if True:",
        Comparison(TP, f"{EMBEDDING} parameter", changes={"kv_heads": 1}),
    ),
    Fault(
        "the copies of a key/value head are on ranks that are no neighbours",
        "parallel/weights.py",
        "block = tensor_part(full, rank // replicated.ranks, size // replicated.ranks, 0)",
        "block = tensor_part(full, rank % (size // replicated.ranks), size // replicated.ranks, 0)",
        Comparison({"tp": 4}, "layers.0.attention output", changes={"kv_heads": 2}),
    ),
    Fault(
        "the norm counts parameters that all ranks of tp hold once a rank",
        "parallel/data_parallel/gradients.py",
        "return parameter.numel() if tensor_parallel.rank == 0 else 0",
        "return parameter.numel()",
        Comparison(TP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "the norm counts the copy of the tied weight",
        "parallel/data_parallel/gradients.py",
        "if record.shared:",
        "if False:",
        Comparison(PP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "gradients are clipped where the norm is below the limit",
        "parallel/data_parallel/gradients.py",
        "return factor if factor < 1.0 and",
        "return factor if factor > 1.0 and",
        Comparison(DP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "gradients of the step before are not cleared",
        "parallel/data_parallel/grad_buffers.py",
        "record.has_gradient = record.added_elsewhere",
        "pass",
        Comparison(TP, "final_norm.bias gradient of step 2", steps=2),
    ),
    Fault(
        "norms and biases decay",
        "parallel/data_parallel/parameter_groups.py",
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

DATA_PARALLEL = [
    Fault(
        "gradients are summed over replicas, not averaged",
        "parallel/data_parallel/grad_buffers.py",
        'return 1.0 / replicas, "sum"',
        'return 1.0, "sum"',
        Comparison(DP, "final_norm.bias gradient"),
    ),
    Fault(
        "the collective averages what was scaled already",
        "parallel/data_parallel/grad_buffers.py",
        "is_expert else 1.0)",
        "is_expert else 1.0 / replicas)",
        Comparison({**DP, "average_in_collective": True}, "final_norm.bias gradient"),
    ),
    Fault(
        "the last bucket is never reduced",
        "parallel/data_parallel/distributed_data_parallel.py",
        "under_way = self.buckets\n",
        "under_way = self.buckets[:-1]\n",
        Comparison({**DP, "bucket_size": 10_000}, "layers.0.attention.norm.bias gradient"),
    ),
    Fault(
        "a tied weight is sent before the other stage has added to it",
        "parallel/data_parallel/distributed_data_parallel.py",
        "bucket.waits_for_other_chunk |= any(",
        "bucket.waits_for_other_chunk |= bool(()) and any(",
        "tests/parallel/test_distributed_data_parallel.py -k two_chunks",
    ),
    Fault(
        "a bucket leaves before those ahead of it",
        "parallel/data_parallel/distributed_data_parallel.py",
        "            if not bucket.is_complete:\n                return\n",
        "            if not bucket.is_complete:\n                continue\n",
        "tests/parallel/test_distributed_data_parallel.py -k nothing_else",
    ),
    Fault(
        "each replica divides by its own tokens",
        "parallel/data_parallel/gradients.py",
        "collectives.all_reduce(count, groups.dp_cp)",
        "pass",
        Comparison({**DP, "calculate_per_token_loss": True}, "final_norm.bias gradient"),
    ),
]

DISTRIBUTED_OPTIMIZER = [
    Fault(
        "updated parameters are not gathered",
        "parallel/data_parallel/distributed_optimizer.py",
        "gather.updated()",
        "pass",
        Comparison({**DP, **ZERO}, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "a share of the state ignores the factor of its learning rate",
        "parallel/data_parallel/distributed_optimizer.py",
        'state["lr"] = lr * group.lr_factor',
        'state["lr"] = lr',
        "tests/parallel/test_distributed_optimizer.py -k one_process",
    ),
    Fault(
        "the norm counts every instance",
        "parallel/data_parallel/distributed_optimizer.py",
        "counted_elements(parameter, layout) if first_instance else 0",
        "counted_elements(parameter, layout)",
        Comparison({"world_size": 4, **ZERO, "num_distributed_optimizer_instances": 2}, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "instances keep their own gradients",
        "parallel/data_parallel/grad_buffers.py",
        "yield all_reduce_async(part, self.across, self.op)",
        "pass",
        Comparison({"world_size": 4, **ZERO, "num_distributed_optimizer_instances": 2}, "final_norm.bias gradient"),
    ),
    Fault(
        "the tied embedding shares a bucket, which the two stages cut differently",
        "parallel/data_parallel/bucket_layout.py",
        "alone = parameter.shared_embedding and distributed_optimizer",
        "alone = False",
        "tests/unit/test_bucket_plan.py -k shared_embedding",
    ),
    Fault(
        "a forward does not wait for the parameters that it reads",
        "parallel/data_parallel/param_gather.py",
        "for place in places:",
        "for place in places[:0]:",
        "tests/parallel/test_distributed_optimizer.py",
    ),
    Fault(
        "buckets are not padded to a multiple of the ranks",
        "parallel/data_parallel/bucket_layout.py",
        "math.lcm(dp, BUCKET_ALIGNMENT, pad)",
        "math.lcm(BUCKET_ALIGNMENT, pad)",
        "tests/unit/test_bucket_plan.py",
    ),
    Fault(
        "a piece forgets where in its parameter it begins",
        "parallel/data_parallel/bucket_layout.py",
        "yield Piece(rank, number, name, at, stop, at - start)",
        "yield Piece(rank, number, name, at, stop, 0)",
        "tests/unit/test_shard_map.py",
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
        "parallel/data_parallel/gradients.py",
        "return GradientStatistics(math.sqrt(squares), math.isfinite(squares) and math.isfinite(others))",
        "return GradientStatistics(math.sqrt(squares), bool(_sum_of_squares(counted, device).isfinite()))",
        "tests/parallel/test_numerical_faults.py -k planted",
    ),
    Fault(
        "scaled gradients reach the optimizer",
        "train/stepping.py",
        "factor = clip_factor(norm, clip_grad or math.inf) / scale",
        "factor = clip_factor(norm, clip_grad or math.inf)",
        "tests/parallel/test_numerical_faults.py -k fp16_trains",
    ),
    Fault(
        "the gradient norm keeps the loss scale",
        "train/stepping.py",
        "norm /= scale",
        "pass",
        "tests/parallel/test_numerical_faults.py -k fp16_trains",
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
        "fp8/recipe.py",
        'return E5M2 if self.hybrid and kind == "grad" else E4M3',
        "return E4M3",
        "tests/unit/test_fp8.py -k hybrid",
    ),
    Fault(
        "fp8 values beyond the format become infinite",
        "fp8/casting.py",
        "return (wide * scale).clamp(-limit, limit).to(dtype)",
        "return (wide * scale).to(dtype)",
        "tests/unit/test_fp8.py -k saturates",
    ),
]

PIPELINE = [
    Fault(
        "the loss is not divided by the number of microbatches",
        "schedules/microbatches.py",
        "self.weights[microbatch] = 1 / self._count",
        "self.weights[microbatch] = 1",
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
        "output.data = _one_element(output.dtype, output.device)",
        "pass",
        "tests/parallel/test_activation_release.py -k one_element",
    ),
    Fault(
        "odd ranks issue their transfers in the order of even ones",
        "parallel/posting_order.py",
        "return _EVEN[operation, kind] ^ (rank % 2)",
        "return _EVEN[operation, kind]",
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
        "the same experts of other ranks drop the same elements",
        "parallel/random.py",
        "own + 1024 + 100 * groups.ep.rank + groups.etp.rank",
        "own + 1024 + groups.etp.rank",
        "tests/parallel/test_random.py -k seed_of_the_table",
    ),
    Fault(
        "a random state starts again with every region",
        "parallel/random.py",
        "            self._states[name] = self._current_state()\n            self._switch_to(outer[0])",
        "            self._switch_to(outer[0])",
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
