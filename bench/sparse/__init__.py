"""Sparse attention benchmarks."""
