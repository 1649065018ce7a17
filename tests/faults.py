"""Planted faults: mistakes that people make in a training stack like this one, and what finds each.

Every entry is one change of the source (`planting.py` says how it is made and found). The list grows with every part of
labkit; `make sweep` runs all of it, `make test` a subset, and docs/faults.md is its table.

What the microscope must name follows from the fault, by the order of a training step: outputs of blocks, the loss,
gradients from the output back to the input, updated parameters. A gradient that arrives wrong at the top of a block
spoils what lies below it; a wrong norm or update spoils the first parameter, the word embedding.
"""

from __future__ import annotations

import checkpoint_faults
import expert_faults
import graph_faults
import layer_faults
import merged_faults
import partial_graph_faults
import training_faults
from planting import Fault

FAULTS: dict[str, list[Fault]] = {
    "Tensor parallelism": layer_faults.TENSOR_PARALLEL,
    "Sequence parallelism": layer_faults.SEQUENCE_PARALLEL,
    "Context parallelism": layer_faults.CONTEXT_PARALLEL,
    "Recomputation": layer_faults.RECOMPUTATION,
    "Gradients and the update": training_faults.GRADIENTS,
    "Gradient buckets": training_faults.DATA_PARALLEL,
    "Distributed optimizer": training_faults.DISTRIBUTED_OPTIMIZER,
    "Precision": training_faults.PRECISION,
    "Pipeline": training_faults.PIPELINE,
    "Random states and groups": training_faults.RANDOM_STATES_AND_GROUPS,
    "Checkpoints": checkpoint_faults.RESUMING,
    "Routing of experts": expert_faults.ROUTING,
    "Experts": expert_faults.EXPERTS,
    "Experts in fp8": expert_faults.FLOAT8,
    "Dispatch to experts": expert_faults.DISPATCH,
    "Merged pairs": merged_faults.MERGED_PAIRS,
    "CUDA graphs": graph_faults.GRAPHS,
    "Partial graphs": partial_graph_faults.PARTIAL_GRAPHS,
}
"""By what they break."""


def every_fault() -> list[Fault]:
    """All of them, in order."""
    return [fault for faults in FAULTS.values() for fault in faults]
