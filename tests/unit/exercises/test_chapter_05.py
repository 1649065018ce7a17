"""Wrong answers to the exercises of chapter 05, with what each believes and words of its score."""

# ---- 05.kept ----

KEEPS = dict.fromkeys(("linear", "matmul", "norm", "gelu"), "inputs") | dict.fromkeys(("relu", "softmax"), "result")
KEEPS |= {"dropout": "mask", "scale": "", "add": ""}


def kept(**other):
    """An answer; an argument is an operation that it takes for another kind."""

    def answer(program):
        found = set()
        for result, operation, inputs in program:
            kind = (KEEPS | other)[operation]
            found |= {"inputs": set(inputs), "first": {inputs[0]}, "result": {result}}.get(kind, set())
            found |= {f"mask of {result}"} if kind == "mask" else set()
        return found

    return answer


KEPT = {
    # Believes that backward needs whatever forward has computed.
    "results": (lambda program: {result for result, _, _ in program}, "that is every result"),
    # Believes that every derivative needs the input, as that of a product does.
    "inputs": (lambda program: {name for _, _, inputs in program for name in inputs}, "that is every input"),
    "relu": (kept(relu="inputs", softmax="inputs"), "written with their results"),
    "gelu": (kept(gelu="result"), "gelu's derivative needs its input"),
    "dropout": (kept(dropout="inputs"), "dropout keeps its mask alone"),
    "no mask": (kept(dropout=""), "dropout keeps a mask"),
    # Keeps both terms of a residual addition, the commonest over-count of a layer.
    "add": (kept(add="inputs"), "a sum passes the gradient on"),
    "scale": (kept(scale="inputs"), "the derivative of a constant factor is the factor"),
    # Thinks of a product as of a function of one tensor.
    "first factor": (kept(matmul="first"), "both factors of this product are activations"),
    "no product": (kept(linear=""), "the gradient of a weight needs"),
    "norm": (kept(norm="result"), "a norm's derivative needs the input"),
    "number": (lambda program: len(kept()(program)), "this is not a set of names"),
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

# ---- 05.plan ----


def peak(names, ways):
    before, most = 0, 0
    for name in names:
        most, before = max(most, before + ways[name][1]), before + ways[name][0]
    return max(most, before)


def search(order=("full", "selective", "keep"), measure=peak):
    """An answer that tries all numbers of layers, put in this order, and takes the cheapest that fits."""

    def answer(layers, room, ways):
        tried = []
        for full in range(layers + 1):
            for some in range(layers - full + 1):
                number = {"full": full, "selective": some, "keep": layers - full - some}
                names = [name for name in order for _ in range(number[name])]
                if measure(names, ways) <= room:
                    tried.append((sum(ways[name][2] for name in names), names))
        return min(tried)[1] if tried else ["full"] * layers

    return answer


PLANS = {
    # The usual cure everywhere: it fits, and is as dear as it can be.
    "all full": (lambda layers, room, ways: ["full"] * layers, "not every layer needs full recomputation"),
    "all kept": (lambda layers, room, ways: ["keep"] * layers, "forward alone does not fit"),
    # Adds up what forward keeps, and forgets that it comes back.
    "forward only": (
        search(measure=lambda names, ways: sum(ways[name][0] for name in names)), "forward fits, but backward",
    ),
    # Recomputes at the end, where backward comes first.
    "last ones": (search(order=("keep", "selective", "full")), "begin with the layers that keep least"),
    # One full layer per layer too many, and nothing kept at the end.
    "last one too": (
        lambda layers, room, ways: [*search()(layers, room, ways)[:-1], "full"], "the last layer is needed again",
    ),
    # Knows one policy besides full recomputation.
    "two ways": (
        lambda layers, room, ways: next(
            names for full in range(layers + 1)
            if peak(names := ["full"] * full + ["keep"] * (layers - full), ways) <= room
        ),
        "fits, and costs",
    ),
    "numbers": (lambda layers, room, ways: [1, layers - 2, 1], "this is not a list with one of the words"),
    "too few": (lambda layers, room, ways: ["full"], "this is not a list with one of the words"),
}  # fmt: skip

TABLES = {"05.kept": KEPT, "05.replay": REPLAY, "05.plan": PLANS}
