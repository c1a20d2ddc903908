"""FFI calls of block copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv._src.cache.host_layout import PageGeometry
from jaxkv._src.runtime import native
from jaxkv._src.runtime.errors import scope_number
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.runtime.sharding import _varying_axes, match_varying_axes
from jaxkv._src.transfer.ids import HostIds, IdPair, num_ids_of, position_of
from jaxkv._src.transfer.memory_kinds import check_host_results
from jaxkv._src.transfer.xla_copy import copy_blocks_xla
from jaxkv._src.tuning.copy_table import Implementation

if TYPE_CHECKING:
    from jax.core import ShapedArray

FfiAttribute: TypeAlias = np.ndarray | np.generic | bool

# FFI target of each implementation. The CUDA kernel and the CPU implementation share a target, so
# that a call without a fixed implementation lowers for either platform.
TARGETS = {
    "kernel": "jaxkv_copy_blocks",
    "host": "jaxkv_copy_blocks",
    "dma": "jaxkv_copy_blocks_dma",
}
# FFI targets that start an asynchronous copy.
START_TARGETS = {
    "kernel": "jaxkv_start_copy",
    "host": "jaxkv_start_copy",
    "dma": "jaxkv_start_copy_dma",
}

# Each thread block of the kernel reads all ids, host ids over the host link. Above this number of
# ids a plan is faster.
_INLINE_HOST_IDS = 1024
# The same holds for the thread blocks of a plan. Above this number it first moves the host ids to
# device memory, which takes two copies.
_UNSTAGED_HOST_IDS = 4096


@dataclasses.dataclass(frozen=True)
class BlockCopy:
    """A copy of buffers with one common geometry: one FFI call.

    Attributes:
      operation: name of the public function, for messages and profiles.
      to_dense: direction; the dense arrays are written if True, otherwise the strided ones.
      dense: arrays with contiguous blocks; buffer b is in array b modulo their number.
      strided: arrays of the strided side, in the same order.
      geometry: the block on each side.
      dense_offsets, strided_offsets: byte offset of each buffer's first block in its array.
      num_dense, num_strided: number of blocks on each side.
    """

    operation: str
    to_dense: bool
    dense: list[jax.Array]
    strided: list[jax.Array]
    geometry: PageGeometry
    dense_offsets: list[int]
    strided_offsets: list[int]
    num_dense: int
    num_strided: int

    @property
    def written(self) -> list[jax.Array]:
        """Arrays that the copy writes; aliased by the results."""
        return self.dense if self.to_dense else self.strided

    def with_fusion_barriers(self, *, sources: bool) -> BlockCopy:
        """The copy with fusion barriers around its destinations, and its sources if `sources`.

        A kernel may read a fused slice. The copy engine may not: XLA may capture a fusion in a
        CUDA graph, and the handler of the copy engine rejects capture.
        """
        dense = fusion_barrier(self.dense) if self.to_dense or sources else self.dense
        strided = self.strided if self.to_dense and not sources else fusion_barrier(self.strided)
        return dataclasses.replace(self, dense=dense, strided=strided)

    @property
    def num_buffers(self) -> int:
        """Number of buffers: blocks that are copied for each pair of ids."""
        return len(self.strided_offsets)

    @property
    def num_sources(self) -> int:
        """Number of source blocks: the limit of source ids."""
        return self.num_strided if self.to_dense else self.num_dense

    @property
    def num_destinations(self) -> int:
        """Number of destination blocks: the limit of destination ids."""
        return self.num_dense if self.to_dense else self.num_strided


def with_varying_axes(copy: BlockCopy, ids: IdPair) -> BlockCopy:
    """The copy; written arrays are typed with the varying mesh axes of their sources and ids."""
    written, read = copy.written, copy.strided if copy.to_dense else copy.dense
    if not any(map(_varying_axes, jax.tree.leaves((ids, read)))):
        return copy
    pairwise = len(written) == len(read)
    sources = [(ids, source) for source in read] if pairwise else [(ids, read)] * len(written)
    typed = [
        match_varying_axes(array, jax.tree.leaves(source))
        for array, source in zip(written, sources, strict=True)
    ]
    if copy.to_dense:
        return dataclasses.replace(copy, dense=typed)
    return dataclasses.replace(copy, strided=typed)


def needs_plan(ids: IdPair) -> bool:
    """Whether copies by kernel or host use a plan instead of checking their ids."""
    limit = _INLINE_HOST_IDS if _any_on_host(ids) else native.extension().INLINE_IDS
    return num_ids_of(ids[0]) > limit


def plan_pairs(copy: BlockCopy, ids: IdPair) -> jax.Array:
    """Traces the check of the ids; returns int32[2 + 2n]: the valid pairs and their number."""
    like, num_ids = jax.typeof(copy.written[0]), num_ids_of(ids[0])
    results = [scratch_like(like, 2 + 2 * num_ids)]
    if _any_on_host(ids) and num_ids > _UNSTAGED_HOST_IDS:
        results.append(scratch_like(like, 2 * num_ids))
    plan = jax.ffi.ffi_call("jaxkv_plan_pairs", results)
    return plan(*_id_operands(ids), copy=_copy_attribute(copy, ids))[0]


def _any_on_host(ids: IdPair) -> bool:
    return any(isinstance(entry, HostIds) for entry in ids)


def copy_blocks(
    copy: BlockCopy,
    ids: IdPair,
    pairs: jax.Array | None,
    implementation: Implementation,
    num_sms: int,
) -> list[jax.Array]:
    """Traces the copy; returns the written arrays.

    Args:
      copy: the buffers to copy.
      ids: source and destination ids.
      pairs: result of `plan_pairs`, or None for a copy that checks the ids itself, as the copy
        engine always does.
      implementation: the selected implementation.
      num_sms: SM limit; 0 if it uses none.
    """
    if implementation == "xla":
        return copy_blocks_xla(copy, ids)
    planned = pairs is not None and implementation != "dma"
    target = "jaxkv_copy_pairs" if planned else TARGETS[implementation]
    return call_copy_handler(target, copy, ids, pairs if planned else None, num_sms)


def call_copy_handler(
    target: str,
    copy: BlockCopy,
    ids: IdPair,
    pairs: jax.Array | None,
    num_sms: int,
    *,
    tickets: Sequence[ShapedArray] = (),
    **attributes: FfiAttribute,
) -> list[jax.Array]:
    """Traces a call of a copy handler; returns its tickets and the written arrays.

    Args:
      target: the handler's FFI target.
      copy: the buffers to copy.
      ids: source and destination ids, if `pairs` is None.
      pairs: result of `plan_pairs`.
      num_sms: SM limit; 0 if it uses none.
      tickets: types of the results before the written arrays.
      **attributes: additional attributes of the FFI call.
    """
    operands = _id_operands(ids) if pairs is None else [pairs]
    written = result_types(copy)
    check_host_results(copy.operation, [*tickets, *written])
    first_written = len(operands) + (len(copy.strided) if copy.to_dense else 0)
    call = jax.ffi.ffi_call(
        target,
        [*tickets, *written],
        input_output_aliases={first_written + i: len(tickets) + i for i in range(len(written))},
    )
    attributes["copy"] = _copy_attribute(copy, ids, num_sms)
    return list(call(*operands, *copy.strided, *copy.dense, **attributes))


_HEADER_NUMBERS = 17


def _copy_attribute(copy: BlockCopy, ids: IdPair, num_sms: int = 0) -> np.ndarray:
    """The attribute `copy` of a handler, in the order in which the handler decodes it."""
    geometry = copy.geometry
    return np.array(
        [
            native.extension().OPERATIONS.index(copy.operation) | scope_number() << 8,
            copy.to_dense,
            num_sms or 1,  # 0 for the copy engine and the host
            *(position_of(entry) if isinstance(entry, HostIds) else 0 for entry in ids),
            num_ids_of(ids[0]),
            len(copy.dense),
            geometry.block_bytes,
            geometry.dense_stride_bytes,
            geometry.run_bytes,
            *geometry.counts,
            *geometry.strides_bytes,
            geometry.page_stride_bytes,
            copy.num_dense,
            copy.num_strided,
            *copy.strided_offsets,
            *copy.dense_offsets,
        ],
        np.int64,
    )


def is_to_dense(attribute: Sequence[int]) -> bool:
    """Whether a copy writes its dense arrays, from its attribute."""
    return bool(attribute[1])


def num_buffers_of(attribute: Sequence[int]) -> int:
    """Number of buffers of a copy, from its attribute: two offsets each after the header."""
    return (len(attribute) - _HEADER_NUMBERS) // 2


def _id_operands(ids: IdPair) -> list[jax.Array]:
    return [entry.data if isinstance(entry, HostIds) else jnp.asarray(entry) for entry in ids]


def result_types(copy: BlockCopy) -> list[ShapedArray]:
    """The types of the written arrays; the type of a traced pool may lack its memory space."""
    types = [jax.typeof(array) for array in copy.written]
    if copy.operation in ("store_pages", "start_store"):
        return [entry.update(memory_space=jax.memory.Space.Host) for entry in types]
    return types


def scratch_like(result: ShapedArray, length: int) -> jax.ShapeDtypeStruct:
    """int32 device memory for the handler, with the varying mesh axes of the result."""
    mesh = result.sharding.mesh
    return jax.ShapeDtypeStruct(
        (length,),
        jnp.int32,
        sharding=None if mesh.empty else NamedSharding(mesh, PartitionSpec(None)),
        manual_axis_type=result.manual_axis_type,
    )
