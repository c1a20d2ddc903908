"""Sections of a batch: decodes, extends and prefills, counted and put in order on the device.

Semantics follow vLLM's split_decodes_and_prefills, split_decodes_prefills_and_extends and
reorder_batch_to_split_decodes_and_prefills, which run on the host. `schedule.reorder_batch` is the
order for a scheduler on the host.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.metadata.checks import check_flags, check_has_rows, check_rows, check_threshold
from jaxkv.metadata.common import (
    NULL_BLOCK,
    BatchMetadata,
    check_batch,
    num_computed_tokens,
    token_to_request,
)
from jaxkv.metadata.segments import (
    Array,
    int32_on_device,
    on_device,
    prefix_sum,
    rows_from,
    starts_from,
)

_DECODE, _SHORT_EXTEND, _LONG_EXTEND, _PREFILL, _PADDING = range(5)


class Split(NamedTuple):
    """Split of a batch into decodes and prefills; each field is an int32[].

    Attributes:
      num_decodes: number of decode rows.
      num_prefills: number of prefill rows.
      num_decode_tokens: query tokens of the decodes.
      num_prefill_tokens: query tokens of the prefills.

    Padding tokens count as prefill tokens, or as decode tokens if there are no prefills.
    """

    num_decodes: jax.Array
    num_prefills: jax.Array
    num_decode_tokens: jax.Array
    num_prefill_tokens: jax.Array


def split_decodes_and_prefills(
    batch: BatchMetadata,
    decode_threshold: int = 1,
    *,
    require_uniform: bool = False,
    treat_short_extends_as_decodes: bool = True,
    is_prefilling: Array | None = None,
) -> Split:
    """Boundary between decodes and prefills of a batch in that order (see `reorder_batch`).

    Args:
      batch: the batch.
      decode_threshold: maximum number of query tokens of a decode.
      require_uniform: whether all decodes must have the query length of the first row; rows
        without query tokens are exempt.
      treat_short_extends_as_decodes: whether a row that is still prefilling counts as a decode if
        its query is short.
      is_prefilling: bool[B], rows that are still prefilling; required unless short extends count
        as decodes.

    Raises:
      ValueError: a threshold below 0, an `is_prefilling` that is missing or not bool[B], or a batch
        without rows.

    Example: query lengths [1, 1, 4] are 2 decodes and 1 prefill of 2 and 4 tokens.
    """
    check_batch("split_decodes_and_prefills", batch)
    check_has_rows(batch.max_num_reqs)
    decode_threshold = check_threshold(decode_threshold)
    if not treat_short_extends_as_decodes and is_prefilling is None:
        raise ValueError("treat_short_extends_as_decodes=False requires is_prefilling, bool[B]")
    if is_prefilling is not None:
        check_flags("is_prefilling", is_prefilling, batch.max_num_reqs)
    batch = on_device(batch)
    query = batch.query_lens
    is_prefill = query > decode_threshold
    if require_uniform:
        long = jnp.any(is_prefill)
        is_prefill = (query != query[0]) & (query != 0)
        if decode_threshold <= 1 and treat_short_extends_as_decodes:
            is_prefill &= long  # single-token queries are always uniform
    if not treat_short_extends_as_decodes and is_prefilling is not None:
        is_prefill |= is_prefilling
    is_prefill |= query[0] > decode_threshold
    first = _first(is_prefill, batch)
    tokens = _tokens_before(batch, first)
    return Split(first, batch.num_reqs - first, tokens, batch.num_tokens - tokens)


class ExtendSplit(NamedTuple):
    """Split of a batch into decodes, extends and prefills; each field is an int32[].

    Attributes:
      num_decodes: number of decode rows.
      num_extends: number of rows that continue a context with a long query.
      num_prefills: number of rows from the first one with a long query and no earlier context.
      num_decode_tokens: query tokens of the decodes.
      num_extend_tokens: query tokens of the extends.
      num_prefill_tokens: query tokens of the prefills.

    Padding tokens count as tokens of the last section that is not empty.
    """

    num_decodes: jax.Array
    num_extends: jax.Array
    num_prefills: jax.Array
    num_decode_tokens: jax.Array
    num_extend_tokens: jax.Array
    num_prefill_tokens: jax.Array


def split_decodes_prefills_and_extends(
    batch: BatchMetadata, decode_threshold: int = 1
) -> ExtendSplit:
    """Boundaries between decodes, extends and prefills of a batch in that order.

    Decodes end at the first row with more than `decode_threshold` query tokens, extends at the
    first of those without context from earlier steps. Follows vLLM's function of that name.

    Args:
      batch: the batch, in the order of `reorder_batch` or `reorder_batch_on_device`.
      decode_threshold: maximum number of query tokens of a decode.

    Raises:
      ValueError: a threshold below 0, or a batch without rows.

    Example: query lengths [1, 1, 4, 3] of contexts [7, 3, 9, 3] are 2 decodes, 1 extend and 1
    prefill of 2, 4 and 3 tokens.
    """
    check_batch("split_decodes_prefills_and_extends", batch)
    check_has_rows(batch.max_num_reqs)
    decode_threshold = check_threshold(decode_threshold)
    batch = on_device(batch)
    is_long = batch.query_lens > decode_threshold
    is_prefill = is_long & (batch.seq_lens == batch.query_lens)
    first_long, first_prefill = _first(is_long, batch), _first(is_prefill, batch)
    starts = [_tokens_before(batch, row) for row in (first_long, first_prefill)]
    return ExtendSplit(
        num_decodes=first_long,
        num_extends=first_prefill - first_long,
        num_prefills=batch.num_reqs - first_prefill,
        num_decode_tokens=starts[0],
        num_extend_tokens=starts[1] - starts[0],
        num_prefill_tokens=batch.num_tokens - starts[1],
    )


def sections(batch: BatchMetadata, split: Split | ExtendSplit) -> tuple[BatchMetadata, ...]:
    """The sections of a batch as batches, in their order, within the bounds of the batch.

    `query_start_loc` of a section counts from its first token, which follows the tokens of the
    sections before it.

    Args:
      batch: the batch.
      split: its split.

    Example: `decode, prefill = sections(batch, split_decodes_and_prefills(batch))`.
    """
    check_batch("sections", batch)
    batch = on_device(batch)
    counts, tokens = split[: len(split) // 2], split[len(split) // 2 :]
    first: jax.Array | int = 0
    out = []
    for count, num_tokens in zip(counts, tokens, strict=True):
        section = dataclasses.replace(
            batch,
            query_start_loc=starts_from(batch.query_start_loc, first, count),
            seq_lens=rows_from(batch.seq_lens, first, count),
            block_table=rows_from(batch.block_table, first, count, fill=NULL_BLOCK),
            num_reqs=count,
            num_tokens=num_tokens,
        )
        out.append(section)
        first = first + count
    return tuple(out)


class Reordered(NamedTuple):
    """A batch in another order of its rows.

    Attributes:
      batch: the batch in the new order.
      rows: int32[B], `rows[i]` is the former row of row i; padding rows stay in place.
      tokens: int32[T], former index of each query token; padding tokens stay in place.
    """

    batch: BatchMetadata
    rows: jax.Array
    tokens: jax.Array


def reorder_batch_on_device(
    batch: BatchMetadata, num_prompt: Array, decode_threshold: int = 1
) -> Reordered:
    """A batch with decodes first, then short extends, long extends and prefills.

    The order is that of `reorder_batch` on the host, including its few moves: rows already in
    their region stay in place. Further arrays of rows follow by `x[reordered.rows]`, arrays of
    tokens by `x[reordered.tokens]`.

    Args:
      batch: the batch, in any order.
      num_prompt: int32[B], prompt length of each request in tokens.
      decode_threshold: maximum number of query tokens of a decode.

    Raises:
      ValueError: a threshold below 0, `num_prompt` not integers of shape [B] or outside int32, or a
        batch without rows.

    Example:
      `batch, rows, tokens = reorder_batch_on_device(batch, num_prompt)`, then
      `token_ids = token_ids[tokens]`.
    """
    check_batch("reorder_batch_on_device", batch)
    check_has_rows(batch.max_num_reqs)
    check_rows("num_prompt", num_prompt, batch.max_num_reqs)
    decode_threshold = check_threshold(decode_threshold)
    batch = on_device(batch)
    prompts = int32_on_device("num_prompt", num_prompt)
    rows = _order(_regions(batch, prompts, decode_threshold))
    starts = prefix_sum(batch.query_lens[rows])
    token = jnp.arange(batch.max_num_tokens, dtype=jnp.int32)
    row = token_to_request(starts, batch.max_num_tokens)
    moved = batch.query_start_loc[rows[row]] + token - starts[row]
    return Reordered(
        batch=dataclasses.replace(
            batch,
            query_start_loc=starts,
            seq_lens=batch.seq_lens[rows],
            block_table=batch.block_table[rows],
        ),
        rows=rows,
        tokens=jnp.where(token < starts[-1], moved, token),
    )


def _regions(batch: BatchMetadata, num_prompt: jax.Array, decode_threshold: int) -> jax.Array:
    """int32[B], the region in which each row belongs."""
    computed = num_computed_tokens(batch)
    return jnp.select(
        [
            ~batch.row_mask,
            computed == 0,
            batch.query_lens > decode_threshold,
            computed < num_prompt,
        ],
        [jnp.int32(region) for region in (_PADDING, _PREFILL, _LONG_EXTEND, _SHORT_EXTEND)],
        jnp.int32(_DECODE),
    )


def _order(region: jax.Array) -> jax.Array:
    """int32[B]: misplaced rows, stably sorted by region, fill the misplaced places in order."""
    index = jnp.arange(region.shape[0], dtype=jnp.int32)
    ends = jnp.sum(
        region[:, None] <= jnp.arange(_PADDING, dtype=jnp.int32)[None], axis=0, dtype=jnp.int32
    )
    region_here = jnp.sum(ends[None] <= index[:, None], axis=1, dtype=jnp.int32)
    misplaced = region != region_here
    before = index[None] < index[:, None]
    same, lower = region[None] == region[:, None], region[None] < region[:, None]
    earlier = lower | (same & before)
    rank = jnp.sum(earlier & misplaced[None], axis=1, dtype=jnp.int32)
    place = jnp.sum(before & misplaced[None], axis=1, dtype=jnp.int32)
    # Rows in place get distinct targets past the end, as unique_indices requires.
    target = jnp.where(misplaced, rank, region.shape[0] + index)
    by_rank = jnp.zeros_like(index).at[target].set(index, mode="drop", unique_indices=True)
    return jnp.where(misplaced, by_rank[place], index)


def _first(flags: jax.Array, batch: BatchMetadata) -> jax.Array:
    """int32[], the first row with the flag; `num_reqs`, regardless of padding rows, if none."""
    index = jnp.arange(batch.max_num_reqs, dtype=jnp.int32)
    return jnp.min(jnp.where(flags, index, batch.num_reqs))


def _tokens_before(batch: BatchMetadata, row: jax.Array) -> jax.Array:
    """int32[], tokens of the rows before `row`; with the padding if no row follows."""
    return jnp.where(row < batch.num_reqs, batch.query_start_loc[row], batch.num_tokens)
