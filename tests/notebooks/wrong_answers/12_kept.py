"""Chapter 12, exercise `12.kept`: kept(row) -> the most (stage, microbatch) pairs that the rank keeps at once."""


def wrong_1(row):
    """Believes that I frees the activations, as B does: W still reads them."""
    return _most(row, "BI")


def wrong_2(row):
    """Believes that each stage of a rank has a memory of its own, and takes the fullest."""
    stages = {action.partition("F")[0] for action in row if "F" in action}
    return max(_most([a for a in row if a.rstrip("0123456789")[:-1] == stage], "BW") for stage in stages)


def wrong_3(row):
    """Believes that memory only grows until the first backward, and stops there."""
    ahead = next(i for i, action in enumerate(row) if "F" not in action)
    return _most(row[:ahead], "BW")
