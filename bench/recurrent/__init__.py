"""Benchmarks of recurrent states."""
