"""Host pool benchmarks."""
