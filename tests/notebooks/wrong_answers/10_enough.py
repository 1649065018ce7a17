"""Chapter 10, exercise `10.enough`: enough(p, share) -> the fewest microbatches for that share."""


def wrong_1(p, share):
    """Takes (p - 1)/m for the bubble's share of the step; it is the bubble over the work."""
    return max(1, -int(-(p - 1) // share))


def wrong_2(p, share):
    """Rounds down, although fewer microbatches mean a larger bubble."""
    return int((p - 1) * (1 - share) / share)


def wrong_3(p, share):
    """Lets p stages wait for the first microbatch; the first stage does not wait."""
    return next(m for m in range(1, 1000) if p / (m + p) <= share)
