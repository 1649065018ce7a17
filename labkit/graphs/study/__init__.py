"""What chapters and benchmarks show of graphs: their operations, launches, calls and rejections."""
