"""Attention metadata with static shapes, computed on the device: one module a backend."""
