"""Tiers below host memory: local files, Mooncake Store. Python only, without JAX."""
