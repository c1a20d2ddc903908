"""Host-side validation of the arguments of builders."""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike


def check_rows(name: str, array: ArrayLike, rows: int, *others: int | str) -> None:
    """Raises a ValueError unless `array` is [rows, *others]; a string matches any size.

    Without the check, JAX would broadcast a single row and clamp indices of missing rows.
    """
    shape = np.shape(array)
    fixed = [(i, size) for i, size in enumerate((rows, *others)) if isinstance(size, int)]
    if len(shape) != 1 + len(others) or any(shape[i] != size for i, size in fixed):
        wanted = ", ".join([f"{rows} rows", *map(str, others)])
        raise ValueError(f"{name} must be [{wanted}], got {shape}")


def check_has_rows(rows: int) -> None:
    """Raises a ValueError for a batch without rows, which builders cannot index."""
    if rows < 1:
        raise ValueError(
            "batch: seq_lens has 0 rows, at least 1 is required; pad an empty batch, with "
            "num_reqs=0, or use BatchMetadata.from_host"
        )


def integers(name: str, values: npt.ArrayLike) -> np.ndarray:
    """`values` as int64[n]."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be integers in one dimension, got {array.dtype}{[*array.shape]}"
        )
    return array.astype(np.int64, copy=False)


def at_least_1(**sizes: int) -> list[int]:
    """The sizes as Python integers; NumPy integers would promote int32 to int64 under x64."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    return [operator.index(value) for value in sizes.values()]
