"""Recurrent state benchmarks."""
