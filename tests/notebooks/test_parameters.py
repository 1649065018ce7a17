"""One parameter changed through papermill: the figures' sentences change as predicted, and no cell fails.

Predictions are made by hand from the chapter's formula, stated beside each case; the sentence before is the one that is
stored in the chapter, so a figure that ignores its parameter fails here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import papermill
import pytest
from papermill.exceptions import PapermillExecutionError

from labkit.check.parameters import declared
from labkit.cli.chapter_parameters import parameter_cell

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
CHAPTERS = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))


class Case(NamedTuple):
    """A change of parameters, and what it does to sentences: part of the stored one -> part of the new one."""

    parameters: dict[str, object]
    predicted: dict[str, str]


CASES = {
    # bubble (p - 1)/(m + p - 1): 1/5 with 2 stages and 4 microbatches, 3/7 with 4; 1F1B keeps min(p, m) in flight
    "00_tour": Case(
        {"tp": 1, "pp": 4},
        {
            "your order, 2 stages, 4 microbatches: bubble 20.0%, peak 2 in flight": (
                "your order, 4 stages, 4 microbatches: bubble 42.9%, peak 4 in flight"
            ),
            "one at a time, 2 stages, 4 microbatches: bubble 50.0%": (
                "one at a time, 4 stages, 4 microbatches: bubble 75.0%"
            ),
            "your order, 2 stages, 4 microbatches: both stages ran": (
                "your order, 4 stages, 4 microbatches: all 4 stages ran"
            ),
            "tp2 pp2 dp1 6.95 to": "tp1 pp4 dp1 6.95 to",
            # without tensor parallelism no rank has half of a layer, so there is no sum to lose
            "a sum lost differs from one process by up to 4.5e-03": "no step differs by more than 1e-05",
            "tp 2 groups of 2": "tp 4 groups of 1",
        },
    ),
    # g = 3 ranks have 3 chunks each, and a half of a ring has g - 1 = 2 steps of g messages, each a 3 x 3 matrix of
    # floats; the sizes are 0.1 to 3 times g x 5 ms x 20 MB/s
    "01_collectives": Case(
        {"world_size": 3},
        {
            "of 4 ranks: all-reduce 4 before and 4 sums after": "of 3 ranks: all-reduce 3 before and 3 sums after",
            "Second half: 4 ranks, 3 steps, 12 messages, bytes sent 192 from each": (
                "Second half: 3 ranks, 2 steps, 6 messages, bytes sent 72 from each"
            ),
            "of 40,000 to 1,200,000 bytes": "of 30,000 to 900,000 bytes",
        },
    ),
    # 16 ranks: dp has stride 4 and two members, so nodes of 4 put its members on two nodes, nodes of 8 on one
    "02_rank_groups": Case(
        {"gpus_per_node": 4},
        {
            "16 ranks on 2 nodes of 8: tp 4 groups of 4, all inside a node; dp 8 groups of 2, all inside a node": (
                "16 ranks on 4 nodes of 4: tp 4 groups of 4, all inside a node; dp 8 groups of 2, all across nodes"
            ),
            "dp [1, 5] on 1 node": "dp [1, 5] on 2 nodes",
        },
    ),
    # cp = ep = 4: 4 x 4 ranks on 2 nodes of 8. By the rule ep has stride 4 (0, 4 | 8, 12), across the nodes
    "15_moe_folding": Case(
        {"world_size": 4},
        {
            "64 ranks on 8 nodes of 8, not folded: attention cp 8 dp 8, experts ep 8 edp 8; cp groups all inside a "
            "node; ep groups all across nodes": (
                "16 ranks on 2 nodes of 8, not folded: attention cp 4 dp 4, experts ep 4 edp 4; cp groups all inside a "
                "node; ep groups all across nodes"
            ),
            "64 ranks on 8 nodes of 8: attention cp 8 dp 8, experts ep 8 edp 8": (
                "16 ranks on 2 nodes of 8: attention cp 4 dp 4, experts ep 4 edp 4"
            ),
        },
    ),
    # an all-reduce moves s b h float64 values: 16 x 2 x 64 x 8 = 16,384 bytes, twice that at hidden 128; still 2 and 2
    "03_f_and_g": Case(
        {"hidden": 128},
        {
            "2 forward (g) of 16,384 bytes each": "2 forward (g) of 32,768 bytes each",
            "2 backward (f) of 16,384 bytes each": "2 backward (f) of 32,768 bytes each",
        },
    ),
    # 2,000 words padded to a multiple of 8 x 4 are 2,016, 504 for each rank; a rank's own logits are in
    # memory twice, 2 x 504 / 2,000 of the gathered ones
    "04_vocabulary_and_loss": Case(
        {"vocab_size": 2000},
        {
            "1,000 words in a table of 1,024 rows over 4 ranks: 256 rows each, 24 of them padding": (
                "2,000 words in a table of 2,016 rows over 4 ranks: 504 rows each, 16 of them padding"
            ),
            "parallel 0.52 of 0.51 predicted": "parallel 0.51 of 0.50 predicted",
        },
    ),
    # with 512 tokens core attention weighs 5 a s / h = 40 s b h instead of 80, so 34 + 40 = 74, and s b h is half of
    # what it was: 12 x 74 x 25.2 MB = 22.3 GB; full 12 x 2 + 72 = 96, 2.4 GB. The core's products add 4 s to the
    # 3 (24 h + 4 s) operations of a step: 2,048 / (3 x 20,480) = 3.3%
    "05_memory_and_recomputation": Case(
        {"seq_length": 512},
        {
            "tensors are kept: 114.0 s b h, of which 80.0": "tensors are kept: 74.0 s b h, of which 40.0",
            "keep does not fit, peak 68.9 GB": "keep does not fit, peak 22.4 GB",
            "full fits, peak 6.8 GB": "full fits, peak 2.4 GB",
        },
    ),
    # at hidden 128 the probabilities weigh 5 a s / h = 20 instead of 40: 34 + 20, over 2 ranks 10 + 24/2 + 20/2, then
    # (34 + 20)/2, 34/2, 30/2, 2/2. Inside a region a rank has 4 x 128 / 2 = 256 columns
    "06_sequence_parallel": Case(
        {"hidden": 128},
        {
            "a rank holds [64, 2, 64] with f and g; inside [64, 2, 128]": (
                "a rank holds [64, 2, 128] with f and g; inside [64, 2, 256]"
            ),
            "a rank holds [32, 2, 64] with f_s and g_s; inside [64, 2, 128]": (
                "a rank holds [32, 2, 128] with f_s and g_s; inside [64, 2, 256]"
            ),
            "one rank 74.0, tensor parallel 42.0, + sequence parallel 37.0, + core attention recomputed 17.0, + norms' "
            "outputs recomputed 15.0, whole layer recomputed 1.0; measured within 1%": (
                "one rank 54.0, tensor parallel 32.0, + sequence parallel 27.0, + core attention recomputed 17.0, + "
                "norms' outputs recomputed 15.0, whole layer recomputed 1.0; measured within 1%"
            ),
        },
    ),
    # a layer has 2 x 64 x 256 weights and 256 + 64 biases, 33,088: two fill a bucket of 60,000. Four layers, 132,352,
    # fill one of 120,000, which the first layer's first matrix closes; the words are 512 x 64. In each of two steps
    # each of four ranks sends its 8 bytes to three others.
    "08_data_parallel": Case(
        {"bucket_size": 120_000, "world_size": 4},
        {
            "17 parameters of 165,120 elements in 3 buckets of 32,768 to 66,176": (
                "17 parameters of 165,120 elements in 2 buckets of 32,768 to 132,352"
            ),
            "each rank in its own order: 2 ranks, 2 steps, 4 messages, bytes sent 16 from each rank": (
                "each rank in its own order: 4 ranks, 2 steps, 24 messages, bytes sent 48 from each rank"
            ),
        },
    ),
    # 6 + 12/d, 2 + 16/d and 18/d for d = 2; p1 lies at 64 to 364 of a bucket of 384, cut at 192
    "09_distributed_optimizer": Case(
        {"world_size": 2},
        {
            "d = 4 ranks: 18 bytes per parameter replicated; stage 1: 9 (6 + 12/d)": (
                "d = 2 ranks: 18 bytes per parameter replicated; stage 1: 12 (6 + 12/d)"
            ),
            "counted: stage 0 18, stage 1 9": "counted: stage 0 18, stage 1 12",
            "each of 4 ranks owns 128; 2 parameters have several owners, at most 4": (
                "each of 2 ranks owns 256; 2 parameters have several owners, at most 2"
            ),
        },
    ),
    # cp 2, L = 32: plain cut 32 33/2 = 528 pairs for rank 0 and 528 + 32^2 = 1,552 for rank 1; zigzag 64 65/4 = 1,040;
    # busy 2,080/(2 x 1,552) = 67.0%; blocks that are not all masked: 2 + 1, and 2 x 2 with zigzag. A hop carries 2 x 32
    # x 8 doubles, 4,096 bytes; forward 1, backward 1 of kv and 1 of dkv
    "07_context_parallel": Case(
        {"world_size": 2},
        {
            "kv, hop by hop: 4 ranks, 3 steps, 12 messages, bytes sent 6,144": (
                "kv, hop by hop: 2 ranks, 1 step, 2 messages, bytes sent 4,096"
            ),
            "kv and dkv, hop by hop: 4 ranks, 4 steps, 24 messages, bytes sent 12,288": (
                "kv and dkv, hop by hop: 2 ranks, 2 steps, 4 messages, bytes sent 8,192"
            ),
            "over cp 4, 2,080 pairs: plain cut 136 pairs for rank 0 and 904 for rank 3, zigzag 520 for every rank": (
                "over cp 2, 2,080 pairs: plain cut 528 pairs for rank 0 and 1,552 for rank 1, zigzag 1,040 for every"
            ),
            "plain cut 904 pairs of time, ranks busy 57.5%": "plain cut 1,552 pairs of time, ranks busy 67.0%",
            "plain cut 10 blocks, your cut 16 blocks; your cut ended first": (
                "plain cut 3 blocks, your cut 4 blocks; your cut ended first"
            ),
        },
    ),
    # curves are means of 50 steps up to the last one
    "13_mixed_precision": Case({"world_size": 4, "steps": 400}, {"at 1000; 16 bits": "at 400; 16 bits"}),
    # under pp 2 the first stage's two replicas share the layer's optimizer, and each has half of its 256 x 64 weights
    "23_checkpoints": Case(
        {"steps": 40, "new_pp": 2},
        {
            "Training loss over 60 steps: never cut": "Training loss over 40 steps: never cut",
            "tp 1, pp 1, dp 4: 2 boxes, rank 2 with 8,128 elements and rank 3 with 8,256 elements": (
                "tp 1, pp 2, dp 2: 2 boxes, rank 0 and rank 1 with 8,192 elements each"
            ),
        },
    ),
    # 16 experts on 4 ranks, 2 for a token; the cheat has 8 experts whatever the layer has, and the table 3
    "14_moe_layer": Case(
        {"experts": 16, "steps": 6},
        {
            "The fullest of 8 experts has 2.00 times the mean": "The fullest of 8 experts has 2.00 times the mean",
            "Load of 8 experts over 120 steps": "Load of 16 experts over 6 steps",
        },
    ),
    # w + 1 buffers (4, and 11 interleaved) whatever m is. The pool is drawn for at most 8 microbatches: 2 layers, a
    # forward and a backward make 32 captures
    "17_graphs_in_a_pipeline": Case(
        {"microbatches": 16},
        {
            "1F1B, 4 stages, rank 0: 4 buffers for 8 inputs, at most 4": (
                "1F1B, 4 stages, rank 0: 4 buffers for 16 inputs, at most 4"
            ),
            "interleaved 1F1B, 4 ranks, rank 0: 11 buffers for 16": "4 ranks, rank 0: 11 buffers for 32 inputs",
            # one buffer fewer; each forward from the third on takes one that is still held, but for the warm-up's two
            "One step early, 4 stages, rank 0: 3 buffers for 8 inputs; held twice in 5 places": (
                "One step early, 4 stages, rank 0: 3 buffers for 16 inputs; held twice in 13 places"
            ),
            "at most 762 KiB were held at once": "at most 762 KiB were held at once",
            "rank 0: 32 captures took": "rank 0: 32 captures took",
            "GPT, pp 4, 8 microbatches over 12 steps": "GPT, pp 4, 16 microbatches over 12 steps",
        },
    ),
    # Python counts warm-up and capture, 5 + 1, and no replay; the tensor counts the 12 replays alone. Results of the
    # block with 16 rows of 32: 4 of [16, 64], two of [16, 32], two weights of 64 x 32 and biases of 64 and 32 numbers
    # of 4 bytes are 4 x 4,096 + 2 x 2,048 + 2 x 8,192 + 384 = 37,248
    "16_cuda_graphs": Case(
        {"warmup": 5, "steps": 12, "rows": 16},
        {
            "Runs counted after 24 calls (4 of them warm-up and capture): by Python 4, in a tensor 20.": (
                "Runs counted after 18 calls (6 of them warm-up and capture): by Python 6, in a tensor 12."
            ),
            "kB instead of 57.7.": "kB instead of 37.2.",
        },
    ),
    # 16 experts, 2 of them for a token: room for every token at every expert is 16/2 times the rows that are routed;
    # at factor 1 the rows are as many as those routed, whatever the number of experts
    "18_partial_graphs_moe": Case(
        {"experts": 16, "steps": 6},
        {
            "padded, factor 1 1.00 times the work": "padded, factor 1 1.00 times the work",
            "padded, factor 4 4.00 times the work": "padded, factor 8 8.00 times the work",
        },
    ),
    # 2 L + 1 norms: 65 in 32 layers
    "19_bert_and_layernorm": Case(
        {"layers": 32},
        {"49 norms in 24 layers": "65 norms in 32 layers", "passes 49 of them": "passes 65 of them"},
    ),
    # merged 1F1B keeps 2 (p - r) microbatches where 1F1B keeps p - r; its bubble is (p - 1)/(m + p - 1) for m = 3 p
    "25_overlap": Case(
        {"stages": 3, "unit_ms": 5},
        {
            "merged 1F1B, 4 stages, 12 microbatches: bubble 20.0%, ranks keep 8, 6, 4, 2": (
                "merged 1F1B, 3 stages, 9 microbatches: bubble 18.2%, ranks keep 6, 4, 2"
            ),
        },
    ),
    # 8 stages of one layer: the decoder's first is stage 2, and its last, which scores the words, is stage 7
    "24_encoder_decoders": Case(
        {"world_size": 8, "split": 2},
        {
            "4 stages, the decoder from stage 1 on: words on stages 0, 1 and 3; positions on stages 0 and 1": (
                "8 stages, the decoder from stage 2 on: words on stages 0, 2 and 7; positions on stages 0 and 2"
            ),
        },
    ),
    # a curve ends with the last step; the motion is that of two ranks
    "26_eight_bits": Case(
        {"world_size": 4, "steps": 100},
        {
            " at 200; current": " at 100; current",
            "a gather of bytes: 2 ranks, 2 steps, 4 messages": "a gather of bytes: 2 ranks, 2 steps, 4 messages",
        },
    ),
    # 2,173 tokens: behind the first 64 labels 2,172 - 64 = 2,108 are left, 263 strides of 8 and 4 labels more, or 131
    # of 16 and 12 more
    "20_evaluation_and_generation": Case(
        {"stride": 16, "steps": 20},
        {
            "265 windows of 64 tokens over 2,173 tokens, of which 12 are drawn": "133 windows of 64 tokens over 2,173",
            "the first scores 64 labels, the last 4, all": "the first scores 64 labels, the last 12, all",
        },
    ),
    # 20 heads are shared by 1, 2 or 4 ranks, and 32 by twice as many up to 32; so tp 8 of the default bet is illegal
    "21_scaling_laws_of_the_machine": Case(
        {"preset": "table1_2_5b", "gpus": 64},
        {
            "6 predictions: tp 1": "3 predictions: tp 1",
            "7 predictions: the winner": "4 predictions: the winner",
        },
    ),
    # the curves of section 5 are those of the exercise, at 0.7; 96 questions in steps of 16 do not depend on the ranks
    "22_cleaning_and_fine_tuning": Case(
        {"world_size": 4, "seeds": 3},
        {
            "bands of the sketch, 25 bands of 5: 99.0% of the pairs with similarity 0.7 become candidates, 12.3%": (
                "bands of the sketch, 25 bands of 5: 99.0% of the pairs with similarity 0.7 become candidates, 12.3%"
            ),
            "accuracy, % by number of seeds: best run: promised": "accuracy, % by number of seeds: best run: promised",
        },
    ),
    # bubble (p-1)/(m+p-1): 3/11 = 27.3% for 8 microbatches, 3/19 = 15.8% for 16; GPipe holds all m, 1F1B at most p
    "10_p2p_and_1f1b": Case(
        {"microbatches": 16},
        {
            "GPipe, 4 stages, 8 microbatches: bubble 27.3%, peak 8 in flight": (
                "GPipe, 4 stages, 16 microbatches: bubble 15.8%, peak 16 in flight"
            ),
            "1F1B, 4 stages, 8 microbatches: bubble 27.3%, peak 4 in flight": (
                "1F1B, 4 stages, 16 microbatches: bubble 15.8%, peak 4 in flight"
            ),
            "8 microbatches: all 4 ranks ran their rows in the predicted order": (
                "16 microbatches: all 4 ranks ran their rows in the predicted order"
            ),
            # 48 of 3 x 19 + 2 x 3 x 1 = 63 units are work
            "Messages of 1, 4 stages, 8 microbatches: bubble 38.5%, peak 7 in flight": (
                "Messages of 1, 4 stages, 16 microbatches: bubble 23.8%, peak 7 in flight"
            ),
        },
    ),
    # bubble (p-1)/(v m + p-1): v2 3/19 = 15.8% and 3/35 = 8.6%; in flight (2(p-1) + (v-1)p + 1)/v shares: 5.5
    "11_interleaving": Case(
        {"microbatches": 16},
        {
            "1F1B, 4 stages, 8 microbatches: bubble 27.3%, peak 4 in flight": (
                "1F1B, 4 stages, 16 microbatches: bubble 15.8%, peak 4 in flight"
            ),
            "interleaved, 8 stages, 8 microbatches: bubble 15.8%, peak 5.5 in flight": (
                "interleaved, 8 stages, 16 microbatches: bubble 8.6%, peak 5.5 in flight"
            ),
            "interleaved, 8 stages, 8 microbatches: all 4 ranks ran their rows": (
                "interleaved, 8 stages, 16 microbatches: all 4 ranks ran their rows"
            ),
        },
    ),
    # bubble idle/(3m + idle), 3m = 24 for 8 microbatches and 36 for 12; idle is 3(p - 1) = 9 for GPipe (the untouched
    # table of the reader) and 1F1B, 2(p - 1) = 6 with W right after I or at the end, p - 1 = 3 for ZB-H1 and
    # (p - 1)/2 = 1.5 over a V; GPipe and all W at the end keep m, others p
    "12_write_your_own_schedule": Case(
        {"microbatches": 12},
        {
            "1F1B takes 33 steps": "1F1B takes 45 steps",
            "W after I, 4 stages, 8 microbatches: bubble 20.0%, ranks keep 4, 3, 2, 1 in flight": (
                "W after I, 4 stages, 12 microbatches: bubble 14.3%, ranks keep 4, 3, 2, 1 in flight"
            ),
            "W at the end, 4 stages, 8 microbatches: bubble 20.0%, ranks keep 8, 8, 8, 8 in flight": (
                "W at the end, 4 stages, 12 microbatches: bubble 14.3%, ranks keep 12, 12, 12, 12 in flight"
            ),
            "yours takes 33 steps": "yours takes 45 steps",
            "yours, 4 stages, 8 microbatches: all 4 ranks ran their rows in the predicted order, peak 8 in": (
                "yours, 4 stages, 12 microbatches: all 4 ranks ran their rows in the predicted order, peak 12 in"
            ),
            "ZB-H1, 4 stages, 8 microbatches: bubble 11.1%, peak 4 in flight": (
                "ZB-H1, 4 stages, 12 microbatches: bubble 7.7%, peak 4 in flight"
            ),
            "ZB-V, 8 stages, 8 microbatches: bubble 5.9%, peak 4 in flight": (
                "ZB-V, 8 stages, 12 microbatches: bubble 4.0%, peak 4 in flight"
            ),
        },
    ),
}


FURTHER = {
    # 64 positions over 4 ranks: position i of a rank is 16, 32 or 48 after position i of an earlier one, 16 times for
    # each of 6 pairs of ranks
    "06_sequence_parallel": Case(
        {"world_size": 4},
        {
            "seed 1234 on every rank: 32 pairs of positions have the same mask, 32 positions apart": (
                "seed 1234 on every rank: 96 pairs of positions have the same mask, 16, 32, 48 positions apart"
            ),
        },
    ),
    # w + 1 = 2 buffers, and (p - 1) 2 + p + 1 = 5 interleaved; early, every forward but the first meets another life
    "17_graphs_in_a_pipeline": Case(
        {"world_size": 2, "steps": 4},
        {
            "1F1B, 4 stages, rank 0: 4 buffers for 8 inputs, at most 4": (
                "1F1B, 2 stages, rank 0: 2 buffers for 8 inputs, at most 2"
            ),
            "interleaved 1F1B, 4 ranks, rank 0: 11 buffers for 16": "1F1B, 2 ranks, rank 0: 5 buffers for 16",
            "GPT, pp 4, 8 microbatches over 12 steps": "GPT, pp 2, 8 microbatches over 4 steps",
        },
    ),
    # room for every token is factor 4/2 = 2: the same as the factor in the middle, which is drawn once
    "18_partial_graphs_moe": Case(
        {"world_size": 4, "experts": 4, "microbatches": 5, "steps": 6, "fault": 0},
        {"padded, factor 4 4.00 times the work": "padded, factor 2 2.00 times the work"},
    ),
}
"""A second change of a chapter: another number of ranks, the least that a parameter allows."""

EXTREMES = [
    ("00_tour", {"world_size": 1, "tp": 1, "pp": 1, "steps": 3, "fault": 0}),
    ("00_tour", {"world_size": 16, "tp": 4, "pp": 4, "steps": 4}),
    ("00_tour", {"world_size": 8, "tp": 2, "pp": 1, "steps": 100, "fault": 99}),
    ("01_collectives", {"world_size": 2, "latency_ms": 1, "link_mb": 1, "fault": 0}),
    ("01_collectives", {"world_size": 8, "latency_ms": 5, "link_mb": 50, "fault": 99}),
    ("02_rank_groups", {"world_size": 4, "gpus_per_node": 1, "order": "dp-ep-cp-tp-pp", "fault": 0}),
    ("02_rank_groups", {"world_size": 16, "gpus_per_node": 64, "order": "ep-cp-tp-dp-pp", "fault": 99}),
    ("15_moe_folding", {"world_size": 4, "gpus_per_node": 1, "tokens_per_rank": 1, "fault": 0}),
    ("15_moe_folding", {"world_size": 12, "gpus_per_node": 64, "tokens_per_rank": 256, "fault": 99}),
    ("03_f_and_g", {"world_size": 8, "layers": 1, "hidden": 8, "fault": 0}),
    ("03_f_and_g", {"world_size": 2, "layers": 16, "hidden": 512, "fault": 99}),
    ("04_vocabulary_and_loss", {"world_size": 8, "vocab_size": 600, "hidden": 8, "tokens": 4, "steps": 2, "fault": 0}),
    (
        "04_vocabulary_and_loss",
        {"world_size": 2, "vocab_size": 4096, "hidden": 256, "tokens": 1024, "steps": 100, "fault": 99},
    ),
    (
        "05_memory_and_recomputation",
        {"world_size": 4, "hidden": 64, "seq_length": 128, "dropout": 0.05, "fault": 0},
    ),
    (
        "05_memory_and_recomputation",
        {"world_size": 2, "hidden": 1024, "seq_length": 2048, "dropout": 0.9, "fault": 99},
    ),
    ("06_sequence_parallel", {"world_size": 8, "hidden": 64, "seq_length": 8, "dropout": 0.05, "fault": 0}),
    ("06_sequence_parallel", {"world_size": 2, "hidden": 512, "seq_length": 256, "dropout": 0.9, "fault": 99}),
    ("07_context_parallel", {"world_size": 2, "seq_length": 16, "pair_us": 1, "fault": 0}),
    ("07_context_parallel", {"world_size": 8, "seq_length": 256, "pair_us": 50, "fault": 99}),
    ("07_context_parallel", {"world_size": 3, "seq_length": 18, "pair_us": 1000, "fault": 3}),
    (
        "08_data_parallel",
        {"world_size": 2, "bucket_size": 1, "layer_ms": 1, "link_ms": 0, "link_mb": 1000, "fault": 0},
    ),
    (
        "08_data_parallel",
        {"world_size": 8, "bucket_size": 10**6, "layer_ms": 200, "link_ms": 100, "link_mb": 1, "fault": 99},
    ),
    ("09_distributed_optimizer", {"world_size": 2, "steps": 2, "layer_ms": 1, "link_ms": 0, "fault": 0}),
    ("09_distributed_optimizer", {"world_size": 8, "steps": 20, "layer_ms": 100, "link_ms": 50, "fault": 99}),
    ("10_p2p_and_1f1b", {"world_size": 2, "microbatches": 1, "forward_ms": 1, "backward_ms": 1, "fault": 0}),
    ("10_p2p_and_1f1b", {"world_size": 8, "microbatches": 32, "forward_ms": 40, "backward_ms": 80, "fault": 99}),
    ("11_interleaving", {"world_size": 2, "chunks": 2, "microbatches": 2, "stage_ms": 3, "fault": 0}),
    ("11_interleaving", {"world_size": 2, "chunks": 4, "microbatches": 32, "stage_ms": 120, "fault": 99}),
    ("12_write_your_own_schedule", {"world_size": 2, "microbatches": 4, "fault": 0}),
    ("12_write_your_own_schedule", {"world_size": 4, "microbatches": 64, "fault": 99}),
    ("13_mixed_precision", {"world_size": 2, "steps": 200, "rate": 1e-4, "fault": 0}),
    ("13_mixed_precision", {"world_size": 4, "steps": 2000, "rate": 1e-3, "fault": 99}),
    ("23_checkpoints", {"world_size": 2, "tp": 1, "new_tp": 2, "new_pp": 1, "steps": 40, "fault": 0}),
    ("23_checkpoints", {"world_size": 8, "tp": 2, "new_tp": 2, "new_pp": 2, "steps": 40, "fault": 99}),
    ("23_checkpoints", {"world_size": 4, "tp": 2, "new_tp": 1, "new_pp": 2, "steps": 100, "fault": 3}),
    ("14_moe_layer", {"world_size": 2, "experts": 4, "tokens": 16, "row_us": 1, "steps": 1, "fault": 0}),
    ("14_moe_layer", {"world_size": 8, "experts": 16, "tokens": 256, "row_us": 1, "steps": 2, "fault": 99}),
    ("14_moe_layer", {"world_size": 4, "experts": 16, "tokens": 256, "row_us": 1000, "steps": 200, "fault": 2}),
    ("16_cuda_graphs", {"world_size": 1, "rows": 2, "width": 1, "warmup": 1, "steps": 8, "fault": 0}),
    (
        "16_cuda_graphs",
        {"world_size": 4, "rows": 256, "width": 256, "warmup": 20, "steps": 40, "fault": 99},
    ),
    ("17_graphs_in_a_pipeline", {"world_size": 2, "microbatches": 2, "steps": 4, "fault": 0}),
    ("17_graphs_in_a_pipeline", {"world_size": 4, "microbatches": 32, "steps": 40, "fault": 99}),
    ("19_bert_and_layernorm", {"world_size": 2, "layers": 24, "steps": 60, "rate": 0.002, "fault": 0}),
    ("19_bert_and_layernorm", {"world_size": 4, "layers": 32, "steps": 200, "rate": 0.006, "fault": 99}),
    ("24_encoder_decoders", {"world_size": 4, "split": 1, "fault": 0}),
    ("24_encoder_decoders", {"world_size": 8, "split": 4, "fault": 99}),
    ("25_overlap", {"world_size": 2, "unit_ms": 5, "stages": 2, "fault": 0}),
    ("25_overlap", {"world_size": 4, "unit_ms": 20, "stages": 6, "fault": 99}),
    ("26_eight_bits", {"world_size": 2, "steps": 100, "fault": 0}),
    ("26_eight_bits", {"world_size": 4, "steps": 1000, "fault": 99}),
    (
        "20_evaluation_and_generation",
        {"world_size": 1, "steps": 20, "stride": 1, "temperature": 0.1, "new_tokens": 2, "fault": 0},
    ),
    (
        "20_evaluation_and_generation",
        {"world_size": 4, "steps": 400, "stride": 64, "temperature": 5, "new_tokens": 48, "fault": 99},
    ),
    (
        "21_scaling_laws_of_the_machine",
        {"world_size": 4, "machine": "v100", "gpus": 64, "preset": "table1_8_3b", "fault": 0},
    ),
    (
        "21_scaling_laws_of_the_machine",
        {"world_size": 2, "machine": "a100", "gpus": 128, "preset": "table1_4_2b", "fault": 99},
    ),
    ("22_cleaning_and_fine_tuning", {"world_size": 2, "threshold": 0.3, "seeds": 3, "fault": 0}),
    ("22_cleaning_and_fine_tuning", {"world_size": 4, "threshold": 0.9, "seeds": 9, "fault": 99}),
    ("18_partial_graphs_moe", {"world_size": 2, "experts": 2, "top_k": 2, "microbatches": 5, "steps": 6, "fault": 0}),
    (
        "18_partial_graphs_moe",
        {"world_size": 8, "experts": 64, "top_k": 64, "microbatches": 64, "steps": 6, "fault": 2},
    ),
    (
        "18_partial_graphs_moe",
        {"world_size": 8, "experts": 64, "top_k": 2, "microbatches": 5, "steps": 100, "fault": 99},
    ),
]
"""Both ends of the rules that the chapters state; what they allow has to work."""
EVERYDAY = ("rank_groups", "f_and_g")
"""Chapters, without their numbers, that `make test` runs with other parameters: one without ranks, one that counts
collectives. `make sweep` runs all of them."""
QUICK = {("03_f_and_g", 8)}
"""Chapter and world size of the extremes that `make test` runs."""

REFUSED = [
    ("17_graphs_in_a_pipeline", {"world_size": 1}, "world_size = 1: must be 2 or 4"),
    (
        "10_p2p_and_1f1b",
        {"microbatches": 0, "world_size": 3},
        "world_size = 3: must be 2, 4 or 8; microbatches = 0: must",
    ),
]
"""Refused by the chapter itself; `labkit run` refuses the same before it starts a kernel."""


def sentences(notebook: Path) -> list[str]:
    """What each figure of an executed notebook says, in order."""
    cells = json.loads(notebook.read_text())["cells"]
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return ["".join(each["text/plain"]) for each in data if "image/png" in each]


def run_chapter(chapter: Path, out: Path, parameters: dict[str, object]) -> subprocess.CompletedProcess[str]:
    words = [word for name, value in parameters.items() for word in ("-p", name, str(value))]
    command = [sys.executable, "-m", "labkit.cli", "run", str(chapter), "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "chapter",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem[3:] in EVERYDAY else pytest.mark.sweep)
        for path in CHAPTERS
    ],
)
def test_sentences_follow_a_parameter(chapter, tmp_path):
    follows(chapter, CASES[chapter.stem], tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("stem", FURTHER)
def test_sentences_follow_further_parameters(stem, tmp_path):
    follows(NOTEBOOKS / f"{stem}.ipynb", FURTHER[stem], tmp_path)


@pytest.mark.parametrize(("stem", "parameters", "message"), REFUSED)
def test_what_does_not_fit_is_refused_in_the_first_cells(stem, parameters, message, tmp_path):
    with pytest.raises(PapermillExecutionError, match=f"ValueError: {re.escape(message)}"):
        papermill.execute_notebook(
            NOTEBOOKS / f"{stem}.ipynb", tmp_path / "out.ipynb", parameters, kernel_name="python3", progress_bar=False
        )


@pytest.mark.parametrize(
    ("stem", "parameters"),
    [
        pytest.param(stem, given, marks=[] if (stem, given["world_size"]) in QUICK else pytest.mark.sweep)
        for stem, given in EXTREMES
    ],
)
def test_what_a_chapter_allows_works(stem, parameters, tmp_path):
    done = run_chapter(NOTEBOOKS / f"{stem}.ipynb", tmp_path, parameters)
    assert done.returncode == 0, done.stderr


def test_every_parameter_is_taken_to_both_ends():
    for chapter in CHAPTERS:
        names = {name for stem, given in EXTREMES if stem == chapter.stem for name in given}
        fixed = {"device", "backend", "output_dir", "impl"}  # what the machine offers, and a folder
        assert names == set(declared(parameter_cell(chapter))) - fixed, chapter.stem


def follows(chapter: Path, case: Case, tmp_path: Path) -> None:
    """Run the chapter with other parameters, and hold its sentences against those that are stored."""
    done = run_chapter(chapter, tmp_path, case.parameters)
    assert done.returncode == 0, done.stderr
    stored, fresh = sentences(chapter), sentences(tmp_path / chapter.name)
    assert len(fresh) == len(stored)
    for before, after in case.predicted.items():
        places = [place for place, sentence in enumerate(stored) if before in sentence]
        assert places, f"no stored figure says {before!r}: {stored}"
        assert all(after in fresh[place] for place in places), [fresh[place] for place in places]


def test_every_chapter_has_a_prediction_and_no_other():
    stems = {chapter.stem for chapter in CHAPTERS}
    assert set(CASES) == stems
    assert set(EVERYDAY) <= {stem[3:] for stem in stems}
