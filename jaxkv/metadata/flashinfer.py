"""Metadata for FlashInfer's paged wrappers and dense (TensorRT-LLM) kernels.

Follows the FlashInfer builder of vLLM 0.33: decodes come first and have a uniform query length, and
under decode context parallelism (DCP) pages are counted from the lengths on this rank, not from the
full lengths. Cascade attention is omitted, because that builder never uses it.

Rows of a part past its number of rows are padding: start arrays repeat their last value there, and
lengths are 0.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from .checks import check_threshold
from .common import (
    NULL_BLOCK,
    BatchMetadata,
    check_batch,
    context_parallel,
    dcp_local_seq_lens,
    slot_mapping,
    token_positions,
)
from .flashinfer_kernel import build_in_one_kernel, in_one_kernel
from .pages import packed_pages
from .segments import cdiv, on_device, prefix_sum, rows_from, starts_from
from .splits import split_decodes_and_prefills


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedPart:
    """The decodes or the prefills of a batch, for a paged wrapper.

    Attributes:
      qo_indptr: int32[B + 1], start of each row's query tokens, relative to the part.
      paged_kv_indptr: int32[B + 1], start of each row's pages in the `paged_kv_indices` of the
        entire batch.
      paged_kv_last_page_len: int32[B], tokens in each row's last page; 0 without pages.
    """

    qo_indptr: jax.Array
    paged_kv_indptr: jax.Array
    paged_kv_last_page_len: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PagedMetadata:
    """See `build`.

    Attributes:
      num_actual_tokens: int32[], query tokens of the batch.
      num_decodes: int32[], number of decode rows.
      num_prefills: int32[], number of prefill rows.
      num_decode_tokens: int32[], query tokens of the decodes.
      num_prefill_tokens: int32[], query tokens of the prefills.
      slot_mapping: int32[T], slot of each token on this rank, or PAD_SLOT (-1).
      paged_kv_indices: int32[max_pages], page ids of all rows in order; NULL_BLOCK (0) for padding.
      decode: the decodes.
      prefill: the prefills.

    Padding tokens count as prefill tokens, or as decode tokens if there are no prefills.
    """

    num_actual_tokens: jax.Array
    num_decodes: jax.Array
    num_prefills: jax.Array
    num_decode_tokens: jax.Array
    num_prefill_tokens: jax.Array
    slot_mapping: jax.Array
    paged_kv_indices: jax.Array
    decode: PagedPart
    prefill: PagedPart


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DensePart:
    """The decodes or the prefills of a batch, for a kernel that reads block tables.

    Attributes:
      block_tables: int32[B, W], block ids of each row; NULL_BLOCK (0) for padding rows.
      seq_lens: int32[B], context length of each row in tokens.
      cum_seq_lens_q: int32[B + 1], start of each row's query tokens, relative to the part.
      cum_seq_lens_kv: int32[B + 1], exclusive prefix sum of pages (not tokens) of the rows.
      max_q_len: int32[], longest query of this part in tokens.
      max_seq_len: int32[], longest context of the entire batch in tokens.
    """

    block_tables: jax.Array
    seq_lens: jax.Array
    cum_seq_lens_q: jax.Array
    cum_seq_lens_kv: jax.Array
    max_q_len: jax.Array
    max_seq_len: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DenseMetadata:
    """See `build_dense`; the fields are those of `PagedMetadata`, without `paged_kv_indices`."""

    num_actual_tokens: jax.Array
    num_decodes: jax.Array
    num_prefills: jax.Array
    num_decode_tokens: jax.Array
    num_prefill_tokens: jax.Array
    slot_mapping: jax.Array
    decode: DensePart
    prefill: DensePart


def build(
    batch: BatchMetadata,
    *,
    decode_threshold: int = 1,
    max_pages: int | None = None,
    dcp_world_size: int = 1,
    dcp_rank: int | jax.Array = 0,
    dcp_interleave: int = 1,
) -> PagedMetadata:
    """Metadata for the paged wrappers, with packed page lists.

    Under decode context parallelism, the pages of a prefill contain only its earlier tokens:
    attention to the new tokens is computed separately, and the results are merged.

    On CUDA one kernel builds it, unless there are several ranks, more than 4,095 rows, or arrays
    that vary over the axes of a `shard_map`; otherwise plain JAX builds it, in about a dozen
    kernels.

    Args:
      batch: the batch, decodes first.
      decode_threshold: maximum number of query tokens of a decode.
      max_pages: upper bound of pages of a batch; None for B * W. A batch with more is a
        `jaxkv.BoundError`, and its page list is truncated.
      dcp_world_size: ranks of the decode-context-parallel group.
      dcp_rank: this rank, an int or int32[].
      dcp_interleave: consecutive tokens on one rank.

    Raises:
      TypeError: a size that is not an integer.
      ValueError: `decode_threshold` below 0, or above 1 with several ranks, `dcp_interleave` does
        not divide the block size, a size below 1, or a rank on the host outside the group.

    Example: `flashinfer.build(batch, max_pages=8)`.
    """
    check_batch("flashinfer.build", batch)
    dcp_world_size, dcp_rank, dcp_interleave = context_parallel(
        dcp_world_size, dcp_rank, dcp_interleave, "dcp_", batch.block_size
    )
    if dcp_world_size > 1 and decode_threshold > 1:
        raise ValueError(
            f"decode_threshold must be 1 with dcp_world_size={dcp_world_size}, "
            f"got {decode_threshold}"
        )
    plain = functools.partial(
        _build,
        decode_threshold=decode_threshold,
        max_pages=max_pages,
        dcp_world_size=dcp_world_size,
        dcp_rank=dcp_rank,
        dcp_interleave=dcp_interleave,
    )
    if dcp_world_size > 1 or not in_one_kernel(batch):
        return plain(batch)
    check_threshold(decode_threshold)

    def on_cuda(batch: BatchMetadata) -> PagedMetadata:
        made = build_in_one_kernel(batch, decode_threshold, max_pages)
        return PagedMetadata(
            num_actual_tokens=batch.num_tokens,
            **made.split._asdict(),
            slot_mapping=made.slot_mapping,
            paged_kv_indices=made.paged_kv_indices,
            decode=PagedPart(*made.decode),
            prefill=PagedPart(*made.prefill),
        )

    return jax.lax.platform_dependent(on_device(batch), cuda=on_cuda, default=plain)


def _build(
    batch: BatchMetadata,
    *,
    decode_threshold: int,
    max_pages: int | None,
    dcp_world_size: int,
    dcp_rank: int | jax.Array,
    dcp_interleave: int,
) -> PagedMetadata:
    """`build` in plain JAX."""
    split = split_decodes_and_prefills(batch, decode_threshold, require_uniform=True)
    lens = _cached_lens(batch, split.num_decodes, dcp_world_size, dcp_rank, dcp_interleave)
    page_size = batch.block_size
    indptr, indices = packed_pages(
        "flashinfer.build", batch.block_table, cdiv(lens, page_size), max_pages
    )
    last_page_len = jnp.where(lens > 0, (lens - 1) % page_size + 1, 0)

    def part(first: jax.Array, count: jax.Array) -> PagedPart:
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
    batch: BatchMetadata,
    num_decodes: jax.Array,
    world_size: int,
    rank: int | jax.Array,
    interleave: int,
) -> jax.Array:
    """int32[B], tokens of each row in the pages of this rank."""
    if world_size == 1:
        return batch.seq_lens
    row = jnp.arange(batch.max_num_reqs, dtype=jnp.int32)
    lens = jnp.where(row < num_decodes, batch.seq_lens, batch.seq_lens - batch.query_lens)
    return dcp_local_seq_lens(lens, world_size, rank, interleave)


def build_dense(batch: BatchMetadata, *, decode_threshold: int = 1) -> DenseMetadata:
    """Metadata for kernels that read block tables.

    Args:
      batch: the batch, decodes first.
      decode_threshold: maximum number of query tokens of a decode; all decodes have the query
        length of the first one, or none.

    Raises:
      ValueError: `decode_threshold` below 0.

    Example: `flashinfer.build_dense(batch)`.
    """
    check_batch("flashinfer.build_dense", batch)
    split = split_decodes_and_prefills(batch, decode_threshold, require_uniform=True)
    return DenseMetadata(
        num_actual_tokens=batch.num_tokens,
        **split._asdict(),
        slot_mapping=slot_mapping(batch, token_positions(batch)),
        decode=_dense_part(batch, jnp.int32(0), split.num_decodes),
        prefill=_dense_part(batch, split.num_decodes, split.num_prefills),
    )


def _dense_part(batch: BatchMetadata, first: jax.Array, count: jax.Array) -> DensePart:
    seq_lens = rows_from(batch.seq_lens, first, count)
    return DensePart(
        block_tables=rows_from(batch.block_table, first, count, fill=NULL_BLOCK),
        seq_lens=seq_lens,
        cum_seq_lens_q=starts_from(batch.query_start_loc, first, count),
        cum_seq_lens_kv=prefix_sum(cdiv(seq_lens, batch.block_size)),
        max_q_len=jnp.max(rows_from(batch.query_lens, first, count)),
        max_seq_len=jnp.max(batch.seq_lens),
    )
