"""Packed page lists: the pages of all rows, concatenated without padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxkv._src.runtime.bounds import check_bounds

from .checks import at_least_1
from .common import NULL_BLOCK
from .segments import Array, on_device, prefix_sum, row_of


def page_limit(block_table: Array, max_pages: int | None) -> int:
    """The bound of pages of a batch: `max_pages`, or that of W pages in each row.

    Raises:
      ValueError: below 1.
    """
    (limit,) = at_least_1(max_pages=block_table.size if max_pages is None else max_pages)
    return limit


def packed_pages(
    operation: str, block_table: Array, num_pages: jax.Array, max_pages: int | None
) -> tuple[jax.Array, jax.Array]:
    """Concatenates the first pages of each row of a block table.

    More than `max_pages` pages are an error, counted on the device by a program that uses either
    result. Both are then truncated to `max_pages`, so that consumers do not read out of bounds.

    Args:
      operation: name of the public function, for the error.
      block_table: int32[B, W].
      num_pages: int32[B], pages of each row, at most W.
      max_pages: upper bound of pages of a batch; None for B * W, which no batch exceeds.

    Returns:
      int32[B + 1], start of each row's pages, and int32[max_pages], page ids padded with
      NULL_BLOCK.

    Raises:
      ValueError: `max_pages` below 1.
    """
    max_rows, width = block_table.shape
    limit = page_limit(block_table, max_pages)
    starts = prefix_sum(num_pages)
    truncated = limit < max_rows * width
    if truncated:
        # Before both results: a program that uses only one of them would lose the check to DCE.
        starts = check_bounds(operation, starts, max_pages=(starts[-1], limit))
    position = jnp.arange(limit, dtype=jnp.int32)
    row = jnp.minimum(row_of(starts, position), max_rows - 1)
    page = on_device(block_table)[row, jnp.clip(position - starts[row], 0, width - 1)]
    pages = jnp.where(position < starts[-1], page, NULL_BLOCK)
    return jnp.minimum(starts, limit) if truncated else starts, pages
