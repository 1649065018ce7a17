"""Views of graphs for chapters and benchmarks: operations, launches, calls and refusals."""
