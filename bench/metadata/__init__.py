"""Attention metadata benchmarks."""
