"""Rows of KV tokens that sparse attention reads from host memory."""
