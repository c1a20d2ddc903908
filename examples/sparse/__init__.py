"""Sparse attention over a KV cache in host memory, compared with one in HBM; see engine.Engine."""
