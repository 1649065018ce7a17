"""Plans of static inputs against the sample arguments that megatron-core lays out for Transformer Engine."""

from math import ceil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.graphs import plan_buffers, sample_index
from labkit.schedules import get_overlap_moe_expert_parallel_comm_order, interleaved, one_f_one_b

cuda_graphs = pytest.importorskip("megatron.core.transformer.cuda_graphs", reason="needs megatron-core")
pytestmark = pytest.mark.oracle


class Layer:
    """Says what its input looks like; that is all Megatron asks of it here."""

    def __init__(self, width):
        self.width = width

    def get_layer_static_inputs(self, seq_length, micro_batch_size):
        return {"hidden_states": torch.zeros(seq_length, micro_batch_size, self.width)}


def megatron(order, widths, microbatches):
    """Megatron's buffer of every sample argument, numbered as `plan_buffers` numbers them; widths: by chunk, layer."""
    chunks = [[Layer(width) for width in chunk] for chunk in widths]
    helper = SimpleNamespace(
        num_model_chunks=len(chunks),
        num_microbatches=microbatches,
        flattened_callables=[layer for chunk in chunks for layer in chunk],
        callables_per_chunk=chunks,
        num_layers_per_chunk=[len(chunk) for chunk in chunks],
        chunks_with_decoder=[SimpleNamespace(decoder=SimpleNamespace(layers=chunk)) for chunk in chunks],
        seq_length=2,
        micro_batch_size=1,
        config=SimpleNamespace(cuda_graph_scope=[]),
    )
    single = all(len(chunk) == 1 for chunk in chunks)  # where layers are chunks, it wants to know whose they were
    places = [(abs(ceil(entry)) - 1, 0) for entry in order] if single else None
    with mock.patch.object(cuda_graphs, "is_te_min_version", lambda version: True):
        return cuda_graphs.TECudaGraphHelper._get_sample_arguments(helper, list(order), places)[0]


def assert_same_buffers(order, widths, microbatches):
    samples = megatron(order, widths, microbatches)
    layers = [len(chunk) for chunk in widths]
    plan = plan_buffers(order, layers, [width for chunk in widths for width in chunk])
    assert len({id(sample[0]) for sample in samples}) == plan.num_buffers
    buffers = {}
    for (chunk, layer, microbatch), buffer in plan.assignment.items():
        tensor = samples[sample_index(layers, microbatches, chunk, layer, microbatch)][0]
        assert buffers.setdefault(buffer, tensor) is tensor
        assert tensor.shape[-1] == plan.signature[buffer]


@given(st.integers(1, 4), st.integers(1, 6), st.lists(st.sampled_from([1, 2]), min_size=1, max_size=3), st.data())
@settings(max_examples=40)
def test_one_chunk(pp, microbatches, widths, data):
    order = one_f_one_b(pp, microbatches).order(data.draw(st.integers(0, pp - 1)))
    assert_same_buffers(order, [widths], microbatches)


@given(st.integers(2, 4), st.integers(2, 3), st.integers(1, 3), st.data())
@settings(max_examples=40)
def test_chunks_of_unequal_layers(pp, vpp, groups, data):
    widths = [data.draw(st.lists(st.sampled_from([1, 2]), max_size=3)) for _ in range(vpp)]
    order = interleaved(pp, vpp, groups * pp).order(data.draw(st.integers(0, pp - 1)))
    assert_same_buffers(order, widths, groups * pp)


@pytest.mark.parametrize("weights", [False, True])
def test_weight_gradients_of_their_own_change_nothing(weights):
    """Every layer is a chunk here; Megatron gives an input back at the backward, not at the weight gradients."""
    order = get_overlap_moe_expert_parallel_comm_order(interleaved(2, 2, 4).order(0), [1, 2], weights)
    assert_same_buffers(order, [[1], [1], [2]], 4)
