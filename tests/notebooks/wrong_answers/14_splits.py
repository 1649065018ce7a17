"""Chapter 14, exercise `14.splits`: splits(counts, rank) -> (rows sent to each rank, rows received from each)."""


def wrong_1(counts, rank):
    """Deals the experts out one by one, so that expert e is on rank e % ranks; neighbours lie on one rank."""
    ranks = len(counts)
    return [sum(counts[rank][s::ranks]) for s in range(ranks)], [sum(row[rank::ranks]) for row in counts]


def wrong_2(counts, rank):
    """Takes what the others send for what this rank sends: the two lists are exchanged."""
    sends, receives = solution(counts, rank)
    return receives, sends


def wrong_3(counts, rank):
    """Leaves out the rows that stay on their rank, because these need no network."""
    return tuple([0 if other == rank else n for other, n in enumerate(each)] for each in solution(counts, rank))
