"""The bytes of the pages of a host pool, for tiers."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import numpy as np

from jaxkv._src.cache.array_cache import ArrayHostLayout
from jaxkv._src.cache.host_pool import HostPool, description
from jaxkv._src.cache.pinned_memory import view_of, writable
from jaxkv._src.offload.integers import checked_integer
from jaxkv._src.runtime import native


class PoolMemory:
    """The parts of each page: its contiguous runs in each shard of the pool.

    They are views of the pinned memory, which stays where it is as long as the pool is donated to
    every store.
    Keys of the parts name their place and the layout of the pool, so that pools of another layout
    or another number of shards do not read them.

    Args:
      pool: on one device, or sharded over heads or arrays, with all shards in this process.

    Raises:
      ValueError: it is not a pool, or has page shards, or shards in other processes.
    """

    def __init__(self, pool: HostPool | int) -> None:
        if not isinstance(pool, HostPool):
            raise ValueError(f"OffloadEngine: tiers need the pool itself, got pool={pool}")
        if not pool.data.is_fully_addressable:
            raise ValueError(
                "OffloadEngine: tiers need a pool with all shards in this process; give each "
                "process a pool of its own, and decide in one of them"
            )
        if getattr(pool.spec, "num_page_shards", 1) > 1:
            raise ValueError("OffloadEngine: tiers do not support pools with page shards")
        shards = {_start(shard): shard for shard in pool.data.addressable_shards}  # no replicas
        self._memory: list[Any] = []
        self._runs: list[np.ndarray[Any, Any]] = []
        for start in sorted(shards):
            memory = writable(view_of(pool.data, shards[start].device))
            self._memory.append(native.extension().pinned_ref(memory.ctypes.data))
            self._runs += [*memory.reshape(_num_runs(pool), pool.num_pages, -1)]
        self.block_bytes = self._runs[0].shape[1]
        what = f"{description(pool.spec)} {pool.layout} {pool.head_groups} {len(shards)}"
        digest = hashlib.sha256(what.encode()).digest()[:8]
        self._suffixes = [digest + struct.pack("<H", i) for i in range(len(self._runs))]

    def keys(self, key: bytes) -> list[bytes]:
        return [key + suffix for suffix in self._suffixes]

    def parts(self, page: int) -> list[memoryview]:
        return [run[page].data for run in self._runs]

    def is_in_use(self) -> bool:
        """Whether the shards are still arrays of JAX, rather than copies that a step returned."""
        return all(map(native.extension().num_pinned_arrays, self._memory))


def num_pages_of(pool: HostPool | int) -> int:
    """The pages of a pool, or their number itself."""
    if isinstance(pool, HostPool):
        shards = getattr(pool.spec, "num_page_shards", 1)
        if shards > 1:
            raise ValueError(
                f"OffloadEngine: pool has num_page_shards={shards}, and page ids are those in a "
                f"shard; create an engine for each, with pool={pool.num_pages // shards}"
            )
        return pool.num_pages
    expected = "the HostPool, or its number of pages if there are no tiers"
    return checked_integer("OffloadEngine: pool", pool, expected, 0)


def _start(shard: Any) -> tuple[int, ...]:
    return tuple(axis.start or 0 for axis in shard.index)


def _num_runs(pool: HostPool) -> int:
    """The number of contiguous runs of a page in a shard."""
    layout = pool.host_layout
    if isinstance(layout, ArrayHostLayout):
        return layout.spec.num_layers if layout.name == "layer_first" else 1
    place = next(i for i, merged in enumerate(layout.axes) if "page" in merged)
    return math.prod(layout.shape[:place])
