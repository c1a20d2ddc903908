"""Tiers below host memory: local files. Python only, without JAX."""
