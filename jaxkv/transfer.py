"""Page copies between pinned host memory and HBM, as functions on pools and caches.

A copy has a dense side, where each block is contiguous, and a strided side, a host layout that may
strew a block over runs. `load_pages` goes from strided to dense, `store_pages` back, and
`swap_blocks` is the case in which both sides are dense.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxkv import all_reduce
from jaxkv.block_copy import (
    BlockCopy,
    check_whole,
    copy_blocks,
    kept_whole,
    needs_plan,
    plan_pairs,
    result_types,
    typed_for,
)
from jaxkv.choice import Choice, check_name, choose
from jaxkv.device_cache import DeviceCache
from jaxkv.host_ids import HostIds, as_ids, check_page_ids, ids_on_host, num_ids_of
from jaxkv.host_pool import HostPool, check_pair
from jaxkv.layout import PageGeometry, check_kept, check_whole_bytes
from jaxkv.symmetric_memory import SymmetricMemory

Ids = Any  # int32[n] array, list of ints, or HostIds
# Copies, blocks on either side, and what puts the written arrays of all copies back in place.
_Resolved = tuple[list[BlockCopy], tuple[int, int] | None, Callable[[list[list[Any]]], Any]]


def load_pages(
    pool: HostPool,
    cache: DeviceCache,
    host_pages: Ids,
    device_pages: Ids,
    *,
    layers: int | Sequence[int] | None = None,
    implementation: str | None = None,
) -> DeviceCache:
    """Copies pages from host memory into the device cache.

    Page `host_pages[i]` of the pool becomes page `device_pages[i]` of the cache, in the chosen
    layers, K and V; all other bytes of the cache stay as they were. With the cache donated to the
    surrounding jit the copy is in place; without, XLA first copies the cache. (The load direction
    of SGLang's HiCache and of vLLM's offloading connector.)

    Args:
      pool: pages in pinned host memory, any layout.
      cache: pages in device memory; donate it.
      host_pages, device_pages: int32[n]; a pair with an entry < 0 is padding. NumPy or device
        arrays, or `HostIds`, which the copy engine needs.
      layers: all for None, one, or a sequence such as `range(4, 8)`.
      implementation: "dma", "kernel", "pallas", "host", or None for the best that serves the call.

    Returns:
      The cache with the pages in it.

    Raises:
      ValueError, TypeError: arguments that do not go together, with name, value and limit.
      NotImplementedError: `implementation` does not serve this call, and why.
      PageIndexError: an id out of range or a destination named twice, where both lists are known
        on the host; else the entries are skipped and `check_errors` raises.
    """
    return _dispatch(
        "load_pages", (pool, cache), (host_pages, device_pages), layers, implementation
    )


def store_pages(
    pool: HostPool,
    cache: DeviceCache,
    device_pages: Ids,
    host_pages: Ids,
    *,
    layers: int | Sequence[int] | None = None,
    implementation: str | None = None,
) -> HostPool:
    """Copies pages from the device cache into host memory.

    The mirror of `load_pages`: page `device_pages[i]` of the cache becomes page `host_pages[i]` of
    the pool. With the pool donated to the surrounding jit it is written in place in host memory;
    without, XLA first copies the whole pool.

    Args:
      pool: pages in pinned host memory, any layout; donate it.
      cache: pages in device memory.
      device_pages, host_pages, layers, implementation: as for `load_pages`.

    Returns:
      The pool with the pages in it.

    Raises:
      As `load_pages`.
    """
    return _dispatch(
        "store_pages", (pool, cache), (device_pages, host_pages), layers, implementation
    )


def swap_blocks(
    src: Any, dst: Any, src_ids: Ids, dst_ids: Ids, *, implementation: str | None = None
) -> Any:
    """Copies blocks between arrays: `dst[dst_ids[i]] = src[src_ids[i]]` in every leaf.

    The flat primitive under `load_pages`, for engines with arrays of their own; either side may be
    in host or device memory. (vLLM's swap_blocks.)

    Args:
      src: pytree of `dtype[num_src_blocks, ...]` arrays, of whole-byte dtypes.
      dst: pytree of the same structure, `dtype[num_dst_blocks, ...]`; block shapes and dtypes are
        those of `src`. Donate it to be written in place.
      src_ids, dst_ids: int32[n]; a pair with an entry < 0 is padding.
      implementation: as for `load_pages`.

    Returns:
      `dst` with the blocks in it.

    Raises:
      As `load_pages`.
    """
    return _dispatch("swap_blocks", (src, dst), (src_ids, dst_ids), None, implementation)


def explain(operation: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Says which implementation `operation(*args, **options)` takes and why not the others.

    Args:
      operation: `load_pages`, `store_pages`, `swap_blocks`, `start_load`, `start_store`, or
        `all_reduce` of a `SymmetricMemory`.
      *args, **options: its arguments; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
      A line for the choice, one for each implementation that was not chosen, and the table that
      the figures come from.
    """
    if isinstance(memory := getattr(operation, "__self__", None), SymmetricMemory):
        return all_reduce.explain(memory, *args, **options)
    lines = [choice.text for choice in choices_of(operation, *args, **options)]
    return "\n".join(lines) or f"{operation.__name__}: nothing to copy"


def choices_of(operation: Callable[..., Any], *args: Any, **options: Any) -> list[Choice]:
    """What `operation(*args, **options)` takes for each of its copies; arguments as `explain`'s."""
    name = getattr(operation, "__name__", operation)
    if name not in _OPERATIONS:
        raise ValueError(f"operation must be one of {', '.join(_OPERATIONS)}, got {name!r}")
    given = inspect.signature(operation).bind(*args, **options).arguments  # in the order declared
    layers, implementation = given.pop("layers", None), given.pop("implementation", None)
    *state, source_ids, destination_ids = given.values()
    call = resolve(name, tuple(state), (source_ids, destination_ids), layers)
    overlapped = name in ("start_load", "start_store")
    return [choose(copy, call.ids, implementation, overlapped=overlapped) for copy in call.copies]


@dataclasses.dataclass(frozen=True)
class PreparedCall:
    """What an operation comes to: its copies, and how their results make its own."""

    copies: list[BlockCopy]
    ids: tuple[Any, Any]
    limits: tuple[int, int] | None  # blocks on either side; None where there are no arrays
    rebuild: Callable[[list[list[Any]]], Any]


def prepare(
    operation: str,
    state: tuple[Any, Any],
    ids: tuple[Ids, Ids],
    layers: int | Sequence[int] | None,
    implementation: str | None,
) -> tuple[PreparedCall, bool]:
    """Checks the arguments of an operation; returns its copies, and whether it is being traced."""
    check_name(implementation)
    call = resolve(operation, state, ids, layers)
    leaves = jax.tree.leaves((state, call.ids))
    check_whole(leaves)
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if traced:
        _check_host_ids_are_passed(call.ids, _OPERATIONS[operation][0])
    else:
        _check_concrete(call, leaves, _OPERATIONS[operation][0])
    return call, traced


def _dispatch(
    operation: str,
    state: tuple[Any, Any],
    ids: tuple[Ids, Ids],
    layers: int | Sequence[int] | None,
    implementation: str | None,
) -> Any:
    call, traced = prepare(operation, state, ids, layers, implementation)
    if traced:
        return _run(call, implementation)
    return _eager(operation, state, call.ids, static_layers(layers), implementation)


def static_layers(layers: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """`layers` as a static argument of jit."""
    return None if layers is None else tuple(np.atleast_1d(layers).tolist())


# Nothing is donated: outside jit JAX's values stay what they were, at the price of a copy.
@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _eager(
    operation: str,
    state: tuple[Any, Any],
    ids: tuple[Ids, Ids],
    layers: tuple[int, ...] | None,
    implementation: str | None,
) -> Any:
    return _run(resolve(operation, state, ids, layers), implementation)


def resolve(
    operation: str,
    state: tuple[Any, Any],
    ids: tuple[Ids, Ids],
    layers: int | Sequence[int] | None,
) -> PreparedCall:
    """What an operation comes to; raises where its arguments do not go together."""
    names, make_copies = _OPERATIONS[operation]
    source_ids, destination_ids = (
        as_ids(value, name) for value, name in zip(ids, names, strict=True)
    )
    if num_ids_of(source_ids) != num_ids_of(destination_ids):
        raise ValueError(
            f"{names[0]} has {num_ids_of(source_ids)} entries, "
            f"{names[1]} has {num_ids_of(destination_ids)}"
        )
    copies, limits, rebuild = make_copies(operation, *state, layers)
    copies = [typed_for(copy, (source_ids, destination_ids)) for copy in copies]
    return PreparedCall(copies, (source_ids, destination_ids), limits, rebuild)


def _run(call: PreparedCall, implementation: str | None) -> Any:
    if not call.copies or num_ids_of(call.ids[0]) == 0:
        return call.rebuild([list(copy.written) for copy in call.copies])
    chosen = [choose(copy, call.ids, implementation) for copy in call.copies]
    with jax.named_scope(f"jaxkv.{call.copies[0].operation}"):
        copies = [
            copy.kept_whole(sources=choice.implementation == "dma")
            for copy, choice in zip(call.copies, chosen, strict=True)
        ]
        written = _copy_all(dataclasses.replace(call, copies=copies), chosen)
        return call.rebuild(kept_whole(written))


def _copy_all(call: PreparedCall, chosen: list[Choice]) -> list[list[Any]]:
    """The written arrays of each copy; those that Pallas serves share a launch."""
    together = [i for i, choice in enumerate(chosen) if choice.implementation == "pallas"]
    # All copies name the same blocks, so they share one plan; the copy engine makes its own.
    not_by_dma = [choice for choice in chosen if choice.implementation != "dma"]
    planned = together or needs_plan(call.ids, len(not_by_dma))
    pairs: Any = plan_pairs(call.copies[0], call.ids) if planned else None
    written = {}
    if together:
        from jaxkv import swap  # here, because Pallas takes half a second to import

        copies = [call.copies[i] for i in together]
        results = [result_types(copy) for copy in copies]
        num_sms = max(chosen[i].num_sms for i in together)
        arrays = swap.copy_blocks_pallas(copies, pairs, results, num_sms=num_sms)
        written = dict(zip(together, arrays, strict=True))
    for i, (copy, choice) in enumerate(zip(call.copies, chosen, strict=True)):
        if i not in written:
            name, num_sms = choice.implementation, choice.num_sms
            written[i] = copy_blocks(copy, call.ids, pairs, name, num_sms)
    return [written[i] for i in range(len(chosen))]


def _resolve_pages(
    operation: str, pool: HostPool, cache: DeviceCache, layers: int | Sequence[int] | None
) -> _Resolved:
    check_pair(pool, cache)
    to_dense = operation in ("load_pages", "start_load")
    layout = pool.host_layout
    chosen = layout.spec.select_layers(layers)
    buffers = [(layer, kv) for layer in chosen for kv in range(layout.spec.num_kv)]
    copy = BlockCopy(
        operation=operation,
        to_dense=to_dense,
        dense=[cache.layers[layer][kv] for layer, kv in buffers],
        strided=[pool.data],
        geometry=layout.page_geometry(),
        strided_offsets=[layout.buffer_offset_bytes(kv, layer) for layer, kv in buffers],
        num_dense=cache.num_pages,
        num_strided=layout.num_pages,
    )

    def rebuild(written: list[list[Any]]) -> HostPool | DeviceCache:
        if not to_dense:
            return dataclasses.replace(pool, data=written[0][0])
        arrays = {buffer: array for buffer, array in zip(buffers, written[0], strict=True)}
        layers = tuple(
            tuple(arrays.get((layer, kv), old) for kv, old in enumerate(halves))
            for layer, halves in enumerate(cache.layers)
        )
        return dataclasses.replace(cache, layers=layers)

    limits = copy.num_sources, copy.num_destinations
    if not buffers:
        return [], limits, lambda _: cache if to_dense else pool
    return [copy], limits, rebuild


def _resolve_swap(operation: str, src: Any, dst: Any, layers: None) -> _Resolved:
    sources, source_tree = jax.tree.flatten(src)
    destinations, destination_tree = jax.tree.flatten(dst)
    if source_tree != destination_tree:  # type: ignore[operator]
        raise ValueError(f"src has structure {source_tree}, dst {destination_tree}")
    for side, arrays in (("src", sources), ("dst", destinations)):
        for array in arrays:
            if not hasattr(array, "dtype"):
                raise TypeError(f"{side} must be a pytree of arrays, got {type(array).__name__}")
            if array.ndim < 1:
                raise ValueError(f"each array of {side} must be [num_blocks, ...], got a scalar")
            check_kept(array, f"an array of {side}")
        if len({array.shape[0] for array in arrays}) > 1:
            sizes = [array.shape[0] for array in arrays]
            raise ValueError(f"all arrays of {side} must have as many blocks, got {sizes}")
        if arrays and arrays[0].shape[0] > (most := np.iinfo(np.int32).max):
            raise ValueError(f"{side} has {arrays[0].shape[0]} blocks, ids can name {most}")
    groups: dict[int, list[int]] = {}
    for leaf, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        ours, theirs = ((tuple(a.shape[1:]), a.dtype) for a in (source, destination))
        if ours != theirs:
            raise ValueError(f"leaf {leaf}: a block of src is {ours}, of dst {theirs}")
        check_whole_bytes(source.dtype, f"dtype of leaf {leaf}")
        block_bytes = int(np.prod(source.shape[1:], dtype=np.int64)) * source.dtype.itemsize
        if block_bytes and source.shape[0] and destination.shape[0]:
            groups.setdefault(block_bytes, []).append(leaf)
    copies = [
        BlockCopy(
            operation=operation,
            to_dense=True,
            dense=[destinations[leaf] for leaf in leaves],
            strided=[sources[leaf] for leaf in leaves],
            geometry=PageGeometry(block_bytes, block_bytes, (1, 1), (0, 0), block_bytes),
            strided_offsets=[0] * len(leaves),
            num_dense=destinations[0].shape[0],
            num_strided=sources[0].shape[0],
        )
        for block_bytes, leaves in groups.items()
    ]

    def rebuild(written: list[list[Any]]) -> Any:
        result = list(destinations)
        for leaves, arrays in zip(groups.values(), written, strict=True):
            for leaf, array in zip(leaves, arrays, strict=True):
                result[leaf] = array
        return jax.tree.unflatten(destination_tree, result)

    limits = (sources[0].shape[0], destinations[0].shape[0]) if sources else None
    return copies, limits, rebuild


# For each operation the names of its id lists, source first, and what turns it into copies.
_OPERATIONS: dict[str, tuple[tuple[str, str], Callable[..., Any]]] = {
    "load_pages": (("host_pages", "device_pages"), _resolve_pages),
    "store_pages": (("device_pages", "host_pages"), _resolve_pages),
    "start_load": (("host_pages", "device_pages"), _resolve_pages),
    "start_store": (("device_pages", "host_pages"), _resolve_pages),
    "swap_blocks": (("src_ids", "dst_ids"), _resolve_swap),
}


def _check_host_ids_are_passed(ids: tuple[Any, Any], names: tuple[str, str]) -> None:
    """What a program closes over, XLA copies: such HostIds are not those that the host made."""
    for entry, name in zip(ids, names, strict=True):
        if isinstance(entry, HostIds) and not isinstance(entry.data, jax.core.Tracer):
            raise ValueError(f"{name}: HostIds must be arguments of the jitted function")


def _check_concrete(call: PreparedCall, leaves: list[Any], names: tuple[str, str]) -> None:
    """What only values show: released arrays, and ids that the host can read."""
    for leaf in leaves:
        if not isinstance(leaf, jax.Array):
            continue
        if leaf.is_deleted():
            raise ValueError("an array of the call was released or donated: its memory is gone")
    if call.limits is not None:
        sources, destinations = (ids_on_host(entry) for entry in call.ids)
        check_page_ids((sources, destinations), call.limits, names)
