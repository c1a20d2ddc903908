"""Benchmarks of the offload manager; both run on a CPU."""
