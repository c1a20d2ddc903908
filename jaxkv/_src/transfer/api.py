"""Page copies between pinned host memory and HBM, as functions on pools and caches.

A copy has a dense side, where each block is contiguous, and a strided side, a host layout in which
a block may consist of several runs. `load_pages` copies from strided to dense, `store_pages` from
dense to strided; in `swap_blocks` both sides are dense.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxkv._src.cache.device_cache import DeviceCache
from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.transfer.block_copy import copy_blocks, needs_plan, plan_pairs, result_types
from jaxkv._src.transfer.dispatch import Selection, select_implementation
from jaxkv._src.transfer.ids import num_ids_of
from jaxkv._src.transfer.memory_kinds import check_memory_kinds
from jaxkv._src.transfer.resolve import prepare, resolve

if TYPE_CHECKING:
    from jaxkv._src.transfer.resolve import Ids, PreparedCall


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

    Page `host_pages[i]` of the pool is copied to page `device_pages[i]` of the cache, in the
    selected layers, K and V; all other pages keep their contents. Donate the cache to the
    surrounding jit to update it in place; otherwise XLA copies it first.

        load = jax.jit(jaxkv.load_pages, donate_argnames="cache")
        cache = load(pool, cache, host_pages, device_pages)

    This is the load direction of SGLang's HiCache and of vLLM's offloading connector.

    Args:
      pool: `HostPool` in any layout.
      cache: `DeviceCache` of the same `KVCacheSpec`; donate it.
      host_pages: int32[n], page ids in the pool. A list, a NumPy array, a device array, or
        `HostIds`, which "dma" requires.
      device_pages: int32[n], page ids in the cache, in the same forms. Pair i is padding if
        either id is negative.
      layers: a layer number, a sequence such as `range(4, 8)`, or None for all layers.
      implementation: "dma" (copy engine), "kernel" (SMs), "pallas" (SMs), "host" (CPU backend),
        or None for dispatch by the tuning table.

    Returns:
      The `DeviceCache` with the loaded pages.

    Raises:
      ValueError: the arguments do not match, for example in spec or length; the message has the
        argument, its value and the limit.
      TypeError: an argument has another type, or a device array of ids another dtype than int32.
      NotImplementedError: `implementation` does not support this call; the message has the reason.
      PageIndexError: an id is out of range or a destination is a duplicate, if both lists are
        known on the host. Otherwise the kernel skips these entries and `check_errors` raises.
    """
    return _dispatch(
        "load_pages", (pool, cache), (host_pages, device_pages), layers, implementation
    )


def store_pages(
    pool: HostPool,
    cache: DeviceCache,
    host_pages: Ids,
    device_pages: Ids,
    *,
    layers: int | Sequence[int] | None = None,
    implementation: str | None = None,
) -> HostPool:
    """Copies pages from the device cache into host memory.

    The reverse of `load_pages`: page `device_pages[i]` of the cache is copied to page
    `host_pages[i]` of the pool. Donate the pool to the surrounding jit to update it in place;
    otherwise XLA copies the entire pool first.

        store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
        pool = store(pool, cache, host_pages, device_pages)

    Args:
      pool: `HostPool` in any layout; donate it.
      cache: `DeviceCache` of the same `KVCacheSpec`.
      host_pages, device_pages, layers, implementation: as for `load_pages`.

    Returns:
      The `HostPool` with the stored pages.

    Raises:
      ValueError, TypeError, NotImplementedError, PageIndexError: as for `load_pages`.
    """
    return _dispatch(
        "store_pages", (pool, cache), (device_pages, host_pages), layers, implementation
    )


def swap_blocks(
    src: Any, dst: Any, src_ids: Ids, dst_ids: Ids, *, implementation: str | None = None
) -> Any:
    """Copies blocks between arrays: `dst[dst_ids[i]] = src[src_ids[i]]` in every leaf.

    The primitive below `load_pages` for engines with their own arrays, which may be in host or
    device memory on either side. This is vLLM's swap_blocks.

        swap = jax.jit(jaxkv.swap_blocks, donate_argnames="dst")
        on_device = swap(on_host, on_device, host_blocks, device_blocks)

    Args:
      src: pytree of `dtype[num_src_blocks, ...]` arrays of byte-aligned dtypes.
      dst: pytree of `dtype[num_dst_blocks, ...]` arrays with the structure, block shapes and dtypes
        of `src`. Donate it to update it in place.
      src_ids, dst_ids: int32[n], block ids in the forms of `load_pages`. Pair i is padding if
        either id is negative.
      implementation: as for `load_pages`.

    Returns:
      `dst` with the copied blocks.

    Raises:
      ValueError, TypeError, NotImplementedError, PageIndexError: as for `load_pages`.
    """
    return _dispatch("swap_blocks", (src, dst), (src_ids, dst_ids), None, implementation)


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


# No donation: outside jit arrays are immutable, at the cost of a copy.
@functools.partial(jax.jit, static_argnums=(0, 3, 4))
def _eager(
    operation: str,
    state: tuple[Any, Any],
    ids: tuple[Ids, Ids],
    layers: tuple[int, ...] | None,
    implementation: str | None,
) -> Any:
    return _run(resolve(operation, state, ids, layers), implementation)


def _run(call: PreparedCall, implementation: str | None) -> Any:
    if not call.copies or num_ids_of(call.ids[0]) == 0:
        return call.rebuild([list(copy.written) for copy in call.copies])
    chosen = [select_implementation(copy, call.ids, implementation) for copy in call.copies]
    operation = call.copies[0].operation
    with jax.named_scope(f"jaxkv.{operation}"):
        copies = [
            copy.with_fusion_barriers(sources=selection.implementation == "dma")
            for copy, selection in zip(call.copies, chosen, strict=True)
        ]
        if operation == "swap_blocks":
            copies = [
                dataclasses.replace(copy, dense=check_memory_kinds(copy.dense)) for copy in copies
            ]
        written = _copy_all(dataclasses.replace(call, copies=copies), chosen)
        return call.rebuild(fusion_barrier(written))


def _copy_all(call: PreparedCall, chosen: list[Selection]) -> list[list[Any]]:
    """The written arrays of each copy; Pallas copies share one launch."""
    together = [i for i, selection in enumerate(chosen) if selection.implementation == "pallas"]
    # All copies have the same ids and share one plan; the copy engine makes its own.
    not_by_dma = [selection for selection in chosen if selection.implementation != "dma"]
    planned = together or needs_plan(call.ids, len(not_by_dma))
    pairs: Any = plan_pairs(call.copies[0], call.ids) if planned else None
    written = {}
    if together:
        from jaxkv._src.transfer import (
            pallas_copy,  # lazy: the import of Pallas takes half a second
        )

        copies = [call.copies[i] for i in together]
        results = [result_types(copy) for copy in copies]
        num_sms = max(chosen[i].num_sms for i in together)
        arrays = pallas_copy.copy_blocks_pallas(copies, pairs, results, num_sms=num_sms)
        written = dict(zip(together, arrays, strict=True))
    for i, (copy, selection) in enumerate(zip(call.copies, chosen, strict=True)):
        if i not in written:
            name, num_sms = selection.implementation, selection.num_sms
            written[i] = copy_blocks(copy, call.ids, pairs, name, num_sms)
    return [written[i] for i in range(len(chosen))]
