"""Metadata for attention over a TurboQuant cache.

Follows the TurboQuant builder of vLLM 0.33: decodes come first, and the longest query and context
of the prefills exclude the decodes, so that `max_query_len == max_seq_len` identifies prompts that
begin in this step. A continued prompt may process each of its tokens as a decode; the operands for
that are included for all tokens.

Rows of a part past its number of rows are padding: start arrays repeat their last value there,
lengths are 0 and block tables NULL_BLOCK (0).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .common import (
    NULL_BLOCK,
    BatchMetadata,
    check_batch,
    slot_mapping,
    token_positions,
    token_to_request,
)
from .segments import rows_from, starts_from
from .splits import split_decodes_and_prefills


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """The decodes or the prefills of a batch.

    Attributes:
      query_start_loc: int32[B + 1], start of each row's query tokens, relative to the part.
      seq_lens: int32[B], context length of each row in tokens.
      block_table: int32[B, W], block ids of each row.
      max_query_len: int32[], longest query of this part in tokens.
      max_seq_len: int32[], longest context of this part in tokens.
    """

    query_start_loc: jax.Array
    seq_lens: jax.Array
    block_table: jax.Array
    max_query_len: jax.Array
    max_seq_len: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TurboQuantMetadata:
    """See `build`.

    Attributes:
      num_actual_tokens: int32[], query tokens of the batch.
      num_decodes: int32[], number of decode rows.
      num_decode_tokens: int32[], query tokens of the decodes; with padding if all rows are decodes.
      is_prefill: bool[], whether any row has several query tokens.
      query_start_loc: int32[B + 1], as in the batch.
      seq_lens: int32[B], as in the batch.
      block_table: int32[B, W], as in the batch.
      max_query_len: int32[], longest query in tokens.
      max_seq_len: int32[], longest context in tokens.
      slot_mapping: int32[T], slot of each token; PAD_SLOT (-1) for padding.
      token_to_req: int32[T], row of the block table for each token as a single-token decode; 0 for
        padding.
      token_seq_lens: int32[T], context length of that decode in tokens; 0 for padding.
      decode: the decodes.
      prefill: the prefills.
    """

    num_actual_tokens: jax.Array
    num_decodes: jax.Array
    num_decode_tokens: jax.Array
    is_prefill: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    block_table: jax.Array
    max_query_len: jax.Array
    max_seq_len: jax.Array
    slot_mapping: jax.Array
    token_to_req: jax.Array
    token_seq_lens: jax.Array
    decode: Part
    prefill: Part


def build(batch: BatchMetadata) -> TurboQuantMetadata:
    """Metadata of a batch for attention over a TurboQuant cache.

    Args:
      batch: the batch, decodes first.

    Raises:
      ValueError: a batch without rows.

    Example: `turboquant.build(batch)`.
    """
    check_batch("turboquant.build", batch)
    split = split_decodes_and_prefills(batch)
    token = jnp.arange(batch.max_num_tokens, dtype=jnp.int32)
    positions = token_positions(batch)
    max_query_len = jnp.max(batch.query_lens)
    return TurboQuantMetadata(
        num_actual_tokens=batch.num_tokens,
        num_decodes=split.num_decodes,
        num_decode_tokens=split.num_decode_tokens,
        is_prefill=max_query_len > 1,
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        max_query_len=max_query_len,
        max_seq_len=jnp.max(batch.seq_lens),
        slot_mapping=slot_mapping(batch, positions),
        token_to_req=token_to_request(batch.query_start_loc, batch.max_num_tokens),
        token_seq_lens=jnp.where(token < batch.query_start_loc[-1], positions + 1, 0),
        decode=_part(batch, jnp.int32(0), split.num_decodes),
        prefill=_part(batch, split.num_decodes, split.num_prefills),
    )


def _part(batch: BatchMetadata, first: jax.Array, count: jax.Array) -> Part:
    seq_lens = rows_from(batch.seq_lens, first, count)
    return Part(
        query_start_loc=starts_from(batch.query_start_loc, first, count),
        seq_lens=seq_lens,
        block_table=rows_from(batch.block_table, first, count, fill=NULL_BLOCK),
        max_query_len=jnp.max(rows_from(batch.query_lens, first, count)),
        max_seq_len=jnp.max(seq_lens),
    )
