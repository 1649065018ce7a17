"""Solutions of chapter 05, What a layer remembers: memory and recomputation."""

from labkit.check.solution_source import solves


@solves("05.kept")
def kept(program):
    """What the derivative of each operation is written with, each tensor once."""
    found = set()
    for result, operation, inputs in program:
        if operation in ("linear", "matmul", "norm", "gelu"):
            found |= set(inputs)
        elif operation in ("relu", "softmax"):
            found.add(result)
        elif operation == "dropout":
            found.add(f"mask of {result}")
    return found


@solves("05.replay")
def input_gradient(blocks, x, dy, rng):
    """Keep the input and the state before each block; put the last state back."""
    kept = []
    for block in blocks:
        kept.append((x, rng.state))
        x = block.forward(x, rng)
        block.free()
    end = rng.state
    for block, (x, state) in zip(reversed(blocks), reversed(kept)):
        rng.state = state
        block.forward(x, rng)
        dy = block.backward(dy)
    rng.state = end
    return dy


@solves("05.plan")
def plan(layers, room, ways):
    """Full before selective before keep, because backward adds most to a full layer and
    least waits in front; of all numbers of full and selective layers, the cheapest."""

    def peak(names):
        before, most = 0, 0
        for name in names:
            after, during, _ = ways[name]
            most = max(most, before + during)
            before += after
        return max(most, before)

    best, least = None, float("inf")
    for full in range(layers + 1):
        for some in range(layers - full + 1):
            rest = layers - full - some
            names = ["full"] * full + ["selective"] * some + ["keep"] * rest
            cost = sum(ways[name][2] for name in names)
            if peak(names) <= room and cost < least:
                best, least = names, cost
    return best
