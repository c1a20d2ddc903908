"""Benchmarks and recorded evidence; each module writes `bench/results/<device>/<name>.json`.

Those of several GPUs write `<name>_2.json`, `<name>_4.json`: one for each number of devices.
"""
