"""Benchmarks of attention metadata."""
