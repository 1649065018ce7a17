"""Chapter 07, exercise `07.work`: pairs of each rank under the plain cut and a causal mask."""


def wrong_1(seq_length, cp):
    """Shares the pairs out evenly, as if every position saw the same number of keys."""
    return [seq_length * (seq_length + 1) // 2 // cp] * cp


def wrong_2(seq_length, cp):
    """Counts the rank's own keys alone, and forgets that late ranks see the keys of all earlier ones."""
    part = seq_length // cp
    return [part * (part + 1) // 2] * cp


def wrong_3(seq_length, cp):
    """Takes the own block for a square, although a query sees no later key of its own rank."""
    return [(rank + 1) * (seq_length // cp) ** 2 for rank in range(cp)]
