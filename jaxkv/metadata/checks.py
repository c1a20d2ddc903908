"""Host-side validation of the arguments of builders."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from jaxkv._src.runtime.int32 import check_fits_int32


def check_rows(name: str, array: ArrayLike, rows: int, *others: int | str) -> None:
    """Raises a ValueError unless `array` is [rows, *others]; a string matches any size.

    Without the check, JAX would broadcast a single row and clamp indices of missing rows.
    """
    shape = np.shape(array)
    fixed = [(i, size) for i, size in enumerate((rows, *others)) if isinstance(size, int)]
    if len(shape) != 1 + len(others) or any(shape[i] != size for i, size in fixed):
        wanted = ", ".join([f"{rows} rows", *map(str, others)])
        raise ValueError(f"{name} must be [{wanted}], got {shape}")


def check_flags(name: str, array: ArrayLike, rows: int) -> None:
    """Raises a ValueError unless `array` is bool[rows]: of integers, `&` would be bitwise."""
    check_rows(name, array, rows)
    dtype = getattr(array, "dtype", type(array).__name__)
    if dtype != np.bool_:
        raise ValueError(f"{name} must be bool[{rows}], got {dtype}: compare counts, as in `n > 0`")


def check_field(operation: str, name: str, array: ArrayLike, *sizes: int | str) -> None:
    """Raises a ValueError unless the field of a batch is int32[*sizes]; a string is any size."""
    shape, dtype = np.shape(array), getattr(array, "dtype", None)
    fixed = [(i, size) for i, size in enumerate(sizes) if isinstance(size, int)]
    is_int32 = dtype == np.int32
    if is_int32 and len(shape) == len(sizes) and all(shape[i] == size for i, size in fixed):
        return
    wanted = ", ".join(map(str, sizes))
    if is_int32:
        remedy = "see BatchMetadata"
    elif dtype is None:
        remedy = "pass an int32 array" if sizes else "pass an integer, or int32[] on the device"
    else:
        remedy = "cast it to int32, and sum with dtype=jnp.int32"
    raise ValueError(
        f"{operation}: batch.{name} must be int32[{wanted}], got "
        f"{dtype or type(array).__name__}{[*shape]}: {remedy}"
    )


def as_int32_scalar(name: str, value: Any) -> Any:
    """An integer of Python or NumPy as NumPy int32[]; others, such as tracers, unchanged.

    As an argument of jit, it would be int64 with jax_enable_x64.

    Raises:
      ValueError: it exceeds int32.
    """
    if isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iu":
        value = value[()]
    if isinstance(value, np.int32 | bool) or not isinstance(value, int | np.integer):
        return value
    check_fits_int32(name, value)
    return np.int32(value)


def as_python_int(value: Any) -> Any:
    """An integer as a Python integer: NumPy's would promote int32 to int64 under x64."""
    try:
        return value if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return value


def check_has_rows(rows: int) -> None:
    """Raises a ValueError for a batch without rows, which builders cannot index."""
    if rows < 1:
        raise ValueError(
            "batch: seq_lens has 0 rows, at least 1 is required; pad an empty batch, with "
            "num_reqs=0, or use BatchMetadata.from_host"
        )


def check_threshold(decode_threshold: int) -> int:
    """The threshold as a Python integer; raises a ValueError if it is negative."""
    if decode_threshold < 0:
        raise ValueError(f"decode_threshold must be >= 0 tokens, got {decode_threshold}")
    return as_python_int(decode_threshold)


def check_drafts(operation: str, num_draft_tokens: ArrayLike, num_spec_tokens: int) -> None:
    """Raises unless `num_spec_tokens` is an upper bound; drafts on the device are not read."""
    known = isinstance(num_draft_tokens, np.ndarray)
    least = int(np.max(num_draft_tokens, initial=1)) if known else 1
    if num_spec_tokens < least:
        raise ValueError(
            f"{operation}: num_draft_tokens requires num_spec_tokens >= {least}, got "
            f"{num_spec_tokens}: pass the upper bound of drafts of a row"
        )


def check_accepted(operation: str, rows: ArrayLike, accepted: ArrayLike, drafts: ArrayLike) -> None:
    """Raises a ValueError unless `accepted` is in [1, drafts + 1] in `rows`, bool[B].

    Arguments on the device are not read.
    """
    if not (
        isinstance(rows, np.ndarray)
        and isinstance(accepted, np.ndarray)
        and isinstance(drafts, np.ndarray)
    ):
        return
    most = drafts.astype(np.int64) + 1
    for i in np.flatnonzero(rows & ~((accepted >= 1) & (accepted <= most))):
        raise ValueError(
            f"{operation}: the accepted tokens of row {i} must be in [1, {most[i]}], up to one "
            f"more than its drafts, got {accepted[i]}"
        )


def integers(name: str, values: npt.ArrayLike) -> np.ndarray:
    """`values` as int64[n]."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(
            f"{name} must be integers in one dimension, got lists of different lengths"
        ) from None
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be integers in one dimension, got {array.dtype}{[*array.shape]}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} must fit int64, got {array.max()}")
    return array.astype(np.int64, copy=False)


def at_least_1(**sizes: int) -> list[int]:
    """The sizes as Python integers; NumPy integers would promote int32 to int64 under x64."""
    for name, value in sizes.items():
        if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    return [operator.index(value) for value in sizes.values()]
