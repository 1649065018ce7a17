"""Chapter 05, exercise `05.replay`: input_gradient(blocks, x, dy, rng) -> the gradient of x."""


def wrong_1(blocks, x, dy, rng):
    """Trusts the generator: the second forward draws new numbers, and later draws differ from a run that keeps all."""
    inputs = []
    for block in blocks:
        inputs.append(x)
        x = block.forward(x, rng)
        block.free()
    for block, x in zip(reversed(blocks), reversed(inputs)):
        block.forward(x, rng)
        dy = block.backward(dy)
    return dy


def wrong_2(blocks, x, dy, rng):
    """Sets the first state once, ahead of backward; the last block then draws the first block's mask."""
    start, inputs = rng.state, []
    for block in blocks:
        inputs.append(x)
        x = block.forward(x, rng)
        block.free()
    rng.state = start
    for block, x in zip(reversed(blocks), reversed(inputs)):
        block.forward(x, rng)
        dy = block.backward(dy)
    return dy


def wrong_3(blocks, x, dy, rng):
    """Replays each state, and leaves the generator at the first block's: the next microbatch repeats masks."""
    kept = []
    for block in blocks:
        kept.append((x, rng.state))
        x = block.forward(x, rng)
        block.free()
    for block, (x, state) in zip(reversed(blocks), reversed(kept)):
        rng.state = state
        block.forward(x, rng)
        dy = block.backward(dy)
    return dy
