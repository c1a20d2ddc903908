"""Copies of an offload engine: those of blocks, and those during one step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from jaxkv._src.cache.device_cache import DeviceCache
from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.cache.spec import check_size
from jaxkv._src.offload.specs import LoadSpec, StoreSpec
from jaxkv._src.transfer.async_copy import start_load, start_store
from jaxkv._src.transfer.async_handles import LoadHandle, StoreHandle
from jaxkv._src.transfer.dispatch import check_implementation_name
from jaxkv._src.transfer.ids import HostIdPair, HostIds
from jaxkv._src.tuning.copy_table import Implementation

Kind: TypeAlias = Literal["load", "store", "none"]


@dataclasses.dataclass(eq=False)
class OffloadCopy:
    """A load or store of an `OffloadEngine`; its device pages are in use until it is issued.

        store = host_tier.store(keys, device_pages)
        ...                                                   # steps, until store.issued
        pages.free(store.device_pages)

    Attributes:
      kind: "load" or "store".
      keys: the blocks.
      host_pages: page id of each block in the host pool.
      device_pages: page id of each block in the device cache.
      issued: whether `next_batch` has returned all its pages. From the step of that batch on,
        after the waits for it, loaded pages may be read, and stored pages overwritten.
      done: whether the copy has ended. `lookup` then finds stored blocks, unless it `failed`.
      failed: whether a step with pages of the copy has failed or was abandoned, or a block to load
        has been discarded: do not use the loaded pages.
    """

    kind: Kind
    keys: tuple[bytes, ...]
    host_pages: tuple[int, ...]
    device_pages: tuple[int, ...]
    _spec: LoadSpec | StoreSpec = dataclasses.field(repr=False)
    issued: bool = False
    done: bool = False
    failed: bool = False
    _num_taken: int = dataclasses.field(default=0, repr=False)  # pages
    _num_in_flight: int = dataclasses.field(default=0, repr=False)  # batches


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["host_pages", "device_pages"],
    meta_fields=["kind", "implementation"],
    drop_fields=["copies"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class CopyBatch:
    """The pages to copy during one step: a pytree, passed to the program of the step.

        @partial(jax.jit, donate_argnames=("pool", "cache"))
        def step(pool, cache, x, batch):
            copies = batch.start(pool, cache)
            for layer in range(num_layers):
                k, v = copies.wait(layer, after=x)
                ...
            pool = copies.pool if batch.kind == "store" else pool

    Only a batch of kind "store" has `copies.pool`: the others return a `LoadHandle`, without it.
    `kind`, `implementation` and the number of pages are static: one compiled program for each. The
    counterpart of the connector metadata that vLLM's scheduler passes to its workers.

    Attributes:
      kind: "load", "store", or "none" if there is nothing to copy.
      host_pages: int32[n], page ids in the host pool, padded with -1; n is one of the batch sizes.
      device_pages: int32[n], page ids in the device cache, padded with -1.
      copies: the copies with pages in this batch; those that it completes are `issued`. Empty for
        an object rebuilt by a JAX transformation.
      implementation: that of `start_load` and `start_store`; None for dispatch by the tuning table.
    """

    kind: Kind
    host_pages: Any
    device_pages: Any
    copies: tuple[OffloadCopy, ...] = ()
    implementation: Implementation | None = None

    def by(
        self,
        implementation: Implementation | None,
        *,
        sharding: jax.sharding.Sharding | None = None,
    ) -> CopyBatch:
        """The same batch copied by a given implementation; itself if there is nothing to copy.

            pool, cache, tokens = step(pool, cache, x, batch.by("dma"))

        "dma" leaves the SMs to a compute-bound step, such as a prefill. Its ids are
        uploaded here, as `HostIds`, unless they already have been. Each page costs descriptors
        that the host writes; padding costs none.

        Args:
          implementation: as for `start_load`; None leaves the batch as it is.
          sharding: placement of the ids for "dma" under `shard_map`, e.g. replicated over its mesh.

        Raises:
          ValueError: unknown implementation, or `sharding` is not fully replicated.
          TypeError: `sharding` has another type, or the ids are arrays of JAX, as inside jit.
        """
        check_implementation_name(implementation)
        if self.kind == "none" or implementation is None:
            return self
        host_pages, device_pages = self.host_pages, self.device_pages
        if implementation == "dma" and not isinstance(host_pages, HostIds):
            host_pages, device_pages = HostIdPair(host_pages, device_pages, sharding=sharding)
        return dataclasses.replace(
            self,
            host_pages=host_pages,
            device_pages=device_pages,
            implementation=implementation,
        )

    def start(self, pool: HostPool | None, cache: Any, **options: Any) -> LoadHandle | StoreHandle:
        """Starts the copies, in the program of the step.

        Args:
          pool, cache: as for `start_load` or `start_store`; `pool` may be None if there is nothing
            to copy and `cache` is a `DeviceCache`.
          **options: other arguments of `start_load` and `start_store`.

        Returns:
          Their handle. If there is nothing to copy, its waits return the layers unchanged.

        Raises:
          TypeError: `pool` is None, but there are pages to copy, or `cache` is not a `DeviceCache`.
          ValueError, NotImplementedError, PageIndexError: as for `start_load`.
        """
        if pool is None:
            if self.kind != "none" or not isinstance(cache, DeviceCache):
                raise TypeError(
                    f"CopyBatch.start: pool is None, for a batch of kind {self.kind!r} and a cache "
                    f"of type {type(cache).__name__}; pass the HostPool"
                )
            return LoadHandle.idle(cache)
        start = start_store if self.kind == "store" else start_load
        ids = self.host_pages, self.device_pages
        if self.kind == "none":
            ids = ids[0][:0], ids[1][:0]
        handle: LoadHandle | StoreHandle = start(
            pool, cache, *ids, implementation=self.implementation, **options
        )
        return handle


def checked_sizes(batch_sizes: Any) -> tuple[int, ...]:
    """The sizes of the batches of an engine, in ascending order.

    Raises:
      ValueError: there is none, or one is not an integer in [1, 2^31).
    """
    sizes = tuple(batch_sizes) if isinstance(batch_sizes, Iterable) else ()
    if not sizes:
        raise ValueError(
            f"OffloadEngine: batch_sizes={batch_sizes!r:.60} has to be a sequence of at least one "
            "size, such as (16,)"
        )
    names = (f"OffloadEngine: batch_sizes[{i}]" for i in range(len(sizes)))
    return tuple(sorted(map(check_size, sizes, names)))


def paddings(sizes: Sequence[int], *, has_host_tier: bool) -> list[CopyBatch]:
    """A batch without pages of each kind and size; one of kind "none" is enough."""
    kinds: tuple[Kind, ...] = ("none", "load", "store")
    return [
        padded_batch(kind, [], (size,))
        for kind in kinds[: 3 if has_host_tier else 1]
        for size in (sizes[:1] if kind == "none" else sizes)
    ]


def padded_batch(
    kind: Kind,
    pages: Sequence[tuple[int, int]],
    sizes: Sequence[int],
    copies: Sequence[OffloadCopy] = (),
) -> CopyBatch:
    """A batch of pages in the host pool and in the device cache, padded to one of `sizes`."""
    size = next(size for size in sizes if size >= len(pages))
    host_pages, device_pages = (_padded([pair[i] for pair in pages], size) for i in (0, 1))
    return CopyBatch(kind, host_pages, device_pages, tuple(copies))


def _padded(pages: Sequence[int], size: int) -> np.ndarray:
    padded = np.full(size, -1, np.int32)
    padded[: len(pages)] = pages
    return padded
