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
        "_sum_tied_embedding",
        "record_of(parameter).shared_embedding",
        "False",
        Comparison(PP, f"{EMBEDDING} gradient"),
    ),
    Fault(
        "the copies of a key/value head keep their own gradients",
        "finalize_model_grads",
        "_sum_replicated_rows(chunks, groups)",
        "",
        Comparison(TP, "layers.3.attention.qkv.bias gradient", changes={"kv_heads": 1}),
    ),
    Fault(
        "the norm counts every copy of a key/value head",
        "counted_elements",
        "replicated is None or tensor_parallel.rank % replicated.ranks == 0",
        "True",
        Comparison(TP, f"{EMBEDDING} parameter", changes={"kv_heads": 1}),
    ),
    Fault(
        "the copies of a key/value head are on ranks that aren't neighbours",
        "tensor_part",
        "rank // replicated.ranks",
        "rank % (size // replicated.ranks)",
        Comparison({"tp": 4}, "layers.0.attention output", changes={"kv_heads": 2}),
    ),
    Fault(
        "the norm counts replicated parameters once per tp rank",
        "counted_elements",
        "parameter.numel() if tensor_parallel.rank == 0 else 0",
        "parameter.numel()",
        Comparison(TP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "the norm counts the copy of the tied weight",
        "counted_elements",
        "record.shared",
        "False",
        Comparison(PP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "gradients are clipped where the norm is below the limit",
        "clip_factor",
        "factor < 1.0",
        "factor > 1.0",
        Comparison(DP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "gradients of the previous step are not cleared",
        "GradBucket.reset",
        "record.has_gradient = record.added_elsewhere",
        "pass",
        Comparison(TP, "final_norm.bias gradient of step 2", steps=2),
    ),
    Fault(
        "norms and biases get weight decay",
        "is_bias_or_norm",
        'param.ndim == 1 or name.endswith(".bias")',
        "False",
        Comparison(TP, "layers.0.attention.norm.weight parameter"),
    ),
    Fault(
        "replicas report their own loss",
        "Pipeline.means",
        "all_reduce(totals, groups.dp_cp)",
        "pass",
        Comparison(DP, "loss"),
    ),
    Fault(
        "every replica reads the same samples",
        "batches:_microbatches",
        "microbatch_positions(config, dp=groups.dp.size, dp_rank=groups.dp.rank, step=step)",
        "microbatch_positions(config, dp=groups.dp.size, dp_rank=0, step=step)",
        Comparison(DP, "loss"),
    ),
]

DATA_PARALLEL = [
    Fault(
        "gradients are summed over replicas, not averaged",
        "_averaging",
        "1.0 / replicas",
        "1.0",
        Comparison(DP, "final_norm.bias gradient"),
    ),
    Fault(
        "the collective averages gradients that are already scaled",
        "_averaging",
        "groups.edp.size / replicas if is_expert else 1.0",
        "groups.edp.size / replicas if is_expert else 1.0 / replicas",
        Comparison({**DP, "average_in_collective": True}, "final_norm.bias gradient"),
    ),
    Fault(
        "the last bucket is never reduced",
        "DistributedDataParallel.finish_grad_sync",
        "under_way = self.buckets",
        "under_way = self.buckets[:-1]",
        Comparison({**DP, "bucket_size": 10_000}, "layers.0.attention.norm.bias gradient"),
    ),
    Fault(
        "a tied weight's gradient is sent before the other stage has added to it",
        "DistributedDataParallel._share",
        "any(id(p) in theirs for p in bucket.parameters)",
        "bool(()) and any(id(p) in theirs for p in bucket.parameters)",
        "tests/parallel/test_distributed_data_parallel.py -k two_chunks",
    ),
    Fault(
        "a bucket starts before the buckets that come first",
        "DistributedDataParallel._start_complete",
        "if not bucket.is_complete:\n    return",
        "if not bucket.is_complete:\n    continue",
        "tests/parallel/test_distributed_data_parallel.py -k nothing_else",
    ),
    Fault(
        "each replica divides by its own token count",
        "_divide_by_tokens",
        "collectives.all_reduce(count, groups.dp_cp)",
        "pass",
        Comparison({**DP, "calculate_per_token_loss": True}, "final_norm.bias gradient"),
    ),
]

DISTRIBUTED_OPTIMIZER = [
    Fault(
        "updated parameters are not gathered",
        "DistributedOptimizer.step",
        "gather.updated()",
        "pass",
        Comparison({**DP, **ZERO}, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "a shard of the state ignores its learning-rate factor",
        "DistributedOptimizer.step",
        "lr * group.lr_factor",
        "lr",
        "tests/parallel/test_distributed_optimizer.py -k one_process",
    ),
    Fault(
        "the norm counts every optimizer instance",
        "distributed_optimizer:_pieces",
        "counted_elements(parameter, layout) if first_instance else 0",
        "counted_elements(parameter, layout)",
        Comparison({"world_size": 4, **ZERO, "num_distributed_optimizer_instances": 2}, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "optimizer instances keep their own gradients",
        "Reduction.run",
        "yield all_reduce_async(part, self.across, self.op)",
        "pass",
        Comparison({"world_size": 4, **ZERO, "num_distributed_optimizer_instances": 2}, "final_norm.bias gradient"),
    ),
    Fault(
        "the tied embedding shares a bucket, which the two stages split differently",
        "plan_buckets",
        "parameter.shared_embedding and distributed_optimizer",
        "False",
        "tests/unit/test_bucket_plan.py -k shared_embedding",
    ),
    Fault(
        "a forward does not wait for the parameters that it reads",
        "ParamGather._hook.wait",
        "for place in places:\n    self._need(place)",
        "for place in places[:0]:\n    self._need(place)",
        "tests/parallel/test_distributed_optimizer.py",
    ),
    Fault(
        "buckets are not padded to a multiple of the number of ranks",
        "plan_buckets",
        "math.lcm(dp, BUCKET_ALIGNMENT, pad)",
        "math.lcm(BUCKET_ALIGNMENT, pad)",
        "tests/unit/test_bucket_plan.py",
    ),
    Fault(
        "a slice forgets its offset in the parameter",
        "pieces_of_rank",
        "first - start",
        "0",
        "tests/unit/test_shard_map.py",
    ),
]

PRECISION = [
    Fault(
        "the loss scale is lowered one overflow too late",
        "LossScaler.update",
        "self.hysteresis_left <= 0",
        "self.hysteresis_left < 0",
        "tests/unit/test_train_loss_scaler.py",
    ),
    Fault(
        "every good step resets the patience",
        "LossScaler.update",
        "self.good_steps += 1",
        "self.good_steps += 1\nself.hysteresis_left = self.hysteresis",
        "tests/unit/test_train_loss_scaler.py",
    ),
    Fault(
        "a single rank skips a step",
        "gradient_statistics",
        "math.isfinite(squares) and math.isfinite(others)",
        "bool(_sum_of_squares(counted, device).isfinite())",
        "tests/parallel/test_numerical_faults.py -k planted",
    ),
    Fault(
        "only the rank that was asked to stop leaves the loop",
        "gradient_statistics",
        "ranks > 0",
        "stop",
        "tests/parallel/test_gradients.py -k counts_every_element",
    ),
    Fault(
        "a non-finite loss ends a run that should skip the step",
        "cause_of_skip",
        "stops and losses",
        "losses",
        "tests/parallel/test_numerical_faults.py -k may_skip",
    ),
    Fault(
        "scaled gradients reach the optimizer",
        "train_step",
        "clip_factor(norm, clip_grad or math.inf) / scale",
        "clip_factor(norm, clip_grad or math.inf)",
        "tests/parallel/test_numerical_faults.py -k fp16_trains",
    ),
    Fault(
        "the gradient norm keeps the loss scale",
        "train_step",
        "norm /= scale",
        "pass",
        "tests/parallel/test_numerical_faults.py -k fp16_trains",
    ),
    Fault(
        "16-bit weights are updated without an fp32 master copy",
        "_master",
        "param.detach().float()",
        "param.detach().clone()",
        "tests/unit/test_train_optimizer.py -k bf16",
    ),
    Fault(
        "gradients in fp8 are cast to e4m3",
        "Float8Recipe.dtype",
        'E5M2 if self.hybrid and kind == "grad" else E4M3',
        "E4M3",
        "tests/unit/test_fp8.py -k hybrid",
    ),
    Fault(
        "fp8 values beyond the format become infinite",
        "cast",
        "(wide * scale).clamp(-limit, limit)",
        "wide * scale",
        "tests/unit/test_fp8.py -k saturates",
    ),
]

PIPELINE = [
    Fault(
        "the loss is not divided by the number of microbatches",
        "MicrobatchLosses.loss",
        "1 / self._count",
        "1",
        Comparison(PP, "final_norm.bias gradient"),
    ),
    Fault(
        "the warm-up of interleaving counts the distance to the last rank once, not twice",
        "get_pp_rank_microbatches",
        "2 * (pp_size - pp_rank - 1)",
        "pp_size - pp_rank - 1",
        "tests/unit/test_schedules_tables.py -k sources",
    ),
    Fault(
        "backward visits the chunks in the order of forward",
        "convert_schedule_table_to_order",
        "chunk - num_model_chunks",
        "-chunk - 1",
        "tests/unit/test_schedules_tables.py -k sources",
    ),
    Fault(
        "a sent output keeps its memory",
        "deallocate_output_tensor",
        "output.data = _one_element(output.dtype, output.device)",
        "pass",
        "tests/parallel/test_activation_release.py -k one_element",
    ),
    Fault(
        "odd ranks issue their transfers in the order of even ranks",
        "even_odd_place",
        "_EVEN[operation, kind] ^ (rank % 2)",
        "_EVEN[operation, kind]",
        "tests/unit/test_schedules_transfers.py",
    ),
]

RANDOM_STATES_AND_GROUPS = [
    Fault(
        "all tp ranks use the same dropout mask inside a tensor-parallel region",
        "model_parallel_seed",
        "own + 2718 + groups.tp.rank",
        "own + 2718",
        "tests/parallel/test_random.py -k masks",
    ),
    Fault(
        "experts on different ranks use the same dropout mask",
        "model_parallel_seed",
        "own + 1024 + 100 * groups.ep.rank",
        "own + 1024",
        "tests/parallel/test_random.py -k seed_of_the_table",
    ),
    Fault(
        "a random state restarts in every region",
        "RngTracker.fork.leave",
        "self._states[name] = self._current_state()",
        "",
        "tests/parallel/test_random.py -k forked",
    ),
    Fault(
        "the order string is read from right to left",
        "RankGenerator.__init__",
        "zip(self.axes, prefix_product(self.ordered_size))",
        "zip(self.axes[::-1], prefix_product(self.ordered_size[::-1]))",
        "tests/unit/test_rank_generator.py -k one_ranks_group",
    ),
]
