"""Chapter 05, exercise `05.kept`: kept_bytes(width, chain) -> the bytes that autograd keeps for a token."""


def wrong_1(width, chain):
    """Counts a tensor for each operation that keeps it, although the storage exists once."""
    widths = [width, *(result for _, result in chain)]
    total = 0
    for place, (operation, result) in enumerate(chain):
        if operation in ("linear", "norm", "gelu"):
            total += 2 * widths[place]
        elif operation in ("relu", "softmax"):
            total += 2 * result
        elif operation == "dropout":
            total += result
    return total


def wrong_2(width, chain):
    """Lets ReLU and softmax keep their input: their derivatives can be written so, but autograd takes the result."""
    as_inputs = {"relu": "gelu", "softmax": "gelu"}
    return solution(width, [(as_inputs.get(operation, operation), result) for operation, result in chain])


def wrong_3(width, chain):
    """Counts every result, also those that no derivative names and that are freed at once."""
    return 2 * sum(result for _, result in chain)
