"""The map from physical blocks to positions in the context of each request, for flex."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata
from jaxkv.metadata.segments import cdiv


def physical_to_logical(batch: BatchMetadata, num_blocks: int) -> jax.Array:
    """Logical index of each physical block in each request's context, see FlexMetadata.

    Block table entries past the context are ignored.
    """
    blocks = mapped_blocks(batch)
    rows, width = blocks.shape
    # Filling the map dominates the time of a build, hence the narrowest possible dtype.
    dtype = jnp.int16 if width <= 2**15 else jnp.int32
    return _entered(_filled_with_minus_one((rows, num_blocks), dtype), blocks)


def mapped_blocks(batch: BatchMetadata) -> jax.Array:
    """int32[B, W], the blocks of the contexts; NULL_BLOCK where there is nothing to map."""
    column = jnp.arange(batch.max_blocks, dtype=jnp.int32)
    used = column[None] < cdiv(batch.seq_lens, batch.block_size)[:, None]
    return jnp.where(used, batch.block_table, NULL_BLOCK)


def updated(logical: jax.Array, before: jax.Array, blocks: jax.Array) -> jax.Array:
    """The map of `blocks`, given that of `before`; writes only entries of rows that changed.

    Args:
      logical: int[B, num_blocks], the map of `before`; in place if it may be overwritten.
      before: int32[B, W], see `mapped_blocks`.
      blocks: int32[B, W], likewise.
    """
    changed = before != blocks
    row, entry = _entries(logical, jnp.where(changed, before, NULL_BLOCK))
    cleared = logical.at[row, entry].set(-1, mode="drop")
    # A block that a column lost may be in another column too: the row is entered again.
    lost = jnp.any(changed & (before != NULL_BLOCK), axis=1, keepdims=True)
    return _entered(cleared, jnp.where(lost | changed, blocks, NULL_BLOCK))


def _entered(logical: jax.Array, blocks: jax.Array) -> jax.Array:
    """The map, its entries of `blocks` raised to at least the columns of `blocks`."""
    row, entry = _entries(logical, blocks)
    columns = jnp.arange(blocks.shape[1], dtype=jnp.int32).astype(logical.dtype)
    return logical.at[row, entry].max(jnp.broadcast_to(columns, blocks.shape), mode="drop")


def _entries(logical: jax.Array, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of the entries of `blocks`; out of range for NULL_BLOCK, which has none."""
    rows, num_blocks = logical.shape
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return row, jnp.where(blocks == NULL_BLOCK, num_blocks, blocks)


def _filled_with_minus_one(shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """An array filled with -1."""
    if dtype == jnp.int32:
        return jnp.full(shape, -1, dtype)
    # XLA fills 16-bit and 32-bit elements at the same rate per element, so fill with pairs, behind
    # a barrier that hides their equal halves from XLA's simplification.
    size = math.prod(shape)
    pairs = jax.lax.optimization_barrier(jnp.full(cdiv(size, 2), -1, jnp.int32))
    return jax.lax.bitcast_convert_type(pairs, dtype).reshape(-1)[:size].reshape(shape)
