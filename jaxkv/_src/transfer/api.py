"""Page copies between pinned host memory and HBM, as functions on pools and caches.

A copy has a dense side, where each block is contiguous, and a strided side, a host layout in which
a block may consist of several runs. `load_pages` copies from strided to dense, `store_pages` from
dense to strided; in `swap_blocks` both sides are dense.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.transfer.block_copy import (
    BlockCopy,
    copy_blocks,
    needs_plan,
    plan_pairs,
    result_types,
)
from jaxkv._src.transfer.dispatch import Selection, select_implementation
from jaxkv._src.transfer.groups import (
    IdsOrGroups,
    LayersOrGroups,
    PoolOrGroups,
    TokensOrGroups,
    for_each_group,
    naming_group,
)
from jaxkv._src.transfer.ids import num_ids_of
from jaxkv._src.transfer.memory_kinds import check_memory_kinds
from jaxkv._src.transfer.merged_copies import MERGED, GroupCopy, copy_merged
from jaxkv._src.transfer.resolve import check_known_ids, prepare, resolve
from jaxkv._src.transfer.sharded_arguments import check_sharded_arguments
from jaxkv._src.tuning.copy_table import Implementation

if TYPE_CHECKING:
    from jaxkv._src.transfer.ids import Ids
    from jaxkv._src.transfer.resolve import PreparedCall, PyTree


def load_pages(
    pool: PoolOrGroups,
    cache: PyTree,
    host_pages: IdsOrGroups,
    device_pages: IdsOrGroups,
    *,
    layers: LayersOrGroups = None,
    tokens: TokensOrGroups = None,
    implementation: Implementation | None = None,
) -> PyTree:
    """Copies pages from host memory into the device cache.

    Page `host_pages[i]` of the pool is copied to page `device_pages[i]` of the cache, in the
    selected layers, K and V; all other pages keep their contents. Donate the cache to the
    surrounding jit to update it in place; otherwise XLA copies it first. This is the load direction
    of SGLang's HiCache and of vLLM's offloading connector.

        load = jax.jit(jaxkv.load_pages, donate_argnames="cache")
        cache = load(pool, cache, host_pages, device_pages)

    `layers`, `tokens` and `implementation` are static: bind them with `functools.partial`, or name
    them in `static_argnames`.

    Args:
      pool: `HostPool` in any layout. To copy several caches in one call, pass dicts with the same
        keys as `pool`, `cache`, `host_pages` and `device_pages`; the result is a dict.
      cache: `DeviceCache` of the same `KVCacheSpec`, or the arrays that the pool's
        `ArrayCacheSpec` describes; donate it.
      host_pages: int32[n], page ids in the pool. A list, a NumPy array, a device array, or
        `HostIds`, which "dma" requires. As arguments of a jitted function: int32 arrays or
        `HostIds`. jit makes tracers of the items of a list, and truncates int64 to int32 unchecked.
      device_pages: int32[n], page ids in the cache, in the same forms. Pair i is padding if
        either id is negative.
      layers: a layer number, a sequence such as `range(4, 8)`, or None for all layers. With
        several caches: a dict for some of them; of the others all layers are copied.
      tokens: positions in each page, such as `range(0, 5)`, or None for whole pages. Only these
        tokens are copied, so that an engine can store a page that is not full yet. Each range is
        compiled separately, so round up to a few. An `ArrayCacheSpec` requires its `page_size`.
        With several caches: one range for all of them, or a dict of ranges for some.
      implementation: "dma" (copy engine), "kernel" (SMs), "pallas" (SMs), "host" (CPU backend),
        "xla" (plain JAX, on any platform), or None for dispatch by the tuning table.

    Returns:
      `cache` with the loaded pages.

    Raises:
      ValueError: the arguments do not match, for example in spec or length; an array is deleted,
        closed over by jit, or sharded outside `shard_map`.
      TypeError: an argument has another type, ids are not integers, or an id array of JAX is not
        int32; or `layers` or `tokens` is traced.
      NotImplementedError: `implementation` does not support this call; or inside `jax.vmap`, or
        differentiated.
      PageIndexError: outside jit, an id is out of range or a destination is a duplicate, if both
        lists are known on the host. Otherwise these entries are skipped and `check_errors` raises;
        on the CPU backend the jitted call fails instead, with this name in its text. "xla" counts
        no errors. Ids of a call that copies nothing, such as with `layers=[]`, are not checked.
    """
    state = {"pool": pool, "cache": cache}
    ids = {"host_pages": host_pages, "device_pages": device_pages}
    return _dispatch("load_pages", state, ids, layers, tokens, implementation)


def store_pages(
    pool: PoolOrGroups,
    cache: PyTree,
    host_pages: IdsOrGroups,
    device_pages: IdsOrGroups,
    *,
    layers: LayersOrGroups = None,
    tokens: TokensOrGroups = None,
    implementation: Implementation | None = None,
) -> HostPool:
    """Copies pages from the device cache into host memory.

    The reverse of `load_pages`: page `device_pages[i]` of the cache is copied to page
    `host_pages[i]` of the pool. Donate the pool to the surrounding jit to update it in place;
    otherwise XLA copies the entire pool first. This is the store direction of SGLang's HiCache and
    of vLLM's offloading connector.

        store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
        pool = store(pool, cache, host_pages, device_pages)

    Args:
      pool: `HostPool` in any layout; donate it.
      cache, host_pages, device_pages, layers, tokens, implementation: as for `load_pages`.

    Returns:
      The `HostPool` with the stored pages.

    Raises:
      ValueError: as for `load_pages`, or in a `shard_map` outside jit.
      TypeError, NotImplementedError, PageIndexError: as for `load_pages`.
    """
    state = {"pool": pool, "cache": cache}
    ids = {"device_pages": device_pages, "host_pages": host_pages}
    return _dispatch("store_pages", state, ids, layers, tokens, implementation)


def swap_blocks(
    src: PyTree,
    dst: PyTree,
    src_ids: IdsOrGroups,
    dst_ids: IdsOrGroups,
    *,
    implementation: Implementation | None = None,
) -> PyTree:
    """Copies blocks between arrays: `dst[dst_ids[i]] = src[src_ids[i]]` in every leaf.

    The primitive below `load_pages` for engines with their own arrays, which may be in host or
    device memory on either side. It corresponds to vLLM's swap_blocks.

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
      ValueError: as for `load_pages`; `dst` in host memory in a `shard_map` outside jit; or the
        program copies into so many arrays in host memory that XLA would not compile it.
      TypeError, NotImplementedError, PageIndexError: as for `load_pages`.
    """
    state, ids = {"src": src, "dst": dst}, {"src_ids": src_ids, "dst_ids": dst_ids}
    return _dispatch("swap_blocks", state, ids, None, None, implementation)


def _dispatch(
    operation: str,
    state: dict[str, PyTree],
    ids: dict[str, Any],
    layers: Any,
    tokens: Any,
    implementation: Implementation | None,
) -> PyTree:
    """The result of an operation; `ids` are the source ids, then the destination ids."""

    def prepare_group(
        state: dict[str, PyTree], ids: dict[str, Ids], layers: Any, tokens: Any
    ) -> Any:
        source_ids, destination_ids = ids.values()
        first, second = state.values()
        given = source_ids, destination_ids
        call, traced = prepare(operation, (first, second), given, layers, tokens, implementation)
        return call, traced, (static_layers(layers), tokens)

    groups = for_each_group(operation, state, ids, layers, tokens, prepare_group)
    prepared = {None: prepare_group(state, ids, layers, tokens)} if groups is None else groups
    if any(traced for _, traced, _ in prepared.values()):
        calls = {group: call for group, (call, _, _) in prepared.items()}
        results = _run(operation, calls, implementation)
    else:
        arguments = [(call.state, call.ids) for call, _, _ in prepared.values()]
        selected = tuple((group, *selection) for group, (_, _, selection) in prepared.items())
        with jax.disable_jit(False):  # a Pallas kernel of host memory requires a compiled program
            results = _eager(operation, arguments, selected, implementation)
    return results[0] if groups is None else dict(zip(prepared, results, strict=True))


def static_layers(layers: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """`layers` as a static argument of jit."""
    return None if layers is None else tuple(np.atleast_1d(layers).tolist())


# No donation: outside jit arrays are immutable, at the cost of a copy.
@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def _eager(
    operation: str,
    arguments: list[tuple[tuple[PyTree, PyTree], tuple[Ids, Ids]]],
    selected: tuple[tuple[str | None, tuple[int, ...] | None, range | None], ...],
    implementation: Implementation | None,
) -> list[PyTree]:
    calls = {
        group: resolve(operation, state, ids, layers, tokens)
        for (state, ids), (group, layers, tokens) in zip(arguments, selected, strict=True)
    }
    return _run(operation, calls, implementation)


def copy_now(call: PreparedCall, implementation: Implementation | None) -> list[list[jax.Array]]:
    """Traces the copies of a call; returns the written arrays of each."""
    call = dataclasses.replace(call, rebuild=lambda arrays: arrays)
    (written,) = _run(call.copies[0].operation, {None: call}, implementation)
    return written


def _run(
    operation: str,
    calls: Mapping[str | None, PreparedCall],
    implementation: Implementation | None,
) -> list[PyTree]:
    """The result of each call; `calls` is by group."""
    groups: dict[int, tuple[PreparedCall, list[Selection]]] = {}
    written = [[list(copy.written) for copy in call.copies] for call in calls.values()]
    with jax.named_scope(f"jaxkv.{operation}"):
        for i, (group, call) in enumerate(calls.items()):
            if not call.copies or num_ids_of(call.ids[0]) == 0:
                continue
            with naming_group(operation, group):
                chosen = [select_implementation(c, call.ids, implementation) for c in call.copies]
                groups[i] = _with_barriers(operation, call, chosen), chosen
        for i, of_group in _copy_all(groups).items():
            checked = [check_sharded_arguments(operation, arrays) for arrays in of_group]
            written[i] = fusion_barrier(checked)
    return [call.rebuild(arrays) for call, arrays in zip(calls.values(), written, strict=True)]


def _with_barriers(operation: str, call: PreparedCall, chosen: list[Selection]) -> PreparedCall:
    if chosen[0].implementation == "xla":
        check_known_ids(operation, call)
    copies = [
        copy.with_fusion_barriers(sources=selection.implementation == "dma")
        for copy, selection in zip(call.copies, chosen, strict=True)
    ]
    if operation == "swap_blocks":
        copies = [
            dataclasses.replace(copy, dense=check_memory_kinds(operation, copy.dense))
            for copy in copies
        ]
    if share_destination(copies):
        copies = [dataclasses.replace(copy, strided=copies[0].strided) for copy in copies]
    return dataclasses.replace(call, copies=copies)


def _copy_all(
    groups: dict[int, tuple[PreparedCall, list[Selection]]],
) -> dict[int, list[list[jax.Array]]]:
    """The written arrays of each copy of each group; copies by kernel or host are one call."""
    plans: dict[int, jax.Array | None] = {}
    merged: list[GroupCopy] = []
    for i, (call, chosen) in groups.items():
        names = [selection.implementation for selection in chosen]
        by_kernel = any(name in MERGED for name in names)
        # "dma" and "xla" check the ids themselves.
        planned = "pallas" in names or (by_kernel and needs_plan(call.ids))
        plans[i] = plan_pairs(call.copies[0], call.ids) if planned else None
        merged += [
            GroupCopy(copy, i, call.ids, plans[i], name, selection.num_sms)
            for copy, name, selection in zip(call.copies, names, chosen, strict=True)
            if name in MERGED
        ]
    results = iter(copy_merged(merged) if merged else [])
    return {
        i: _copy_group(
            call,
            chosen,
            plans[i],
            {k: next(results) for k, entry in enumerate(chosen) if entry.implementation in MERGED},
        )
        for i, (call, chosen) in groups.items()
    }


def _copy_group(
    call: PreparedCall,
    chosen: list[Selection],
    pairs: jax.Array | None,
    written: dict[int, list[jax.Array]],
) -> list[list[jax.Array]]:
    """The written arrays of each copy of a group; `written` are those of copies already made."""
    if share_destination(call.copies):
        return _copy_in_sequence(call, chosen, pairs, written)
    together = [i for i, entry in enumerate(chosen) if entry.implementation == "pallas"]
    written |= zip(together, _copy_by_pallas(call, chosen, together, pairs), strict=True)
    for i, (copy, selection) in enumerate(zip(call.copies, chosen, strict=True)):
        if i not in written:
            name, num_sms = selection.implementation, selection.num_sms
            written[i] = copy_blocks(copy, call.ids, pairs, name, num_sms)
    return [written[i] for i in range(len(chosen))]


def share_destination(copies: Sequence[BlockCopy]) -> bool:
    """Whether several copies write the same array: arrays of a layer with different block sizes."""
    return len(copies) > 1 and copies[0].operation in ("store_pages", "start_store")


def _copy_in_sequence(
    call: PreparedCall,
    chosen: list[Selection],
    pairs: jax.Array | None,
    written: dict[int, list[jax.Array]],
) -> list[list[jax.Array]]:
    last = next(iter(written.values()), call.copies[0].strided)
    for i, selection in enumerate(chosen):
        if i in written:
            continue
        copy = dataclasses.replace(call.copies[i], strided=last)
        if selection.implementation == "pallas":
            call.copies[i] = copy
            (last,) = _copy_by_pallas(call, chosen, [i], pairs)
        else:
            name, num_sms = selection.implementation, selection.num_sms
            last = copy_blocks(copy, call.ids, pairs, name, num_sms)
    return [last] * len(chosen)


def _copy_by_pallas(
    call: PreparedCall, chosen: list[Selection], which: list[int], pairs: jax.Array | None
) -> list[list[jax.Array]]:
    """The written arrays of some copies, which share one launch."""
    if not which:
        return []
    from jaxkv._src.transfer import pallas_copy  # lazy: importing Pallas takes half a second

    assert pairs is not None
    copies = [call.copies[i] for i in which]
    results = [result_types(copy) for copy in copies]
    num_sms = max(chosen[i].num_sms for i in which)
    return pallas_copy.copy_blocks_pallas(copies, pairs, results, num_sms=num_sms)
