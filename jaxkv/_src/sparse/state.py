"""The hot buffer of a sparse-attention model, and which positions are in it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv._src.cache.array_spec import ArrayCacheSpec
from jaxkv._src.cache.spec import KVCacheSpec, check_num_elements, check_size
from jaxkv._src.runtime import native
from jaxkv._src.runtime.tracing import check_not_closed_over, check_not_deleted

_WORD_BYTES = 16  # rows consist of whole words of the copy kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SparseState:
    """Rows of KV tokens in HBM, the most recently used of each request: a pytree of arrays.

        state = jaxkv.sparse.SparseState.create(spec, batch=32, slots=4096, max_length=32768)

    Donate it to the jit of the step, which returns the new one. Shard all arrays over their second
    axis, the batch, to use it inside `shard_map`. SGLang (HiSparse) and vLLM (PR 53781) have such a
    buffer in front of a host tier.

    Attributes:
      hot: `dtype[num_layers, batch, slots, width]`, the rows.
      positions: int32[num_layers, batch, slots], position in its request of the token in each slot,
        -1 if the slot is free.
      used: int32[num_layers, batch, slots], value of `clock` during the call that last used each
        slot.
      slot_of: int16[num_layers, batch, max_length], slot of each position; entries of positions
        that are not in the buffer are meaningless.
      clock: int32[num_layers, batch], calls of `fetch` and `append` so far.
    """

    hot: jax.Array
    positions: jax.Array
    used: jax.Array
    slot_of: jax.Array
    clock: jax.Array

    @classmethod
    def create(
        cls, spec: KVCacheSpec | ArrayCacheSpec, *, batch: int, slots: int, max_length: int
    ) -> SparseState:
        """An empty buffer. To create it sharded, call it in a jit with `out_shardings`.

        Args:
          spec: the cache, with one row for each token and layer, of a multiple of 16 bytes: a
            `KVCacheSpec` with `kind="mla"` and rows of `head_dim` elements, or an
            `ArrayCacheSpec` of one array `[num_pages, page_size, ...]` for each layer. A row of
            several dtypes is declared as bytes: DeepSeek V3.2's 656 bytes (512 of fp8, 16 of
            scales, 128 of bf16) are `head_dim=656, dtype="uint8"`.
          batch: requests of a step, at most 4,096.
          slots: rows per request and layer, at least the number of ids of a `fetch`, at most
            12,288.
          max_length: tokens of the longest request.

        Raises:
          TypeError: `spec` is of another type.
          ValueError: a size out of range, or a cache without such rows.
        """
        rows = rows_of(spec)
        most = {"batch": "MAX_SPARSE_BATCH", "slots": "MAX_SPARSE_SLOTS"}
        sizes = {"batch": batch, "slots": slots, "max_length": max_length}
        for name, value in sizes.items():
            sizes[name] = check_size(value, name)
            limit = getattr(native.extension(), most[name]) if name in most else None
            if limit is not None and value > limit:
                raise ValueError(f"{name} must be at most {limit}, got {value}")
        batch, slots, max_length = sizes.values()
        requests = rows.num_layers, batch
        check_num_elements((*requests, slots, rows.width), "hot")
        check_num_elements((*requests, max_length), "slot_of")
        if requests[0] * batch * slots > np.iinfo(np.int32).max:
            raise ValueError(
                f"num_layers * batch * slots must be below 2^31, since rows are numbered by int32, "
                f"got {rows.num_layers} * {batch} * {slots}: use one state for fewer layers"
            )
        return cls(
            hot=jnp.zeros((*requests, slots, rows.width), rows.dtype),
            positions=jnp.full((*requests, slots), -1, jnp.int32),
            used=jnp.zeros((*requests, slots), jnp.int32),
            slot_of=jnp.zeros((*requests, max_length), jnp.int16),
            clock=jnp.zeros(requests, jnp.int32),
        )

    @property
    def rows(self) -> jax.Array:
        """`dtype[num_layers * batch * slots, width]`: `hot`, as numbered by `fetch`."""
        return self.hot.reshape(-1, self.hot.shape[-1])


class RowSpec(NamedTuple):
    """The rows of a cache: one for each token and layer."""

    num_layers: int
    page_size: int
    width: int
    dtype: np.dtype[Any]


def rows_of(spec: object) -> RowSpec:
    """The rows of a cache; raises a TypeError or ValueError if a token has none of whole words."""
    if isinstance(spec, KVCacheSpec):
        if spec.kind != "mla":
            raise ValueError(
                f"sparse rows require kind='mla', one row per token and layer, got {spec.kind!r}"
            )
        rows = RowSpec(spec.num_layers, spec.page_size, spec.head_dim, np.dtype(spec.dtype))
    elif isinstance(spec, ArrayCacheSpec):
        rows = _rows_of_arrays(spec)
    else:
        raise TypeError(
            f"sparse rows require a KVCacheSpec or an ArrayCacheSpec, got {type(spec).__name__}"
        )
    row_bytes = rows.width * rows.dtype.itemsize
    if row_bytes % _WORD_BYTES:
        raise ValueError(
            f"rows must be a multiple of {_WORD_BYTES} bytes, got {row_bytes}: {rows.width} "
            f"elements of {rows.dtype}"
        )
    return rows


def _rows_of_arrays(spec: ArrayCacheSpec) -> RowSpec:
    if len(spec.arrays) != 1:
        raise ValueError(
            f"sparse rows require one array per layer, got {len(spec.arrays)}: describe a cache of "
            "one of them, or of bytes"
        )
    (array,) = spec.arrays
    if spec.page_size is None or array.shape[0] != spec.page_size or spec.block_axes:
        raise ValueError(
            "sparse rows require arrays [num_pages, page_size, ...] whose pages are not sharded, "
            f"with page_size passed to ArrayCacheSpec.from_arrays, got page_size={spec.page_size} "
            f"and pages of shape {list(array.shape)} sharded over {list(spec.block_axes)}"
        )
    return RowSpec(spec.num_layers, spec.page_size, math.prod(array.shape[1:]), array.dtype)


def release(state: SparseState, ended: ArrayLike) -> SparseState:
    """Frees all rows of requests that ended; their places in the batch may be reused immediately.

        state = jaxkv.sparse.release(state, ended)

    Call it before the first `fetch` or `append` of the request that takes the place. Writes the
    slots' positions of all layers, not the rows.

    Args:
      state: the buffer; donate it.
      ended: bool[batch], the requests that ended.

    Returns:
      The state.

    Raises:
      TypeError: `state` is not a `SparseState`.
      ValueError: `ended` is not bool[batch], or a state that was deleted or donated, or that a
        traced function closes over.
    """
    operation = "sparse.release"
    check_is_state(operation, state)
    check_not_closed_over(operation, "state", state)
    check_not_deleted(operation, state=state, ended=ended)
    ended = jnp.asarray(ended)
    batch = state.clock.shape[1]
    if ended.shape != (batch,) or ended.dtype != jnp.bool_:
        raise ValueError(f"ended must be bool[{batch}], got {ended.dtype}{[*ended.shape]}")
    positions = jnp.where(ended[None, :, None], -1, state.positions)
    return dataclasses.replace(state, positions=positions)


def check_is_state(operation: str, state: object) -> None:
    """Raises a TypeError unless `state` is a `SparseState`."""
    if not isinstance(state, SparseState):
        raise TypeError(f"{operation}: state must be a SparseState, got {type(state).__name__}")
