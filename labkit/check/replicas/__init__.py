"""Exercises of data parallelism: gradient buckets, and the shards of the distributed optimizer."""
