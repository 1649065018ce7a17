"""Pictures of CUDA graphs: launches and memory, the pool of a pipeline's graphs, partial graphs."""
