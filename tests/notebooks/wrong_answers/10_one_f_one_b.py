"""Chapter 10, exercise `10.one_f_one_b`: row(pp, rank, microbatches) -> the actions of one rank under 1F1B."""


def wrong_1(pp, rank, microbatches):
    """Believes that ranks further down the pipeline warm up longer, because they start later."""
    return _row(rank, min(rank, microbatches), microbatches)


def wrong_2(pp, rank, microbatches):
    """Forgets that there may be fewer microbatches than stages behind a rank."""
    return _row(rank, pp - rank - 1, microbatches)


def wrong_3(pp, rank, microbatches):
    """Runs all forwards before the first backward: that is GPipe, with its memory."""
    return _row(rank, microbatches, microbatches)
