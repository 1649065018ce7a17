"""Chapter 08, exercise `08.cuts`: cuts(ready, sizes, latency, bandwidth) -> the number of gradients of each bucket."""


def wrong_1(ready, sizes, latency, bandwidth):
    """Pays the latency once, by one bucket, which leaves when the backward has ended."""
    return [len(sizes)]


def wrong_2(ready, sizes, latency, bandwidth):
    """Makes every bucket as small as possible, so that the last one is; the link pays the latency for each."""
    return [1] * len(sizes)


def wrong_3(ready, sizes, latency, bandwidth):
    """Cuts into halves of equal bytes and does not ask when gradients are complete."""
    half, held = 0, 0.0
    while half < len(sizes) - 1 and held < sum(sizes) / 2:
        held += sizes[half]
        half += 1
    return [half, len(sizes) - half]
