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
    """A host pool, and its copies to and from the caches of `num_layers` layers of one shape.

    Staging arrays are `[n, *page]` for each layer, replicated over the mesh axis that shards the
    pages of the caches, if any; so are the pages of the pool. Callable from several threads.
    """

    def __init__(self, cache: jax.Array, num_layers: int, num_pages: int) -> None:
        placement: Any = cache.sharding
        mesh, spec = placement.mesh, placement.spec
        self.sharding = NamedSharding(mesh, P(None, *spec[1:]))
        page = jax.ShapeDtypeStruct((1, *cache.shape[1:]), cache.dtype, sharding=self.sharding)
        self._page, self._num_layers, self._lock = page, num_layers, threading.Lock()
        arrays = jaxkv.ArrayCacheSpec.from_arrays([page] * num_layers)
        self._pool = jaxkv.HostPool.create(arrays, num_pages=num_pages)
        self._storing: Any = None  # the store in flight, which owns the pool
        pool, staged = self._pool.partition_spec, self.sharding.spec
        self._store = TwoPrograms(jaxkv.start_store, "pool", mesh, (pool, staged), pool, (0, 1))
        self._load = TwoPrograms(jaxkv.start_load, "cache", mesh, (pool, staged), staged, 1)
        axis = spec[0] if spec else None

        def to_own_pages(copy: Any, source: Any, cache: Any, ids: Any, pages: Any) -> Any:
            shard = jax.lax.axis_index(axis) if axis else 0
            pages = pages - shard * len(cache[0])
            own = jnp.where(pages < len(cache[0]), pages, -1)  # below 0: padding
            return copy(source, cache, ids, own)

        self._programs = {
            copy: jax.jit(
                over_shards(
                    functools.partial(to_own_pages, copy), mesh, (source, spec, P(), P()), spec
                ),
                donate_argnums=1,
            )
            for copy, source in ((jaxkv.load_pages, pool), (jaxkv.swap_blocks, staged))
        }

    def store(self, staged: list[jax.Array], host_pages: np.ndarray) -> None:
        """Starts a store of row i as page `host_pages[i]`; owns the staging arrays."""
        with self._lock:
            self._storing = self._store.start(self._idle_pool(), staged, host_pages)

    def load(self, host_pages: np.ndarray) -> Callable[[], list[jax.Array]]:
        """Starts a load of page `host_pages[i]` as row i; returns the wait for the rows."""
        shape = len(host_pages), *self._page.shape[1:]
        zeros = functools.partial(jnp.zeros, shape, self._page.dtype, device=self.sharding)
        with self._lock:
            staged = [zeros() for _ in range(self._num_layers)]
            loading = self._load.start(self._idle_pool(), staged, host_pages)
        return functools.cache(lambda: self._load.end(loading))

    def scatter(self, staged: Any, caches: Any, rows: np.ndarray, pages: np.ndarray) -> Any:
        """Copies row `rows[i]` to page `pages[i]` of the caches, in place."""
        return self._programs[jaxkv.swap_blocks](staged, caches, rows, pages)

    def load_into(self, caches: Any, host_pages: np.ndarray, pages: np.ndarray) -> Any:
        """Loads page `host_pages[i]` into page `pages[i]` of the caches, in place."""
        with self._lock:
            return self._programs[jaxkv.load_pages](self._idle_pool(), caches, host_pages, pages)

    def _idle_pool(self) -> jaxkv.HostPool:
        if self._storing is not None:
            self._pool, self._storing = self._store.end(self._storing), None
        return self._pool


class TwoPrograms:
    """An asynchronous copy: one program starts it, another one waits."""

    def __init__(
        self, operation: Any, result: str, mesh: Mesh, in_specs: Any, out_specs: P, donate: Any
    ) -> None:
        def start(pool: jaxkv.HostPool, staged: Any, host_pages: jax.Array) -> Any:
            rows = jnp.arange(len(host_pages), dtype=jnp.int32)
            handle = operation(pool, staged, host_pages, rows)
            # Over explicit axes the leaves can leave shard_map, the handle cannot.
            leaves, self._structure = jax.tree.flatten(handle)
            return leaves

        def end(leaves: Any) -> Any:
            return getattr(jax.tree.unflatten(self._structure, leaves), result)

        concatenated = P(mesh.axis_names)  # the shards of a leaf, whatever its sharding
        start = over_shards(start, mesh, (*in_specs, P()), concatenated)
        self.start = jax.jit(start, donate_argnums=donate)
        self.end = jax.jit(over_shards(end, mesh, (concatenated,), out_specs), donate_argnums=0)


def over_shards(function: Any, mesh: Mesh, in_specs: Any, out_specs: Any) -> Any:
    """`function` on the shards of each device."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def padded(ids: Sequence[int], padding: int = -1) -> np.ndarray:
    """`ids` up to a power of two, which limits the number of compiled programs."""
    length = 1 << (len(ids) - 1).bit_length()
    return np.array([*ids, *[padding] * (length - len(ids))], np.int32)
