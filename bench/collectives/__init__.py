"""Benchmarks of all-reduce."""
