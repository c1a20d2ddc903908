"""Asynchronous copies, overlapped with compute layer by layer.

`start_load`, `start_store` and `start_swap` enqueue a copy on a copy stream and return a handle.
The handle owns the arrays of the copy, so that no operation reads or overwrites them early: `wait`
returns the arrays of a layer after its copy.
"""

from __future__ import annotations

from typing import Any

from jaxkv._src.transfer.async_handles import LoadHandle, StoreHandle
from jaxkv._src.transfer.groups import (
    IdsOrGroups,
    LayersOrGroups,
    PoolOrGroups,
    TokensOrGroups,
    for_each_group,
)
from jaxkv._src.transfer.swap_handle import SwapHandle
from jaxkv._src.tuning.copy_table import Implementation


def start_load(
    pool: PoolOrGroups,
    cache: Any,
    host_pages: IdsOrGroups,
    device_pages: IdsOrGroups,
    *,
    layers: LayersOrGroups = None,
    tokens: TokensOrGroups = None,
    implementation: Implementation | None = None,
    timeout_s: float = 30.0,
) -> Any:
    """Starts an asynchronous copy of pages from host memory into the device cache.

    Like `load_pages`, but on a copy stream and layer by layer in the order of `layers`. Wait for a
    layer where it is first used, so that its copy overlaps the compute of the layers before it:

        loading = jaxkv.start_load(pool, cache, host_pages, device_pages)
        for layer in range(spec.num_layers):
            k, v = loading.wait(layer, after=x)
            x = attention(x, k, v)
        cache = loading.cache

    Copies of one direction with one implementation complete in the order of their starts. To wait
    in another program, return the handle from the program that starts it and pass it, donated, to
    the one that waits; do not overwrite the pool before that wait. XLA orders both in one program.

    If the arrays of a layer have several block sizes (pages and their scales), those of the size
    with the most bytes are copied in this way, and the others before the compute that follows.

    A layer without a wait is correct but not overlapped: the program then waits for the entire
    copy at its start, since XLA could otherwise reuse the memory of that layer during the copy.

    This is the layer-wise overlap of SGLang's HiCache, which has one event per layer.

    Args:
      pool, host_pages, device_pages, layers, tokens: as for `load_pages`.
      cache: as for `load_pages`; donate it.
      implementation: "dma" (copy engine), "kernel" (SMs), "host" (CPU backend), "xla" (plain
        JAX, on any platform: not overlapped, complete at the start), or None for dispatch by the
        tuning table.
      timeout_s: limit of each wait in seconds, more than 0 and at most 1e9; static, like `layers`.
        After a timeout the arrays may miss pages, and `check_errors` raises TransferError.

    Returns:
      A `LoadHandle`, or a dict of them; the host does not block.

    Raises:
      ValueError: `timeout_s` is out of range; more than 1,023 layers, or more than 256 arrays of
        one block size in a layer; in a program for several devices, outside a `shard_map` over all
        mesh axes; or as for `load_pages`.
      RuntimeError: the handle leaves its program under `jax_debug_nans`, which disables donation.
      TypeError: `timeout_s` is traced, or as for `load_pages`.
      NotImplementedError, PageIndexError: as for `load_pages`.
    """
    ids = {"host_pages": host_pages, "device_pages": device_pages}
    state = {"pool": pool, "cache": cache}
    return _start(LoadHandle, "start_load", state, ids, layers, tokens, implementation, timeout_s)


def start_store(
    pool: PoolOrGroups,
    cache: Any,
    host_pages: IdsOrGroups,
    device_pages: IdsOrGroups,
    *,
    layers: LayersOrGroups = None,
    tokens: TokensOrGroups = None,
    implementation: Implementation | None = None,
    timeout_s: float = 30.0,
) -> Any:
    """Starts an asynchronous copy of pages from the device cache into host memory.

    Like `store_pages`, but on a copy stream. Take the arrays of a layer from `wait` before they
    are overwritten; otherwise XLA copies them first. Take the pool from `.pool`:

        storing = jaxkv.start_store(pool, cache, host_pages, device_pages)
        for layer in range(spec.num_layers):
            k, v = storing.wait(layer, after=x)
            x, k, v = decode(x, k, v)
        pool = storing.pool

    SGLang's HiCache stores on a separate CUDA stream in this way.

    Args:
      pool, cache: as for `store_pages`; donate both, otherwise XLA copies them first.
      host_pages, device_pages, layers, tokens: as for `load_pages`.
      implementation, timeout_s: as for `start_load`.

    Returns:
      A `StoreHandle`, or a dict of them; the host does not block.

    Raises:
      ValueError, TypeError, NotImplementedError, PageIndexError: as for `start_load`.
    """
    ids = {"device_pages": device_pages, "host_pages": host_pages}
    state = {"pool": pool, "cache": cache}
    return _start(StoreHandle, "start_store", state, ids, layers, tokens, implementation, timeout_s)


def start_swap(
    src: Any,
    dst: Any,
    src_ids: IdsOrGroups,
    dst_ids: IdsOrGroups,
    *,
    implementation: Implementation | None = None,
    timeout_s: float = 30.0,
) -> Any:
    """Starts an asynchronous copy of blocks: `dst[dst_ids[i]] = src[src_ids[i]]` in every leaf.

    Like `swap_blocks`, but on a copy stream and array by array. Wait for an array where it is first
    used, so that its copy overlaps the compute before it:

        swapping = jaxkv.start_swap(on_host, on_device, host_blocks, device_blocks)
        for layer in range(num_layers):
            x = attention(x, swapping.wait(layer, after=x))
        on_device = swapping.wait()

    A swap to the device follows the rules of `start_load`: keep `src` unchanged until the wait. A
    swap into pinned host memory follows those of `start_store`: the handle owns `src` too, and
    `.src` returns it. vLLM's offloading connector calls its `swap_blocks` on CUDA streams of its
    own in this way.

    Args:
      src: as for `swap_blocks`; donate it if `dst` is in pinned host memory, otherwise XLA copies
        what the program returns of it.
      dst: as for `swap_blocks`, in one memory kind; donate it. Of several block sizes, the one with
        the most bytes is copied asynchronously.
      src_ids, dst_ids: as for `swap_blocks`.
      implementation, timeout_s: as for `start_load`.

    Returns:
      A `SwapHandle`, or a dict of them for groups; the host does not block.

    Raises:
      ValueError: arrays of `dst`, or of `src` if `dst` is in host memory, in several memory kinds;
        more than 1,023 of one block size; as for `start_load`; or the program copies into so many
        arrays in host memory that XLA would not compile it.
      TypeError: as for `start_load`.
      NotImplementedError, PageIndexError: as for `swap_blocks`.
    """
    state, ids = {"src": src, "dst": dst}, {"src_ids": src_ids, "dst_ids": dst_ids}

    def start_group(state: dict[str, Any], ids: dict[str, Any], *_: None) -> SwapHandle:
        given = ids["src_ids"], ids["dst_ids"]
        return SwapHandle._begin(state["src"], state["dst"], given, implementation, timeout_s)

    groups = for_each_group("start_swap", state, ids, None, None, start_group)
    return start_group(state, ids) if groups is None else groups


def _start(
    handle: type[LoadHandle] | type[StoreHandle],
    operation: str,
    state: dict[str, Any],
    ids: dict[str, Any],
    layers: Any,
    tokens: Any,
    implementation: Implementation | None,
    timeout_s: float,
) -> Any:
    """The handle of a copy, or a dict of the handles of groups."""

    def start_group(state: dict[str, Any], ids: dict[str, Any], layers: Any, tokens: Any) -> Any:
        source_ids, destination_ids = ids.values()
        return handle._begin(
            operation,
            state["pool"],
            state["cache"],
            (source_ids, destination_ids),
            layers,
            tokens,
            implementation,
            timeout_s,
        )

    groups = for_each_group(operation, state, ids, layers, tokens, start_group)
    return start_group(state, ids, layers, tokens) if groups is None else groups
