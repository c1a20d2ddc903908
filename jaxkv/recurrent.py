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

import ctypes
import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import _native
from jaxkv.block_copy import check_whole, kept_whole, varying_with
from jaxkv.bounds import within
from jaxkv.errors import StaleCountsError
from jaxkv.layout import check_kept, check_whole_bytes
from jaxkv.metadata.common import BatchMetadata, num_computed_tokens
from jaxkv.metadata.segments import cdiv, prefix_sum

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
    check_whole(leaves)
    rows = batch.max_num_reqs
    num_accepted = _counts("num_accepted", num_accepted, rows)
    known = _counts(known_name, known, rows)
    if rows == 0:
        return states, num_accepted
    operands = [batch.query_start_loc, batch.seq_lens, batch.num_reqs, batch.block_table, known]
    num_accepted = varying_with(num_accepted, operands)
    leaves = kept_whole([varying_with(leaf, (*operands, num_accepted)) for leaf in leaves])
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
    return jax.tree.unflatten(treedef, kept_whole(moved)), counts


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
    limit = _native.extension().MAX_STATES
    if not 1 <= len(leaves) <= limit:
        raise ValueError(f"states has {len(leaves)} arrays, must have 1 to {limit}")
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if not isinstance(kind, StateKind):
            raise ValueError(f"kinds: leaf {i} is {kind!r}, not a StateKind")
        check_whole_bytes(leaf.dtype, f"states: dtype of leaf {i}")
        check_kept(leaf, f"states: leaf {i}")
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
    checked = within(
        jnp.concatenate([starts, seq_lens]),
        num_tokens=(starts[-1], batch.max_num_tokens),
        seq_len=(jnp.max(seq_lens, initial=0), batch.max_blocks * batch.block_size),
    )
    starts, seq_lens = checked[: rows + 1], checked[rows + 1 :]
    return dataclasses.replace(
        batch, query_start_loc=starts, seq_lens=seq_lens, num_tokens=starts[-1]
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeferredCounts:
    """Accepted counts on their way to pinned host memory, with what they belong to.

    A step starts the copy and returns it with its other results; the host reads it while the next
    step runs. The step's number and the rows' requests travel in the same array as the counts, so
    counts of another step, or of rows that changed places, cannot be taken for those wanted.

    Attributes:
      packed: int32[1 + 2B] in pinned host memory: the step, the requests, the counts.
    """

    packed: Any

    @classmethod
    def start(cls, num_accepted: Any, *, step: Any, request_ids: Any) -> DeferredCounts:
        """Traces the copy, within the jitted step.

        Args:
          num_accepted: int32[B].
          step: int32[], the step's number.
          request_ids: int32[B], the caller's number of each row's request.

        Raises:
          ValueError: operands of another shape or type, or that do not fit int32.
        """
        rows = jnp.shape(num_accepted)[0]
        parts = [
            _counts("step", jnp.reshape(_fitting("step", step), 1), 1),
            _counts("request_ids", request_ids, rows),
            _counts("num_accepted", num_accepted, rows),
        ]
        return cls(jax.device_put(jnp.concatenate(parts), jax.memory.Space.Host))

    def is_ready(self) -> bool:
        """Whether `read` would return without a wait.

        Raises:
          RuntimeError: the counts were donated or deleted.
        """
        if self.packed.is_deleted():  # JAX would read freed memory
            raise RuntimeError("these counts were donated or deleted")
        return self.packed.is_ready()

    def read(self, *, step: int, request_ids: Any) -> np.ndarray:
        """int32[B], the counts; waits only if the step that made them still runs.

        Args:
          step: the number of the step whose counts are wanted.
          request_ids: int[n], the requests whose counts are wanted, for the first n rows.

        Raises:
          RuntimeError: the counts were donated or deleted.
          StaleCountsError: the counts are of another step, or of other requests.
          ValueError: the counts were moved out of host memory.
        """
        if not self.is_ready():
            self.packed.block_until_ready()
        words = _host_words(self.packed)
        ids, counts = np.split(words[1:], 2)
        wanted = np.asarray(request_ids)
        if words[0] != step:
            raise StaleCountsError(
                f"counts of step {step} were wanted, these are of step {words[0]}"
            )
        if len(wanted) > len(ids):
            raise StaleCountsError(f"{len(wanted)} rows were wanted, step {step} had {len(ids)}")
        for row in np.flatnonzero(wanted != ids[: len(wanted)]):
            raise StaleCountsError(
                f"row {row} of step {step} is of request {ids[row]}, not of {wanted[row]}"
            )
        return counts[: len(wanted)]


def _host_words(ready: jax.Array) -> np.ndarray:
    """A copy of an int32[n] in host memory, which NumPy's own way would fetch through a stream."""
    shard = ready.addressable_data(0)
    platforms, kind = {device.platform for device in shard.devices()}, shard.sharding.memory_kind
    if kind == "device" and platforms != {"cpu"}:
        raise ValueError(
            f"these counts lie in memory of kind {kind!r}, which the host cannot read: leave them "
            "in pinned host memory, where DeferredCounts.start put them"
        )
    words = (ctypes.c_int32 * shard.size).from_address(shard.unsafe_buffer_pointer())
    return np.array(words, np.int32)
