"""Counts of graphs and bytes, by hand from the order; measured ones are read off stand-ins of graphed callables."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from labkit.graphs import (
    GraphMemoryReport,
    LayerMemory,
    graph_objects_made,
    measure_graphs,
    plan_buffers,
    predict_graph_memory,
    predict_workspaces,
    sample_index,
)

ORDER = [1, 1, -1, 1, -1, -1]
"""One layer, three microbatches, two of them in flight."""
LAYER = LayerMemory(forward_peak=100, kept=80, backward_peak=30, grad_inputs=10)


def graphed(inputs, outputs, gradients, pool):
    return SimpleNamespace(
        graphs=(SimpleNamespace(num_operations=5), SimpleNamespace(num_operations=7), None),
        static_inputs=inputs,
        static_outputs=outputs,
        captured=SimpleNamespace(grad_outputs=gradients),
        pool=pool,
    )


def test_parts_of_a_small_order_by_hand():
    memory = predict_graph_memory(ORDER, 1, LAYER, input_bytes=8, gradient_bytes=6, store_bytes=5)
    assert memory.graphs == 6
    assert memory.static_inputs == 16  # two buffers
    assert memory.static_gradients == 6  # one for all
    assert memory.break_points == 10  # of two microbatches
    assert memory.pool_peak == 200  # F0 F1 leave 160, B0 takes 70 net; F2: 90 + 100; B1: 170 + 30
    assert memory.fragmentation is None


def test_layers_of_other_sizes_have_their_own_buffers():
    memory = predict_graph_memory([1, 2, -2, -1], [1, 1], LAYER, input_bytes=[8, 4], store_bytes=[0, 3])
    assert (memory.static_inputs, memory.static_gradients, memory.break_points) == (12, 12, 3)


def test_measured_parts_count_each_address_once():
    pool = SimpleNamespace(peak_bytes=200, reserved_bytes=256, workspace_bytes=64)
    buffers, gradient = [torch.empty(2), torch.empty(2)], torch.empty(3, dtype=torch.int16)
    plan = plan_buffers(ORDER, 1)
    callables = [
        graphed([buffers[plan.assignment[0, 0, m]]], [torch.empty(1), None, torch.empty(1, dtype=torch.int8)],
                [gradient, None], pool)
        for m in range(3)
    ]  # fmt: skip
    measured = measure_graphs(callables, ORDER, 1, graph_objects=7)
    predicted = predict_graph_memory(
        ORDER, 1, LAYER, input_bytes=8, gradient_bytes=6, store_bytes=5, operations=12, workspaces=64
    )
    report = GraphMemoryReport(measured, predicted)
    assert [(label, before, after) for label, before, after in report.rows()] == [
        ("graphs", 6, 6), ("operations", 36, 36), ("graph objects", None, 7), ("static inputs", 16, 16),
        ("static gradients", 6, 6), ("pool, peak", 200, 200), ("of it break points", 10, 10),
        ("pool, reserved", None, 256), ("fragmentation", None, 56),
        ("cuBLAS workspaces", 64, 64),
    ]  # fmt: skip
    assert "fragmentation" in str(report)
    assert "unknown            56" in str(report)


def test_a_part_that_nobody_knows_is_left_out():
    memory = predict_graph_memory(ORDER, 1, LAYER, input_bytes=8)
    assert "graph objects" not in str(GraphMemoryReport(memory, memory))
    assert "workspaces" not in str(GraphMemoryReport(memory, memory))


def test_workspaces_of_cublas_by_the_sources():
    """PyTorch's CublasHandlePool.cpp: 32 MiB from Hopper on, else `:4096:2:16:8`; one for each of two threads."""
    assert predict_workspaces((9, 0), config="") == 2 * 33_554_432
    assert predict_workspaces((10, 0), config="", threads=1) == 33_554_432
    assert predict_workspaces((8, 0), config="", threads=1) == 8_519_680
    assert predict_workspaces((9, 0), config=":4096:2:16:8", threads=1) == 8_519_680
    assert predict_workspaces((8, 0), config="nonsense", threads=1) == 8_519_680
    assert predict_workspaces((9, 0), config=":0:0") == 0
    with pytest.raises(ValueError, match="threads=0"):
        predict_workspaces((9, 0), threads=0)


def test_workspaces_are_those_of_the_environment(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert predict_workspaces((9, 0)) == 2 * 128 * 1024
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    assert predict_workspaces((9, 0)) == 2 * 33_554_432


def test_the_pool_is_predicted_without_workspaces():
    with_them = predict_graph_memory(ORDER, 1, LAYER, input_bytes=8, workspaces=1000)
    assert with_them.pool_peak == predict_graph_memory(ORDER, 1, LAYER, input_bytes=8).pool_peak == 200
    assert with_them.workspaces == 1000


def test_graph_objects_are_what_the_driver_lost_beyond_the_allocator():
    """It took 900 bytes, 700 of them for the pool."""
    free, reserved = iter([(5000, 9000), (4100, 9000)]), iter([1000, 1700])
    named = {"mem_get_info": lambda _: next(free), "memory_reserved": lambda _: next(reserved)}
    with patch.multiple(torch.cuda, synchronize=lambda _: None, **named), graph_objects_made("cuda") as found:
        assert found == []
    assert found == [200]
    with graph_objects_made("cpu") as found:
        pass
    assert found == []


def test_a_whole_layer_has_no_break_point():
    pool = SimpleNamespace(peak_bytes=0, reserved_bytes=0, workspace_bytes=None)
    callables = [graphed([torch.empty(2)], [torch.empty(1)], [torch.empty(1)], pool) for _ in range(3)]
    assert measure_graphs(callables, ORDER, 1).break_points == 0


def test_break_points_of_all_chunks_are_held_together():
    """Chunk 2 holds 3 while chunk 1 holds 5 twice: layers stand at their place among the sample arguments."""
    pool = SimpleNamespace(peak_bytes=0, reserved_bytes=0, workspace_bytes=None)
    order, layers, sizes = [1, 2, 1, -2, -1, 2, -2, -1], [1, 2], {(0, 0): 5, (1, 0): 3, (1, 1): 0}
    callables = [None] * 6
    for chunk, layer in sizes:
        for m in range(2):
            outputs = [torch.empty(sizes[chunk, layer], dtype=torch.int8), torch.empty(0)]
            place = sample_index(layers, 2, chunk, layer, m)
            callables[place] = graphed([torch.empty(1)], outputs if sizes[chunk, layer] else outputs[1:], [], pool)
    assert measure_graphs(callables, order, layers).break_points == 13
    with pytest.raises(ValueError, match="5 callables for 3 layers and 2 microbatches"):
        measure_graphs(callables[1:], order, layers)


def test_numbers_for_another_number_of_layers_are_refused():
    with pytest.raises(ValueError, match="input_bytes has 1 numbers for 2 layers"):
        predict_graph_memory([1, -1], 2, LAYER, input_bytes=[8])
