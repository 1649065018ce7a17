"""Solutions of chapter 06, Sequence parallelism and random numbers."""

import numpy as np

from labkit.check.solution_source import solves


@solves("06.shapes")
def shapes(s, b, h, t, sequence_parallel):
    """Between the regions positions are cut, inside the width; what is gathered for fc1
    is not kept."""
    between, inside = [s // t if sequence_parallel else s, b, h], [s, b, 4 * h // t]
    names = {"norm input": between, "fc1 input": between, "dropout mask": between}
    return names | {"gelu input": inside, "fc2 input": inside}


@solves("06.sequence")
def block(x, dy, gain, A, B, tp):
    """Gather before A, reduce-scatter after B, the same two transposed backward; the gain
    saw other positions on each rank, so its gradients are parts of a sum. What A has
    read is kept; Megatron keeps x and gathers again."""
    scaled = tp.all_gather(x * gain)
    inner = np.maximum(scaled @ A.T, 0)
    y = tp.reduce_scatter(inner @ B.T)
    d_inner = (tp.all_gather(dy) @ B) * (inner > 0)
    d_scaled = tp.reduce_scatter(d_inner @ A)
    dgain = tp.all_reduce((d_scaled * x).sum(0))
    return y, d_scaled * gain, dgain, d_inner.T @ scaled


@solves("06.seeds")
def seed(place, tp_rank, pp_rank, sequence_parallel):
    """Ranks with the same values share a state, and each stage has its own: Megatron's
    seeds."""
    common = 1234 + 100 * pp_rank
    same_values = place == "between" and not sequence_parallel
    return common if same_values else common + 2718 + tp_rank
