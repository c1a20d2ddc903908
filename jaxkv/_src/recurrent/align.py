"""Recurrent states of hybrid models under speculative decoding, without a host sync.

A state array has one state per block, `[num_blocks, ...]`, addressed by a block table like KV
pages. A step with draft tokens produces the state after each of them: in additional rows of a
convolution state, or in additional blocks of a temporal state. The valid one depends on the number
of accepted draft tokens, which only the device knows at that point.

Semantics follow vLLM's mamba cache mode "align": states at block boundaries are retained for prefix
caching. `align_postprocess` saves them after a step, and `align_preprocess` moves the running state
before a step. Each is a single kernel that reads the counts on the device.

The host reads the counts one step later through `DeferredCounts`; `advance` computes the next
step's batch on the device.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from jaxkv._src.runtime import native
from jaxkv._src.runtime.dtypes import check_byte_dtype, check_canonical_dtype
from jaxkv._src.runtime.errors import scope_attribute
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.runtime.int32 import check_fits_int32
from jaxkv._src.runtime.sharding import check_unsharded, match_varying_axes
from jaxkv._src.transfer.sharded_arguments import check_sharded_arguments
from jaxkv._src.transfer.transformations import reject_transformations
from jaxkv.metadata.checks import at_least_1, check_accepted, integers
from jaxkv.metadata.common import BatchMetadata, check_batch
from jaxkv.metadata.segments import Array, cdiv

Tree = TypeVar("Tree")  # a pytree of arrays

_OPERANDS = 6  # int32 operands of the FFI call, before the states


class StateKind(enum.Enum):
    """Kind and layout of a state array; SD and DS are vLLM's names of the convolution layouts.

        kinds = {"conv": StateKind.CONV_SD, "ssm": StateKind.TEMPORAL}

    Attributes:
      CONV_SD: window of a convolution, `[num_blocks, width, dim...]`.
      CONV_DS: window of a convolution, tokens last: `[num_blocks, dim..., width]`.
      TEMPORAL: state after one token, `[num_blocks, ...]`.
    """

    CONV_SD = enum.auto()
    CONV_DS = enum.auto()
    TEMPORAL = enum.auto()


# --------------------------------------------------------------------------------------------------
# Copies at block boundaries


def align_postprocess(
    states: Tree, batch: BatchMetadata, num_accepted: Array, *, kinds: Any, num_drafts: Array
) -> tuple[Tree, jax.Array]:
    """Saves the states of rows that reached a block boundary in the completed step.

    A row now has `valid = seq_len - num_drafts + num_accepted - 1` tokens. The state after its
    last full block is copied to the block in that column of the block table, if the step computed
    it. If that is the block of the running state, because the boundary is the end of the step and
    all draft tokens were accepted, the state takes the place of the running state: later calls
    read it there with the returned count, which is 1. Follows vLLM's `postprocess_mamba` in its
    mamba cache mode "align".

        states, accepted = jaxkv.recurrent.align_postprocess(
            states, batch, sampled, kinds=jaxkv.recurrent.StateKind.TEMPORAL, num_drafts=drafts
        )

    One kernel launch for all arrays. Rows from `batch.num_reqs` on, rows without query tokens and
    rows that refer to NULL_BLOCK are unchanged. Rows with a block id or column out of range are
    unchanged and counted for `jaxkv.check_errors()`. A block that is written must belong to one row
    only.

    Args:
      states: pytree of up to 256 arrays `[num_blocks, ...]` of byte-aligned dtypes, with up to 16
        different geometries (kind, shape and bytes of an element), written in place if donated to
        the jit.
      batch: batch of the completed step, with the block table and block size of these states.
      num_accepted: int32[B], accepted tokens of each row, in [1, num_drafts + 1].
      kinds: pytree of `StateKind`, with the structure of `states` or a prefix of it.
      num_drafts: int32[B], draft tokens among each row's query tokens.

    Returns:
      The states, and int32[B] accepted counts for the next step.

    Raises:
      TypeError: a batch of another type.
      ValueError: inconsistent arrays, kinds or counts, on the host accepted tokens outside
        [1, num_drafts + 1] or not fewer drafts than query tokens, or arrays that are sharded
        outside `shard_map`; in a jit with automatic mesh axes, arguments of the program.
      NotImplementedError: inside vmap or a derivative.
    """
    return _align(states, batch, num_accepted, kinds, num_drafts, "num_drafts", before=False)


def align_preprocess(
    states: Tree, batch: BatchMetadata, num_accepted: Array, *, kinds: Any, state_idx: Array
) -> tuple[Tree, jax.Array, jax.Array]:
    """Copies running states to the blocks in which the next step reads them.

    If the next step of a row ends in a different block than that of its running state, the state
    after the last accepted token is copied to that block, and the accepted count becomes 1. Follows
    vLLM's `preprocess_mamba` in its mamba cache mode "align".

        states, accepted, state_idx = jaxkv.recurrent.align_preprocess(
            states, batch, accepted, kinds=jaxkv.recurrent.StateKind.TEMPORAL, state_idx=state_idx
        )

    Rows from `batch.num_reqs` on, rows without query tokens and rows that refer to NULL_BLOCK keep
    their states and counts. So do rows with a block id or column out of range, which are counted
    for `jaxkv.check_errors()`.

    Args:
      states: as for `align_postprocess`.
      batch: batch of the next step.
      num_accepted: int32[B], accepted tokens of each row in its last step, at least 1; 1 for a new
        request.
      kinds: as for `align_postprocess`.
      state_idx: int32[B], block table column of each row's running state, as returned by the
        previous call; -1 for a new, preempted or resumed request, to derive it from the last
        computed token.

    Returns:
      The states, int32[B] accepted counts, and int32[B] columns for the next call.

    Raises:
      TypeError: a batch of another type.
      ValueError: inconsistent arrays, kinds or counts, on the host accepted tokens below 1 in a row
        with query tokens, or arrays that are sharded outside `shard_map`; in a jit with automatic
        mesh axes, arguments of the program.
      NotImplementedError: inside vmap or a derivative.
    """
    states, counts = _align(states, batch, num_accepted, kinds, state_idx, "state_idx", before=True)
    current = cdiv(batch.seq_lens, batch.block_size) - 1
    scheduled = batch.row_mask & (batch.query_lens > 0)
    return states, counts, jnp.where(scheduled, current, jnp.asarray(state_idx, jnp.int32))


def _align(
    states: Tree,
    batch: BatchMetadata,
    num_accepted: Array,
    kinds: Any,
    known: Array,
    known_name: str,
    *,
    before: bool,
) -> tuple[Tree, jax.Array]:
    """Traces the FFI call of both operations; `known` is `num_drafts` or `state_idx`."""
    operation = "recurrent.align_preprocess" if before else "recurrent.align_postprocess"
    check_batch(operation, batch)
    states, batch, num_accepted, known = reject_transformations(
        operation, (states, batch, num_accepted, known)
    )
    leaves, treedef = jax.tree.flatten(states)
    try:
        leaf_kinds = jax.tree.leaves(jax.tree.broadcast(kinds, states))
    except ValueError:
        raise ValueError(
            "kinds must have the structure of states, or a prefix of it: "
            f"got {jax.tree.structure(kinds)} for {jax.tree.structure(states)}"
        ) from None
    num_blocks = _check_states(leaves, leaf_kinds)
    check_unsharded(jax.tree.leaves((leaves, batch, num_accepted, known)))
    rows = batch.max_num_reqs
    given = _on_host(num_accepted), _on_host(known)
    num_accepted = _counts(operation, "num_accepted", num_accepted, rows, nonnegative=True)
    known = _counts(operation, known_name, known, rows, nonnegative=not before)
    if before:
        _check_last_step(operation, batch, given[0])
    else:
        _check_step(operation, batch, *given)
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
        **scope_attribute(),
    )
    counts, *moved = check_sharded_arguments(operation, [counts, *moved])
    return jax.tree.unflatten(treedef, fusion_barrier(moved)), counts


def _geometry(kind: StateKind, state: jax.Array) -> list[int]:
    """[temporal, outer, width, inner bytes] of a block; see cuda/recurrent/align_states.h."""
    shape, itemsize = state.shape[1:], np.dtype(state.dtype).itemsize
    if kind is StateKind.TEMPORAL:
        return [1, 1, 1, math.prod(shape) * itemsize]
    if kind is StateKind.CONV_SD:
        return [0, 1, shape[0], math.prod(shape[1:]) * itemsize]
    return [0, math.prod(shape[:-1]), shape[-1], itemsize]


def _check_states(leaves: Sequence[jax.Array], kinds: Sequence[object]) -> int:
    """Number of blocks of the arrays.

    Raises:
      ValueError: arrays that a call does not support.
    """
    limit = native.extension().MAX_STATES
    if not 1 <= len(leaves) <= limit:
        raise ValueError(f"states must have 1 to {limit} arrays, got {len(leaves)}")
    for i, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if not isinstance(kind, StateKind):
            raise ValueError(f"kinds: leaf {i} must be a StateKind, got {kind!r}")
        check_byte_dtype(leaf.dtype, f"states: dtype of leaf {i}")
        check_canonical_dtype(leaf, f"states: leaf {i}")
        axes = 1 if kind is StateKind.TEMPORAL else 2
        if leaf.ndim < axes or leaf.size == 0:
            raise ValueError(
                f"states: leaf {i} of kind {kind.name} must have at least {axes} axes and no empty "
                f"ones, got shape {leaf.shape}"
            )
        if leaf.shape[0] != leaves[0].shape[0]:
            raise ValueError(
                "states: all leaves must have the same number of blocks, got "
                f"{leaf.shape[0]} in leaf {i} and {leaves[0].shape[0]} in leaf 0"
            )
    limit = native.extension().MAX_STATE_GEOMETRIES
    geometries = {
        tuple(_geometry(kind, leaf))
        for kind, leaf in zip(kinds, leaves, strict=True)
        if isinstance(kind, StateKind)  # all, as checked above
    }
    if len(geometries) > limit:
        raise ValueError(
            f"states: {len(geometries)} different geometries of a block (kind, shape, bytes of an "
            f"element), the limit of a call is {limit}: call it for some of the arrays at a time"
        )
    return leaves[0].shape[0]


def _check_step(operation: str, batch: BatchMetadata, accepted: Array, drafts: Array) -> None:
    """Raises a ValueError for counts on the host that contradict the batch, if that is, too."""
    query_lens: Any = batch.query_lens  # of a batch from the host, a NumPy array
    if not isinstance(query_lens, np.ndarray):
        return
    if isinstance(drafts, np.ndarray):
        for i in np.flatnonzero((query_lens > 0) & (drafts >= query_lens)):
            raise ValueError(
                f"{operation}: row {i} must have fewer drafts than its {query_lens[i]} query "
                f"tokens, got num_drafts {drafts[i]}"
            )
    check_accepted(operation, query_lens > 0, accepted, drafts)


def _check_last_step(operation: str, batch: BatchMetadata, accepted: Array) -> None:
    """Raises a ValueError for counts on the host below 1 in rows with tokens, as `_check_step`."""
    query_lens: Any = batch.query_lens
    if isinstance(query_lens, np.ndarray) and isinstance(accepted, np.ndarray):
        for i in np.flatnonzero((query_lens > 0) & (accepted < 1)):
            raise ValueError(
                f"{operation}: the accepted tokens of row {i} must be at least 1, got "
                f"{accepted[i]}: pass 1 for a new request"
            )


def _counts(
    operation: str, name: str, values: ArrayLike, *shape: int, nonnegative: bool = False
) -> jax.Array:
    """`values` as int32[*shape], of any integer dtype on the host and of int32 on the device.

    On the host, values below 0 are an error if `nonnegative`, and empty lists have no dtype. On the
    device, results of Python integers alone have none: with jax_enable_x64 they are weak int64.
    """
    check_fits_int32(f"{operation}: {name}", values)
    given = _on_host(values)
    if isinstance(given, np.ndarray) and (given.dtype.kind in "iu" or given.size == 0):
        given = given.astype(np.int32)  # with jax_enable_x64, JAX would keep int64
        if nonnegative and np.any(given < 0):
            raise ValueError(
                f"{operation}: {name} must be at least 0 in each row, got {given.min()}"
            )
    values = jnp.asarray(given)
    if values.weak_type and jnp.issubdtype(values.dtype, jnp.integer):
        values = values.astype(jnp.int32)
    if values.shape != shape or values.dtype != jnp.int32:
        wanted = ", ".join(map(str, shape))
        raise ValueError(
            f"{operation}: {name} must be int32[{wanted}], got {values.dtype}{[*values.shape]}"
        )
    return values


def _on_host(values: ArrayLike) -> Array:
    """Lists and numbers of the host as a NumPy array; others unchanged."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values)):
        return cast(Array, values)
    return np.asarray(values)


def can_skip_align_postprocess(
    num_computed: npt.ArrayLike,
    num_scheduled: npt.ArrayLike,
    num_drafts: npt.ArrayLike,
    block_size: int,
) -> bool:
    """Whether `align_postprocess` is a no-op for all possible accepted counts; on the host.

    The result is exact: False means that some counts in [1, num_drafts + 1] would copy a state or
    change a count. (The original, vLLM PR 42574, also returns False for a row without draft tokens
    that ends on a boundary. Its state is already in the right block, and its count is 1.)

        if not jaxkv.recurrent.can_skip_align_postprocess(computed, query_lens, drafts, block_size):
            states, accepted = save(states, batch, sampled, drafts)  # calls align_postprocess

    Args:
      num_computed: int[n], computed tokens of each request before the step.
      num_scheduled: int[n], tokens of the step, including draft tokens; 0 for an idle request.
      num_drafts: int[n], draft tokens among them.
      block_size: tokens per block.

    Raises:
      TypeError: a block size that is not an integer.
      ValueError: lists of different lengths or not of integers, or a block size below 1.
    """
    # Mirrors plan_postprocess (cuda/recurrent/align_states.h): change the two together.
    computed = integers("can_skip_align_postprocess: num_computed", num_computed)
    scheduled = integers("can_skip_align_postprocess: num_scheduled", num_scheduled)
    drafts = integers("can_skip_align_postprocess: num_drafts", num_drafts)
    (block_size,) = at_least_1(block_size=block_size)
    if not len(computed) == len(scheduled) == len(drafts):
        raise ValueError(
            "can_skip_align_postprocess: num_computed, num_scheduled and num_drafts must have one "
            f"entry for each request, got {len(computed)}, {len(scheduled)} and {len(drafts)}"
        )
    certain = computed + scheduled - drafts
    last_boundary = (certain + drafts) // block_size * block_size
    return not bool(((scheduled > 0) & (drafts > 0) & (last_boundary >= certain)).any())
