"""Recurrent states of hybrid models under speculative decoding, without a wait for the host.

A state array holds one state a block, `[num_blocks, ...]`, and a request finds its states by a
block table, as it does its KV pages. A step with drafts leaves the states after each of them: in
further rows of a convolution's state, in further blocks for a temporal one. Which of them is right
follows from how many drafts were accepted, a number that the device has first.

Semantics are those of vLLM's mamba cache mode "align": states at block boundaries are kept, for
prefixes to be found again. `align_postprocess` saves them after a step and `align_preprocess` moves
the running state before one, both by one kernel that takes the counts from the device.

The host reads the counts a step later, by `DeferredCounts`; `advance` makes the next step's batch
without it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.runtime import native
from jaxkv._src.runtime.dtypes import check_byte_dtype, check_canonical_dtype
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.runtime.sharding import check_unsharded, match_varying_axes
from jaxkv.metadata.common import BatchMetadata
from jaxkv.metadata.segments import cdiv

_OPERANDS = 6  # int32 operands of the FFI call, before the states


class StateKind(enum.Enum):
    """What a state array holds in each block.

    Attributes:
      CONV_SD: a convolution's window of tokens, `[num_blocks, width, dim...]`.
      CONV_DS: the same, tokens last: `[num_blocks, dim..., width]`.
      TEMPORAL: a state of one token, `[num_blocks, ...]`.
    """

    CONV_SD = enum.auto()
    CONV_DS = enum.auto()
    TEMPORAL = enum.auto()


# --------------------------------------------------------------------------------------------------
# Copies at block boundaries


def align_postprocess(
    states: Any, batch: BatchMetadata, num_accepted: Any, *, kinds: Any, num_drafts: Any
) -> tuple[Any, Any]:
    """Saves the states of rows that reached a block boundary in the step that just ran.

    Of a row that now has `valid = seq_len - num_drafts + num_accepted - 1` tokens, the state after
    the last whole block goes into that block's column of the table, if the step computed it. If the
    step wrote its state there already, the row's accepted count becomes 1: what later calls take as
    the running state was moved to the front.

    One launch for all arrays. Rows past `batch.num_reqs`, rows without query tokens and rows that
    name NULL_BLOCK are left as they are. So are rows with a block out of range, which are counted
    for `jaxkv.check_errors()`. No block that is written may be one of another row.

    Args:
      states: pytree of arrays `[num_blocks, ...]` of whole-byte dtypes, written in place where the
        jit donates them.
      batch: the step that ran, with the block table and the block size of these states.
      num_accepted: int32[B], tokens that each row accepted, in [1, num_drafts + 1].
      kinds: pytree of `StateKind`, like `states` or a prefix of it.
      num_drafts: int32[B], speculative tokens among each row's query tokens.

    Returns:
      The states, and int32[B] accepted counts for the next step.

    Raises:
      ValueError: arrays, kinds or counts that do not go together, or arrays that are known to be
        split over a mesh.
    """
    return _align(states, batch, num_accepted, kinds, num_drafts, "num_drafts", before=False)


def align_preprocess(
    states: Any, batch: BatchMetadata, num_accepted: Any, *, kinds: Any, state_idx: Any
) -> tuple[Any, Any, Any]:
    """Moves running states to the blocks in which the coming step looks for them.

    A row whose step ends in another block than its running state is in gets that state copied
    there, at the token that the last step accepted; its accepted count becomes 1. Which rows are
    left as they are says `align_postprocess`.

    Args:
      states: as for `align_postprocess`.
      batch: the step to come.
      num_accepted: int32[B], tokens that each row accepted in its last step, 1 if that is new.
      kinds: as for `align_postprocess`.
      state_idx: int32[B], the column of each row's running state as the last call returned it; -1
        for a request that is new, was preempted or resumed, whose last computed token tells it.

    Returns:
      The states, int32[B] accepted counts, and int32[B] columns for the next call.

    Raises:
      ValueError: arrays, kinds or counts that do not go together, or arrays that are known to be
        split over a mesh.
    """
    states, counts = _align(states, batch, num_accepted, kinds, state_idx, "state_idx", before=True)
    current = cdiv(batch.seq_lens, batch.block_size) - 1
    scheduled = batch.row_mask & (batch.query_lens > 0)
    return states, counts, jnp.where(scheduled, current, state_idx)


def _align(
    states: Any,
    batch: BatchMetadata,
    num_accepted: Any,
    kinds: Any,
    known: Any,
    known_name: str,
    *,
    before: bool,
) -> tuple[Any, Any]:
    """Traces the call under both copies; `known` is what else it is told of each row."""
    leaves, treedef = jax.tree.flatten(states)
    leaf_kinds = jax.tree.leaves(jax.tree.broadcast(kinds, states))
    num_blocks = _check_states(leaves, leaf_kinds)
    check_unsharded(leaves)
    rows = batch.max_num_reqs
    num_accepted = _counts("num_accepted", num_accepted, rows)
    known = _counts(known_name, known, rows)
    if rows == 0:
        return states, num_accepted
    operands = [batch.query_start_loc, batch.seq_lens, batch.num_reqs, batch.block_table, known]
    num_accepted = match_varying_axes(num_accepted, operands)
    leaves = fusion_barrier(
        [match_varying_axes(leaf, (*operands, num_accepted)) for leaf in leaves]
    )
    types = [jax.typeof(leaf) for leaf in leaves]
    call = jax.ffi.ffi_call(
        "jaxkv_align_states",
        [jax.typeof(num_accepted), *types],
        input_output_aliases={_OPERANDS + i: 1 + i for i in range(len(leaves))},
    )
    geometry = [_geometry(kind, leaf) for kind, leaf in zip(leaf_kinds, leaves, strict=True)]
    counts, *moved = call(
        *(jnp.asarray(operand) for operand in operands),
        num_accepted,
        *leaves,
        before=before,
        block_size=np.int64(batch.block_size),
        num_blocks=np.int64(num_blocks),
        geometry=np.array(geometry, np.int64).ravel(),
    )
    return jax.tree.unflatten(treedef, fusion_barrier(moved)), counts


def _geometry(kind: StateKind, state: Any) -> list[int]:
    """[temporal, outer, width, inner bytes] of a block; see cuda/recurrent/align_states.h."""
    shape, itemsize = state.shape[1:], np.dtype(state.dtype).itemsize
    if kind is StateKind.TEMPORAL:
        return [1, 1, 1, math.prod(shape) * itemsize]
    if kind is StateKind.CONV_SD:
        return [0, 1, shape[0], math.prod(shape[1:]) * itemsize]
    return [0, math.prod(shape[:-1]), shape[-1], itemsize]


def _check_states(leaves: Sequence[Any], kinds: Sequence[Any]) -> int:
    """Blocks of every array.

    Raises:
      ValueError: arrays that one call cannot serve.
    """
    limit = native.extension().MAX_STATES
    if not 1 <= len(leaves) <= limit:
        raise ValueError(f"states has {len(leaves)} arrays, must have 1 to {limit}")
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if not isinstance(kind, StateKind):
            raise ValueError(f"kinds: leaf {i} is {kind!r}, not a StateKind")
        check_byte_dtype(leaf.dtype, f"states: dtype of leaf {i}")
        check_canonical_dtype(leaf, f"states: leaf {i}")
        axes = 1 if kind is StateKind.TEMPORAL else 2
        if leaf.ndim < axes or leaf.size == 0:
            raise ValueError(
                f"states: leaf {i} has shape {leaf.shape}, but {kind.name} needs at least {axes} "
                "axes, none of them empty"
            )
        if leaf.shape[0] != leaves[0].shape[0]:
            raise ValueError(
                f"states: leaf {i} has {leaf.shape[0]} blocks, leaf 0 {leaves[0].shape[0]} blocks"
            )
    return leaves[0].shape[0]


def _counts(name: str, values: Any, rows: int) -> Any:
    values = jnp.asarray(_fitting(name, values))
    if values.shape != (rows,) or values.dtype != jnp.int32:
        raise ValueError(f"{name} must be int32[{rows}], got {values.dtype}{[*values.shape]}")
    return values


def _fitting(name: str, values: Any) -> Any:
    """`values`; what the host made must fit int32, as JAX would cut NumPy's int64 silently."""
    if any(isinstance(value, jax.Array) for value in jax.tree.leaves(values)):
        return values
    array = np.asarray(values)
    if array.size and array.dtype.kind in "iu":
        low, high = array.min(), array.max()
        if low < np.iinfo(np.int32).min or high > np.iinfo(np.int32).max:
            raise ValueError(f"{name} must fit int32, got {low} .. {high}")
    return values


def can_skip_align_postprocess(
    num_computed: Any, num_scheduled: Any, num_drafts: Any, block_size: int
) -> bool:
    """Whether `align_postprocess` changes nothing, whatever the step accepts; on the host.

    It mirrors plan_after (cuda/recurrent/align_states.h): change both or none. The answer is
    exact: False means
    that some counts in [1, num_drafts + 1] would copy a state or change a count. (vLLM PR 42574,
    from which it is, also says False for a row without drafts that ends on a boundary. Its state is
    where it belongs, and its count is 1 already.)

    Args:
      num_computed: int[n], tokens of each request before the step.
      num_scheduled: int[n], tokens of the step, drafts among them; 0 for a request that rests.
      num_drafts: int[n], speculative tokens among them.
      block_size: tokens a block.
    """
    computed, scheduled, drafts = (
        np.asarray(values, np.int64) for values in (num_computed, num_scheduled, num_drafts)
    )
    certain = computed + scheduled - drafts
    last_boundary = (certain + drafts) // block_size * block_size
    return not bool(((scheduled > 0) & (drafts > 0) & (last_boundary >= certain)).any())
