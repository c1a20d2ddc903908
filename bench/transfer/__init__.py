"""Block copy benchmarks."""
