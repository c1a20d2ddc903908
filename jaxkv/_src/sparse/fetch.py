"""Rows chosen on the device: from host memory to the hot buffer, and new rows to both.

The rows of each request are replaced in the order of their last use (LRU), decided on the device.
Published systems with this use of a host tier are SGLang (HiSparse) and vLLM (PR 53781).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv._src.cache.array_cache import ArrayHostLayout
from jaxkv._src.cache.host_pool import HostPool, check_memory_kind
from jaxkv._src.runtime import native
from jaxkv._src.runtime.dtypes import check_canonical_dtype
from jaxkv._src.runtime.errors import scope_attribute
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.runtime.int32 import check_fits_int32
from jaxkv._src.runtime.sharding import check_arguments_unsharded, match_varying_axes
from jaxkv._src.runtime.tracing import check_not_closed_over, check_not_deleted
from jaxkv._src.sparse.state import SparseState, check_is_state, rows_of
from jaxkv._src.transfer.block_copy import scratch_like
from jaxkv._src.transfer.memory_kinds import with_checked_pool
from jaxkv._src.transfer.sharded_arguments import check_sharded_arguments
from jaxkv._src.transfer.transformations import reject_transformations

_STATE = ("hot", "positions", "used", "slot_of", "clock")  # in the order of cuda/sparse/rows.h


def fetch(
    state: SparseState,
    pool: HostPool,
    topk_ids: ArrayLike,
    *,
    layer: int,
    lengths: ArrayLike,
    block_table: ArrayLike,
    num_sms: int = 16,
) -> tuple[jax.Array, SparseState]:
    """Brings the rows of chosen tokens to the hot buffer, and returns where they are.

    Rows in the buffer stay there. The others are copied from the pool and replace the request's
    least recently used rows (LRU, as in SGLang's HiSparse), but no row that this call uses.

        rows, state = jaxkv.sparse.fetch(
            state, pool, topk_ids, layer=layer, lengths=lengths, block_table=block_table
        )
        chosen = state.rows[rows]

    Two kernel launches, without a host sync; CUDA graphs may replay them.

    Args:
      state: the hot buffer; donate it to the surrounding jit.
      pool: `HostPool` of the state's cache, in any layout. Not written.
      topk_ids: int32[batch, ...], token positions of each request, such as [batch, k] or
        [batch, heads, k]; -1 is padding. A position may occur several times. At most 4,096 per
        request, and at most `slots`.
      layer: layer number, of the state and the pool.
      lengths: int32[batch], number of tokens of each request: positions are below it and below
        `max_length` of the state.
      block_table: int32[batch, num_columns], pages of the pool that have the tokens of each
        request, `page_size` in each.
      num_sms: SMs that the copy uses.

    Returns:
      int32 of the shape of `topk_ids`, index of each token's row in `state.rows`, and the state.
      -1 for padding, and for positions that are out of range, or neither in the buffer nor on a
      page: nothing is copied for them, and all but padding are counted for `jaxkv.check_errors()`
      (PageIndexError).

    Raises:
      TypeError, ValueError: arguments of other types, shapes or dtypes, lists with integers
        outside int32, a `layer` or `num_sms` out of range, too many ids, arrays that are sharded
        outside `shard_map` (in a jit with automatic mesh axes, arguments of the program), a pool
        that is not in pinned host memory, a state or pool that a traced function closes over, or
        arrays that were closed, deleted or donated.
      NotImplementedError: inside vmap or a derivative.
    """
    check_not_deleted(
        "sparse.fetch",
        state=state,
        pool=pool,
        topk_ids=topk_ids,
        lengths=lengths,
        block_table=block_table,
    )
    topk_ids = _as_int32("sparse.fetch: topk_ids", topk_ids)
    static = _static("sparse.fetch", state, pool, topk_ids, layer, num_sms)
    arguments = (
        state,
        pool,
        topk_ids,
        _as_int32("sparse.fetch: lengths", lengths),
        _as_int32("sparse.fetch: block_table", block_table),
    )
    names = "state", "pool", "topk_ids", "lengths", "block_table"
    check_arguments_unsharded("sparse.fetch", dict(zip(names, arguments, strict=True)))
    run = _fetch if _has_tracers(arguments) else _fetch_now
    return run(*reject_transformations("sparse.fetch", arguments), static)


def append(
    state: SparseState,
    pool: HostPool,
    rows: ArrayLike,
    positions: ArrayLike,
    *,
    layer: int,
    block_table: ArrayLike,
    num_sms: int = 16,
) -> tuple[SparseState, HostPool]:
    """Writes rows of new tokens to the hot buffer and the pool.

    A later `fetch` then finds them in the buffer, or in the pool after they were replaced. If a
    position has a row, for example that of a rejected draft token, the row is overwritten.

        state, pool = jaxkv.sparse.append(
            state, pool, rows, positions, layer=layer, block_table=block_table
        )

    Args:
      state, pool: as for `fetch`; donate both.
      rows: `dtype[batch, n, width]`, of the dtype of the cache.
      positions: int32[batch, n], position of each row in its request, -1 for padding. n is at most
        `slots` and at most 4,096.
      layer, block_table, num_sms: as for `fetch`.

    Returns:
      The state and the pool. A row whose position is out of range, without a page, or equal to
      another position of the same request earlier in this call is not written, and counted for
      `jaxkv.check_errors()` (PageIndexError).

    Raises:
      TypeError, ValueError, NotImplementedError: as for `fetch`.
    """
    check_not_deleted(
        "sparse.append",
        state=state,
        pool=pool,
        rows=rows,
        positions=positions,
        block_table=block_table,
    )
    positions = _as_int32("sparse.append: positions", positions)
    static = _static("sparse.append", state, pool, positions, layer, num_sms)
    for array in jax.tree.leaves(rows):
        if isinstance(array, np.ndarray):
            check_canonical_dtype(array, "sparse.append: rows")
    rows = jnp.asarray(rows)
    expected = (*positions.shape, state.hot.shape[-1])
    if rows.shape != expected or rows.dtype != state.hot.dtype:
        raise ValueError(
            f"sparse.append: rows must be {state.hot.dtype}{[*expected]}, got "
            f"{rows.dtype}{[*rows.shape]}"
        )
    table = _as_int32("sparse.append: block_table", block_table)
    arguments = state, pool, rows, positions, table
    names = "state", "pool", "rows", "positions", "block_table"
    check_arguments_unsharded("sparse.append", dict(zip(names, arguments, strict=True)))
    run = _append if _has_tracers(arguments) else _append_now
    return run(*reject_transformations("sparse.append", arguments), static)


def _has_tracers(arguments: tuple[Any, ...]) -> bool:
    """Whether a call is traced: its state and pool are not closed over."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments))


def _as_int32(name: str, values: ArrayLike) -> jax.Array:
    """`values` as a JAX array; JAX would truncate floats and NumPy's int64 silently."""
    if hasattr(values, "dtype"):
        valid, dtype = values.dtype == jnp.int32, values.dtype
    else:
        check_fits_int32(name, values)
        on_host = not any(isinstance(value, jax.Array) for value in jax.tree.leaves(values))
        array = np.asarray(values) if on_host else jnp.asarray(values)
        valid, dtype = array.size == 0 or array.dtype.kind in "iu", array.dtype
    if not valid:
        raise ValueError(f"{name} must be int32, got {dtype}")
    return jnp.asarray(values, jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Static:
    operation: str
    layer: int
    num_sms: int


def _static(
    operation: str, state: Any, pool: Any, ids: jax.Array, layer: int, num_sms: int
) -> _Static:
    """Static arguments, checked."""
    _check_state(operation, state, pool)
    num_layers, batch, slots = state.positions.shape
    if not _is_integer(layer) or not 0 <= layer < num_layers:
        raise ValueError(
            f"{operation}: layer must be a static integer in [0, {num_layers}), got {layer!r}"
        )
    if not _is_integer(num_sms) or not 1 <= num_sms < 2**31:
        raise ValueError(f"{operation}: num_sms must be an integer of at least 1, got {num_sms!r}")
    name = "topk_ids" if operation == "sparse.fetch" else "positions"
    if ids.ndim < 2 or ids.shape[0] != batch:
        raise ValueError(f"{operation}: {name} must be int32[{batch}, ...], got {[*ids.shape]}")
    count = math.prod(ids.shape[1:])
    most = min(slots, native.extension().MAX_SPARSE_IDS)
    if count > most:
        limit = f"slots={slots}" if most == slots else f"the limit of {most}"
        raise ValueError(
            f"{operation}: {name} has {count} ids for each request, more than {limit}: each may "
            "need a separate row"
        )
    words = batch * count * (state.hot.shape[-1] * state.hot.dtype.itemsize // 16)
    if words > np.iinfo(np.int32).max:
        raise ValueError(f"{operation}: {words} words of 16 bytes in one call exceed 2^31 - 1")
    return _Static(operation, int(layer), int(num_sms))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_state(operation: str, state: Any, pool: Any) -> None:
    check_is_state(operation, state)
    if not isinstance(pool, HostPool):
        raise TypeError(f"{operation}: pool must be a jaxkv.HostPool, got {type(pool).__name__}")
    check_not_closed_over(operation, "state", state)
    check_not_closed_over(operation, "pool", pool)
    spec = rows_of(pool.spec)
    check_memory_kind(operation, pool.data)
    layers, batch, slots, _ = state.hot.shape
    cells = layers, batch, slots
    expected = {
        "hot": ((*cells, spec.width), spec.dtype),
        "positions": (cells, jnp.int32),
        "used": (cells, jnp.int32),
        "slot_of": ((layers, batch, state.slot_of.shape[-1]), jnp.int16),
        "clock": ((layers, batch), jnp.int32),
    }
    if layers != spec.num_layers:
        raise ValueError(f"{operation}: state has {layers} layers, the pool has {spec.num_layers}")
    for name, (shape, dtype) in expected.items():
        array = getattr(state, name)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{operation}: state.{name} must be {np.dtype(dtype)}{[*shape]} for this pool, got "
                f"{array.dtype}{[*array.shape]}"
            )
    if pool.num_pages * spec.page_size > np.iinfo(np.int32).max:
        raise ValueError(
            f"{operation}: pool has {pool.num_pages} pages of {spec.page_size} tokens, tokens "
            "are numbered by int32"
        )


def _table(operation: str, block_table: jax.Array, batch: int) -> int:
    """Number of columns."""
    most = np.iinfo(np.int32).max // native.extension().MAX_SPARSE_BATCH
    if (
        block_table.ndim != 2
        or block_table.shape[0] != batch
        or not 1 <= block_table.shape[1] <= most
    ):
        raise ValueError(
            f"{operation}: block_table must be int32[{batch}, n] with n from 1 to {most}, got "
            f"{[*block_table.shape]}"
        )
    return block_table.shape[1]


def _fetch(
    state: SparseState,
    pool: HostPool,
    topk_ids: jax.Array,
    lengths: jax.Array,
    block_table: jax.Array,
    static: _Static,
) -> tuple[jax.Array, SparseState]:
    batch = topk_ids.shape[0]
    if lengths.shape != (batch,):
        raise ValueError(f"sparse.fetch: lengths must be int32[{batch}], got {[*lengths.shape]}")
    geometry = _geometry(state, pool, topk_ids, block_table, static)
    if topk_ids.size == 0:
        return topk_ids, state
    pool, _ = with_checked_pool("sparse.fetch", pool, None)
    operands = [topk_ids, lengths, block_table, pool.data]
    arrays = _matched(state, operands)
    topk_ids = match_varying_axes(topk_ids, [*operands, *arrays])
    ids_type = jax.typeof(topk_ids)
    scratch = [scratch_like(ids_type, 2 * topk_ids.size), scratch_like(ids_type, batch)]
    with jax.named_scope("jaxkv.sparse.fetch"):
        call = jax.ffi.ffi_call(
            "jaxkv_sparse_fetch",
            [ids_type, *scratch, *map(jax.typeof, arrays)],
            input_output_aliases={4 + i: 3 + i for i in range(len(arrays))},
        )
        rows, _, _, *written = call(
            topk_ids, *operands[1:], *arrays, geometry=geometry, **scope_attribute()
        )
    rows, *written = check_sharded_arguments("sparse.fetch", [rows, *written])
    return rows, SparseState(*fusion_barrier(written))


def _append(
    state: SparseState,
    pool: HostPool,
    rows: jax.Array,
    positions: jax.Array,
    block_table: jax.Array,
    static: _Static,
) -> tuple[SparseState, HostPool]:
    geometry = _geometry(state, pool, positions, block_table, static)
    if positions.size == 0:
        return state, pool
    pool, _ = with_checked_pool("sparse.append", pool, None)
    operands = [positions, block_table, rows]
    arrays = _matched(state, [*operands, pool.data])
    data = match_varying_axes(fusion_barrier(pool.data), [*operands, *arrays])
    moves_type = scratch_like(jax.typeof(arrays[0]), 2 * positions.size)
    # The type of a traced pool may lack its memory space.
    host = jax.typeof(data).update(memory_space=jax.memory.Space.Host)
    # Two calls, since XLA places all results of a call in host memory if one of them is there.
    with jax.named_scope("jaxkv.sparse.append"):
        to_hot = jax.ffi.ffi_call(
            "jaxkv_sparse_append",
            [moves_type, *map(jax.typeof, arrays)],
            input_output_aliases={3 + i: 1 + i for i in range(len(arrays))},
        )
        attributes = {"geometry": geometry, **scope_attribute()}
        moves, *written = to_hot(*operands, *arrays, **attributes)
        to_pool = jax.ffi.ffi_call("jaxkv_sparse_write_added", host, input_output_aliases={2: 0})
        data = to_pool(moves, rows, data, **attributes)
    results = check_sharded_arguments("sparse.append", [data, *written])
    data, *written = fusion_barrier(results)
    return SparseState(*written), dataclasses.replace(pool, data=data)


# No donation: outside jit arrays are immutable, at the cost of a copy.
_fetch_now = jax.jit(_fetch, static_argnums=5)
_append_now = jax.jit(_append, static_argnums=5)


def _matched(state: SparseState, operands: list[jax.Array]) -> list[jax.Array]:
    """The arrays of the state, typed as varying over the mesh axes of all of them."""
    arrays = [getattr(state, name) for name in _STATE]
    return fusion_barrier([match_varying_axes(array, [*operands, *arrays]) for array in arrays])


def _geometry(
    state: SparseState, pool: HostPool, ids: jax.Array, block_table: jax.Array, static: _Static
) -> np.ndarray:
    """The attribute `geometry`, in the order of cuda/sparse/rows.cc."""
    layout = pool.host_layout
    of_arrays = isinstance(layout, ArrayHostLayout)
    pages = layout.page_geometry(0) if of_arrays else layout.page_geometry()
    num_layers, batch, slots, width = state.hot.shape
    columns = _table(static.operation, block_table, batch)
    first = layout.buffer_offset_bytes(0, static.layer)
    numbers = [
        static.num_sms,
        static.layer,
        num_layers,
        batch,
        math.prod(ids.shape[1:]),
        slots,
        state.slot_of.shape[-1],
        columns,
        layout.num_pages,
        layout.spec.page_size,
        width * state.hot.dtype.itemsize,
        first,
        pages.page_stride_bytes,
        layout.buffer_offset_bytes(0, static.layer, 1) - first,
    ]
    return np.array(numbers, np.int64)
