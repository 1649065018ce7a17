"""Chapter 09, exercise `09.shards`: shards(sizes, bucket_size, dp) -> by rank, the (parameter, first, last) it owns."""


def wrong_1(sizes, bucket_size, dp):
    """Cuts the buffer as a whole, not each bucket: then one rank owns a whole bucket, and its link carries it alone."""
    buckets = laid_out(sizes, bucket_size, dp)
    return parts([(0, buckets[-1][1], [each for _, _, placed in buckets for each in placed])], dp)


def wrong_2(sizes, bucket_size, dp):
    """Lays parameters end to end: parts are still equal, but a parameter starts anywhere, off the hardware's stride."""
    return parts(laid_out(sizes, bucket_size, dp, align=1, multiple=1), dp)


def wrong_3(sizes, bucket_size, dp):
    """Lays parameters out as they were registered: the first bucket is then complete when the backward is."""
    return parts(laid_out(sizes, bucket_size, dp, order=range(len(sizes))), dp)
