"""Chapter 16, exercise `16.stale`: stale(captures, replays) -> the replays that read another graph's value."""


def wrong_1(captures, replays):
    """Takes every other order for a wrong one: two graphs that share no address may change places."""
    order = list(captures)
    return [i for i, name in enumerate(replays) if name != order[i % len(order)]]


def wrong_2(captures, replays):
    """Asks only whether anybody has written there, and not who wrote last."""
    return [i for i, seen in enumerate(seen_by(captures, replays)) if None in seen.values()]


def wrong_3(captures, replays):
    """Believes that each graph has a pool of its own, so that no replay disturbs another."""
    return []
