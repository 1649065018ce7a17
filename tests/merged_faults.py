"""Planted faults of merged pairs: which part runs when, for which microbatch, and where gradients go (`faults.py`)."""

from __future__ import annotations

from planting import Fault

RANKS = "tests/parallel/test_merged_pairs.py -k delayed"
UNIT = "tests/unit/test_schedules_merged.py"
GRAPHS = "tests/unit/test_graphs_merged.py"
REPLAYS = "tests/parallel/test_merged_pairs.py -k 1f1b"

MERGED_PAIRS = [
    Fault(
        "the backward's combine starts after the part that was to hide it",
        "merging:_by_turns",
        "(back, ahead) if len(back) >= len(ahead) else (ahead, back)",
        "(ahead, back) if len(back) >= len(ahead) else (back, ahead)",
        f"{UNIT} -k take_turns",
    ),
    Fault(
        "a layer's combine is awaited at the end of the pair",
        "pair_order",
        "[*runs, *waiting]",
        "sorted([*runs, *waiting], key=lambda part: (part.side, part.part) == ('F', 'combine'))",
        f"{UNIT} -k take_turns",
    ),
    Fault(
        "a pair goes backward through the newest microbatch of the stage",
        "MergedStep._begin_backward",
        "self.parts.pop(key)",
        "self.parts.pop(max(parts for parts in self.parts if parts[0] == key[0]))",
        RANKS,
    ),
    Fault(
        "the weight gradients of experts are forgotten in a pair",
        "merging:_with_early_weights",
        "run.part in _LEAVES",
        "run.part in _LEAVES[1:]",
        RANKS,
    ),
    Fault(
        "the weight gradients of a pair's last layer are forgotten",
        "MergedStep._run_part",
        "self.weight_gradients.run(key)",
        "run.layer and self.weight_gradients.run(key)",
        RANKS,
    ),
    Fault(
        "what combine gives back to attention's outputs is lost",
        "_LayerRun.backward",
        "[*self._of_attention, *gradients]",
        "[None, None, *gradients]",
        RANKS,
    ),
    Fault(
        "a pair starts without waiting for the backward's message",
        "dependencies:awaited",
        "waits = np.where(schedule.merged & (own == index - 1), index, waits)",
        "waits = np.where(schedule.merged, -1, waits)",
        f"{UNIT} -k brute_force",
    ),
    Fault(
        "the two gradients of a tied embedding arrive one by one",
        "MergedStep._finish_backward",
        "parts.ties or step.verb == 'I'",
        "step.verb == 'I'",
        "tests/parallel/test_merged_pairs.py -k everyday",
    ),
    Fault(
        "the graphs of weight gradients are replayed at the end of their pair",
        "pair_order",
        "[*runs, *waiting]",
        "sorted([*runs, *waiting], key=lambda part: part.side == 'W')",
        REPLAYS,
    ),
    Fault(
        "the graph of the weight gradients is left out of a replay",
        "GraphedCallable.replay_backward",
        "deferred([parameter for parameter, _ in captured.late], partial(self._weight_gradients, flight))",
        "pass",
        REPLAYS,
    ),
    Fault(
        "the graphs of a pair are captured one side after the other",
        "merged_capture_order",
        "reversed(cell)",
        "cell",
        f"{GRAPHS} -k megatrons_order",
    ),
    Fault(
        "layers without graphs are left out before the sides of a pair are lined up",
        "merged_capture_order",
        "[len(layers) for layers in captured]",
        "[sum(layers) for layers in captured]",
        f"{GRAPHS} -k lined_up",
    ),
    Fault(
        "the output of the norm before experts stays gone in a pair",
        "Recomputation.norm",
        "[y for y in made if isinstance(y, Tensor)]",
        "[y.clone() for y in made if isinstance(y, Tensor)]",
        "tests/unit/test_chunk_parts.py",
    ),
]
