"""Planted faults of what happens inside a layer: cuts, sums and positions (see `faults.py`)."""

from __future__ import annotations

from planting import Comparison, Fault

TP = {"tp": 2}
SP = {"tp": 2, "sequence_parallel": True}
CP = {"cp": 2}

TENSOR_PARALLEL = [
    Fault(
        "chunks of the loss are counted by real columns, of which ranks have different numbers",
        "_LinearCrossEntropy.backward",
        "exp_NV.shape[1]",
        "shard.columns",
        "tests/parallel/test_vocab.py -k chunks",
    ),
    Fault(
        "g averages the partial outputs instead of adding them",
        "_RowLinear.forward",
        "reduce(partial, plan.group)",
        'reduce(partial, plan.group, op="avg")',
        Comparison(TP, "layers.0.attention output"),
    ),
    Fault(
        "f averages the gradients of a column layer's input",
        "_ColumnLinear.backward",
        "start(grad_x, plan.group)",
        'start(grad_x, plan.group, op="avg")',
        Comparison(TP, "layers.3.mlp.norm.bias gradient"),
    ),
    Fault(
        "every rank adds the bias of a row layer",
        "_RowLinear.forward",
        "y.add_(bias)",
        "y.add_(bias, alpha=plan.group.size)",
        Comparison(TP, "loss of step 2", steps=2),
    ),
    Fault(
        "rows of ids that belong to other ranks are not zeroed",
        "VocabParallelEmbedding.forward",
        "own = own.masked_fill(foreign.unsqueeze(-1), 0.0)",
        "pass",
        Comparison(TP, "embedding output"),
    ),
    Fault(
        "sums of exponentials are added without a common maximum",
        "_combine",
        "sums[0] *= rescale",
        "pass",
        Comparison(TP, "loss"),
    ),
    Fault(
        "label smoothing divides by the columns of one rank",
        "_combine",
        "sums[2] / shard.vocab_size",
        "sums[2] / shard.columns",
        Comparison(TP, "loss", changes={"label_smoothing": 0.1}),
    ),
    Fault(
        "padding columns of the vocabulary enter the loss",
        "cross_entropy:_shard",
        "min(max(vocab_size - first, 0), width)",
        "width",
        Comparison(TP, "loss", changes={"make_vocab_size_divisible_by": 96}),
    ),
    Fault(
        "a rank's slice ignores that gate and up are stacked",
        "tensor_part",
        "chunks[rank::size]",
        "chunks[rank * stride : (rank + 1) * stride]",
        Comparison(TP, "layers.0.mlp output", preset="llama_tiny"),
    ),
    Fault(
        "the first id beyond the vocabulary is accepted",
        "check_token_ids",
        "highest >= vocab_size",
        "highest > vocab_size",
        "tests/parallel/test_vocab.py -k ids_out_of_range",
    ),
    Fault(
        "a step doesn't ask the device for the bad ids that it recorded",
        "_norm_and_finite",
        "[*optimizer.uncounted_pieces(), *losses, *ids.alarm()]",
        "[*optimizer.uncounted_pieces(), *losses]",
        "tests/parallel/test_token_ids.py -k tp2",
    ),
]

SEQUENCE_PARALLEL = [
    Fault(
        "the gradients of norms are not summed over tp",
        "_sum_sequence_parallel",
        "_parameters(chunks)",
        "()",
        Comparison(SP, "final_norm.bias gradient"),
    ),
    Fault(
        "the gradient of a column layer's input is awaited before that of its weight",
        "_ColumnLinear.backward",
        "pending = start(grad_x, plan.group)",
        "pending = start(grad_x, plan.group)\npending.wait()",
        "tests/parallel/test_sequence_parallel.py -k hides_behind",
    ),
    Fault(
        "every rank adds the embeddings of the first positions",
        "PositionEmbedding.own_positions",
        "slice(self.sequence_part * each, (self.sequence_part + 1) * each)",
        "slice(0, each)",
        Comparison(SP, "embedding output"),
    ),
    Fault(
        "the loss averages the gradients of its hidden states",
        "_InputGradient.start",
        "start(partial_NH, group)",
        'start(partial_NH, group, op="avg")',
        Comparison(SP, "final_norm.bias gradient"),
    ),
    Fault(
        "all ranks use the same dropout mask for different positions",
        "OwnDropout.forward",
        "with self.rng.fork('model-parallel-rng'):\n    return super().forward(input)",
        "if True:\n    return super().forward(input)",
        "tests/parallel/test_sequence_parallel.py -k drops",
    ),
]

CONTEXT_PARALLEL = [
    Fault(
        "every rank embeds the positions of the first rank",
        "GPTModel._own_positions",
        "zigzag_positions(length * self.cp.size, self.cp.size, self.cp.rank, device=device)",
        "zigzag_positions(length * self.cp.size, self.cp.size, 0, device=device)",
        Comparison(CP, "embedding output"),
    ),
    Fault(
        "every rank rotates by the positions of the first rank",
        "GPTModel._own_positions",
        "zigzag_positions(length * self.cp.size, self.cp.size, self.cp.rank, device=device)",
        "zigzag_positions(length * self.cp.size, self.cp.size, 0, device=device)",
        Comparison(CP, "layers.0.attention output", preset="llama_tiny"),
    ),
    Fault(
        "the batch is split into contiguous chunks, but attention assumes zigzag",
        "zigzag_split",
        'split_sequence(x, cp, rank, dim, "zigzag")',
        'split_sequence(x, cp, rank, dim, "contiguous")',
        Comparison(CP, "embedding output"),
    ),
    Fault(
        "blocks are combined without rescaling the earlier sum",
        "merge_",
        "out.mul_((lse - total).exp()[..., None])",
        "out",
        Comparison(CP, "layers.0.attention output"),
    ),
    Fault(
        "queries see the second half of the keys of lower ranks",
        "ring_block",
        "Block(BOTH, (0, 1))",
        "Block(BOTH, BOTH)",
        Comparison(CP, "layers.0.attention output"),
    ),
    Fault(
        "keys go around the ring in the wrong direction",
        "_Ring.__init__",
        "(group.ranks[(group.rank + way) % group.size] for way in (1, -1))",
        "(group.ranks[(group.rank + way) % group.size] for way in (-1, 1))",
        Comparison({"cp": 4}, "layers.0.attention output"),
    ),
    Fault(
        "gradients of keys stay on the rank that computed them",
        "_RingAttention.backward",
        "own += sums.held",
        "pass",
        Comparison(CP, "layers.3.attention.qkv.bias gradient"),
    ),
    Fault(
        "gathered keys are read in the order of ranks",
        "_in_sequence",
        "join_sequence(gathered.chunk(group.size, dim=3), 3, layout)",
        "gathered",
        Comparison({**CP, "cp_comm_type": "all_gather"}, "layers.0.attention output"),
    ),
    Fault(
        "the loss is not multiplied by cp, although it will be averaged over it",
        "MicrobatchLosses._mean",
        "loss_sum * self._cp.size",
        "loss_sum",
        Comparison(CP, "final_norm.bias gradient"),
    ),
    Fault(
        "each rank of cp divides by its own token count",
        "MicrobatchLosses._mean",
        "all_reduce(tokens, self._cp, in_place=False)",
        "tokens * self._cp.size",
        "tests/parallel/test_context_parallel.py -k unequal",
    ),
]

RECOMPUTATION = [
    Fault(
        "a layer draws different random numbers when it is recomputed",
        "_Again._same_numbers",
        "self.states.restore(self.rng)",
        "pass",
        "tests/unit/test_recompute.py -k without_recomputation",
    ),
    Fault(
        "random states are not restored after the second forward",
        "_Again._same_numbers",
        "before.restore(self.rng)",
        "pass",
        "tests/unit/test_recompute.py",
    ),
    Fault(
        "the output of a norm is recomputed but never freed",
        "CheckpointWithoutOutput.discard_output_and_register_recompute",
        "self._output.untyped_storage().resize_(0)",
        "pass",
        "tests/unit/test_activation_bytes.py tests/unit/test_recompute.py",
    ),
    Fault(
        "a group of recomputed layers loses its last layer",
        "Recomputation._pieces",
        "min(i + self._count, layers)",
        "min(i + self._count, layers - 1)",
        Comparison({"recompute_granularity": "full", "recompute_num_layers": 2}, "layers.3.attention output"),
    ),
]
