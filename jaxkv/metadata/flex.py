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
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxkv.metadata.checks import check_rows
from jaxkv.metadata.common import (
    NULL_BLOCK,
    BatchMetadata,
    num_computed_tokens,
    token_to_request,
)
from jaxkv.metadata.segments import Array, cdiv, on_device, prefix_sum, row_of

Q_BLOCK_SIZE = 16  # query tokens that share a list of blocks
_WORD = 32  # bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlexMetadata:
    """Operands of the mask, and the block list of each group of Q_BLOCK_SIZE query tokens.

    Attributes:
      doc_ids: int32[T], the request of each query token; -1 for padding.
      query_start_loc: int32[B + 1].
      seq_lens: int32[B].
      decode_offset: int32[B], position of each request's first query token.
      physical_to_logical: int16[B, num_blocks], or int32 for block tables with more than 2**15
        columns: logical index of each physical block in each request's context, the last one if
        there are several. -1 for blocks of other requests and for NULL_BLOCK.
      mm_prefix_range: int32[B, R, 2], first and last position of ranges with bidirectional
        attention, of more than one token each; or None.
      kv_indices: int32[ceil(T / Q_BLOCK_SIZE), N], blocks with a slot visible to some token of the
        group: each once, sorted by request, then by position. Padded with -1.
      kv_num_blocks: int32[ceil(T / Q_BLOCK_SIZE)], number of blocks in the list of each group.
      block_size: tokens per block.
      causal: whether attention is causal.
      sliding_window: a token sees tokens at a distance below this; None for no window.
    """

    doc_ids: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    decode_offset: jax.Array
    physical_to_logical: jax.Array
    mm_prefix_range: jax.Array | None
    kv_indices: jax.Array
    kv_num_blocks: jax.Array
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
) -> FlexMetadata:
    """Metadata of a batch over a paged cache.

    Args:
      batch: the batch, with block ids below `num_blocks`. Requests may share blocks.
      num_blocks: number of blocks of the cache.
      causal: whether attention is causal.
      sliding_window: a token sees tokens at a distance below this; None for no window.
      mm_prefix_range: int32[B, R, 2], first and last position of ranges with bidirectional
        attention regardless of the window; ranges with first >= last are padding.

    Raises:
      ValueError: a window below 1 token, a cache without blocks, more slots than int32 can
        represent, or ranges of the wrong shape.
    """
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be >= 1 token, got {sliding_window}")
    if num_blocks < 1:
        raise ValueError(f"num_blocks must be >= 1 (including NULL_BLOCK), got {num_blocks}")
    if num_blocks * batch.block_size > 2**31:
        raise ValueError(
            f"num_blocks={num_blocks} blocks of {batch.block_size} tokens exceed 2**31 slots"
        )
    if mm_prefix_range is not None:
        check_rows("mm_prefix_range", mm_prefix_range, batch.max_num_reqs, "ranges", 2)
    batch, ranges = on_device(batch), on_device(mm_prefix_range)
    logical = physical_to_logical(batch, num_blocks)
    spans = _spans(batch, causal, sliding_window, ranges)
    if mm_prefix_range is None:
        columns = _max_columns(batch, causal, sliding_window)
    else:
        columns = batch.max_blocks
    kv_indices, kv_num_blocks = _block_list(batch, logical, spans, columns)
    return FlexMetadata(
        doc_ids=document_ids(batch),
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        decode_offset=num_computed_tokens(batch),
        physical_to_logical=logical,
        mm_prefix_range=ranges,
        kv_indices=kv_indices,
        kv_num_blocks=kv_num_blocks,
        block_size=batch.block_size,
        causal=causal,
        sliding_window=sliding_window,
    )


def document_ids(batch: BatchMetadata) -> jax.Array:
    """int32[T], the request of each query token; -1 for padding."""
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
    """
    last = doc_ids.shape[0] - 1
    exists = (q >= 0) & (q <= last) & (kv >= 0) & (kv <= last)
    doc = doc_ids[jnp.clip(q, 0, last)]
    allowed = (doc >= 0) & (doc == doc_ids[jnp.clip(kv, 0, last)]) & exists
    return allowed if sliding_window is None else allowed & (jnp.abs(q - kv) < sliding_window)


def physical_to_logical(batch: BatchMetadata, num_blocks: int) -> jax.Array:
    """Logical index of each physical block in each request's context, see FlexMetadata.

    Block table entries past the context are ignored.
    """
    rows, width = batch.block_table.shape
    # Filling the map dominates the time of a build, hence the narrowest possible dtype.
    dtype = jnp.int16 if width <= 2**15 else jnp.int32
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    column = jnp.arange(width, dtype=jnp.int32)
    used = column < cdiv(batch.seq_lens, batch.block_size)[:, None]
    used &= batch.block_table != NULL_BLOCK
    block = jnp.where(used, batch.block_table, num_blocks)
    columns = jnp.broadcast_to(column.astype(dtype), block.shape)
    return (
        _filled_with_minus_one((rows, num_blocks), dtype).at[row, block].max(columns, mode="drop")
    )


def _filled_with_minus_one(shape: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    """An array filled with -1."""
    if dtype == jnp.int32:
        return jnp.full(shape, -1, dtype)
    # XLA fills 16-bit and 32-bit elements at the same rate per element, so fill with pairs, behind
    # a barrier that hides their equal halves from XLA's simplification.
    size = math.prod(shape)
    pairs = jax.lax.optimization_barrier(jnp.full(cdiv(size, 2), -1, jnp.int32))
    return jax.lax.bitcast_convert_type(pairs, dtype).reshape(-1)[:size].reshape(shape)


# --------------------------------------------------------------------------------------------------
# The block list. A span consists of the query tokens of one request within one group. The blocks
# visible to a span are contiguous columns of its block table, so spans replace single tokens below.


class _Spans(NamedTuple):
    """Spans in token order; fields are int32[S] except for `starts`. Padding spans are empty.

    Attributes:
      starts: int32[B + 1], first span of each request.
      row: request of the span.
      group: group of query tokens; the number of groups for padding.
      first: first visible column of the request's block table.
      end: one past the last visible column.
    """

    starts: jax.Array
    row: jax.Array
    group: jax.Array
    first: jax.Array
    end: jax.Array


def _max_spans(batch: BatchMetadata) -> int:
    # A span starts at the first token of a group or of a request; the first token of the batch is
    # both.
    groups = cdiv(batch.max_num_tokens, Q_BLOCK_SIZE)
    return min(batch.max_num_tokens, groups + batch.max_num_reqs - 1)


def _max_columns(batch: BatchMetadata, causal: bool, window: int | None) -> int:
    """Upper bound of the visible columns of a span."""
    if window is None:
        return batch.max_blocks
    # From the oldest key of the first token to the last token (causal) or one window beyond it.
    # n + 1 consecutive tokens touch at most ceil(n / block_size) + 1 blocks.
    others = Q_BLOCK_SIZE - 1 + (window - 1) * (1 if causal else 2)
    return min(batch.max_blocks, cdiv(others, batch.block_size) + 1)


def _spans(
    batch: BatchMetadata, causal: bool, window: int | None, ranges: jax.Array | None
) -> _Spans:
    starts, ends = batch.query_start_loc[:-1], batch.query_start_loc[1:]
    groups = jnp.where(ends > starts, (ends - 1) // Q_BLOCK_SIZE - starts // Q_BLOCK_SIZE + 1, 0)
    span_starts = prefix_sum(groups)
    span = jnp.arange(_max_spans(batch), dtype=jnp.int32)
    used = span < span_starts[-1]
    row = jnp.minimum(row_of(span_starts, span), batch.max_num_reqs - 1)
    group = starts[row] // Q_BLOCK_SIZE + span - span_starts[row]
    first_token = jnp.maximum(starts[row], group * Q_BLOCK_SIZE)
    last_token = jnp.minimum(ends[row], (group + 1) * Q_BLOCK_SIZE) - 1
    offset = (num_computed_tokens(batch) - starts)[row]
    low, high = _visible(
        first_token + offset,
        last_token + offset,
        causal,
        None if window is None else min(window, batch.max_blocks * batch.block_size),
        None if ranges is None else ranges[row],
    )
    high = jnp.minimum(high, batch.seq_lens[row])
    return _Spans(
        starts=span_starts,
        row=row,
        group=jnp.where(used, group, cdiv(batch.max_num_tokens, Q_BLOCK_SIZE)),
        first=jnp.where(used, low // batch.block_size, 0),
        end=jnp.where(used, cdiv(high, batch.block_size), 0),
    )


def _visible(
    first: jax.Array, last: jax.Array, causal: bool, window: int | None, ranges: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Union of the positions visible to tokens at first..last, as [low, high), without clipping.

    The union is contiguous: the positions visible to one token are contiguous and include it.
    """
    everything = jnp.iinfo(jnp.int32).max
    low, high = jnp.zeros_like(first), jnp.full_like(last, everything)
    if window is not None:
        low, high = jnp.maximum(first - (window - 1), 0), last + window
    if causal:
        high = last + 1
    if ranges is not None:
        start, end = ranges[..., 0], ranges[..., 1]
        meets = (start < end) & (start <= last[:, None]) & (end >= first[:, None])
        low = jnp.minimum(low, jnp.min(jnp.where(meets, start, everything), axis=1))
        high = jnp.maximum(high, jnp.max(jnp.where(meets, end + 1, 0), axis=1))
    return low, high


def _block_list(
    batch: BatchMetadata, logical: jax.Array, spans: _Spans, columns: int
) -> tuple[jax.Array, jax.Array]:
    """`kv_indices` and `kv_num_blocks`, see FlexMetadata."""
    num_spans, num_blocks = spans.row.shape[0], logical.shape[1]
    num_groups = cdiv(batch.max_num_tokens, Q_BLOCK_SIZE)
    # One bit for each column of a span: whether the span lists its block. One reduction packs the
    # bits into words; positions in the list are popcounts of the words, without a scan.
    shape = (num_spans, cdiv(columns, _WORD), _WORD)
    bit = jnp.arange(_WORD, dtype=jnp.uint32)
    span = jnp.arange(num_spans, dtype=jnp.int32)
    column, block = _columns(batch, spans, span, spans.row, shape[1:])
    is_entry = (logical[_per_row(spans.row), block] == column) & (column < _per_row(spans.end))
    taken = _taken(batch, logical, spans, shape[1:])[spans.row]
    listed = is_entry & ~(taken & _per_row(span == spans.starts[spans.row]))
    words = jnp.sum(
        jnp.where(listed, jnp.uint32(1) << bit, jnp.uint32(0)), axis=2, dtype=jnp.uint32
    )

    counts = jax.lax.population_count(words).astype(jnp.int32)
    totals = jnp.sum(counts, axis=1, dtype=jnp.int32)
    earlier = (spans.group[:, None] == spans.group) & (span[:, None] > span)
    base = jnp.sum(jnp.where(earlier, totals, 0), axis=1, dtype=jnp.int32)
    word = jnp.arange(shape[1], dtype=jnp.int32)
    words_before = word[:, None] > word
    base = base[:, None] + jnp.sum(
        jnp.where(words_before, counts[:, None, :], 0), axis=2, dtype=jnp.int32
    )
    bits_before = words[:, :, None] & ((jnp.uint32(1) << bit) - 1)
    position = base[:, :, None] + jax.lax.population_count(bits_before).astype(jnp.int32)

    # Upper bound of requests per group; a group lists each block except NULL_BLOCK at most once.
    requests = min(Q_BLOCK_SIZE, batch.max_num_tokens, batch.max_num_reqs)
    width = min(requests * columns, num_blocks - 1)
    is_listed = (words[:, :, None] >> bit) & 1 == 1
    kv_indices = (
        jnp.full((num_groups, width), -1, jnp.int32)
        .at[spans.group[:, None, None], jnp.where(is_listed, position, width)]
        .set(block, mode="drop")
    )
    group = jnp.arange(num_groups, dtype=jnp.int32)
    of_group = group[:, None] == spans.group
    return kv_indices, jnp.sum(jnp.where(of_group, totals, 0), axis=1, dtype=jnp.int32)


def _per_row(x: jax.Array) -> jax.Array:
    return x[:, None, None]


def _columns(
    batch: BatchMetadata, spans: _Spans, span: jax.Array, row: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """int32[n, *shape]: columns of each span from its first one on, and their blocks."""
    index = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
    column = _per_row(spans.first[span]) + index
    return column, batch.block_table[_per_row(row), jnp.minimum(column, batch.max_blocks - 1)]


def _taken(
    batch: BatchMetadata, logical: jax.Array, spans: _Spans, shape: tuple[int, ...]
) -> jax.Array:
    """bool[B, *shape]: blocks of a request's first span listed by an earlier span of its group.

    Only the first span of a request can have earlier spans in its group; later spans start their
    group. Rows without query tokens have arbitrary values.
    """
    row = jnp.arange(batch.max_num_reqs, dtype=jnp.int32)
    span = jnp.minimum(spans.starts[:-1], spans.row.shape[0] - 1)
    _, block = _columns(batch, spans, span, row, shape)
    taken = jnp.zeros(block.shape, bool)
    # Spans of one group are adjacent: one for each request, with at least one token each.
    # Unrolled loop: as an additional array axis, intermediates would go through memory.
    for back in range(1, min(Q_BLOCK_SIZE, spans.row.shape[0])):
        other = jnp.maximum(span - back, 0)
        has_other = (span >= back) & (spans.group[other] == spans.group[span])
        # Without an earlier span look up NULL_BLOCK, at negligible cost.
        looked_up = jnp.where(_per_row(has_other), block, NULL_BLOCK)
        column = logical[_per_row(spans.row[other]), looked_up]
        taken |= (column >= _per_row(spans.first[other])) & (column < _per_row(spans.end[other]))
    # Fusion barrier: fused into its consumer, this would be recomputed for every span.
    return jax.lax.optimization_barrier(taken)
