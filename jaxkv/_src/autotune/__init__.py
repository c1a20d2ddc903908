"""Measurements that write tuning tables."""
