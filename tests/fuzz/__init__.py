"""Random cases of every operation: see `__main__.py`."""
