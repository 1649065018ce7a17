"""Graphs looked at: operations, launches, calls and refusals, for chapters and benchmarks."""
