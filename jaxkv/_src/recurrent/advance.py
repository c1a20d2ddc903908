"""The next batch of a step loop with speculative decoding, computed on the device."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jaxkv._src.recurrent.align import _check_step, _counts, _on_host
from jaxkv._src.runtime.bounds import check_bounds
from jaxkv.metadata.checks import at_least_1
from jaxkv.metadata.common import BatchMetadata, check_batch, num_computed_tokens
from jaxkv.metadata.segments import Array, prefix_sum

# --------------------------------------------------------------------------------------------------
# The next step


def advance(
    batch: BatchMetadata,
    num_accepted: Array,
    *,
    num_drafts: Array,
    next_query_lens: Array,
    cp_world_size: int = 1,
) -> BatchMetadata:
    """Batch of the next step of the same requests, before the host knows the accepted counts.

    Each row continues after its valid tokens: `seq_len - num_drafts + num_accepted - 1` of them, or
    its whole context if it had no query tokens. (vLLM's model runner V2 has this as `post_update`.)
    `metadata.token_positions` and `metadata.slot_mapping` give its positions and slots.

        batch = jaxkv.recurrent.advance(
            batch, sampled, num_drafts=drafts, next_query_lens=query_lens
        )

    Args:
      batch: batch of the completed step.
      num_accepted: int32[B], accepted tokens of each row, in [1, num_drafts + 1], as sampled; not
        the counts returned by `align_postprocess`.
      num_drafts: int32[B], draft tokens among each row's query tokens.
      next_query_lens: int32[B], query tokens of each row in the next step: 1 plus its draft
        tokens, or a chunk of its prompt; 0 for an idle row, which keeps its place in the batch.
      cp_world_size: ranks of the context-parallel group, as for `BatchMetadata.from_host`: a
        context has up to `max_blocks * block_size` tokens on each of them.

    Raises:
      TypeError, ValueError: counts that are not int32[B], on the host negative counts, accepted
        tokens outside [1, num_drafts + 1] or not fewer drafts than query tokens, or an invalid
        `cp_world_size`.
      BoundError: by `jaxkv.check_errors()`, for query tokens or a context above the batch's bounds,
        or of a negative length.
    """
    operation = "recurrent.advance"
    check_batch(operation, batch)
    (cp_world_size,) = at_least_1(cp_world_size=cp_world_size)
    rows = batch.max_num_reqs
    given = _on_host(num_accepted), _on_host(num_drafts)
    num_accepted = _counts(operation, "num_accepted", num_accepted, rows, nonnegative=True)
    num_drafts = _counts(operation, "num_drafts", num_drafts, rows, nonnegative=True)
    next_query_lens = _counts(operation, "next_query_lens", next_query_lens, rows, nonnegative=True)
    _check_step(operation, batch, *given)
    ran = batch.query_lens > 0
    valid = num_computed_tokens(batch) + jnp.where(
        ran, batch.query_lens - num_drafts + num_accepted - 1, 0
    )
    query_lens = jnp.where(batch.row_mask, next_query_lens, 0)
    seq_lens = jnp.where(batch.row_mask, valid + query_lens, 0)
    starts = prefix_sum(jnp.maximum(query_lens, 0))
    # Of lengths within the bound, the first sum that exceeds int32 is negative.
    most = jnp.iinfo(jnp.int32).max
    num_tokens = jnp.where(jnp.any(starts < 0), most, jnp.max(query_lens, initial=starts[-1]))
    negative = (query_lens < 0) | (valid < 0) | (seq_lens < 0)
    # Check both together: otherwise a program that uses only one of them loses the check to DCE.
    checked = check_bounds(
        operation,
        jnp.concatenate([starts, seq_lens]),
        **{
            "max_num_tokens": (num_tokens, batch.max_num_tokens),
            "max_blocks * block_size * cp_world_size": (
                jnp.max(seq_lens, initial=0),
                batch.max_blocks * batch.block_size * cp_world_size,
            ),
            "rows of negative length": (jnp.sum(negative), 0),
        },
    )
    starts, seq_lens = checked[: rows + 1], checked[rows + 1 :]
    return dataclasses.replace(
        batch, query_start_loc=starts, seq_lens=seq_lens, num_tokens=starts[-1]
    )
