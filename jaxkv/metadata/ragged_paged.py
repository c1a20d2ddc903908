"""Metadata for the ragged paged attention kernels of JAX, with their three formats of page lists.

| kernel | `pages` | operands in addition to `kv_lens`, `page_indices` and `cu_q_lens` |
|---|---|---|
| JAX's own (Pallas, TPU) | "table" | `num_seqs` |
| tpu-inference, v3 and MLA | "flat" | `distribution` |
| sglang-jax, v3 and MLA | "packed" | `cu_kv_lens`, `distribution` |

Under `jit`, XLA eliminates unused operands. The format "table" also fits JAX's paged attention for
GPUs: `page_indices` are its block tables and `kv_lens` its lengths.

These kernels require at least one query token in every row of the batch; `cu_q_lens`, `kv_lens` and
pages of padding rows are not read.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import Literal

import jax
import jax.numpy as jnp

from jaxkv._src.runtime.bounds import check_bounds

from .common import BatchMetadata, check_batch, slot_mapping, token_positions
from .pages import packed_pages
from .segments import cdiv, prefix_sum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RaggedPagedMetadata:
    """See `build`.

    Attributes:
      input_positions: int32[T], position of each token in its context; 0 for padding.
      slot_mapping: int32[T], slot of each token; PAD_SLOT (-1) for padding.
      kv_lens: int32[B], context length of each row in tokens; 0 for padding rows.
      page_indices: "table": int32[B, W], the block table; "flat": int32[B * W], the same flattened;
        "packed": int32[max_pages], pages of all contexts in order, then NULL_BLOCK (0).
      cu_q_lens: int32[B + 1], start of each row's query tokens; padding rows repeat the last value.
      cu_kv_lens: int32[B + 1], exclusive prefix sum of the context lengths rounded up to full
        pages; divided by the page size, start of each row's pages in packed `page_indices`. For
        "table" and "flat", a total above int32 is a `jaxkv.BoundError` of programs that use it.
      num_seqs: int32[1], number of rows.
      distribution: int32[3], end of the decodes, of the prefills of one static length, and of the
        other rows. Leading rows with one query token are decodes; there are no static-length
        prefills, as in both engines.
    """

    input_positions: jax.Array
    slot_mapping: jax.Array
    kv_lens: jax.Array
    page_indices: jax.Array
    cu_q_lens: jax.Array
    cu_kv_lens: jax.Array
    num_seqs: jax.Array
    distribution: jax.Array


def build(
    batch: BatchMetadata,
    *,
    pages: Literal["table", "flat", "packed"] = "table",
    max_pages: int | None = None,
) -> RaggedPagedMetadata:
    """Metadata of a batch for a ragged paged attention kernel.

    Args:
      batch: the batch; with decodes first, all of them take the fast path of the kernels.
      pages: format of `page_indices`, see above.
      max_pages: upper bound of packed pages of a batch; None for B * W. A batch with more is a
        `jaxkv.BoundError`, and its page list is truncated.

    Raises:
      TypeError: a `max_pages` that is not an integer.
      ValueError: an unknown format, `max_pages` below 1 or without packing, a bound of packed pages
        whose tokens may exceed int32, or a batch without rows.

    Example: `ragged_paged.build(batch, pages="packed", max_pages=8)`.
    """
    check_batch("ragged_paged.build", batch)
    if pages not in ("table", "flat", "packed"):
        raise ValueError(f'pages must be "table", "flat" or "packed", got {pages!r}')
    if max_pages is not None and pages != "packed":
        raise ValueError(f'max_pages={max_pages} requires pages="packed", got {pages!r}')
    limit = batch.block_table.size if max_pages is None else operator.index(max_pages)
    if pages == "packed" and limit * batch.block_size >= 2**31:
        raise ValueError(
            f"{limit} pages of {batch.block_size} tokens exceed the 2**31 - 1 tokens of cu_kv_lens "
            "(int32); reduce max_pages"
        )
    page_indices, num_pages = batch.block_table, cdiv(batch.seq_lens, batch.block_size)
    starts = prefix_sum(num_pages)
    if pages == "flat":
        page_indices = page_indices.reshape(-1)
    elif pages == "packed":
        starts, page_indices = packed_pages(
            "ragged_paged.build", batch.block_table, num_pages, max_pages
        )
    if limit * batch.block_size >= 2**31:
        # Common bounds of tables, whose kernels do not use the result; real batches are smaller.
        most = (2**31 - 1) // batch.block_size
        bound = {"pages with tokens in int32 cu_kv_lens": (starts[-1], most)}
        starts = check_bounds("ragged_paged.build", starts, **bound)
    positions = token_positions(batch)
    decodes = _leading(batch.query_lens == 1)
    return RaggedPagedMetadata(
        input_positions=positions,
        slot_mapping=slot_mapping(batch, positions),
        kv_lens=batch.seq_lens,
        page_indices=page_indices,
        cu_q_lens=batch.query_start_loc,
        cu_kv_lens=starts * batch.block_size,
        num_seqs=batch.num_reqs.reshape(1),
        distribution=jnp.stack([decodes, decodes, batch.num_reqs]),
    )


def _leading(flags: jax.Array) -> jax.Array:
    """int32[], number of leading entries that are set."""
    others = jnp.where(flags, flags.shape[0], jnp.arange(flags.shape[0], dtype=jnp.int32))
    return jnp.min(others)
