"""Random cases of every operation: see `__main__.py`."""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # before jax is imported
