"""Files: Chrome traces that Perfetto opens, and what PyTorch's profiler writes."""
