"""Benchmarks and recorded evidence; each module writes `bench/results/<device>/<name>.json`."""
