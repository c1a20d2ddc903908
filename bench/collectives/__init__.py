"""All-reduce benchmarks."""
