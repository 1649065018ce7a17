"""Solutions of chapter 05, What a layer remembers: memory and recomputation."""

from labkit.check.solution_source import solves


@solves("05.kept")
def kept_bytes(width, chain):
    """Collect the tensors that derivatives name in a set, and count masks apart."""
    widths = [width, *(result for _, result in chain)]
    tensors, masks = set(), 0
    for place, (operation, result) in enumerate(chain):
        if operation in ("linear", "norm", "gelu"):
            tensors.add(place)
        elif operation in ("relu", "softmax"):
            tensors.add(place + 1)
        elif operation == "dropout":
            masks += result
    return 2 * sum(widths[tensor] for tensor in tensors) + masks


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


@solves("05.groups")
def best_group(layers, input_bytes, layer_bytes):
    """The divisor with the smallest sum of all groups' inputs and one group in full."""
    sizes = [n for n in range(1, layers + 1) if layers % n == 0]
    return min(sizes, key=lambda n: layers // n * input_bytes + n * layer_bytes)
