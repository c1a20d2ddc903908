"""Rows of different lengths, one after the other: the operations that builders share.

Each is a few element-wise operations and at most one reduction, which XLA makes one kernel of; its
own scans and searches take several.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_TILE = 128  # flags that one product of `count_before` counts


def on_device(tree: Any) -> Any:
    """The same with JAX's arrays in place of NumPy's, which no tracer can index.

    A traced function meets NumPy's arrays where it closes over a batch from the host.
    """
    return jax.tree.map(jnp.asarray, tree)


def cdiv(numerator: Any, denominator: int) -> Any:
    """Ceil division of values >= 0."""
    return -(-numerator // denominator)


def prefix_sum(x: Any) -> Any:
    """int32[n + 1], the sums of all first entries: 0, x[0], x[0] + x[1], ...

    A masked reduction: for the number of rows of a batch far cheaper on a GPU than a scan, which is
    a chain of kernels.
    """
    n = x.shape[0]
    before = jnp.arange(n + 1, dtype=jnp.int32)[:, None] > jnp.arange(n, dtype=jnp.int32)
    return jnp.sum(jnp.where(before, x.astype(jnp.int32), 0), axis=1, dtype=jnp.int32)


def row_of(starts: Any, positions: Any) -> Any:
    """The row r with starts[r] <= position < starts[r + 1], for each of `positions`.

    Rows without entries are passed over. A position past the end gets the number of rows.

    Args:
      starts: int32[B + 1], not decreasing, from 0.
      positions: int32[...], not negative.
    """
    row = jnp.searchsorted(starts[1:], positions, side="right", method="scan_unrolled")
    return row.astype(jnp.int32)


def rows_from(x: Any, first: Any, count: Any, *, fill: Any = 0) -> Any:
    """`x[first : first + count]` in the shape of `x`, with `fill` behind it.

    Args:
      x: [B, ...].
      first: int32[], the first row wanted.
      count: int32[], how many.
      fill: what the other rows hold.
    """
    x = on_device(x)
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    rows = x[jnp.clip(first + index, 0, x.shape[0] - 1)]
    wanted = (index < count).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(wanted, rows, jnp.asarray(fill, x.dtype))


def starts_from(starts: Any, first: Any, count: Any) -> Any:
    """`starts[first : first + count + 1]` counted from 0, its last value repeated behind it.

    Args:
      starts: int32[B + 1], such as `query_start_loc`.
      first: int32[], the first row wanted.
      count: int32[], how many rows.
    """
    starts = on_device(starts)
    index = jnp.arange(starts.shape[0], dtype=jnp.int32)
    last = starts.shape[0] - 1
    return (
        starts[jnp.clip(first + jnp.minimum(index, count), 0, last)]
        - starts[jnp.clip(first, 0, last)]
    )


def count_before(flags: Any) -> Any:
    """int32[N, L], how many of bool[N, L] are set before each in its row.

    Within a tile by a product with a triangular matrix: XLA's scan of a long row is a chain of
    kernels. Zeros, ones and sums up to a tile are exact in every precision of a product.
    """
    rows, width = flags.shape
    tiles = jnp.pad(flags, ((0, 0), (0, -width % _TILE))).reshape(rows, -1, _TILE)
    earlier = jnp.triu(jnp.ones((_TILE, _TILE), jnp.float32), 1)
    inside = (tiles.astype(jnp.float32) @ earlier).astype(jnp.int32)
    before = jax.vmap(prefix_sum)(jnp.sum(tiles, axis=2, dtype=jnp.int32))[:, :-1]
    return (before[:, :, None] + inside).reshape(rows, -1)[:, :width]
