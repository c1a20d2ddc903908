"""Symmetric memory and all-reduce."""
