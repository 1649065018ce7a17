"""Chapter 08, exercise `08.leaving`: leaving(buckets, backwards) -> (gradient, bucket) for each bucket."""


def wrong_1(buckets, backwards):
    """Lets a complete bucket leave at once, so that ranks may send different buckets at the same place."""
    place = backwards[-1].index
    last = [(max(bucket, key=place), number) for number, bucket in enumerate(buckets)]
    return sorted(last, key=lambda pair: place(pair[0]))


def wrong_2(buckets, backwards):
    """Lets the buckets leave in every microbatch, as if no_sync did not exist."""
    return [pair for arrivals in backwards for pair in solution(buckets, [arrivals])]


def wrong_3(buckets, backwards):
    """Takes the first gradient of a bucket for the signal; the others arrive after the bucket was sent."""
    place = backwards[-1].index
    return [(min(bucket, key=place), number) for number, bucket in enumerate(buckets)]
