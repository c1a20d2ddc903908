"""Ragged rows (segments): operations shared by the builders.

Each consists of a few element-wise operations and at most one reduction, which XLA fuses into one
kernel; XLA's scans and searches take several kernels.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv._src.runtime.int32 import check_fits_int32
from jaxkv.metadata.checks import check_has_rows

Array: TypeAlias = jax.Array | np.ndarray  # on the device, or on the host until it is traced
T = TypeVar("T")
IntOrArray = TypeVar("IntOrArray", int, jax.Array)

_TILE = 128  # flags per matrix product in `count_before`


@overload
def on_device(tree: Array) -> jax.Array: ...
@overload
def on_device(tree: T) -> T: ...
def on_device(tree: Any) -> Any:
    """The tree with JAX arrays instead of NumPy arrays, which cannot be indexed by a tracer.

    NumPy arrays occur when a traced function closes over a batch from the host.
    """
    return jax.tree.map(jnp.asarray, tree)


def int32_on_device(name: str, values: ArrayLike) -> jax.Array:
    """`values` as int32; with jax_enable_x64, int64 of the caller would spread to the results.

    Raises:
      ValueError: values that are not integers, or integers on the host outside int32.
    """
    check_fits_int32(name, values)
    array = jnp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be int32, got {array.dtype}")
    return array.astype(jnp.int32)


def cdiv(numerator: IntOrArray, denominator: int) -> IntOrArray:
    """Ceil division of values >= 0."""
    return -(-numerator // denominator)


def prefix_sum(x: jax.Array) -> jax.Array:
    """int32[n + 1], prefix sum with a leading zero: 0, x[0], x[0] + x[1], ...

    Implemented as a masked reduction: at the number of rows of a batch, far cheaper on a GPU than a
    scan, which takes several kernels.
    """
    n = x.shape[0]
    before = jnp.arange(n + 1, dtype=jnp.int32)[:, None] > jnp.arange(n, dtype=jnp.int32)[None]
    return jnp.sum(jnp.where(before, x.astype(jnp.int32)[None], 0), axis=1, dtype=jnp.int32)


def row_of(starts: jax.Array, positions: jax.Array) -> jax.Array:
    """The row r with starts[r] <= position < starts[r + 1], for each of `positions`.

    Empty rows are skipped. A position past the end yields the number of rows.

    Args:
      starts: int32[B + 1], not decreasing, from 0.
      positions: int32[...], not negative.
    """
    check_has_rows(starts.shape[0] - 1)
    row = jnp.searchsorted(starts[1:], positions, side="right", method="scan_unrolled")
    return row.astype(jnp.int32)


def rows_from(x: Array, first: int | jax.Array, count: jax.Array, *, fill: int = 0) -> jax.Array:
    """`x[first : first + count]`, padded with `fill` to the shape of `x`.

    Args:
      x: [B, ...].
      first: int32[], first row of the slice.
      count: int32[], number of rows.
      fill: value of the other rows.
    """
    x = on_device(x)
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    rows = x[jnp.clip(first + index, 0, x.shape[0] - 1)]
    wanted = (index < count).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(wanted, rows, jnp.asarray(fill, x.dtype))


def starts_from(starts: Array, first: int | jax.Array, count: jax.Array) -> jax.Array:
    """`starts[first : first + count + 1]` relative to its first value, padded with its last value.

    Args:
      starts: int32[B + 1], such as `query_start_loc`.
      first: int32[], first row of the slice.
      count: int32[], number of rows.
    """
    starts = on_device(starts)
    index = jnp.arange(starts.shape[0], dtype=jnp.int32)
    last = starts.shape[0] - 1
    return (
        starts[jnp.clip(first + jnp.minimum(index, count), 0, last)]
        - starts[jnp.clip(first, 0, last)]
    )


def count_before(flags: jax.Array) -> jax.Array:
    """int32[N, L], exclusive count of set flags in each row of bool[N, L].

    Within a tile, by a product with a triangular matrix, because XLA's scan of a long row takes
    several kernels. Zeros, ones and sums up to the tile size are exact in any matmul precision.
    """
    rows, width = flags.shape
    tiles = jnp.pad(flags, ((0, 0), (0, -width % _TILE))).reshape(rows, -1, _TILE)
    earlier = jnp.triu(jnp.ones((_TILE, _TILE), jnp.float32), 1)
    inside = (tiles.astype(jnp.float32) @ earlier).astype(jnp.int32)
    before = jax.vmap(prefix_sum)(jnp.sum(tiles, axis=2, dtype=jnp.int32))[:, :-1]
    return (before[:, :, None] + inside).reshape(rows, -1)[:, :width]
