"""Benchmarks and recorded evidence; their records are `bench/results/<device>/<name>.json`.

Multi-GPU benchmarks write `<name>_2.json`, `<name>_4.json`: one file for each number of devices.
"""
