"""Data parallelism: the naive wrapper, the bucketed one, and the distributed optimizer."""
