"""Asynchronous copies between a host pool and staging arrays in HBM.

For engines whose step takes complete caches, not the handle of a copy: pages are gathered before a
store and scattered after a load, both in HBM, so that the copy itself overlaps the steps between.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv


class StagedCopies:
    """A host pool for pages of one shape and dtype; `page` has one page, with its sharding.

    Staging arrays are `[n, *page.shape[1:]]`, one for each layer. Callable from several threads.
    """

    def __init__(self, page: jax.ShapeDtypeStruct, num_layers: int, num_pages: int) -> None:
        spec = jaxkv.ArrayCacheSpec.from_arrays([page] * num_layers)
        self._pool = jaxkv.HostPool.create(spec, num_pages=num_pages)
        self._page, self._num_layers, self._lock = page, num_layers, threading.Lock()
        self._storing: Any = None  # the store in flight, which owns the pool
        pool = self._pool.partition_spec
        self._store = TwoPrograms(jaxkv.start_store, "pool", page.sharding, pool, (0, 1))
        self._load = TwoPrograms(jaxkv.start_load, "cache", page.sharding, pool, 1)

    def store(self, staged: list[jax.Array], host_pages: Sequence[int]) -> None:
        """Starts a store of row i as page `host_pages[i]`; owns the staging arrays."""
        with self._lock:
            self._storing = self._store.start(self._idle_pool(), staged, np.int32(host_pages))

    def load(self, host_pages: Sequence[int]) -> Callable[[], list[jax.Array]]:
        """Starts a load of page `host_pages[i]` into row i; returns the wait for the rows."""
        shape = len(host_pages), *self._page.shape[1:]
        zeros = functools.partial(jnp.zeros, shape, self._page.dtype, device=self._page.sharding)
        with self._lock:
            staged = [zeros() for _ in range(self._num_layers)]
            loading = self._load.start(self._idle_pool(), staged, np.int32(host_pages))
        return functools.cache(lambda: self._load.end(loading))

    def _idle_pool(self) -> jaxkv.HostPool:
        if self._storing is not None:
            self._pool, self._storing = self._store.end(self._storing), None
        return self._pool


class TwoPrograms:
    """A copy between a pool and staging arrays: one program starts it, another one waits."""

    def __init__(
        self, operation: Any, result: str, sharding: NamedSharding, pool: P, donate: Any
    ) -> None:
        mesh, staged = sharding.mesh, sharding.spec
        leaves = P(mesh.axis_names)  # of any leaf: the shards, one after the other

        def start(pool: jaxkv.HostPool, staged: Any, host_pages: jax.Array) -> Any:
            rows = jnp.arange(len(host_pages), dtype=jnp.int32)
            handle = operation(pool, staged, host_pages, rows)
            # Over explicit axes, the leaves can leave shard_map, the handle cannot.
            values, self.structure = jax.tree.flatten(handle)
            return values

        def end(values: Any) -> Any:
            return getattr(jax.tree.unflatten(self.structure, values), result)

        out = pool if result == "pool" else staged
        start = over_shards(start, mesh, (pool, staged, P()), leaves)
        self.start = jax.jit(start, donate_argnums=donate)
        self.end = jax.jit(over_shards(end, mesh, (leaves,), out), donate_argnums=0)


def over_shards(function: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    """`function` on the shards of each device."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def padded(ids: Sequence[int], padding: int = -1) -> np.ndarray:
    """`ids` up to a power of two, which limits the number of compiled programs."""
    length = 1 << (len(ids) - 1).bit_length()
    return np.array([*ids, *[padding] * (length - len(ids))], np.int32)


def scatter_program(mesh: Mesh, staged: P, cache: P) -> Any:
    """The jitted scatter `cache[pages[i]] = staged[rows[i]]`, in place, of pages over a mesh axis."""

    def scatter(staged: Any, cache: Any, rows: jax.Array, pages: jax.Array) -> Any:
        shard = jax.lax.axis_index(axis) if axis else 0
        pages = pages - shard * len(cache[0])
        own = (pages >= 0) & (pages < len(cache[0]))  # the others are padding
        return jaxkv.swap_blocks(staged, cache, rows, jnp.where(own, pages, -1))

    axis = cache[0] if cache else None
    mapped = over_shards(scatter, mesh, (staged, cache, P(), P()), cache)
    return jax.jit(mapped, donate_argnums=1)
