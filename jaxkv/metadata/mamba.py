"""Metadata for Mamba and Mamba2 layers: state indices, and the chunks of prefills.

Follows vLLM's Mamba builders: modes "none" and "align" in their current form, mode "all" in its
last form before removal. vLLM computes the chunks of prefills on the host, from an upper bound of
the context lengths; here they are computed on the device from the exact lengths. As in vLLM, a row
that is still prefilling, has a state, and has a query of one token, or of the length of a draft
verification, counts as a decode.

The batch has decodes first, then prefills (see `split_decodes_and_prefills`). The suffix _d denotes
attributes of the decodes, _p those of the prefills; both are padded to B rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.checks import (
    as_python_int,
    at_least_1,
    check_accepted,
    check_drafts,
    check_flags,
    check_rows,
)
from jaxkv.metadata.common import (
    NULL_BLOCK,
    BatchMetadata,
    check_batch,
    num_computed_tokens,
)
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
from jaxkv.metadata.splits import Split, split_decodes_and_prefills

Mode = Literal["none", "align", "all"]

CONV_BLOCK_M = 8  # tokens per program of the causal convolution


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MambaMetadata:
    """Operands of the kernels of a Mamba layer.

    Attributes:
      num_prefills: int32[].
      num_prefill_tokens: int32[].
      num_decodes: int32[].
      num_decode_tokens: int32[].
      seq_lens: int32[B], context lengths of all rows.
      has_initial_states_p: bool[B], whether a part of the context was computed in earlier steps.
      prep_initial_states: bool[], whether any prefill has an initial state.
      query_start_loc_p: int32[B + 1], relative to the first prefill token; padding rows are empty.
      num_computed_tokens_p: int32[B].
      state_indices_tensor_p: int32[B], block of each prefill's state; in mode "all" int32[B, W],
        all its blocks. NULL_BLOCK (0) for padding.
      state_indices_tensor_d: int32[B, 1 + num_spec_tokens], blocks of each decode's state and of
        the states of its draft tokens; in mode "all" int32[B, W]. NULL_BLOCK for padding.
      query_start_loc_d: int32[B + 1]; None without speculative decoding.
      num_accepted_tokens: int32[B], accepted tokens of the decodes, 1 for padding; None without
        speculative decoding.
      block_idx_last_computed_token: int32[B], mode "all" only: block table column of the last
        computed token of each row; 0 if there is none.
      block_idx_first_scheduled_token_p: int32[B], mode "all" only: column of each prefill's first
        token of this step.
      block_idx_last_scheduled_token: int32[B], mode "all" only: column of each row's last token.
      chunks: chunks of the prefills; None without `chunk_size`, except in mode "all".
      conv1d: programs of the causal convolution.
    """

    num_prefills: jax.Array
    num_prefill_tokens: jax.Array
    num_decodes: jax.Array
    num_decode_tokens: jax.Array
    seq_lens: jax.Array
    has_initial_states_p: jax.Array
    prep_initial_states: jax.Array
    query_start_loc_p: jax.Array
    num_computed_tokens_p: jax.Array
    state_indices_tensor_p: jax.Array
    state_indices_tensor_d: jax.Array
    query_start_loc_d: jax.Array | None
    num_accepted_tokens: jax.Array | None
    block_idx_last_computed_token: jax.Array | None
    block_idx_first_scheduled_token_p: jax.Array | None
    block_idx_last_scheduled_token: jax.Array | None
    chunks: Chunks | None
    conv1d: CausalConv1d


class Chunks(NamedTuple):
    """Prefills split at positions that are multiples of the chunk size; up to N chunks.

    Attributes:
      cu_chunk_seqlen_p: int32[N + 1], first prefill token of each chunk; padded with the number of
        prefill tokens.
      seq_idx_p: int32[N], prefill of each chunk; padded with -1.
      last_chunk_indices_p: int32[B], last chunk of each prefill, or the preceding chunk if it has
        none (-1 for the first prefill); padding rows repeat the last row's.
    """

    cu_chunk_seqlen_p: jax.Array
    seq_idx_p: jax.Array
    last_chunk_indices_p: jax.Array


class CausalConv1d(NamedTuple):
    """Programs of the causal convolution, each for up to CONV_BLOCK_M tokens of one prefill.

    Attributes:
      batch_ptr: int32[N], prefill of each program; -1 for idle programs.
      token_chunk_offset_ptr: int32[N], index of the program within its prefill; -1 for idle
        programs.
    """

    batch_ptr: jax.Array
    token_chunk_offset_ptr: jax.Array


def build(
    batch: BatchMetadata,
    *,
    is_prefilling: Array,
    mode: Mode = "none",
    chunk_size: int | None = None,
    num_spec_tokens: int = 0,
    num_accepted_tokens: Array | None = None,
    num_draft_tokens: Array | None = None,
) -> MambaMetadata:
    """The metadata of a batch.

    Args:
      batch: the batch, with the block table and block size of the state cache.
      is_prefilling: bool[B], rows that are still prefilling.
      mode: caching of states. "none": the last state; "align": the state at the last block
        boundary, in the column of that block; "all": the states at all block boundaries.
      chunk_size: tokens per chunk, for Mamba2; None for Mamba, whose chunks in mode "all" are
        blocks.
      num_spec_tokens: upper bound of `num_draft_tokens`, required with it; drafts on the device are
        not checked against it.
      num_accepted_tokens: int32[B], accepted tokens of each row in the last step, in
        [1, num_spec_tokens + 1] for decodes; None before the first draft tokens, when decodes keep
        all their tokens. Requires `num_spec_tokens`.
      num_draft_tokens: int32[B], draft tokens of each row, -1 for rows without drafting; None if
        no prompt is padded with draft tokens.

    Raises:
      TypeError: a chunk size that is not an integer.
      ValueError: an unknown mode, a chunk size below 1, a negative `num_spec_tokens`, draft tokens
        without an upper bound or, on the host, above it, accepted tokens without `num_spec_tokens`
        or, of decodes and with all operands on the host, outside their range, a block table too
        narrow for the states of draft tokens, operands not of shape [B], flags that are not bool,
        or counts that are not integers.

    Example: `mamba.build(batch, is_prefilling=batch.query_lens > 1, chunk_size=256)`.
    """
    check_batch("mamba.build", batch)
    _check_mode(mode)
    num_spec_tokens = as_python_int(num_spec_tokens)
    if chunk_size is not None:
        (chunk_size,) = at_least_1(chunk_size=chunk_size)
    _check_rows(batch, is_prefilling, num_accepted_tokens, num_draft_tokens)
    if num_accepted_tokens is not None and not num_spec_tokens:
        raise ValueError(
            "mamba.build: num_accepted_tokens requires num_spec_tokens >= 1, got 0: pass the upper "
            "bound of drafts of a row"
        )
    if num_draft_tokens is not None:
        drafts = int32_on_device("num_draft_tokens", num_draft_tokens)
        check_drafts("mamba.build", num_draft_tokens, num_spec_tokens)
        num_draft_tokens = drafts
    all_states = mode == "all"
    chunk_size = chunk_size or (batch.block_size if all_states else None)
    split = _split(batch, is_prefilling, num_spec_tokens, num_accepted_tokens, num_draft_tokens)
    first, count = split.num_decodes, split.num_prefills
    states = state_indices(batch, mode=mode, num_spec_tokens=num_spec_tokens)
    of_prefills = states if all_states else states[:, 0]
    computed = num_computed_tokens(batch)
    computed_p = rows_from(computed, first, count)
    starts_p = starts_from(batch.query_start_loc, first, count)
    by_mode = _block_columns(batch, computed, computed_p) if all_states else _NO_COLUMNS
    starts_d, accepted_d = None, None
    if num_spec_tokens:
        accepted = batch.query_lens
        if num_accepted_tokens is not None:
            accepted = int32_on_device("num_accepted_tokens", num_accepted_tokens)
            _check_accepted(batch, is_prefilling, num_accepted_tokens, num_spec_tokens)
        starts_d = starts_from(batch.query_start_loc, 0, first)
        accepted_d = rows_from(accepted, 0, first, fill=1)
    return MambaMetadata(
        **split._asdict(),
        seq_lens=batch.seq_lens,
        has_initial_states_p=computed_p > 0,
        prep_initial_states=jnp.any(computed_p > 0),
        query_start_loc_p=starts_p,
        num_computed_tokens_p=computed_p,
        state_indices_tensor_p=rows_from(of_prefills, first, count, fill=NULL_BLOCK),
        state_indices_tensor_d=rows_from(states, 0, first, fill=NULL_BLOCK),
        query_start_loc_d=starts_d,
        num_accepted_tokens=accepted_d,
        **by_mode,
        chunks=_chunks(chunk_size, starts_p, computed_p, batch.max_num_tokens),
        conv1d=causal_conv1d(starts_p, batch.max_num_tokens),
    )


_NO_COLUMNS: dict[str, Any] = dict.fromkeys(
    (
        "block_idx_last_computed_token",
        "block_idx_first_scheduled_token_p",
        "block_idx_last_scheduled_token",
    )
)


def _block_columns(
    batch: BatchMetadata, computed: jax.Array, computed_p: jax.Array
) -> dict[str, jax.Array]:
    """Block table columns for mode "all"."""
    ends = computed, computed_p + 1, batch.seq_lens
    return {name: _last_block(batch, n) for name, n in zip(_NO_COLUMNS, ends, strict=True)}


def _check_mode(mode: str) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")


def _check_rows(
    batch: BatchMetadata, is_prefilling: Array, accepted: Array | None, drafts: Array | None
) -> None:
    check_flags("is_prefilling", is_prefilling, batch.max_num_reqs)
    for name, values in (("num_accepted_tokens", accepted), ("num_draft_tokens", drafts)):
        if values is not None:
            check_rows(name, values, batch.max_num_reqs)


def _check_accepted(
    batch: BatchMetadata, is_prefilling: Array, accepted: Array, num_spec_tokens: int
) -> None:
    if isinstance(accepted, np.ndarray):
        query = batch.query_lens
        decodes = (query > 0) & (query <= 1 + num_spec_tokens) & ~is_prefilling
        drafts = np.full(accepted.shape, num_spec_tokens)
        check_accepted("mamba.build", decodes, accepted, drafts)


def state_indices(
    batch: BatchMetadata, *, mode: Mode = "none", num_spec_tokens: int = 0
) -> jax.Array:
    """int32[B, 1 + num_spec_tokens], blocks of each row's state and of its draft tokens' states.

    Args:
      batch: the batch, with the block table and block size of the state cache.
      mode: "none": the first blocks of the row; "align": the blocks from that of the last token on,
        NULL_BLOCK (0) past the block table; "all": the entire block table, int32[B, W].
      num_spec_tokens: upper bound of draft tokens per row.

    Raises:
      ValueError: an unknown mode, a negative `num_spec_tokens`, or a block table too narrow for the
        states.

    Example: `state_indices(batch, mode="align", num_spec_tokens=2)`.
    """
    check_batch("mamba.state_indices", batch)
    _check_mode(mode)
    if not 0 <= num_spec_tokens < batch.max_blocks:
        raise ValueError(
            f"num_spec_tokens must be in [0, {batch.max_blocks}), got {num_spec_tokens}: each "
            f"draft token requires a block for its state, of {batch.max_blocks} blocks per row"
        )
    if mode == "all":
        return batch.block_table
    if mode == "none":
        return batch.block_table[:, : 1 + num_spec_tokens]
    first = jnp.maximum(batch.seq_lens - 1, 0) // batch.block_size
    column = first[:, None] + jnp.arange(1 + num_spec_tokens, dtype=jnp.int32)[None]
    row = jnp.arange(batch.max_num_reqs, dtype=jnp.int32)[:, None]
    block = on_device(batch.block_table)[row, jnp.minimum(column, batch.max_blocks - 1)]
    # Columns past the table must not alias the block of another state.
    return jnp.where(column < batch.max_blocks, block, NULL_BLOCK)


def _split(
    batch: BatchMetadata,
    is_prefilling: Array,
    num_spec_tokens: int,
    num_accepted_tokens: Array | None,
    num_draft_tokens: Array | None,
) -> Split:
    query = batch.query_lens
    short = query == 1
    if num_draft_tokens is not None:
        short |= (num_draft_tokens >= 0) & (query == num_draft_tokens + 1)
    has_state = batch.seq_lens > query
    return split_decodes_and_prefills(
        batch,
        1 if num_accepted_tokens is None else 1 + num_spec_tokens,
        treat_short_extends_as_decodes=False,
        is_prefilling=is_prefilling & ~(short & has_state),
    )


def _last_block(batch: BatchMetadata, tokens: jax.Array) -> jax.Array:
    """Column of the block with the last of `tokens` tokens; 0 if there are none."""
    return jnp.maximum(cdiv(tokens, batch.block_size) - 1, 0)


def _max_chunks(chunk_size: int, max_num_tokens: int, max_num_reqs: int) -> int:
    if chunk_size == 1:
        return max_num_tokens
    # A row that stopped inside a chunk has one chunk for free, even without tokens. Two tokens make
    # two chunks: one completes the unfinished chunk, one starts the next. Each further chunk takes
    # a full chunk of tokens.
    all_twice = max_num_reqs + (max_num_tokens - 2 * max_num_reqs) // chunk_size
    return max_num_reqs + min(max_num_tokens // 2, all_twice)


def _chunks(
    chunk_size: int | None, starts: jax.Array, computed: jax.Array, max_num_tokens: int
) -> Chunks | None:
    """Chunks of rows that begin at `starts`, after `computed` tokens of their contexts."""
    if chunk_size is None:
        return None
    max_num_reqs = computed.shape[0]
    first_chunk = computed // chunk_size
    ends = computed + starts[1:] - starts[:-1]
    chunk_starts = prefix_sum(cdiv(ends, chunk_size) - first_chunk)
    chunk = jnp.arange(_max_chunks(chunk_size, max_num_tokens, max_num_reqs) + 1, dtype=jnp.int32)
    row = jnp.minimum(row_of(chunk_starts, chunk), max_num_reqs - 1)
    used = chunk < chunk_starts[-1]
    position = (first_chunk[row] + chunk - chunk_starts[row]) * chunk_size
    begin = starts[row] + jnp.maximum(position - computed[row], 0)
    return Chunks(
        cu_chunk_seqlen_p=jnp.where(used, begin, starts[-1]),
        seq_idx_p=jnp.where(used, row, -1)[:-1],
        last_chunk_indices_p=chunk_starts[1:] - 1,
    )


def causal_conv1d(starts: jax.Array, max_num_tokens: int) -> CausalConv1d:
    """Programs for rows that begin at `starts`, int32[B + 1], of up to `max_num_tokens` in total.

    Example: `causal_conv1d(batch.query_start_loc, batch.max_num_tokens)`.
    """
    max_num_reqs = starts.shape[0] - 1
    program_starts = prefix_sum(cdiv(starts[1:] - starts[:-1], CONV_BLOCK_M))
    # Each program has at least one token; only the last of a row has fewer than CONV_BLOCK_M.
    programs = (max_num_tokens + (CONV_BLOCK_M - 1) * max_num_reqs) // CONV_BLOCK_M
    program = jnp.arange(min(max_num_tokens, programs), dtype=jnp.int32)
    row = jnp.minimum(row_of(program_starts, program), max_num_reqs - 1)
    used = program < program_starts[-1]
    return CausalConv1d(
        batch_ptr=jnp.where(used, row, -1),
        token_chunk_offset_ptr=jnp.where(used, program - program_starts[row], -1),
    )
