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
        "or groups.tp.rank == 0)",
        "or True)",
        Comparison(TP, f"{EMBEDDING} parameter"),
    ),
    Fault(
        "the norm counts the copy of the tied weight",
        "parallel/gradients.py",
        'if not getattr(parameter, "shared", False)\n',
        "if True\n",
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
        "train/optimizer.py",
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
        "loss / tokens.clamp(min=1) / count",
        "loss / tokens.clamp(min=1)",
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

FAULTS = [*TENSOR_PARALLEL, *GRADIENTS, *PIPELINE, *RANDOM_STATES_AND_GROUPS]
