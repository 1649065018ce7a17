"""Chapter 01, exercise `01.after`: after(operation, before) -> the chunks of each rank afterwards."""


def wrong_1(operation, before):
    """Takes an all-to-all for an all-gather: everybody then has everything, g times as much as was asked for."""
    if operation == "all_to_all":
        return [[chunk for chunks in before for chunk in chunks] for _ in before]
    return solution(operation, before)


def wrong_2(operation, before):
    """Scatters without adding: rank r keeps its own chunk r, and the other ranks' shares are lost."""
    if operation == "reduce_scatter":
        return [[before[rank][rank]] for rank in range(len(before))]
    return solution(operation, before)


def wrong_3(operation, before):
    """Divides by the number of ranks, as data parallelism does afterwards; the collective itself adds."""
    if operation in ("all_reduce", "reduce_scatter"):
        return [[total / len(before) for total in sums] for sums in solution(operation, before)]
    return solution(operation, before)
