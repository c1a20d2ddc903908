"""Timing, records, processes and peak bandwidths shared by the benchmarks."""
