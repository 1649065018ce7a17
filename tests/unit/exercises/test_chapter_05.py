"""Wrong answers to the exercises of chapter 05, with what each believes and words of its score."""

# ---- 05.kept ----

KEEPS = {"linear": 0, "norm": 0, "gelu": 0, "relu": 1, "softmax": 1, "dropout": "mask", "scale": None}


def kept(*, once=True, number=2, mask=1, **other):
    """An answer; an argument that is not its default is a misunderstanding."""

    def answer(width, chain):
        keeps = KEEPS | other
        widths = [width, *(result for _, result in chain)]
        tensors = [i + keeps[name] for i, (name, _) in enumerate(chain) if keeps[name] in (0, 1)]
        masks = sum(result for name, result in chain if keeps[name] == "mask")
        return number * sum(widths[t] for t in (set(tensors) if once else tensors)) + mask * masks

    return answer


KEPT = {
    # Counts a tensor for each operation that keeps it, although the storage exists once.
    "twice": (kept(once=False), "keeps the same tensor as input: count it once"),
    "inputs": (kept(once=False, **dict.fromkeys(KEEPS, 0)), "each operation is counted with its input"),
    # Lets ReLU and softmax keep their input: their derivatives can be written so, but autograd takes the result.
    "relu": (kept(relu=0, softmax=0), "keeps the same tensor as input: count it once"),
    "gelu": (kept(gelu=1), "gelu's derivative needs its input"),
    "dropout": (kept(dropout=0), "dropout keeps its mask alone"),
    "no mask": (kept(dropout=None), "the mask of dropout is missing"),
    "wide mask": (kept(mask=2), "a mask has one byte"),
    "scale": (kept(scale=0), "constant factor needs no tensor"),
    # Counts every result, also those that no derivative names and that are freed at once.
    "results": (lambda width, chain: 2 * sum(n for _, n in chain), "every result is counted"),
    "tensors": (lambda width, chain: 2 * (width + sum(n for _, n in chain)), "every tensor is counted"),
    "numbers": (kept(number=1), "a number has two bytes"),
}

# ---- 05.replay ----


def replayed(*, at=lambda states, place: states[place], back=True, free=True, read_late=False):
    """An answer; `at(states, place)` is the state ahead of a second forward, None for the current one."""

    def answer(blocks, x, dy, rng):
        inputs, states = [], []
        for block in blocks:
            inputs.append(x)
            ahead = rng.state
            x = block.forward(x, rng)
            states.append(rng.state if read_late else ahead)
            if free:
                block.free()
        end = rng.state
        for place in reversed(range(len(blocks))):
            state = at(states, place)
            rng.state = rng.state if state is None else state
            blocks[place].forward(inputs[place], rng)
            dy = blocks[place].backward(dy)
        rng.state = end if back else rng.state
        return dy

    return answer


def from_the_start(blocks, x, dy, rng):
    """Keeps one input, and runs all blocks before again for each."""
    start = rng.state
    for place in reversed(range(len(blocks))):
        rng.state, y = start, x
        for block in blocks[: place + 1]:
            y = block.forward(y, rng)
            if block is not blocks[place]:
                block.free()
        dy = blocks[place].backward(dy)
    rng.state = start + len(blocks)
    return dy


def upside_down(blocks, x, dy, rng):
    """Gives the gradient to the blocks in the order of the forward."""
    return replayed()(blocks, x, dy, rng)[::-1]


REPLAY = {
    "new numbers": (replayed(at=lambda states, place: None), "the second forward draws new numbers"),
    "first state": (replayed(at=lambda states, place: states[0]), "at the state before block 0; each block needs"),
    # Sets the first state once, before backward; the last block then draws the first block's mask.
    "set once": (
        replayed(at=lambda states, place: states[0] if place == len(states) - 1 else None),
        "the state is set once",
    ),
    "behind": (replayed(read_late=True), "read it before the first forward"),
    # Replays each state, and leaves the generator at the first block's: the next microbatch repeats masks.
    "not back": (replayed(back=False), "draws masks that this one has drawn"),
    # Trusts the generator: the second forward draws new numbers, and later draws differ from a run that keeps all.
    "moved": (replayed(at=lambda states, place: None, back=False), "a run without recomputation draws other"),
    "not freed": (replayed(free=False), "free a block after its first forward"),
    "quadratic": (from_the_start, "keep the input of each block"),
    "dy": (upside_down, "although the masks agree"),
    "no second": (lambda blocks, x, dy, rng: dy, "by block: a forward, then a second one"),
}

# ---- 05.groups ----


def group(n, i, a):
    sizes = [size for size in range(1, n + 1) if n % size == 0]
    return min(sizes, key=lambda size: n // size * i + size * a)


GROUPS = {
    # Looks at the layers that run again at once alone: one is least, but every layer's input is kept.
    "one": (lambda n, i, a: 1, "the input of every layer is kept"),
    # Looks at the inputs alone: one group keeps one, but then all layers run again at once.
    "all": (lambda n, i, a: n, "all layers run again at once"),
    "root": (lambda n, i, a: round(n**0.5), "the root of the layers is right where"),
    # Takes Chen's root of the number of layers, which is right where a layer keeps no more than its input.
    "divisor": (
        lambda n, i, a: min((k for k in range(1, n + 1) if n % k == 0), key=lambda k: abs(k - n**0.5)),
        "nearest divisor",
    ),
    "balance": (lambda n, i, a: round((n * i / a) ** 0.5), "must divide the layers"),
    "peak": (lambda n, i, a: n // group(n, i, a) * i + group(n, i, a) * a - i, "this is the peak"),
    "count": (lambda n, i, a: n // group(n, i, a), "this is the number of groups"),
    "larger": (
        lambda n, i, a: min((k for k in range(n, 0, -1) if n % k == 0), key=lambda k: n // k * i + k * a),
        "return the smaller",
    ),
}

TABLES = {"05.kept": KEPT, "05.replay": REPLAY, "05.groups": GROUPS}
