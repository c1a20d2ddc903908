"""The next batch of a step loop with speculative decoding, computed on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxkv._src.recurrent.align import _counts
from jaxkv._src.runtime.bounds import check_bounds
from jaxkv.metadata.common import BatchMetadata, num_computed_tokens
from jaxkv.metadata.segments import prefix_sum

# --------------------------------------------------------------------------------------------------
# The next step


def advance(
    batch: BatchMetadata, num_accepted: Any, *, num_drafts: Any, next_query_lens: Any
) -> BatchMetadata:
    """The next step's batch of the same requests, before the host knows what was accepted.

    A row goes on behind the tokens that are valid now: `seq_len - num_drafts + num_accepted - 1`.
    Positions and slots follow from the batch: `metadata.token_positions`, `metadata.slot_mapping`.
    More query tokens, or longer contexts, than the batch has room for are a `BoundError`.

    Args:
      batch: the step that ran.
      num_accepted: int32[B], tokens that each row accepted, in [1, num_drafts + 1], as sampled:
        not the counts that `align_postprocess` returns.
      num_drafts: int32[B], speculative tokens among each row's query tokens.
      next_query_lens: int32[B], query tokens of each row's next step: 1 and its drafts, or a chunk
        of its prompt; 0 for a row that rests, which keeps its place.

    Raises:
      ValueError: counts of another shape or type, or that do not fit int32.
    """
    rows = batch.max_num_reqs
    num_accepted = _counts("num_accepted", num_accepted, rows)
    num_drafts = _counts("num_drafts", num_drafts, rows)
    next_query_lens = _counts("next_query_lens", next_query_lens, rows)
    ran = batch.query_lens > 0
    valid = num_computed_tokens(batch) + jnp.where(
        ran, batch.query_lens - num_drafts + num_accepted - 1, 0
    )
    query_lens = jnp.where(batch.row_mask, next_query_lens, 0)
    seq_lens = jnp.where(batch.row_mask, valid + query_lens, 0)
    starts = prefix_sum(query_lens)
    # Both, or XLA would drop the check from a program that uses but one.
    checked = check_bounds(
        jnp.concatenate([starts, seq_lens]),
        num_tokens=(starts[-1], batch.max_num_tokens),
        seq_len=(jnp.max(seq_lens, initial=0), batch.max_blocks * batch.block_size),
    )
    starts, seq_lens = checked[: rows + 1], checked[rows + 1 :]
    return dataclasses.replace(
        batch, query_start_loc=starts, seq_lens=seq_lens, num_tokens=starts[-1]
    )
