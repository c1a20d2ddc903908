"""The blocks that groups of query tokens see, for flex.

A span consists of the query tokens of one request within one group. The blocks visible to a span
are contiguous columns of its block table, so spans replace single tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata, num_computed_tokens
from jaxkv.metadata.segments import cdiv, prefix_sum, row_of

Q_BLOCK_SIZE = 16  # query tokens that share a list of blocks
_WORD = 32  # bits


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


def max_columns(batch: BatchMetadata, causal: bool, window: int | None) -> int:
    """Upper bound of the visible columns of a span."""
    if window is None:
        return batch.max_blocks
    # From the oldest key of the first token to the last token (causal) or one window beyond it.
    # n + 1 consecutive tokens touch at most ceil(n / block_size) + 1 blocks.
    others = Q_BLOCK_SIZE - 1 + (window - 1) * (1 if causal else 2)
    return min(batch.max_blocks, cdiv(others, batch.block_size) + 1)


def spans_of(
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
    """Union of the positions visible to tokens at first..last, as [low, high), from 0 on.

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
        first_met = jnp.min(jnp.where(meets, start, everything), axis=1, initial=everything)
        past = jnp.minimum(end, everything - 1) + 1  # `end` may be the largest int32
        end_met = jnp.max(jnp.where(meets, past, 0), axis=1, initial=0)
        low = jnp.maximum(jnp.minimum(low, first_met), 0)
        high = jnp.maximum(high, end_met)
    return low, high


def block_list(
    batch: BatchMetadata, logical: jax.Array, spans: _Spans, columns: int
) -> tuple[jax.Array, jax.Array]:
    """`kv_indices` and `kv_num_blocks`, see FlexMetadata."""
    num_spans, num_blocks = spans.row.shape[0], logical.shape[1]
    num_groups = cdiv(batch.max_num_tokens, Q_BLOCK_SIZE)
    # One bit for each column of a span: whether the span lists its block. One reduction packs the
    # bits into words; positions in the list are popcounts of the words, without a scan.
    shape = (num_spans, cdiv(columns, _WORD), _WORD)
    bit = jnp.arange(_WORD, dtype=jnp.uint32)[None, None]
    span = jnp.arange(num_spans, dtype=jnp.int32)
    column, block = _columns(batch, spans, span, spans.row, shape[1:])
    mapped = logical[_per_row(spans.row), block].astype(jnp.int32)
    is_entry = (mapped == column) & (column < _per_row(spans.end))
    taken = _taken(batch, logical, spans, shape[1:])[spans.row]
    listed = is_entry & ~(taken & _per_row(span == spans.starts[spans.row]))
    words = jnp.sum(
        jnp.where(listed, jnp.uint32(1) << bit, jnp.uint32(0)), axis=2, dtype=jnp.uint32
    )

    counts = jax.lax.population_count(words).astype(jnp.int32)
    totals = jnp.sum(counts, axis=1, dtype=jnp.int32)
    earlier = (spans.group[:, None] == spans.group[None]) & (span[:, None] > span[None])
    base = jnp.sum(jnp.where(earlier, totals[None], 0), axis=1, dtype=jnp.int32)
    word = jnp.arange(shape[1], dtype=jnp.int32)
    words_before = (word[:, None] > word[None])[None]
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
    of_group = group[:, None] == spans.group[None]
    return kv_indices, jnp.sum(jnp.where(of_group, totals[None], 0), axis=1, dtype=jnp.int32)


def _per_row(x: jax.Array) -> jax.Array:
    return x[:, None, None]


def _columns(
    batch: BatchMetadata, spans: _Spans, span: jax.Array, row: jax.Array, shape: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """int32[n, *shape]: columns of each span from its first one on, and their blocks."""
    index = jnp.arange(math.prod(shape), dtype=jnp.int32).reshape(shape)
    column = _per_row(spans.first[span]) + index[None]
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
        column = logical[_per_row(spans.row[other]), looked_up].astype(jnp.int32)
        taken |= (column >= _per_row(spans.first[other])) & (column < _per_row(spans.end[other]))
    # Fusion barrier: fused into its consumer, this would be recomputed for every span.
    return jax.lax.optimization_barrier(taken)
