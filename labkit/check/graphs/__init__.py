"""Exercises on CUDA graphs: what a graph can hold, buffers of a pipeline's graphs, the end of a partial graph."""
