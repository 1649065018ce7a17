"""Planted faults of graphs that end inside a layer of experts."""

from __future__ import annotations

from planting import Fault

PARTIAL = "tests/unit/test_graphs_partial.py"
MIDDLE = f"{PARTIAL} -k pieces"
LAYOUTS = "tests/parallel/test_graphs_moe.py"

PARTIAL_GRAPHS: list[Fault] = [
    Fault(
        "after every replay the dispatcher reads the metadata of the layer's first replay",
        "fill_store",
        "cut.metadata_of(others)",
        "vars(cut).setdefault('first_metadata', cut.metadata_of([*map(Tensor.clone, others)]))",
        MIDDLE,
    ),
    Fault(
        "a captured forward keeps its metadata alive, and thus the pool's memory",
        "CutMoELayer.tensors_of",
        "self.metadata_form = form",
        "self.metadata_form, self.kept = form, metadata",
        f"{PARTIAL} -k behind",
    ),
    Fault(
        "shared experts inside a graph are computed again after it",
        "_SKIP",
        "lambda store: store.shared_expert_output",
        "lambda store: None",
        f"{PARTIAL} -k skipped",
    ),
    Fault(
        "a graph that contains the permutation copies the counts to the host inside the graph",
        "CutMoELayer.__init__",
        '"before_ep_alltoall"',
        '"before_permutation_1"',
        f"{PARTIAL} -k copied",
    ),
    Fault(
        "after every replay rows travel by the routing of the layer's first replay",
        "fill_store",
        "routing_map, = others",
        "routing_map = vars(cut).setdefault('first_routing', others[0].clone())",
        f"{LAYOUTS} -k overlap_grad_reduce",
    ),
    Fault(
        "no replay waits for the gathered weights of a norm and a router after the attention",
        "GraphableMegatronModule.get_submodules_under_cudagraphs",
        "[self.parts.norm, *self.cut.captured_modules()]",
        "[]",
        f"{LAYOUTS} -k overlap_param_gather",
    ),
    Fault(
        "the store is not emptied after a replay",
        "CutMoELayer.resume",
        "store.clear()",
        "pass",
        MIDDLE,
    ),
    Fault(
        "rows get their weights through a transpose, whose gradient has a different memory layout than the graph's",
        "permute",
        "probs_TE.reshape(-1).index_select(0, weight_N)",
        "probs_TE.t().reshape(-1).index_select(0, positions)",
        MIDDLE,
    ),
]
