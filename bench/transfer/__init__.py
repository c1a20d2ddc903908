"""Benchmarks of block copies."""
