"""The hot buffer of a sparse-attention model, and which positions are in it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv._src.cache.spec import KVCacheSpec, check_num_elements, check_size
from jaxkv._src.runtime import native

_WORD_BYTES = 16  # rows consist of whole words of the copy kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparseState:
    """Rows of KV tokens in HBM, the most recently used of each request: a pytree of arrays.

        state = jaxkv.sparse.SparseState.create(spec, batch=32, slots=4096, max_length=32768)

    Donate it to the jit of the step, which returns the new one. Shard all arrays over their second
    axis, the batch, to use it inside `shard_map`.

    Attributes:
      hot: `dtype[num_layers, batch, slots, head_dim]`, the rows.
      positions: int32[num_layers, batch, slots], position in its request of the token in each slot,
        -1 if the slot is free.
      used: int32[num_layers, batch, slots], value of `clock` at the last use of each slot.
      slot_of: int16[num_layers, batch, max_length], slot of each position; entries of positions
        that are not in the buffer are meaningless.
      clock: int32[num_layers, batch], calls so far.
    """

    hot: jax.Array
    positions: jax.Array
    used: jax.Array
    slot_of: jax.Array
    clock: jax.Array

    @classmethod
    def create(cls, spec: KVCacheSpec, *, batch: int, slots: int, max_length: int) -> SparseState:
        """An empty buffer. To create it sharded, call it in a jit with `out_shardings`.

        Args:
          spec: the cache; `kind="mla"`, with rows of `head_dim` elements and a multiple of 16
            bytes. A row of several dtypes is bytes: 656 bytes of DeepSeek V3.2 (512 of fp8, 16 of
            scales, 128 of bf16) are `head_dim=656, dtype="uint8"`.
          batch: requests of a step, at most 4,096.
          slots: rows per request and layer, at least the number of ids of a `fetch`, at most
            12,288.
          max_length: tokens of the longest request.

        Raises:
          ValueError: a size out of range, or rows that are not a multiple of 16 bytes.
        """
        check_rows(spec)
        most = {"batch": "MAX_SPARSE_BATCH", "slots": "MAX_SPARSE_SLOTS"}
        for name, value in {"batch": batch, "slots": slots, "max_length": max_length}.items():
            check_size(value, name)
            limit = getattr(native.extension(), most[name]) if name in most else None
            if limit is not None and value > limit:
                raise ValueError(f"{name} must be at most {limit}, got {value}")
        requests = spec.num_layers, batch
        check_num_elements((*requests, slots, spec.head_dim), "hot")
        check_num_elements((*requests, max_length), "slot_of")
        if requests[0] * batch * slots > np.iinfo(np.int32).max:
            raise ValueError(
                f"num_layers * batch * slots must be below 2^31, since rows are numbered by int32, "
                f"got {spec.num_layers} * {batch} * {slots}: use one state for fewer layers"
            )
        return cls(
            hot=jnp.zeros((*requests, slots, spec.head_dim), np.dtype(spec.dtype)),
            positions=jnp.full((*requests, slots), -1, jnp.int32),
            used=jnp.zeros((*requests, slots), jnp.int32),
            slot_of=jnp.zeros((*requests, max_length), jnp.int16),
            clock=jnp.zeros(requests, jnp.int32),
        )

    @property
    def rows(self) -> jax.Array:
        """`dtype[num_layers * batch * slots, head_dim]`: `hot`, as numbered by `fetch`."""
        return self.hot.reshape(-1, self.hot.shape[-1])


def check_rows(spec: object) -> KVCacheSpec:
    """`spec`; raises a TypeError or ValueError unless each token is one row of whole words."""
    if not isinstance(spec, KVCacheSpec):
        raise TypeError(
            f"sparse rows require a KVCacheSpec, got {type(spec).__name__}: describe the cache by "
            "KVCacheSpec(kind='mla'), with dtype='uint8' for rows of several dtypes"
        )
    if spec.kind != "mla":
        raise ValueError(
            f"sparse rows require kind='mla', one row per token and layer, got {spec.kind!r}"
        )
    row_bytes = spec.head_dim * np.dtype(spec.dtype).itemsize
    if row_bytes % _WORD_BYTES:
        raise ValueError(
            f"rows must be a multiple of {_WORD_BYTES} bytes, got {row_bytes}: {spec.head_dim} "
            f"elements of {np.dtype(spec.dtype)}"
        )
    return spec


def release(state: SparseState, ended: ArrayLike) -> SparseState:
    """Frees all rows of requests that ended; their places in the batch may be used again at once.

        state = jaxkv.sparse.release(state, ended)

    Call it before the first `fetch` or `append` of the request that takes the place. Writes the
    slots' positions of all layers, not the rows.

    Args:
      state: the buffer; donate it.
      ended: bool[batch], the requests that ended.

    Returns:
      The state.

    Raises:
      ValueError: `ended` is not bool[batch].
    """
    ended = jnp.asarray(ended)
    batch = state.clock.shape[1]
    if ended.shape != (batch,) or ended.dtype != jnp.bool_:
        raise ValueError(f"ended must be bool[{batch}], got {ended.dtype}{[*ended.shape]}")
    positions = jnp.where(ended[None, :, None], -1, state.positions)
    return dataclasses.replace(state, positions=positions)
