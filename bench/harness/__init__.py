"""Clocks, records, processes, and peak bandwidths that benchmarks share."""
