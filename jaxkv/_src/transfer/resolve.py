"""Validation of the arguments of a transfer, and their resolution to block copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxkv._src.cache.host_layout import PageGeometry
from jaxkv._src.runtime.dtypes import check_byte_dtype, check_canonical_dtype
from jaxkv._src.runtime.pytrees import structure_difference
from jaxkv._src.runtime.sharding import check_arguments_unsharded
from jaxkv._src.runtime.tracing import check_not_closed_over, check_not_deleted
from jaxkv._src.transfer.block_copy import BlockCopy, result_types, with_varying_axes
from jaxkv._src.transfer.dispatch import check_implementation_name, on_host
from jaxkv._src.transfer.ids import (
    HostIds,
    IdPair,
    Ids,
    as_ids,
    check_page_ids,
    known_ids,
    num_ids_of,
    upload_ids,
)
from jaxkv._src.transfer.memory_kinds import SWAPS, check_shard_map_is_compiled, with_checked_pool
from jaxkv._src.transfer.page_copies import PyTree, Rebuild, Resolved, resolve_pages
from jaxkv._src.transfer.transformations import reject_transformations
from jaxkv._src.tuning.copy_table import Implementation


@dataclasses.dataclass(frozen=True)
class PreparedCall:
    """The copies of an operation, and the function that builds its result from theirs."""

    copies: list[BlockCopy]
    state: tuple[PyTree, PyTree]  # pool and cache, or src and dst
    ids: IdPair
    rebuild: Rebuild


def prepare(
    operation: str,
    state: tuple[PyTree, PyTree],
    ids: tuple[Ids, Ids],
    layers: int | Sequence[int] | None,
    tokens: range | None,
    implementation: Implementation | None,
) -> tuple[PreparedCall, bool]:
    """Checks the arguments of an operation; returns its copies and whether it is traced."""
    check_implementation_name(implementation, f"{operation}: implementation")
    names = ("src", "dst") if operation in SWAPS else ("pool", "cache")
    for name, argument in zip(names, state, strict=True):
        check_not_closed_over(operation, name, argument)
    leaves = jax.tree.leaves((state, ids))
    traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
    if traced:
        state, ids = reject_transformations(operation, (state, ids))
        if operation not in SWAPS:
            state = with_checked_pool(operation, *state)
    call = resolve(operation, state, ids, layers, tokens)
    id_names, _ = _OPERATIONS[operation]
    arguments = zip((*names, *id_names), (*state, *call.ids), strict=True)
    check_arguments_unsharded(operation, dict(arguments))
    if traced:
        _check_host_ids_are_passed(operation, call.ids, id_names)
        for copy in call.copies:
            check_shard_map_is_compiled(operation, copy.written, result_types(copy))
    else:
        _check_concrete(operation, call, names)
        call = dataclasses.replace(call, ids=upload_ids(call.ids, jax.tree.leaves(state)))
    return call, traced


def resolve(
    operation: str,
    state: tuple[PyTree, PyTree],
    ids: tuple[Ids, Ids],
    layers: int | Sequence[int] | None,
    tokens: range | None = None,
) -> PreparedCall:
    """The copies of an operation; raises if its arguments do not match."""
    names, make_copies = _OPERATIONS[operation]
    source_ids, destination_ids = (
        as_ids(value, f"{operation}: {name}") for value, name in zip(ids, names, strict=True)
    )
    if num_ids_of(source_ids) != num_ids_of(destination_ids):
        raise ValueError(
            f"{operation}: {names[0]} and {names[1]} must have the same length, got "
            f"{num_ids_of(source_ids)} and {num_ids_of(destination_ids)}"
        )
    copies, rebuild = make_copies(operation, *state, layers, tokens)
    copies = [with_varying_axes(copy, (source_ids, destination_ids)) for copy in copies]
    return PreparedCall(copies, state, (source_ids, destination_ids), rebuild)


def _resolve_swap(operation: str, src: PyTree, dst: PyTree, layers: None, tokens: None) -> Resolved:
    sources, source_tree = jax.tree.flatten(src)
    destinations, destination_tree = jax.tree.flatten(dst)
    if source_tree != destination_tree:  # type: ignore[operator]
        raise ValueError(
            f"{operation}: dst must have the pytree structure of src: "
            + structure_difference(source_tree, destination_tree)
        )
    _check_blocks(operation, "src", sources)
    _check_blocks(operation, "dst", destinations)
    groups: dict[int, list[int]] = {}
    for leaf, (source, destination) in enumerate(zip(sources, destinations, strict=True)):
        in_src, in_dst = (f"{a.dtype}{list(a.shape[1:])}" for a in (source, destination))
        if in_src != in_dst:
            raise ValueError(
                f"{operation}: blocks of src and dst must have the same dtype and shape, got "
                f"{in_src} and {in_dst} in leaf {leaf}"
            )
        check_byte_dtype(source.dtype, f"{operation}: dtype of leaf {leaf}")
        block_bytes = int(np.prod(source.shape[1:], dtype=np.int64)) * source.dtype.itemsize
        if block_bytes and source.shape[0] and destination.shape[0]:
            groups.setdefault(block_bytes, []).append(leaf)
    # The form of a store for asynchronous copies into host memory: its ticket is written there.
    to_dense = operation != "start_swap" or not in_host_memory(operation, "dst", destinations)
    dense, strided = (destinations, sources) if to_dense else (sources, destinations)
    copies = [
        BlockCopy(
            operation=operation,
            to_dense=to_dense,
            dense=[dense[leaf] for leaf in leaves],
            strided=[strided[leaf] for leaf in leaves],
            geometry=PageGeometry.contiguous(block_bytes, block_bytes),
            dense_offsets=[0] * len(leaves),
            strided_offsets=[0] * len(leaves),
            num_dense=dense[0].shape[0],
            num_strided=strided[0].shape[0],
        )
        for block_bytes, leaves in groups.items()
    ]

    def rebuild(written: list[list[jax.Array]]) -> PyTree:
        result = list(destinations)
        for leaves, arrays in zip(groups.values(), written, strict=True):
            for leaf, array in zip(leaves, arrays, strict=True):
                result[leaf] = array
        return jax.tree.unflatten(destination_tree, result)

    return copies, rebuild


def _check_blocks(operation: str, side: str, arrays: Sequence[jax.Array]) -> None:
    """Raises a TypeError or ValueError unless these are arrays of equally many blocks."""
    for array in arrays:
        if not hasattr(array, "dtype"):
            raise TypeError(
                f"{operation}: {side} must be a pytree of arrays, got {type(array).__name__}"
            )
        if array.ndim < 1:
            raise ValueError(
                f"{operation}: each array of {side} must have shape [num_blocks, ...], got shape ()"
            )
        check_canonical_dtype(array, f"{operation}: an array of {side}")
    if len({array.shape[0] for array in arrays}) > 1:
        sizes = [array.shape[0] for array in arrays]
        raise ValueError(
            f"{operation}: all arrays of {side} must have the same number of blocks, got {sizes}"
        )
    if arrays and arrays[0].shape[0] > (limit := np.iinfo(np.int32).max):
        raise ValueError(
            f"{operation}: {side} has {arrays[0].shape[0]} blocks, the limit of int32 ids is "
            f"{limit}"
        )


def in_host_memory(operation: str, side: str, arrays: Sequence[jax.Array]) -> bool:
    """Whether the arrays of a side are in host memory; raises a ValueError if only some are."""
    kinds = [on_host(array) for array in arrays]
    if any(kinds) and not all(kinds):
        raise ValueError(
            f"{operation}: all arrays of {side} must have the same memory kind, got array "
            f"{kinds.index(True)} in pinned_host and array {kinds.index(False)} in device memory; "
            "start one swap for each"
        )
    return any(kinds)


# Per operation: names of the id arguments, source first, and the function that makes its copies.
_OPERATIONS: dict[str, tuple[tuple[str, str], Callable[..., Resolved]]] = {
    "load_pages": (("host_pages", "device_pages"), resolve_pages),
    "store_pages": (("device_pages", "host_pages"), resolve_pages),
    "start_load": (("host_pages", "device_pages"), resolve_pages),
    "start_store": (("device_pages", "host_pages"), resolve_pages),
    "swap_blocks": (("src_ids", "dst_ids"), _resolve_swap),
    "start_swap": (("src_ids", "dst_ids"), _resolve_swap),
}


def _check_host_ids_are_passed(operation: str, ids: IdPair, names: tuple[str, str]) -> None:
    """Rejects closed-over HostIds: XLA copies them, and a copy is not written by the host."""
    for entry, name in zip(ids, names, strict=True):
        if isinstance(entry, HostIds) and not isinstance(entry.data, jax.core.Tracer):
            raise ValueError(
                f"{operation}: {name}: HostIds must be arguments of the jitted function, not "
                "closed over"
            )


def _check_concrete(operation: str, call: PreparedCall, names: tuple[str, str]) -> None:
    """Checks of concrete values: deleted arrays, and ids that are known on the host."""
    id_names, _ = _OPERATIONS[operation]
    arguments = zip((*names, *id_names), (*call.state, *call.ids), strict=True)
    check_not_deleted(operation, **dict(arguments))
    check_known_ids(operation, call)


def check_known_ids(operation: str, call: PreparedCall) -> None:
    """Raises PageIndexError for invalid entries if all ids are known on the host.

    A call that copies nothing does not check its ids, as inside jit, where no handler runs.
    """
    if call.copies:
        sources, destinations = (known_ids(entry) for entry in call.ids)
        limits = call.copies[0].num_sources, call.copies[0].num_destinations
        names, _ = _OPERATIONS[operation]
        check_page_ids(operation, (sources, destinations), limits, names)
