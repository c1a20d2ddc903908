"""Chunked local attention: queries are split at chunk boundaries of the context.

A token attends only to tokens of its own chunk of `chunk_size` tokens. Each part of a query in one
chunk becomes a row of a virtual batch, which any causal kernel supports. Follows vLLM's
make_local_attention_virtual_batches, which copies the lengths to the host and lets negative
columns wrap around. Here the number of rows has a static bound, and columns are clamped to the
block table on both sides.
"""

from __future__ import annotations

import dataclasses
import operator

import jax
import jax.numpy as jnp

from jaxkv.metadata.checks import at_least_1, check_rows
from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata, check_batch
from jaxkv.metadata.segments import Array, cdiv, int32_on_device, on_device, prefix_sum, row_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LocalAttention:
    """A virtual batch with one row for each chunk of a query, in token order.

    Attributes:
      batch: the V rows; `seq_lens` counts from the start of the row's chunk, and `block_table` is
        int32[V, chunk_size / block_size]. Tokens and slots are those of the original batch.
      request: int32[V], row of the original batch; 0 in padding rows.
      chunk: int32[V], chunk index in the context; 0 in padding rows.
      num_rows: B, rows of the original batch.
    """

    batch: BatchMetadata
    request: jax.Array
    chunk: jax.Array
    num_rows: int = dataclasses.field(metadata={"static": True})

    def gather(self, block_table: Array) -> jax.Array:
        """int32[V, chunk_size / block_size], blocks of each row from another block table.

        Columns past the end of the table repeat its last column, which is past the row's context.
        Padding rows are NULL_BLOCK (0).

        Args:
          block_table: int32[B, W'] of the same requests, for example of another KV cache group.

        Raises:
          ValueError: the number of rows of `block_table` differs, or it is not of integers.

        Example: `local_attention.build(batch, 8192).gather(other_block_table)`.
        """
        check_rows("block_table", block_table, self.num_rows, "blocks")
        block_table = int32_on_device("block_table", block_table)
        return _gather(
            block_table, self.batch.row_mask, self.request, self.chunk, self.batch.max_blocks
        )


def build(batch: BatchMetadata, chunk_size: int) -> LocalAttention:
    """The virtual batch of all queries, split at chunk boundaries.

    A row without query tokens yields no row (in vLLM, an unused row without tokens).

    Args:
      batch: the batch.
      chunk_size: tokens per chunk.

    Returns:
      V = `max_pieces(...)` rows, including padding.

    Raises:
      TypeError: a `chunk_size` that is not an integer.
      ValueError: `chunk_size` is not a positive multiple of the block size, or a batch without
        rows.

    Example: `local_attention.build(batch, 8192)`.
    """
    check_batch("local_attention.build", batch)
    chunk_size = operator.index(chunk_size)  # NumPy integers would promote int32 to int64 under x64
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

    # V + 1, including the end of the last row.
    ends = 1 + max_pieces(batch.max_num_reqs, batch.max_num_tokens, chunk_size)
    piece = jnp.arange(ends, dtype=jnp.int32)
    used = piece < first_piece[-1]
    request = jnp.where(used, row_of(first_piece, piece), 0)
    chunk = jnp.where(used, first_chunk[request] + piece - first_piece[request], 0)
    # A row starts at its chunk boundary, except for the first of a request: at the query's start.
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
    """V, tight upper bound of the rows (pieces of queries) for B rows and T query tokens.

    Each piece has at least one token, so V <= T. A query of q >= 1 tokens spans at most
    1 + ceil((q - 1) / C) = 1 + floor((q + C - 2) / C) chunks of C tokens. A sum of floors does not
    exceed the floor of the sum, so all queries span at most B + floor((T + B (C - 2)) / C) chunks.
    The bound is tight: two tokens across a chunk boundary form two pieces, and each C further
    tokens add one. For T >= 2 B some batch reaches the second bound; for fewer tokens, some batch
    has one piece per token.

    Args:
      max_num_reqs: B.
      max_num_tokens: T.
      chunk_size: C, tokens per chunk.

    Raises:
      TypeError: a `chunk_size` that is not an integer.
      ValueError: `chunk_size` below 1.

    Example: `max_pieces(4, 16, 8)` is 9.
    """
    (chunk_size,) = at_least_1(chunk_size=chunk_size)
    limit = max_num_reqs + (max_num_tokens + max_num_reqs * (chunk_size - 2)) // chunk_size
    return min(max_num_tokens, limit)


def _gather(
    block_table: Array, used: jax.Array, request: jax.Array, chunk: jax.Array, width: int
) -> jax.Array:
    column = chunk[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None]
    column = jnp.clip(column, 0, block_table.shape[1] - 1)
    return jnp.where(used[:, None], on_device(block_table)[request[:, None], column], NULL_BLOCK)
