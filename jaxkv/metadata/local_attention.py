"""Chunked local attention: each request's query, cut where chunks of the context end.

A token attends within its chunk of `chunk_size` tokens alone. Every piece of a query that lies in
one chunk becomes a row of a batch of its own, so that any causal kernel serves. Follows vLLM's
make_local_attention_virtual_batches, which reads the lengths back to the host and leaves columns
before the table's start to wrap; here the number of rows has a static bound, and columns stay
within the table on both sides.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.metadata.checks import check_rows
from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata
from jaxkv.metadata.segments import cdiv, on_device, prefix_sum, row_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LocalAttention:
    """A batch of pieces of queries, in the order of their tokens.

    Attributes:
      batch: the V rows, at most one a chunk of each query; `seq_lens` counts from the start of a
        row's chunk, and `block_table` is int32[V, chunk_size / block_size]. Tokens and their slots
        are those of the batch it came from.
      request: int32[V], the row that each row is a piece of; 0 in padding rows.
      chunk: int32[V], which chunk of its context that is; 0 in padding rows.
      num_rows: B, rows of the batch it came from.
    """

    batch: BatchMetadata
    request: Any
    chunk: Any
    num_rows: int = dataclasses.field(metadata={"static": True})

    def gather(self, block_table: Any) -> Any:
        """int32[V, chunk_size / block_size], the blocks of each row in another block table.

        Columns past the table's end repeat its last, which lies behind the row's context; padding
        rows hold NULL_BLOCK.

        Args:
          block_table: int32[B, W'] of the same requests, such as another cache group's.

        Raises:
          ValueError: `block_table` of another number of rows.
        """
        check_rows("block_table", block_table, self.num_rows, "blocks")
        return _gather(
            block_table, self.batch.row_mask, self.request, self.chunk, self.batch.max_blocks
        )


def build(batch: BatchMetadata, chunk_size: int) -> LocalAttention:
    """The batch of all pieces into which chunks of the context cut the queries.

    A row without query tokens has no piece (vLLM gives it one without tokens, which no query uses).

    Args:
      batch: the batch.
      chunk_size: tokens a chunk.

    Returns:
      V = `max_pieces(...)` rows, those past the batch's pieces padding.

    Raises:
      ValueError: `chunk_size` is not a positive multiple of the block size.
    """
    if chunk_size < 1 or chunk_size % batch.block_size:
        raise ValueError(
            f"chunk_size={chunk_size} tokens must be a positive multiple of "
            f"block_size={batch.block_size} tokens"
        )
    batch = on_device(batch)
    computed = batch.seq_lens - batch.query_lens
    first_chunk = computed // chunk_size
    pieces = jnp.where(batch.query_lens > 0, cdiv(batch.seq_lens, chunk_size) - first_chunk, 0)
    first_piece = prefix_sum(pieces)

    # One more than V: where the last row ends.
    ends = 1 + max_pieces(batch.max_num_reqs, batch.max_num_tokens, chunk_size)
    piece = jnp.arange(ends, dtype=jnp.int32)
    used = piece < first_piece[-1]
    request = jnp.where(used, row_of(first_piece, piece), 0)
    chunk = jnp.where(used, first_chunk[request] + piece - first_piece[request], 0)
    # A row starts with its chunk, but a request's first with its query.
    start = jnp.maximum(computed[request], chunk * chunk_size)
    token = batch.query_start_loc[request] + start - computed[request]
    seq_lens = jnp.minimum(batch.seq_lens[request] - chunk * chunk_size, chunk_size)
    query_start_loc = jnp.where(used, token, batch.query_start_loc[-1])

    used, request, chunk, seq_lens = used[:-1], request[:-1], chunk[:-1], seq_lens[:-1]
    width = chunk_size // batch.block_size
    return LocalAttention(
        batch=dataclasses.replace(
            batch,
            query_start_loc=query_start_loc,
            seq_lens=jnp.where(used, seq_lens, 0),
            block_table=_gather(batch.block_table, used, request, chunk, width),
            num_reqs=first_piece[-1],
        ),
        request=request,
        chunk=chunk,
        num_rows=batch.max_num_reqs,
    )


def max_pieces(max_num_reqs: int, max_num_tokens: int, chunk_size: int) -> int:
    """V, the most pieces of a batch of B rows and T query tokens.

    A piece has a token at least, so V <= T. And a query of q >= 1 tokens, wherever it starts, lies
    in at most 1 + ceil((q - 1) / C) = 1 + floor((q + C - 2) / C) chunks of C tokens. Floors add up
    to no more than the floor of the sum, so all queries lie in B + floor((T + B (C - 2)) / C). Two
    tokens on both sides of a chunk's end are two pieces, and each C further tokens one more: with
    T >= 2 B some batch has as many, with less some batch has a piece a token.
    """
    most = max_num_reqs + (max_num_tokens + max_num_reqs * (chunk_size - 2)) // chunk_size
    return min(max_num_tokens, most)


def _gather(block_table: Any, used: Any, request: Any, chunk: Any, width: int) -> Any:
    column = chunk[:, None] * width + jnp.arange(width, dtype=jnp.int32)
    column = jnp.clip(column, 0, block_table.shape[1] - 1)
    return jnp.where(used[:, None], on_device(block_table)[request[:, None], column], NULL_BLOCK)
