"""The block copies between a pool and a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxkv._src.cache.array_cache import ArrayCache, as_array_cache, engine_arrays, is_stacked
from jaxkv._src.cache.array_spec import ArrayCacheSpec, select_array_tokens
from jaxkv._src.cache.device_cache import DeviceCache
from jaxkv._src.cache.host_layout import PageGeometry
from jaxkv._src.cache.host_pool import HostPool, check_pair
from jaxkv._src.cache.spec import KVCacheSpec, select_layers, select_tokens
from jaxkv._src.transfer.block_copy import BlockCopy

PyTree: TypeAlias = Any  # of arrays
Rebuild: TypeAlias = Callable[[list[list[jax.Array]]], PyTree]
# Copies, and a function that builds the result from the arrays that they write.
Resolved: TypeAlias = tuple[list[BlockCopy], Rebuild]


def resolve_pages(
    operation: str,
    pool: HostPool,
    cache: PyTree,
    layers: int | Sequence[int] | None,
    tokens: range | None = None,
) -> Resolved:
    """One copy for each block size of a layer: one, unless the arrays of a layer differ."""
    device_cache = by_layer(operation, pool, cache)
    check_pair(operation, pool, device_cache)
    to_dense = operation in ("load_pages", "start_load")
    if (rank := getattr(layers, "ndim", 0)) > 1:
        raise ValueError(
            f"{operation}: layers must be an integer or one-dimensional, got an array of {rank} "
            "dimensions"
        )
    chosen = select_layers(pool.spec.num_layers, layers, f"{operation}: layers")
    tokens = _select_tokens(pool.spec, tokens, f"{operation}: tokens")
    if not chosen:
        return [], lambda _: cache if to_dense else pool
    copies, places = [], []
    first_token = tokens.start if tokens else 0
    for geometry, arrays in _arrays_of_geometry(pool, tokens).items():
        copies.append(
            _copy_of_arrays(
                operation, to_dense, pool, device_cache, chosen, first_token, geometry, arrays
            )
        )
        rows = [0] if is_stacked(device_cache) else chosen
        places.append([(row, array) for row in rows for array in arrays])

    def rebuild(written: list[list[jax.Array]]) -> PyTree:
        if not to_dense:
            return dataclasses.replace(pool, data=written[-1][0])
        new = {
            place: array
            for copied, arrays in zip(places, written, strict=True)
            for place, array in zip(copied, arrays, strict=True)
        }
        loaded = tuple(
            tuple(new.get((row, index), array) for index, array in enumerate(arrays))
            for row, arrays in enumerate(device_cache.layers)
        )
        result = dataclasses.replace(device_cache, layers=loaded)
        if isinstance(result, ArrayCache) and not isinstance(cache, ArrayCache):
            return engine_arrays(result)
        return result

    return copies, rebuild


def by_layer(operation: str, pool: HostPool, cache: PyTree) -> DeviceCache | ArrayCache:
    """`cache`, or an engine's arrays by layer if the pool is for them."""
    spec = getattr(pool, "spec", None)
    if isinstance(spec, ArrayCacheSpec) and not isinstance(cache, ArrayCache):
        if isinstance(cache, DeviceCache):
            raise TypeError(
                f"{operation}: pool was created for an engine's own arrays (ArrayCacheSpec), but "
                "cache is a DeviceCache; create the pool with cache.spec"
            )
        return as_array_cache(operation, spec, cache)
    return cache


def _select_tokens(
    spec: KVCacheSpec | ArrayCacheSpec, tokens: range | None, name: str
) -> range | None:
    """`spec.select_tokens(tokens)`; `name` begins the error messages."""
    if isinstance(spec, ArrayCacheSpec):
        return select_array_tokens(spec, tokens, name)
    return select_tokens(spec.page_size, tokens, name)


def arrays_of_copies(pool: HostPool, tokens: range | None) -> list[tuple[int, ...]]:
    """For each copy of `resolve_pages`, the arrays of a layer that it covers."""
    arrays = _arrays_of_geometry(pool, pool.spec.select_tokens(tokens)).values()
    return [tuple(indices) for indices in arrays]


def _arrays_of_geometry(pool: HostPool, tokens: range | None) -> dict[PageGeometry, list[int]]:
    """The arrays of a layer, by the geometry of these tokens of their blocks."""
    layout = pool.host_layout
    if not isinstance(pool.spec, ArrayCacheSpec):
        return {layout.page_geometry(tokens): list(range(pool.spec.num_kv))}
    arrays: dict[PageGeometry, list[int]] = {}
    for index in range(len(pool.spec.arrays)):
        arrays.setdefault(layout.page_geometry(index, tokens), []).append(index)
    return arrays


def _copy_of_arrays(
    operation: str,
    to_dense: bool,
    pool: HostPool,
    cache: DeviceCache | ArrayCache,
    layers: Sequence[int],
    first_token: int,
    geometry: PageGeometry,
    arrays: Sequence[int],
) -> BlockCopy:
    layout = pool.host_layout
    buffers = [(layer, array) for layer in layers for array in arrays]
    skipped = 0
    if first_token:
        assert pool.spec.page_size
        skipped = first_token * (geometry.dense_stride_bytes // pool.spec.page_size)
    if is_stacked(cache):
        dense = [cache.layers[0][array] for array in arrays]
        layer_bytes = cache.num_pages * geometry.dense_stride_bytes
        dense_offsets = [layer * layer_bytes + skipped for layer, _ in buffers]
    else:
        dense = [cache.layers[layer][array] for layer, array in buffers]
        dense_offsets = [skipped] * len(buffers)
    return BlockCopy(
        operation=operation,
        to_dense=to_dense,
        dense=dense,
        strided=[pool.data],
        geometry=geometry,
        dense_offsets=dense_offsets,
        strided_offsets=[
            layout.buffer_offset_bytes(array, layer, first_token) for layer, array in buffers
        ],
        num_dense=cache.num_pages,
        num_strided=layout.num_pages,
    )
