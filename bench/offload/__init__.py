"""Benchmarks of the offload manager and of tiers; none needs a GPU."""
