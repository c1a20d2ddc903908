"""Page copies between pinned host memory and HBM, as functions on pools and caches.

A copy has a dense side, where each block is contiguous, and a strided side, a host layout that may
strew a block over runs. `load_pages` goes from strided to dense, `store_pages` back, and
`swap_blocks` is the case in which both sides are dense.
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
    host_pages: Ids,
    device_pages: Ids,
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
      host_pages, device_pages, layers, implementation: as for `load_pages`.

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


def _run(call: PreparedCall, implementation: str | None) -> Any:
    if not call.copies or num_ids_of(call.ids[0]) == 0:
        return call.rebuild([list(copy.written) for copy in call.copies])
    chosen = [select_implementation(copy, call.ids, implementation) for copy in call.copies]
    with jax.named_scope(f"jaxkv.{call.copies[0].operation}"):
        copies = [
            copy.with_fusion_barriers(sources=selection.implementation == "dma")
            for copy, selection in zip(call.copies, chosen, strict=True)
        ]
        written = _copy_all(dataclasses.replace(call, copies=copies), chosen)
        return call.rebuild(fusion_barrier(written))


def _copy_all(call: PreparedCall, chosen: list[Selection]) -> list[list[Any]]:
    """The written arrays of each copy; those that Pallas serves share a launch."""
    together = [i for i, selection in enumerate(chosen) if selection.implementation == "pallas"]
    # All copies name the same blocks, so they share one plan; the copy engine makes its own.
    not_by_dma = [selection for selection in chosen if selection.implementation != "dma"]
    planned = together or needs_plan(call.ids, len(not_by_dma))
    pairs: Any = plan_pairs(call.copies[0], call.ids) if planned else None
    written = {}
    if together:
        from jaxkv._src.transfer import (
            pallas_copy,  # here, because Pallas takes half a second to import
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
