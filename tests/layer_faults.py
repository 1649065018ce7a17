"""Planted faults of what happens inside a layer: cuts, sums and positions (see `faults.py`)."""

from __future__ import annotations

from planting import Comparison, Fault

TP = {"tp": 2}
SP = {"tp": 2, "sequence_parallel": True}
CP = {"cp": 2}

TENSOR_PARALLEL = [
    Fault(
        "chunks of the loss go by the real columns, which ranks have in different numbers",
        "parallel/cross_entropy.py",
        "columns, elements = parts * weight_VH.shape[0]",
        "columns, elements = parts * shard.columns",
        "tests/parallel/test_vocab.py -k chunks",
    ),
    Fault(
        "g averages the partial outputs instead of adding them",
        "parallel/linear_functions.py",
        "y = reduce(partial, plan.group)",
        'y = reduce(partial, plan.group, op="avg")',
        Comparison(TP, "layers.0.attention output"),
    ),
    Fault(
        "f averages the gradients of a column layer's input",
        "parallel/linear_functions.py",
        "pending = start(grad_x, plan.group)",
        'pending = start(grad_x, plan.group, op="avg")',
        Comparison(TP, "layers.3.mlp.norm.bias gradient"),
    ),
    Fault(
        "every rank adds the bias of a row layer",
        "parallel/linear_functions.py",
        "y.add_(bias)",
        "y.add_(bias, alpha=plan.group.size)",
        Comparison(TP, "loss of step 2", steps=2),
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
        "parallel/token_ids.py",
        "if lowest < 0 or highest >= vocab_size:",
        "if lowest < 0 or highest > vocab_size:",
        "tests/parallel/test_vocab.py -k ids_out_of_range",
    ),
    Fault(
        "a step does not ask the device for the bad ids that it noted",
        "train/stepping.py",
        ", *losses, *ids.alarm()]",
        ", *losses]",
        "tests/parallel/test_token_ids.py -k tp2",
    ),
]

SEQUENCE_PARALLEL = [
    Fault(
        "nobody adds up the gradients of norms over tp",
        "parallel/data_parallel/gradients.py",
        "_sum_together([main_grad_of(p) for p in _parameters(chunks) if",
        "_sum_together([main_grad_of(p) for p in () if",
        Comparison(SP, "final_norm.bias gradient"),
    ),
    Fault(
        "the gradient of a column layer's input is awaited before that of its weight",
        "parallel/linear_functions.py",
        "                pending = start(grad_x, plan.group)\n",
        "                pending = start(grad_x, plan.group)\n                pending.wait()\n",
        "tests/parallel/test_sequence_parallel.py -k hides_behind",
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
        "models/norm_and_dropout.py",
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

RECOMPUTATION = [
    Fault(
        "a layer draws other random numbers the second time",
        "parallel/recompute.py",
        "        self.states.restore(self.rng)\n",
        "        pass\n",
        "tests/unit/test_recompute.py -k without_recomputation",
    ),
    Fault(
        "random states are left where the second forward ended",
        "parallel/recompute.py",
        "            before.restore(self.rng)",
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
