"""Predictions of pool and static inputs held against captures on the emulated backend, to the byte."""

from functools import cache

import pytest
import torch
from torch import nn

from labkit.config import presets
from labkit.graphs import (
    LAYER_ORDER,
    CudaGraphHelper,
    GraphMemoryReport,
    layer_memory,
    make_graphed_callables,
    measure_graphs,
    plan_buffers,
    play_back,
    predict_graph_memory,
)
from labkit.models import build_model_chunks
from labkit.parallel import single_process_groups
from labkit.schedules import gpipe, interleaved, one_f_one_b

ROWS, WIDTH = 16, 32


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def capture(order, layers, *, reuse=True):
    """Graphs of `layers` blocks a chunk along an order."""
    chunks = int(max(order))
    microbatches = len(order) // chunks // 2
    samples = [(torch.zeros(ROWS, WIDTH, requires_grad=True),) for _ in range(layers * chunks * microbatches)]
    blocks = tuple(Block() for _ in range(layers * chunks))
    return make_graphed_callables(
        blocks, samples, order=order, num_layers_per_chunk=[layers] * chunks, reuse_buffers=reuse, impl="emulated"
    )


@cache
def of_one_layer():
    """(what it does to a pool, operations of its two graphs)."""
    graphed = capture(LAYER_ORDER, 1)[0]
    return layer_memory(graphed.pool.history), sum(graph.num_operations for graph in graphed.graphs[:2])


@pytest.mark.parametrize(
    ("order", "layers"),
    [
        (one_f_one_b(4, 8).order(0), 2),
        (one_f_one_b(4, 8).order(3), 1),
        (gpipe(2, 5).order(0), 1),
        (interleaved(2, 2, 6).order(0), 2),
    ],
)
def test_one_layer_predicts_the_rank(order, layers):
    callables = capture(order, layers)
    nbytes = ROWS * WIDTH * 4
    memory, operations = of_one_layer()
    predicted = predict_graph_memory(order, layers, memory, input_bytes=nbytes, operations=operations)
    measured = measure_graphs(callables, order, layers)
    assert measured.graphs == predicted.graphs == 2 * len(callables)
    assert measured.operations == predicted.operations
    assert measured.static_inputs == predicted.static_inputs == plan_buffers(order, layers).num_buffers * nbytes
    assert measured.static_gradients == predicted.static_gradients == nbytes
    assert measured.pool_peak == predicted.pool_peak
    assert measured.break_points == predicted.break_points == 0
    playback = play_back(callables[0].pool.history)
    assert playback.peak_bytes == measured.pool_peak <= playback.high_water <= measured.pool_reserved
    assert f"{predicted.pool_peak:,}" in str(GraphMemoryReport(measured, predicted))


def test_frames_name_the_captures_in_order():
    order = one_f_one_b(2, 3).order(0)
    names = [frame.name for frame in play_back(capture(order, 1)[0].pool.history).frames]
    assert [(name.split()[5], name.split()[6]) for name in names] == [
        ("0", "forward"), ("1", "forward"), ("0", "backward"), ("2", "forward"), ("1", "backward"), ("2", "backward"),
    ]  # fmt: skip


def test_what_is_kept_grows_with_microbatches_only_where_nothing_is_given_back():
    def peak(microbatches, reuse):
        return capture(one_f_one_b(4, microbatches).order(2), 1, reuse=reuse)[0].pool.peak_bytes

    assert peak(4, True) == peak(8, True)
    assert peak(8, False) > 1.8 * peak(4, False)


# ---- layers of a real model, captured by the helper of training ----

ROUTER = {"graph.cuda_graph_modules": ("attn", "moe_router"), "moe.num_experts": 4, "moe.top_k": 2}
TOKENS, HIDDEN, EXPERTS = 16, 32, 4


def helper(schedule, layers, **changes):
    shape = {
        "model.layers": layers, "model.hidden": HIDDEN, "model.heads": 4, "model.seq_length": TOKENS,
        "train.micro_batch_size": 1, "graph.cuda_graph_impl": "emulated",
    }  # fmt: skip
    config = presets.tiny().override(shape).override(changes)
    made = CudaGraphHelper(
        build_model_chunks(config, single_process_groups()), config.graph, TOKENS, 1, schedule=schedule
    )
    made.create_cudagraphs()
    return made


def measured_by(made):
    """The report of the helper's graphs, and what its first layer's graphs launch."""
    places = [(layer, m) for m in range(made.num_microbatches) for layer in made.layers]
    graphed = [layer.cuda_graphs[m] for layer, m in places]
    return measure_graphs(graphed, made.order, len(made.layers)), sum(
        graph.num_operations for graph in graphed[0].graphs[:2]
    )


@pytest.mark.parametrize("changes", [{}, ROUTER], ids=["whole layers", "up to the router"])
def test_one_transformer_layer_predicts_the_rank(changes):
    """A graph that ends behind the router gives hidden states, probabilities, the routing map and the residual."""
    store = TOKENS * (2 * HIDDEN * 4 + EXPERTS * 4 + EXPERTS) if changes else 0
    alone = helper(one_f_one_b(2, 3), 1, **changes)
    assert tuple(alone.order) == LAYER_ORDER
    schedule, layers, in_flight = one_f_one_b(3, 6), 2, 3
    predicted = predict_graph_memory(
        schedule.order(0), layers, layer_memory(alone.pool.history), input_bytes=TOKENS * HIDDEN * 4,
        store_bytes=store, operations=measured_by(alone)[1],
    )  # fmt: skip
    measured, _ = measured_by(helper(schedule, layers, **changes))
    assert measured.graphs == predicted.graphs == 2 * layers * 6
    assert measured.operations == predicted.operations
    assert measured.static_inputs == predicted.static_inputs == layers * in_flight * TOKENS * HIDDEN * 4
    assert measured.break_points == predicted.break_points == layers * in_flight * store
    assert measured.pool_peak == predicted.pool_peak
