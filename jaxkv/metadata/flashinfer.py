"""What FlashInfer's wrappers and its dense (TensorRT-LLM) kernels take.

Follows vLLM's FlashInfer builder of 0.33: decodes come first and are uniform, and under decode
context parallelism pages are counted after lengths became those of this rank, not before. Cascade
is left out, as that builder never uses it.

Rows from a part's number of rows on are padding: start arrays repeat their last value there, and
lengths are 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .common import (
    NULL_BLOCK,
    BatchMetadata,
    dcp_local_seq_lens,
    slot_mapping,
    split_decodes_and_prefills,
    token_positions,
)
from .pages import packed_pages
from .segments import cdiv, prefix_sum, rows_from, starts_from


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedPart:
    """The decodes or the prefills of a batch, as a paged wrapper takes them.

    Attributes:
      qo_indptr: int32[B + 1], where each row's query tokens begin, from the part's first on.
      paged_kv_indptr: int32[B + 1], where each row's pages begin in the `paged_kv_indices` of the
        whole batch.
      paged_kv_last_page_len: int32[B], tokens in each row's last page; 0 if it has none.
    """

    qo_indptr: Any
    paged_kv_indptr: Any
    paged_kv_last_page_len: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedMetadata:
    """See `build`.

    Attributes:
      num_actual_tokens: int32[], query tokens of the batch.
      num_decodes: int32[], rows of the first part.
      num_prefills: int32[], the other rows.
      num_decode_tokens: int32[], query tokens of the first part.
      num_prefill_tokens: int32[], the others.
      slot_mapping: int32[T], where each token goes on this rank; PAD_SLOT for none.
      paged_kv_indices: int32[max_pages], pages of all rows one after the other; NULL_BLOCK behind.
      decode: the first part.
      prefill: the second part.
    """

    num_actual_tokens: Any
    num_decodes: Any
    num_prefills: Any
    num_decode_tokens: Any
    num_prefill_tokens: Any
    slot_mapping: Any
    paged_kv_indices: Any
    decode: PagedPart
    prefill: PagedPart


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DensePart:
    """The decodes or the prefills of a batch, as a kernel that reads block tables takes them.

    Attributes:
      block_tables: int32[B, W], blocks of each row; NULL_BLOCK for padding rows.
      seq_lens: int32[B], tokens of each row's context.
      cum_seq_lens_q: int32[B + 1], where each row's query tokens begin, from the part's first on.
      cum_seq_lens_kv: int32[B + 1], pages (not tokens) of the part's rows before each.
      max_q_len: int32[], most query tokens of a row of this part.
      max_seq_len: int32[], tokens of the longest context of the whole batch.
    """

    block_tables: Any
    seq_lens: Any
    cum_seq_lens_q: Any
    cum_seq_lens_kv: Any
    max_q_len: Any
    max_seq_len: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseMetadata:
    """See `build_dense`; what the fields hold is in `PagedMetadata`."""

    num_actual_tokens: Any
    num_decodes: Any
    num_prefills: Any
    num_decode_tokens: Any
    num_prefill_tokens: Any
    slot_mapping: Any
    decode: DensePart
    prefill: DensePart


def build(
    batch: BatchMetadata,
    *,
    decode_threshold: int = 1,
    max_pages: int | None = None,
    dcp_world_size: int = 1,
    dcp_rank: Any = 0,
    dcp_interleave: int = 1,
) -> PagedMetadata:
    """What paged wrappers take: lists of pages.

    Under decode context parallelism a prefill's pages are those of its earlier tokens alone: the
    new ones are attended to as they come, and the two results merged.

    Args:
      batch: the batch, decodes first.
      decode_threshold: query tokens up to which a row counts as a decode.
      max_pages: the most pages of a batch; None for what every row can have. A batch with more is
        an error (`jaxkv.BoundError`), and its last pages are missing.
      dcp_world_size: ranks that share a context.
      dcp_rank: this rank, an int or int32[].
      dcp_interleave: consecutive tokens that one rank holds.

    Raises:
      ValueError: `decode_threshold` above 1 with several ranks, or what `slot_mapping` and
        `packed_pages` refuse.
    """
    if dcp_world_size > 1 and decode_threshold > 1:
        raise ValueError(
            f"decode_threshold={decode_threshold} tokens: with {dcp_world_size} ranks a decode has "
            "1 query token"
        )
    split = split_decodes_and_prefills(batch, decode_threshold, require_uniform=True)
    lens = _cached_lens(batch, split.num_decodes, dcp_world_size, dcp_rank, dcp_interleave)
    page_size = batch.block_size
    indptr, indices = packed_pages(batch.block_table, cdiv(lens, page_size), max_pages)
    last_page_len = jnp.where(lens > 0, (lens - 1) % page_size + 1, 0)

    def part(first: Any, count: Any) -> PagedPart:
        return PagedPart(
            qo_indptr=starts_from(batch.query_start_loc, first, count),
            paged_kv_indptr=indptr[first] + starts_from(indptr, first, count),
            paged_kv_last_page_len=rows_from(last_page_len, first, count),
        )

    slots = slot_mapping(
        batch,
        token_positions(batch),
        cp_world_size=dcp_world_size,
        cp_rank=dcp_rank,
        cp_interleave=dcp_interleave,
    )
    return PagedMetadata(
        num_actual_tokens=batch.num_tokens,
        **split._asdict(),
        slot_mapping=slots,
        paged_kv_indices=indices,
        decode=part(jnp.int32(0), split.num_decodes),
        prefill=part(split.num_decodes, split.num_prefills),
    )


def _cached_lens(
    batch: BatchMetadata, num_decodes: Any, world_size: int, rank: Any, interleave: int
) -> Any:
    """int32[B], tokens of each row in this rank's pages."""
    if world_size == 1:
        return batch.seq_lens
    row = jnp.arange(batch.max_num_reqs, dtype=jnp.int32)
    lens = jnp.where(row < num_decodes, batch.seq_lens, batch.seq_lens - batch.query_lens)
    return dcp_local_seq_lens(lens, world_size, rank, interleave)


def build_dense(batch: BatchMetadata, *, decode_threshold: int = 1) -> DenseMetadata:
    """What kernels take that read block tables.

    Args:
      batch: the batch, decodes first.
      decode_threshold: query tokens up to which a row counts as a decode; all decodes have as many
        as the first, or none.
    """
    split = split_decodes_and_prefills(batch, decode_threshold, require_uniform=True)
    return DenseMetadata(
        num_actual_tokens=batch.num_tokens,
        **split._asdict(),
        slot_mapping=slot_mapping(batch, token_positions(batch)),
        decode=_dense_part(batch, jnp.int32(0), split.num_decodes),
        prefill=_dense_part(batch, split.num_decodes, split.num_prefills),
    )


def _dense_part(batch: BatchMetadata, first: Any, count: Any) -> DensePart:
    seq_lens = rows_from(batch.seq_lens, first, count)
    return DensePart(
        block_tables=rows_from(batch.block_table, first, count, fill=NULL_BLOCK),
        seq_lens=seq_lens,
        cum_seq_lens_q=starts_from(batch.query_start_loc, first, count),
        cum_seq_lens_kv=prefix_sum(cdiv(seq_lens, batch.block_size)),
        max_q_len=jnp.max(rows_from(batch.query_lens, first, count)),
        max_seq_len=jnp.max(batch.seq_lens),
    )
