"""Planted faults of graphs that end inside a layer of experts."""

from __future__ import annotations

from planting import Fault

PARTIAL = "tests/unit/test_graphs_partial.py"
MIDDLE = f"{PARTIAL} -k pieces"
LAYOUTS = "tests/parallel/test_graphs_moe.py"

PARTIAL_GRAPHS: list[Fault] = [
    Fault(
        "after every replay the dispatcher reads the metadata of the layer's first",
        "fill_store",
        "cut.metadata_of(others)",
        "vars(cut).setdefault('first_metadata', cut.metadata_of([*map(Tensor.clone, others)]))",
        MIDDLE,
    ),
    Fault(
        "a captured forward keeps hold of its metadata, and so of the pool's memory",
        "CutMoELayer.tensors_of",
        "self.metadata_form = form",
        "self.metadata_form, self.kept = form, metadata",
        f"{PARTIAL} -k behind",
    ),
    Fault(
        "shared experts in a graph are computed once more behind it",
        "_SKIP",
        "lambda store: store.shared_expert_output",
        "lambda store: None",
        f"{PARTIAL} -k skipped",
    ),
    Fault(
        "a graph that holds the permutation copies counts to the host inside",
        "CutMoELayer.__init__",
        '"before_ep_alltoall"',
        '"before_permutation_1"',
        f"{PARTIAL} -k copied",
    ),
    Fault(
        "behind every replay rows travel by the routing of the layer's first",
        "fill_store",
        "routing_map, = others",
        "routing_map = vars(cut).setdefault('first_routing', others[0].clone())",
        f"{LAYOUTS} -k overlap_grad_reduce",
    ),
    Fault(
        "no replay waits for the gathered weights of a norm and a router behind the attention",
        "GraphableMegatronModule.get_submodules_under_cudagraphs",
        "[self.parts.norm, *self.cut.captured_modules()]",
        "[]",
        f"{LAYOUTS} -k overlap_param_gather",
    ),
    Fault(
        "the store is left filled behind a replay",
        "CutMoELayer.resume",
        "store.clear()",
        "pass",
        MIDDLE,
    ),
    Fault(
        "rows get their weights by way of the transpose, whose gradient lies otherwise than a graph hands it over",
        "permute",
        "probs_TE.reshape(-1).index_select(0, weight_N)",
        "probs_TE.t().reshape(-1).index_select(0, positions)",
        MIDDLE,
    ),
]
