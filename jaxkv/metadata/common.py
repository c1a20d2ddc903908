"""The batch description and helpers shared by the metadata builders of all attention backends.

All functions are pure functions of small device arrays. Shapes are static upper bounds: B rows
(requests), T tokens, W blocks per row. The actual numbers of rows and tokens are scalars on the
device, so one compiled step handles every batch within the bounds, without a host sync. Entries
from the actual number on are padding; each result documents its padding values. Semantics follow
vLLM's CommonAttentionMetadata and its helpers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.checks import as_int32_scalar, as_python_int, at_least_1, check_field, integers
from jaxkv.metadata.host_batch import NULL_BLOCK as NULL_BLOCK
from jaxkv.metadata.host_batch import (
    blocks_of,
    check_block_ids,
    check_last_blocks,
    check_requests,
    check_sizes,
    padded_table,
)
from jaxkv.metadata.segments import Array, count_before, int32_on_device, on_device, row_of

PAD_SLOT = -1  # slot of a token that is not stored in this rank's cache

_ARRAYS = (np.int32, jax.Array)  # once: a union takes longer to create than to check


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BatchMetadata:
    """One batch, the input of all builders.

    Rows from `num_reqs` on are padding: `query_start_loc` repeats its last value there, `seq_lens`
    is 0 and `block_table` is NULL_BLOCK (0). A row before `num_reqs` may have no query tokens.
    B is at least 1: nearly all functions of a batch raise a ValueError for one without rows.

    Attributes:
      query_start_loc: int32[B + 1], start of the query tokens of each row; non-decreasing from 0.
      seq_lens: int32[B], context length of each row in tokens, including this step.
      block_table: int32[B, W], block ids of each row in order.
      num_reqs: int32[], number of rows; given as an integer, NumPy int32[].
      num_tokens: int32[], number of query tokens; those from `query_start_loc[-1]` on are padding.
        Given as an integer, NumPy int32[].
      max_num_tokens: T, upper bound of query tokens.
      block_size: tokens per block.

    Example: `BatchMetadata.from_host([1, 5], [33, 5], [[4, 9, 2], [7]], max_num_reqs=4,
    max_num_tokens=16, max_blocks=8, block_size=16)`.
    """

    query_start_loc: jax.Array
    seq_lens: jax.Array
    block_table: jax.Array
    num_reqs: jax.Array
    num_tokens: jax.Array
    max_num_tokens: int = dataclasses.field(metadata={"static": True})
    block_size: int = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("max_num_tokens", "block_size"):
            if type(size := getattr(self, name)) is not int:
                self._set(name, as_python_int(size))
        for name in ("num_reqs", "num_tokens"):
            value: Any = getattr(self, name)
            # A pytree of other leaves, such as axes for jax.vmap, has no arrays.
            if not isinstance(value, _ARRAYS) and hasattr(self.seq_lens, "dtype"):
                self._set(name, as_int32_scalar(f"BatchMetadata: {name}", value))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen

    @classmethod
    def from_host(
        cls,
        query_lens: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        block_table: Sequence[Sequence[int]] | np.ndarray,
        *,
        max_num_reqs: int,
        max_num_tokens: int,
        max_blocks: int,
        block_size: int,
        cp_world_size: int = 1,
    ) -> BatchMetadata:
        """A batch from the lists of a scheduler, padded to its bounds, as NumPy arrays.

        Args:
          query_lens: query tokens of each request.
          seq_lens: context length of each request in tokens, including this step.
          block_table: block ids of each request, up to `max_blocks`. Fastest as integers [requests,
            columns], for example a scheduler's int32 table padded with NULL_BLOCK (0); the array
            is copied.
          max_num_reqs: B.
          max_num_tokens: T.
          max_blocks: W.
          block_size: tokens per block on one rank.
          cp_world_size: ranks of the context-parallel group; an entry of `block_table` refers to
            one block on each of them.

        Raises:
          TypeError: a size that is not an integer.
          ValueError: more requests, tokens or blocks than the bounds, a query longer than its
            context, a context longer than its blocks, NULL_BLOCK for the last query token of a
            request, a negative query length or block id, a block whose slots exceed int32, a size
            below 1, lists of different lengths, or lists that are not one-dimensional lists of
            integers.
        """
        max_num_reqs, max_num_tokens, max_blocks, block_size, cp_world_size = at_least_1(
            max_num_reqs=max_num_reqs,
            max_num_tokens=max_num_tokens,
            max_blocks=max_blocks,
            block_size=block_size,
            cp_world_size=cp_world_size,
        )
        query, context = integers("query_lens", query_lens), integers("seq_lens", seq_lens)
        blocks, block_ids = blocks_of(block_table)
        check_requests(query, context, blocks, max_blocks, block_size * cp_world_size)
        num_reqs, num_tokens = len(query), int(query.sum())
        check_sizes(num_reqs, max_num_reqs, num_tokens, max_num_tokens)
        check_block_ids(block_ids, block_size)
        table = padded_table(blocks, block_ids, max_num_reqs, max_blocks)
        check_last_blocks(table, query, context, block_size * cp_world_size)
        starts = np.full(max_num_reqs + 1, num_tokens, np.int32)
        starts[: num_reqs + 1] = np.concatenate([[0], np.cumsum(query)])
        lens = np.pad(context, (0, max_num_reqs - num_reqs)).astype(np.int32)
        arrays: dict[str, Any] = {  # NumPy's, which JAX accepts as its own
            "query_start_loc": starts,
            "seq_lens": lens,
            "block_table": table,
            "num_reqs": np.int32(num_reqs),
            "num_tokens": np.int32(num_tokens),
        }
        return cls(**arrays, max_num_tokens=max_num_tokens, block_size=block_size)

    @property
    def max_num_reqs(self) -> int:
        """B, upper bound of rows."""
        return self.seq_lens.shape[0]

    @property
    def max_blocks(self) -> int:
        """W, upper bound of blocks per row."""
        return self.block_table.shape[1]

    @property
    def query_lens(self) -> jax.Array:
        """int32[B], query tokens of each row."""
        return self.query_start_loc[1:] - self.query_start_loc[:-1]

    @property
    def row_mask(self) -> jax.Array:
        """bool[B], False for padding rows."""
        return jnp.arange(self.max_num_reqs, dtype=jnp.int32) < self.num_reqs


def check_batch(operation: str, batch: BatchMetadata) -> None:
    """Raises unless `batch` is a BatchMetadata with the dtypes and shapes of that class.

    A step may replace them. With jax_enable_x64 a sum is int64, which would spread to the results,
    and the step would be compiled again for the batch that it returns. Values are not read.

    Raises:
      TypeError: not a BatchMetadata.
      ValueError: a field of another dtype or shape, or a size that is not an integer >= 1.
    """
    if not isinstance(batch, BatchMetadata):
        raise TypeError(
            f"{operation}: batch must be a BatchMetadata, got {type(batch).__name__}: create it "
            "with BatchMetadata.from_host"
        )
    check_field(operation, "seq_lens", batch.seq_lens, "B")
    rows = batch.max_num_reqs
    check_field(operation, "query_start_loc", batch.query_start_loc, rows + 1)
    check_field(operation, "block_table", batch.block_table, rows, "W")
    check_field(operation, "num_reqs", batch.num_reqs)
    check_field(operation, "num_tokens", batch.num_tokens)
    for name in ("max_num_tokens", "block_size"):
        size = getattr(batch, name)
        if type(size) is not int or size < 1:
            raise ValueError(f"{operation}: batch.{name} must be an integer >= 1, got {size!r}")


# --------------------------------------------------------------------------------------------------
# Tokens: rows, positions and slots


def num_computed_tokens(batch: BatchMetadata) -> jax.Array:
    """int32[B], tokens of each row's context computed in earlier steps."""
    check_batch("num_computed_tokens", batch)
    return batch.seq_lens - batch.query_lens


def token_to_request(query_start_loc: jax.Array, max_num_tokens: int) -> jax.Array:
    """int32[T], the row of each query token; 0 for padding.

    Args:
      query_start_loc: int32[B + 1].
      max_num_tokens: T.

    Example: `token_to_request(jnp.array([0, 1, 3]), 4)` is [0, 1, 1, 0].
    """
    token = jnp.arange(max_num_tokens, dtype=jnp.int32)
    row = row_of(query_start_loc, token)
    return jnp.where(token < query_start_loc[-1], row, 0)


def token_positions(batch: BatchMetadata) -> jax.Array:
    """int32[T], the position of each query token in its context; 0 for padding."""
    check_batch("token_positions", batch)
    batch = on_device(batch)
    token = jnp.arange(batch.max_num_tokens, dtype=jnp.int32)
    row = token_to_request(batch.query_start_loc, batch.max_num_tokens)
    position = (num_computed_tokens(batch) - batch.query_start_loc[:-1])[row] + token
    return jnp.where(token < batch.query_start_loc[-1], position, 0)


def slot_mapping(
    batch: BatchMetadata,
    positions: Array,
    *,
    cp_world_size: int = 1,
    cp_rank: int | jax.Array = 0,
    cp_interleave: int = 1,
) -> jax.Array:
    """int32[T], slot of each query token in the cache: block * block_size + offset.

    Under context parallelism, groups of `cp_interleave` tokens are distributed round-robin over
    the ranks, and `block_size` is the number of tokens of a block on one rank. The slot is PAD_SLOT
    (-1) for tokens of other ranks, for padding, and for positions outside the block table, which
    would otherwise overwrite another token. Slots are int32: up to 2**31 tokens per rank, checked
    by `BatchMetadata.from_host`.

    Args:
      batch: the batch.
      positions: int32[T], see `token_positions`.
      cp_world_size: ranks of the context-parallel group.
      cp_rank: this rank, an int or int32[].
      cp_interleave: consecutive tokens on one rank.

    Raises:
      TypeError: a size that is not an integer.
      ValueError: `positions` not of shape [T] or not integers, `cp_interleave` does not divide the
        block size, a size below 1, or a rank on the host outside the group.

    Example: `slot_mapping(batch, token_positions(batch))`.
    """
    check_batch("slot_mapping", batch)
    cp_world_size, cp_rank, cp_interleave = context_parallel(
        cp_world_size, cp_rank, cp_interleave, "cp_", batch.block_size
    )
    if np.shape(positions) != (batch.max_num_tokens,):
        raise ValueError(
            f"positions must be [{batch.max_num_tokens} tokens], got {np.shape(positions)}"
        )
    batch, positions = on_device(batch), int32_on_device("positions", positions)
    virtual_size = batch.block_size * cp_world_size
    row = token_to_request(batch.query_start_loc, batch.max_num_tokens)
    column = positions // virtual_size
    within_block = positions % virtual_size
    round_size = cp_world_size * cp_interleave
    offset = within_block // round_size * cp_interleave + within_block % cp_interleave
    on_this_rank = within_block // cp_interleave % cp_world_size == cp_rank
    token = jnp.arange(batch.max_num_tokens, dtype=jnp.int32)
    in_table = (column >= 0) & (column < batch.max_blocks)
    used = on_this_rank & in_table & (token < batch.query_start_loc[-1])
    block = batch.block_table[row, jnp.clip(column, 0, batch.max_blocks - 1)]
    return jnp.where(used, block * batch.block_size + offset, PAD_SLOT)


def dcp_local_seq_lens(
    seq_lens: jax.Array, world_size: int, rank: int | jax.Array | None, interleave: int
) -> jax.Array:
    """int32[B], tokens of each context stored on one rank of a decode-context-parallel (DCP) group.

    Args:
      seq_lens: int32[B].
      world_size: ranks of the group.
      rank: an int or int32[]; None for all ranks, with a result of int32[B, world_size].
      interleave: consecutive tokens on one rank.

    Raises:
      TypeError: a size that is not an integer.
      ValueError: a size below 1, or a rank on the host outside the group.

    Example: `dcp_local_seq_lens(jnp.array([5]), 2, None, 1)` is [[3, 2]].
    """
    world_size, of_rank, interleave = context_parallel(
        world_size, 0 if rank is None else rank, interleave
    )
    if rank is None:
        of_rank, seq_lens = jnp.arange(world_size, dtype=jnp.int32)[None], seq_lens[:, None]
    base = seq_lens // interleave // world_size * interleave
    rest = seq_lens - base * world_size - of_rank * interleave
    return base + jnp.clip(rest, 0, interleave)


def context_parallel(
    world_size: int, rank: int | Array, interleave: int, prefix: str = "", block_size: int = 0
) -> tuple[int, int | jax.Array, int]:
    """The arguments as Python integers, a rank on the device as int32[].

    `prefix` is that of their names. `interleave` must divide `block_size`; 0 for no blocks.
    """
    world_size, interleave = at_least_1(
        **{f"{prefix}world_size": world_size, f"{prefix}interleave": interleave}
    )
    if block_size % interleave:
        raise ValueError(
            f"{prefix}interleave={interleave} tokens must divide block_size={block_size} tokens"
        )
    if isinstance(rank, np.ndarray) and rank.ndim == 0 and rank.dtype.kind in "iu":
        rank = rank[()]
    if not isinstance(rank, int | np.integer):
        return world_size, int32_on_device(f"{prefix}rank", rank), interleave
    if not 0 <= rank < world_size:
        raise ValueError(f"{prefix}rank must be in [0, {world_size}), got {rank}")
    return world_size, int(rank), interleave


def logits_indices(batch: BatchMetadata) -> jax.Array:
    """int32[B], index of the last query token of each row; padding rows repeat the last one.

    A row without query tokens gets the index of the preceding token, or 0. For example, query
    lengths [1, 5, 0] give [0, 5, 5].
    """
    check_batch("logits_indices", batch)
    return jnp.maximum(batch.query_start_loc[1:] - 1, 0)


def unique_first_occurrence(
    x: Array, max_value: int, *, ignored: int = 0, pad: int = -1
) -> jax.Array:
    """int32[N, L], distinct values of each row, in order of first occurrence, packed to the left.

    As vLLM's `unique_static_unsorted`. Temporary memory: N * (max_value + 1) * 4 bytes.

    Args:
      x: int32[N, L], values in [0, max_value]. Values on the device are not checked: in a row with
        values out of range, others may be lost.
      max_value: the largest possible value.
      ignored: value to leave out.
      pad: fill value for the rest of a row.

    Raises:
      ValueError: `max_value` is negative, `x` is not of integers, or a NumPy array `x` has values
        out of range.

    Example: `unique_first_occurrence(jnp.array([[3, 1, 0, 1]]), 3)` is [[3, 1, -1, -1]].
    """
    if max_value < 0:
        raise ValueError(f"max_value must be >= 0, got {max_value}")
    if isinstance(x, np.ndarray) and x.size and not 0 <= x.min() <= x.max() <= max_value:
        raise ValueError(
            f"x must be in [0, max_value={max_value}], got values from {x.min()} to {x.max()}"
        )
    rows, width = x.shape
    x = int32_on_device("x", x)  # an unsigned dtype has no -1
    # Two indices: an index of the flat array would overflow int32.
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    index = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), x.shape)
    first = jnp.full((rows, max_value + 1), width, jnp.int32).at[row, x].min(index)
    keep = (x != ignored) & (first[row, x] == index)
    # Dropped values get distinct indices past the end, as unique_indices requires.
    target = jnp.where(keep, count_before(keep), width + index)
    return jnp.full_like(x, pad).at[row, target].set(x, mode="drop", unique_indices=True)
