"""Metadata for FlexAttention: a mask function and a sparse block list.

Follows vLLM's FlexAttention builder with direct block lists. vLLM lists a superset of the blocks;
this builder lists exactly those with a slot visible to some query token of a group, each once (a
kernel that visits a block twice would count its keys twice). Blocks after the queries are listed
too if a prefix-LM range includes them. Slot computations cannot overflow: `build` requires the
slots of the cache to fit int32.

Attention without a cache (encoders) needs no builder: see `encoder_mask`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.block_lists import Q_BLOCK_SIZE as Q_BLOCK_SIZE
from jaxkv.metadata.block_lists import block_list, max_columns, spans_of
from jaxkv.metadata.block_map import mapped_blocks, physical_to_logical, updated
from jaxkv.metadata.checks import check_rows
from jaxkv.metadata.common import (
    BatchMetadata,
    check_batch,
    num_computed_tokens,
    token_to_request,
)
from jaxkv.metadata.segments import Array, int32_on_device, on_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FlexMetadata:
    """Operands of the mask, and the block list of each group of Q_BLOCK_SIZE query tokens.

    Attributes:
      doc_ids: int32[T], the request of each query token; -1 for padding.
      query_start_loc: int32[B + 1].
      seq_lens: int32[B].
      decode_offset: int32[B], position of each request's first query token.
      physical_to_logical: int16[B, num_blocks], or int32 for block tables with more than 2**15
        columns: logical index of each physical block in each request's context, the last one if
        there are several. -1 for blocks of other requests and for NULL_BLOCK (0).
      mm_prefix_range: int32[B, R, 2], first and last position of ranges with bidirectional
        attention, of more than one token each; or None.
      kv_indices: int32[ceil(T / Q_BLOCK_SIZE), N], blocks with a slot visible to some token of the
        group: each once, sorted by request, then by position. Padded with -1.
      kv_num_blocks: int32[ceil(T / Q_BLOCK_SIZE)], number of blocks in the list of each group.
      mapped_blocks: int32[B, W], blocks that `physical_to_logical` maps, NULL_BLOCK elsewhere; None
        unless built as `updatable`.
      block_size: tokens per block.
      causal: whether attention is causal.
      sliding_window: a token sees tokens at a distance below this, up to 2**31 - 1; None for no
        window.
    """

    doc_ids: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    decode_offset: jax.Array
    physical_to_logical: jax.Array
    mm_prefix_range: jax.Array | None
    kv_indices: jax.Array
    kv_num_blocks: jax.Array
    mapped_blocks: jax.Array | None
    block_size: int = dataclasses.field(metadata={"static": True})
    causal: bool = dataclasses.field(metadata={"static": True})
    sliding_window: int | None = dataclasses.field(metadata={"static": True})

    def to_logical(
        self, q: int | Array, physical_kv: int | Array
    ) -> tuple[jax.Array, Array, Array]:
        """Logical positions of a query token and a slot, for the mask and score functions.

        Args:
          q: int32[...], index of a query token of the batch; any value.
          physical_kv: int32[...], slot of the cache, block * block_size + offset; any value.

        Returns:
          bool[...], whether the slot belongs to the context of the query's request, and int32[...]
          positions of query and key, which are only valid where it does.
        """
        num_blocks = self.physical_to_logical.shape[1]
        doc, row = self._request(q)
        block = physical_kv // self.block_size
        logical_block = self.physical_to_logical[row, jnp.clip(block, 0, num_blocks - 1)]
        logical_block = logical_block.astype(jnp.int32)  # before the multiplication
        logical_q = q - self.query_start_loc[row] + self.decode_offset[row]
        logical_kv = logical_block * self.block_size + physical_kv % self.block_size
        exists = (doc >= 0) & (block >= 0) & (block < num_blocks) & (logical_block >= 0)
        return exists & (logical_kv < self.seq_lens[row]), logical_q, logical_kv

    def mask(self, q: int | Array, physical_kv: int | Array) -> jax.Array:
        """bool[...], whether the slot is visible to the query token. Arguments broadcast.

        Args:
          q: int32[...], index of a query token of the batch; False for other values.
          physical_kv: int32[...], slot of the cache; False for other values.

        Example: `metadata.mask(jnp.arange(T)[:, None], jnp.arange(num_slots))`.
        """
        valid, logical_q, logical_kv = self.to_logical(q, physical_kv)
        allowed = logical_q >= logical_kv if self.causal else valid
        if self.sliding_window is not None:
            allowed &= jnp.abs(logical_q - logical_kv) < self.sliding_window
        if self.mm_prefix_range is not None:
            _, row = self._request(q)
            start, end = self.mm_prefix_range[row, :, 0], self.mm_prefix_range[row, :, 1]
            query, key = logical_q[..., None], logical_kv[..., None]
            both = (start <= query) & (query <= end) & (start <= key) & (key <= end)
            allowed |= jnp.any((start < end) & both, axis=-1)
        return valid & allowed

    def _request(self, q: int | Array) -> tuple[jax.Array, jax.Array]:
        """Request of a query token, -1 if out of range; and the same clamped to a valid row."""
        last = self.doc_ids.shape[0] - 1
        doc = jnp.where((q >= 0) & (q <= last), self.doc_ids[jnp.clip(q, 0, last)], -1)
        return doc, jnp.maximum(doc, 0)


def build(
    batch: BatchMetadata,
    *,
    num_blocks: int,
    causal: bool = True,
    sliding_window: int | None = None,
    mm_prefix_range: Array | None = None,
    updatable: bool = False,
) -> FlexMetadata:
    """Metadata of a batch over a paged cache.

    Args:
      batch: the batch, with block ids below `num_blocks`. Requests may share blocks.
      num_blocks: number of blocks of the cache.
      causal: whether attention is causal.
      sliding_window: a token sees tokens at a distance below this; None for no window.
      mm_prefix_range: int32[B, R, 2], first and last position of ranges with bidirectional
        attention regardless of the window; ranges with first >= last are padding.
      updatable: keep what `update` needs, 4 bytes for each entry of the block table.

    Raises:
      ValueError: a window below 1 token, a cache without blocks, more slots than int32 can
        represent, block ids on the host outside the cache, or ranges of the wrong shape or not
        integers.

    Example: `flex.build(batch, num_blocks=1024, sliding_window=4096)`.
    """
    check_batch("flex.build", batch)
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be >= 1 token, got {sliding_window}")
    sliding_window = _within_int32(sliding_window)
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be >= 1 (including NULL_BLOCK), got {num_blocks}")
    if num_blocks * batch.block_size > 2**31:
        raise ValueError(
            f"num_blocks={num_blocks} blocks of {batch.block_size} tokens exceed 2**31 slots"
        )
    _check_table("flex.build", batch.block_table, num_blocks)
    batch, ranges = on_device(batch), _ranges(batch, mm_prefix_range)
    logical = physical_to_logical(batch, num_blocks)
    blocks = mapped_blocks(batch) if updatable else None
    return _metadata(batch, (logical, blocks), causal, sliding_window, ranges)


def update(
    metadata: FlexMetadata, batch: BatchMetadata, *, mm_prefix_range: Array | None = None
) -> FlexMetadata:
    """Metadata of a batch from that of another one, usually of the previous step.

    Equal to `build` for the same cache, causality and window. If the caller donates `metadata`,
    `physical_to_logical` is updated in place, and only where block tables differ, while `build`
    fills all of it: B * num_blocks elements. Rows that only gained blocks are the cheapest.

        step = jax.jit(flex.update, donate_argnums=0)
        metadata = flex.build(batch, num_blocks=num_blocks, updatable=True)
        metadata = step(metadata, next_batch)

    Args:
      metadata: of any batch with the same bounds, built as `updatable`, or updated.
      batch: see `build`.
      mm_prefix_range: see `build`.

    Raises:
      ValueError: `metadata` is not updatable or has other bounds than the batch, block ids on the
        host outside the cache, or ranges of the wrong shape or not integers.
    """
    check_batch("flex.update", batch)
    mapped = metadata.mapped_blocks
    if mapped is None:
        raise ValueError("flex.update: metadata must be of flex.build(..., updatable=True)")
    bounds = (*mapped.shape, metadata.block_size)
    wanted = (*batch.block_table.shape, batch.block_size)
    if bounds != wanted:
        raise ValueError(
            f"flex.update: metadata has (rows, blocks per row, tokens per block) {bounds}, must "
            f"have those of the batch, {wanted}"
        )
    _check_table("flex.update", batch.block_table, metadata.physical_to_logical.shape[1])
    batch, ranges = on_device(batch), _ranges(batch, mm_prefix_range)
    blocks = mapped_blocks(batch)
    logical = updated(jnp.asarray(metadata.physical_to_logical), mapped, blocks)
    return _metadata(batch, (logical, blocks), metadata.causal, metadata.sliding_window, ranges)


def _within_int32(window: int | None) -> int | None:
    # Some configurations have a larger number for no window; no distance exceeds 2**31 - 2.
    return None if window is None else min(window, 2**31 - 1)


def _check_table(operation: str, block_table: Array, num_blocks: int) -> None:
    if isinstance(block_table, np.ndarray) and block_table.max(initial=0) >= num_blocks:
        raise ValueError(
            f"{operation}: block_table must have block ids below num_blocks={num_blocks}, got "
            f"{block_table.max()}"
        )


def _ranges(batch: BatchMetadata, mm_prefix_range: Array | None) -> jax.Array | None:
    if mm_prefix_range is None:
        return None
    check_rows("mm_prefix_range", mm_prefix_range, batch.max_num_reqs, "ranges", 2)
    return int32_on_device("mm_prefix_range", mm_prefix_range)


def _metadata(
    batch: BatchMetadata,
    block_map: tuple[jax.Array, jax.Array | None],
    causal: bool,
    sliding_window: int | None,
    ranges: jax.Array | None,
) -> FlexMetadata:
    logical, blocks = block_map
    spans = spans_of(batch, causal, sliding_window, ranges)
    # Ranges may make any column visible.
    columns = max_columns(batch, causal, sliding_window if ranges is None else None)
    kv_indices, kv_num_blocks = block_list(batch, logical, spans, columns)
    return FlexMetadata(
        doc_ids=document_ids(batch),
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        decode_offset=num_computed_tokens(batch),
        physical_to_logical=logical,
        mm_prefix_range=ranges,
        kv_indices=kv_indices,
        kv_num_blocks=kv_num_blocks,
        mapped_blocks=blocks,
        block_size=batch.block_size,
        causal=causal,
        sliding_window=sliding_window,
    )


def document_ids(batch: BatchMetadata) -> jax.Array:
    """int32[T], the request of each query token; -1 for padding.

    Example: query lengths [1, 2] and T = 4 give [0, 1, 1, -1].
    """
    check_batch("flex.document_ids", batch)
    row = token_to_request(batch.query_start_loc, batch.max_num_tokens)
    token = jnp.arange(batch.max_num_tokens, dtype=jnp.int32)
    return jnp.where(token < batch.query_start_loc[-1], row, -1)


def encoder_mask(
    doc_ids: jax.Array, q: int | Array, kv: int | Array, *, sliding_window: int | None = None
) -> jax.Array:
    """bool[...], mask of attention without a cache: both tokens belong to the same document.

    Args:
      doc_ids: int32[T], see `document_ids`.
      q: int32[...], index of a token of the batch; False for other values.
      kv: int32[...], likewise.
      sliding_window: a token sees tokens at a distance below this; None for no window.

    Example: `encoder_mask(document_ids(batch), jnp.arange(T)[:, None], jnp.arange(T))`.
    """
    last = doc_ids.shape[0] - 1
    exists = (q >= 0) & (q <= last) & (kv >= 0) & (kv <= last)
    doc = doc_ids[jnp.clip(q, 0, last)]
    allowed = (doc >= 0) & (doc == doc_ids[jnp.clip(kv, 0, last)]) & exists
    window = _within_int32(sliding_window)
    return allowed if window is None else allowed & (jnp.abs(q - kv) < window)
