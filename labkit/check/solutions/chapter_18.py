"""Solutions of chapter 18, Partial graphs for MoE."""

from labkit.check.solution_source import solves

STEPS = ["attention", "shared", "route", "preprocess", "dispatch", "experts", "combine"]
HELD = {
    "attn": ["attention"],
    "moe_router": ["shared", "route"],
    "moe_preprocess": ["preprocess"],
}


@solves("18.runs")
def computed(scope, call):
    """A capture computes the captured steps, a replay the others, and an eager call all."""
    inside = [step for word in scope for step in HELD[word]]
    if call == "eager":
        return list(STEPS)
    return [step for step in STEPS if (step in inside) == (call == "capture")]


def _inside(steps):
    """What captured steps read and have not written, and what they write, in the order
    of the last time."""
    inputs = []
    written = []
    for _, reads, writes in steps:
        inputs += [name for name in reads if name not in written and name not in inputs]
        written = [name for name in written if name not in writes] + list(writes)
    return inputs, written


@solves("18.boundary")
def boundary(steps, captured):
    """A value comes out if somebody after the graph reads it before it is written
    again, or if it is the result."""
    inputs, written = _inside(steps[:captured])
    wanted = set(steps[-1][2])
    for _, reads, writes in reversed(steps[captured:]):
        wanted = wanted - set(writes) | set(reads)
    return inputs, [name for name in written if name in wanted]


PARTS = {
    "attn": ["attention"],
    "moe_router": ["mlp.norm", "mlp.router", "mlp.shared_experts"],
    "moe_preprocess": [],
    "moe": ["mlp"],
}


@solves("18.hooks")
def hooks(modules, scope):
    """Modules inside a captured part, as far as they own parameters."""
    parts = [part for word in scope for part in PARTS[word]]
    held = [n for n in modules if any(f"{n}.".startswith(f"{part}.") for part in parts)]
    return [name for name in held if modules[name]]
