"""What attention over a TurboQuant cache takes.

Follows vLLM's TurboQuant builder of 0.33: decodes come first, and the prefills' longest query and
context are their own, not the batch's, so that prompts which begin in this step are known by
`max_query_len == max_seq_len`. A prompt that goes on may take each of its tokens as a decode; what
that needs is here for all tokens.

Rows from a part's number of rows on are padding: start arrays repeat their last value there,
lengths are 0 and tables NULL_BLOCK.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from .common import (
    NULL_BLOCK,
    BatchMetadata,
    slot_mapping,
    split_decodes_and_prefills,
    token_positions,
    token_to_request,
)
from .segments import rows_from, starts_from


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Part:
    """The decodes or the prefills of a batch.

    Attributes:
      query_start_loc: int32[B + 1], where each row's query tokens begin, from the part's first on.
      seq_lens: int32[B], tokens of each row's context.
      block_table: int32[B, W], blocks of each row.
      max_query_len: int32[], most query tokens of a row of this part.
      max_seq_len: int32[], tokens of the longest context of this part.
    """

    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    max_query_len: Any
    max_seq_len: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TurboQuantMetadata:
    """See `build`.

    Attributes:
      num_actual_tokens: int32[], query tokens of the batch.
      num_decodes: int32[], rows of the first part.
      num_decode_tokens: int32[], query tokens of the first part.
      is_prefill: bool[], whether any row has several query tokens.
      query_start_loc: int32[B + 1], as in the batch.
      seq_lens: int32[B], as in the batch.
      block_table: int32[B, W], as in the batch.
      max_query_len: int32[], most query tokens of a row.
      max_seq_len: int32[], tokens of the longest context.
      slot_mapping: int32[T], where each token goes; PAD_SLOT for padding.
      token_to_req: int32[T], the row whose table each token reads as a decode of its own; 0 for
        padding.
      token_seq_lens: int32[T], tokens of the context of such a decode; 0 for padding.
      decode: the first part.
      prefill: the second part.
    """

    num_actual_tokens: Any
    num_decodes: Any
    num_decode_tokens: Any
    is_prefill: Any
    query_start_loc: Any
    seq_lens: Any
    block_table: Any
    max_query_len: Any
    max_seq_len: Any
    slot_mapping: Any
    token_to_req: Any
    token_seq_lens: Any
    decode: Part
    prefill: Part


def build(batch: BatchMetadata) -> TurboQuantMetadata:
    """A batch for attention over a TurboQuant cache.

    Args:
      batch: the batch, decodes first.
    """
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


def _part(batch: BatchMetadata, first: Any, count: Any) -> Part:
    seq_lens = rows_from(batch.seq_lens, first, count)
    return Part(
        query_start_loc=starts_from(batch.query_start_loc, first, count),
        seq_lens=seq_lens,
        block_table=rows_from(batch.block_table, first, count, fill=NULL_BLOCK),
        max_query_len=jnp.max(rows_from(batch.query_lens, first, count)),
        max_seq_len=jnp.max(seq_lens),
    )
