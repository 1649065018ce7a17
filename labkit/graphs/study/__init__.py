"""Counts of a graph's operations, launches, calls and refusals, for chapters and benchmarks."""
