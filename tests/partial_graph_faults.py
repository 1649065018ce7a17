"""Planted faults of graphs that end inside a layer of experts."""

from __future__ import annotations

from planting import Fault

PARTIAL = "tests/unit/test_graphs_partial.py"
MIDDLE = f"{PARTIAL} -k pieces"
LAYOUTS = "tests/parallel/test_graphs_moe.py"

PARTIAL_GRAPHS: list[Fault] = [
    Fault(
        "a replay leaves the dispatcher's attributes as they were at capture",
        "graphs/partial.py",
        "            _write(dispatcher, path, value)\n        dispatcher.hidden_shape",
        "            pass\n        dispatcher.hidden_shape",
        MIDDLE,
    ),
    Fault(
        "a captured forward keeps hold of its attributes, and so of the pool's memory",
        "graphs/partial.py",
        "    for path in valid:\n        _write(dispatcher, path, None)\n",
        "",
        f"{PARTIAL} -k behind",
    ),
    Fault(
        "shared experts in a graph are computed once more behind it",
        "graphs/partial.py",
        '"shared_experts_compute": lambda store: store.shared_expert_output,',
        '"shared_experts_compute": lambda store: None,',
        f"{PARTIAL} -k skipped",
    ),
    Fault(
        "a graph that holds the permutation copies counts to the host inside",
        "graphs/partial.py",
        'moe_layer.token_dispatcher.cuda_dtoh_point = "before_ep_alltoall"',
        'moe_layer.token_dispatcher.cuda_dtoh_point = "before_permutation_1"',
        f"{PARTIAL} -k copied",
    ),
    Fault(
        "behind every replay rows travel by the routing of the layer's first",
        "graphs/partial.py",
        "        (routing_map,) = others\n",
        '        routing_map = vars(cut).setdefault("first_routing", others[0].clone())\n',
        f"{LAYOUTS} -k overlap_grad_reduce",
    ),
    Fault(
        "no replay waits for the gathered weights of a norm and a router behind the attention",
        "graphs/graphable.py",
        "            found += [self.parts.norm, *self.cut.captured_modules()]",
        "            found += []",
        f"{LAYOUTS} -k overlap_param_gather",
    ),
    Fault(
        "the store is left filled behind a replay",
        "graphs/partial.py",
        "            store.clear()\n",
        "            pass\n",
        f"{LAYOUTS} -k pad_to_capacity",
    ),
    Fault(
        "the shape of the layer's input stays that of the last eager forward",
        "graphs/partial.py",
        "        dispatcher.hidden_shape = residual.shape",
        "        pass",
        f"{PARTIAL} -k shape",
    ),
    Fault(
        "rows get their weights by way of the transpose, whose gradient lies otherwise than a graph hands it over",
        "moe/permutation.py",
        "probs_N = probs_TE.reshape(-1).index_select(0, weight_N)",
        "probs_N = probs_TE.t().reshape(-1).index_select(0, positions)",
        MIDDLE,
    ),
]
