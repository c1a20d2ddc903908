"""Metadata for gated-delta (GDN) and linear attention layers.

Follows GDNAttentionMetadata and LinearAttentionMetadata of vLLM 0.33. In a step with draft
tokens, rows that verify drafts (spec) and the others (non-spec) go to different kernels; all others
are then prefills, because the kernel of prefills also updates a state by a single token. Without
draft tokens all rows are non-spec, decodes first.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata import mamba
from jaxkv.metadata.checks import (
    at_least_1,
    check_accepted,
    check_drafts,
    check_has_rows,
    check_rows,
)
from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata, check_batch, num_computed_tokens
from jaxkv.metadata.segments import (
    Array,
    cdiv,
    int32_on_device,
    on_device,
    prefix_sum,
    row_of,
    rows_from,
    starts_from,
)
from jaxkv.metadata.splits import split_decodes_and_prefills

CHUNK_SIZE = 64  # of flash-linear-attention's kernels, in tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GDNMetadata:
    """See `build`. Rows and tokens of a kind are packed in batch order.

    Attributes:
      num_prefills: int32[]. In a step with draft tokens the non-spec rows that have query tokens;
        in one without, as in `Split`: all rows from the first prefill on, also those without query
        tokens.
      num_prefill_tokens: int32[]; in a step without draft tokens with padding, as in `Split`.
      num_decodes: int32[], 0 in a step with draft tokens.
      num_decode_tokens: int32[], 0 in a step with draft tokens; in one without as in `Split`.
      num_spec_decodes: int32[], rows that verify draft tokens.
      num_spec_decode_tokens: int32[].
      spec_sequence_masks: bool[B], the rows that verify draft tokens, in batch order.
      spec_query_start_loc: int32[B + 1], relative to the tokens of spec rows; padded with the last
        value.
      spec_state_indices_tensor: int32[B, 1 + num_spec_tokens], padded with NULL_BLOCK (0).
      spec_token_indx: int32[T], tokens of the spec rows in the batch; padded with T.
      num_accepted_tokens: int32[B], of the spec rows; padded with 1.
      non_spec_query_start_loc: int32[B + 1], relative to the tokens of non-spec rows; padded with
        the last value.
      non_spec_state_indices_tensor: int32[B], padded with NULL_BLOCK.
      non_spec_token_indx: int32[T], tokens of the non-spec rows in the batch; padded with T.
      has_initial_state: bool[B], non-spec rows with context from earlier steps.
      prefill_query_start_loc: int32[B + 1], of the prefills, relative to their first token.
      prefill_state_indices: int32[B], of the prefills; padded with NULL_BLOCK.
      prefill_has_initial_state: bool[B], of the prefills.
      chunk_indices: int32[N, 2], prefill and index within it of each chunk of CHUNK_SIZE tokens;
        padded with -1.
      chunk_offsets: int32[B + 1], first chunk of each prefill; padded with the number of chunks.
      conv1d: programs of the causal convolution over the non-spec rows.
    """

    num_prefills: jax.Array
    num_prefill_tokens: jax.Array
    num_decodes: jax.Array
    num_decode_tokens: jax.Array
    num_spec_decodes: jax.Array
    num_spec_decode_tokens: jax.Array
    spec_sequence_masks: jax.Array
    spec_query_start_loc: jax.Array
    spec_state_indices_tensor: jax.Array
    spec_token_indx: jax.Array
    num_accepted_tokens: jax.Array
    non_spec_query_start_loc: jax.Array
    non_spec_state_indices_tensor: jax.Array
    non_spec_token_indx: jax.Array
    has_initial_state: jax.Array
    prefill_query_start_loc: jax.Array
    prefill_state_indices: jax.Array
    prefill_has_initial_state: jax.Array
    chunk_indices: jax.Array
    chunk_offsets: jax.Array
    conv1d: mamba.CausalConv1d


def build(
    batch: BatchMetadata,
    *,
    num_draft_tokens: Array | None = None,
    num_accepted_tokens: Array | None = None,
    num_spec_tokens: int = 0,
    mode: mamba.Mode = "none",
    chunk_size: int = CHUNK_SIZE,
) -> GDNMetadata:
    """The metadata of a batch for gated-delta layers.

    Args:
      batch: the batch, decodes first, with the block table and block size of the state cache.
      num_draft_tokens: int32[B], draft tokens that each row verifies in this step, -1 for rows
        without; None for a step without. If all are 0 or -1, the step counts as one without.
      num_accepted_tokens: int32[B], accepted tokens of each row in the last step, in
        [1, num_spec_tokens + 1]; required with `num_draft_tokens`.
      num_spec_tokens: upper bound of `num_draft_tokens`, required with it; drafts on the device are
        not checked against it.
      mode: caching of states, see `mamba.build`; "none" or "align".
      chunk_size: tokens per chunk of a prefill.

    Raises:
      TypeError: a chunk size that is not an integer.
      ValueError: operands not integers of shape [B], draft tokens without accepted tokens or
        without an upper bound, draft or accepted tokens on the host above it, accepted tokens on
        the host below 1, mode "all" or an unknown one, a chunk size below 1, a block table too
        narrow for the states of draft tokens, or a batch without rows.

    Example: `gdn.build(batch, num_draft_tokens=drafts, num_accepted_tokens=accepted,
    num_spec_tokens=2)`.
    """
    check_batch("gdn.build", batch)
    check_has_rows(batch.max_num_reqs)
    (chunk_size,) = at_least_1(chunk_size=chunk_size)
    _check_operands(batch, num_draft_tokens, num_accepted_tokens, mode)
    accepted = jnp.ones_like(batch.seq_lens)
    if num_accepted_tokens is not None:
        accepted = int32_on_device("num_accepted_tokens", num_accepted_tokens)
    _check_accepted(batch, num_draft_tokens, num_accepted_tokens, num_spec_tokens)
    batch = on_device(batch)
    is_spec = _spec_rows(batch, num_draft_tokens, num_spec_tokens)
    # Without drafts, rows keep their places, also those without tokens.
    kept = (batch.query_lens > 0) | ~jnp.any(is_spec)
    non_spec = _pack(batch, batch.row_mask & ~is_spec & kept)
    spec = _pack(batch, is_spec)
    counts = _counts(batch, jnp.any(is_spec), non_spec)
    states = mamba.state_indices(batch, mode=mode, num_spec_tokens=num_spec_tokens)
    return GDNMetadata(
        **counts,
        num_spec_decodes=spec.num_rows,
        num_spec_decode_tokens=spec.starts[-1],
        spec_sequence_masks=is_spec,
        spec_query_start_loc=spec.starts,
        spec_state_indices_tensor=_rows(states, spec, NULL_BLOCK),
        spec_token_indx=spec.tokens,
        num_accepted_tokens=_rows(accepted, spec, 1),
        non_spec_token_indx=non_spec.tokens,
        **_non_spec(batch, non_spec, states[:, 0], counts, chunk_size),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LinearAttentionMetadata:
    """See `build_linear`.

    Attributes:
      num_prefills: int32[].
      num_prefill_tokens: int32[].
      num_decodes: int32[].
      num_decode_tokens: int32[].
      query_start_loc: int32[B + 1], as in the batch.
      seq_lens: int32[B], as in the batch.
      state_indices_tensor: int32[B], block of each row's state; NULL_BLOCK (0) for padding.
    """

    num_prefills: jax.Array
    num_prefill_tokens: jax.Array
    num_decodes: jax.Array
    num_decode_tokens: jax.Array
    query_start_loc: jax.Array
    seq_lens: jax.Array
    state_indices_tensor: jax.Array


def build_linear(batch: BatchMetadata, *, mode: mamba.Mode = "none") -> LinearAttentionMetadata:
    """The metadata of a batch for linear attention layers, such as MiniMax's lightning attention.

    Args:
      batch: the batch, decodes first, with the block table and block size of the state cache.
      mode: caching of states, see `mamba.build`; "none" or "align".

    Raises:
      ValueError: mode "all" or an unknown one, or a batch without rows.

    Example: `gdn.build_linear(batch).state_indices_tensor`.
    """
    check_batch("gdn.build_linear", batch)
    _check_operands(batch, None, None, mode)
    return LinearAttentionMetadata(
        **split_decodes_and_prefills(batch)._asdict(),
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        state_indices_tensor=mamba.state_indices(batch, mode=mode)[:, 0],
    )


class _Packed(NamedTuple):
    """Some rows of a batch: `rows` are int32[B], of which the first `num_rows` are used."""

    num_rows: jax.Array
    rows: jax.Array
    starts: jax.Array
    tokens: jax.Array


def _check_operands(
    batch: BatchMetadata, drafts: Array | None, accepted: Array | None, mode: str
) -> None:
    if mode not in ("none", "align"):
        raise ValueError(f"mode must be one of ('none', 'align'), got {mode!r}")
    for name, values in (("num_draft_tokens", drafts), ("num_accepted_tokens", accepted)):
        if values is not None:
            check_rows(name, values, batch.max_num_reqs)
    if drafts is not None and accepted is None:
        raise ValueError("num_draft_tokens requires num_accepted_tokens, int32[B]")


def _check_accepted(
    batch: BatchMetadata, drafts: Array | None, accepted: Array | None, num_spec_tokens: int
) -> None:
    if isinstance(drafts, np.ndarray) and accepted is not None and np.any(drafts > 0):
        verifies = (batch.query_lens > 0) & (drafts >= 0)
        check_accepted("gdn.build", verifies, accepted, np.full_like(drafts, num_spec_tokens))


def _spec_rows(
    batch: BatchMetadata, num_draft_tokens: Array | None, num_spec_tokens: int
) -> jax.Array:
    """bool[B], rows that verify draft tokens; none if there is no draft token at all."""
    if num_draft_tokens is None:
        return jnp.zeros(batch.max_num_reqs, bool)
    drafts = int32_on_device("num_draft_tokens", num_draft_tokens)
    check_drafts("gdn.build", num_draft_tokens, num_spec_tokens)
    verifies = (drafts >= 0) & batch.row_mask
    return verifies & jnp.any(verifies & (drafts > 0))


def _pack(batch: BatchMetadata, flags: jax.Array) -> _Packed:
    """The rows with a flag, and their tokens."""
    size = batch.max_num_reqs
    index = jnp.arange(size, dtype=jnp.int32)
    before = prefix_sum(flags)
    # Other rows get distinct targets past the end, as unique_indices requires.
    target = jnp.where(flags, before[:-1], size + index)
    rows = jnp.zeros_like(index).at[target].set(index, mode="drop", unique_indices=True)
    count = before[-1]
    starts = prefix_sum(jnp.where(index < count, batch.query_lens[rows], 0))
    token = jnp.arange(batch.max_num_tokens, dtype=jnp.int32)
    row = jnp.minimum(row_of(starts, token), size - 1)
    source = batch.query_start_loc[rows[row]] + token - starts[row]
    return _Packed(count, rows, starts, jnp.where(token < starts[-1], source, token.shape[0]))


def _counts(batch: BatchMetadata, any_spec: jax.Array, non_spec: _Packed) -> dict[str, Any]:
    """Counts of non-spec rows and tokens: with drafts, all of them are prefills."""
    split = split_decodes_and_prefills(batch)._asdict()
    prefills = {
        "num_decodes": jnp.int32(0),
        "num_prefills": non_spec.num_rows,
        "num_decode_tokens": jnp.int32(0),
        "num_prefill_tokens": non_spec.starts[-1],
    }
    return {name: jnp.where(any_spec, prefills[name], count) for name, count in split.items()}


def _non_spec(
    batch: BatchMetadata,
    packed: _Packed,
    states: jax.Array,
    counts: dict[str, Any],
    chunk_size: int,
) -> dict[str, Any]:
    """Operands of the kernels of non-spec rows, and of those of the prefills among them."""
    first, count = counts["num_decodes"], counts["num_prefills"]
    states = _rows(states, packed, NULL_BLOCK)
    has_state = _rows(num_computed_tokens(batch) > 0, packed, 0)
    starts_p = starts_from(packed.starts, first, count)
    chunk_indices, chunk_offsets = _chunks(starts_p, chunk_size, batch.max_num_tokens)
    return {
        "non_spec_query_start_loc": packed.starts,
        "non_spec_state_indices_tensor": states,
        "has_initial_state": has_state,
        "prefill_query_start_loc": starts_p,
        "prefill_state_indices": rows_from(states, first, count, fill=NULL_BLOCK),
        "prefill_has_initial_state": rows_from(has_state, first, count),
        "chunk_indices": chunk_indices,
        "chunk_offsets": chunk_offsets,
        "conv1d": mamba.causal_conv1d(packed.starts, batch.max_num_tokens),
    }


def _rows(x: jax.Array, packed: _Packed, fill: int) -> jax.Array:
    """The packed rows of `x`, padded with `fill`."""
    return rows_from(x[packed.rows], 0, packed.num_rows, fill=fill)


def _chunks(starts: jax.Array, chunk_size: int, max_num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """int32[N, 2], row and index of each chunk; int32[B + 1], first chunk of each row."""
    max_num_reqs = starts.shape[0] - 1
    offsets = prefix_sum(cdiv(starts[1:] - starts[:-1], chunk_size))
    # Each chunk has at least one token; only the last of a row has fewer than the chunk size.
    limit = min(max_num_tokens, (max_num_tokens + (chunk_size - 1) * max_num_reqs) // chunk_size)
    chunk = jnp.arange(limit, dtype=jnp.int32)
    row = jnp.minimum(row_of(offsets, chunk), max_num_reqs - 1)
    indices = jnp.stack([row, chunk - offsets[row]], axis=1)
    return jnp.where((chunk < offsets[-1])[:, None], indices, -1), offsets
