"""FFI calls of asynchronous copies: start and wait."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxkv._src.runtime import native
from jaxkv._src.runtime.errors import scope_attribute
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.transfer.api import copy_now, share_destination
from jaxkv._src.transfer.block_copy import (
    START_TARGETS,
    BlockCopy,
    FfiAttribute,
    call_copy_handler,
    plan_pairs,
    result_types,
)
from jaxkv._src.transfer.buffer_lifetime import MOVE_TICKET_TARGET, WAIT_TARGET, analysed
from jaxkv._src.transfer.dispatch import Selection, select_implementation
from jaxkv._src.transfer.ids import IdPair, num_ids_of
from jaxkv._src.transfer.resolve import PreparedCall, check_known_ids
from jaxkv._src.transfer.sharded_arguments import HANDLE_LEAVES, check_sharded_arguments
from jaxkv._src.transfer.xla_copy import copy_blocks_xla
from jaxkv._src.tuning.copy_table import Implementation

if TYPE_CHECKING:
    from jax.core import ShapedArray

# What keeps the copy engine busy while the host launches the compute before the next wait: about
# 2 ms of a PCIe 5 link, or descriptors that take the host about 1 ms.
_BYTES_AHEAD = 128 << 20
_DESCRIPTORS_AHEAD = 1024

_WORDS = 2  # int32 words per 64-bit entry of a ticket: its number, then the address of each array


class StartedCopy(NamedTuple):
    """The results of a start.

    Attributes:
      ticket: identifies the copy in flight; None if all are complete.
      plan: the validated pairs, if the copy in flight reads them.
      written: the arrays that each copy of the call writes.
    """

    ticket: jax.Array | None
    plan: jax.Array | None
    written: list[list[jax.Array]]


def overlapped_copy(copies: Sequence[BlockCopy]) -> int:
    """Number of the copy that a start leaves in flight, the one with the most bytes.

    The others, with blocks of other sizes, are complete when compute continues: scales of quantized
    pages are a few percent of the bytes, and a wait for each size would cost more than they do.
    """
    sizes = [copy.geometry.block_bytes * len(copy.dense_offsets) for copy in copies]
    return sizes.index(max(sizes))


def start_copy(
    call: PreparedCall, implementation: Implementation | None, num_segments: int
) -> StartedCopy:
    """Traces the start of a call whose arrays have fusion barriers.

    Args:
      call: the call.
      implementation: the requested implementation, if any.
      num_segments: number of segments of the copy that remains in flight.
    """
    chosen = overlapped_copy(call.copies)
    copy, others = call.copies[chosen], call.copies[:chosen] + call.copies[chosen + 1 :]
    shared = share_destination(call.copies)
    written: list[list[jax.Array]] = []
    if others:
        written = copy_now(dataclasses.replace(call, copies=others), implementation)
        if shared:
            copy = dataclasses.replace(copy, strided=written[-1])
    ticket, plan, arrays = _start_one(copy, call, implementation, num_segments)
    written = [arrays] * len(call.copies) if shared else written
    if not shared:
        written.insert(chosen, arrays)
    return StartedCopy(ticket, plan, written)


def _start_one(
    copy: BlockCopy,
    call: PreparedCall,
    implementation: Implementation | None,
    num_segments: int,
) -> tuple[jax.Array | None, jax.Array | None, list[jax.Array]]:
    """The ticket, the plan, and the written arrays of a start."""
    operation = copy.operation
    selection = select_implementation(copy, call.ids, implementation, overlapped=True)
    if selection.implementation == "xla":
        check_known_ids(operation, call)
        with jax.named_scope(f"jaxkv.{operation}"):
            return None, None, copy_blocks_xla(copy, call.ids)
    plan = None
    with jax.named_scope(f"jaxkv.{operation}"):
        if selection.implementation != "dma":
            plan = plan_pairs(copy, call.ids)
        segment_buffers = len(copy.dense_offsets) // num_segments
        _check_segments(operation, num_segments, segment_buffers)
        results = _start(copy, call.ids, plan, selection, segment_buffers)
    ticket, *written = analysed(check_sharded_arguments(operation, results), operation)
    if not copy.to_dense:
        # XLA places all results of a call that writes host memory there. But waits read the
        # ticket in device memory, and a leaf that changes its memory space cannot be donated.
        ticket = _move_ticket(ticket, copy.dense[0], operation)
    return ticket, plan, fusion_barrier(written)


def _check_segments(operation: str, num_segments: int, segment_buffers: int) -> None:
    """Limits of the CUDA handlers, which a CPU rejects, too."""
    most, most_buffers = native.extension().MAX_SEGMENTS, native.extension().MAX_SEGMENT_BUFFERS
    if num_segments > most:
        raise ValueError(
            f"{operation}: {num_segments} layers (or swap arrays) exceed the limit {most}; split "
            "the copy"
        )
    if segment_buffers > most_buffers:
        raise ValueError(
            f"{operation}: {segment_buffers} arrays of one shape in each layer exceed the limit "
            f"{most_buffers}; use the synchronous operation"
        )


def _start(
    copy: BlockCopy, ids: IdPair, plan: jax.Array | None, selection: Selection, segment_buffers: int
) -> list[jax.Array]:
    """Traces the start; returns the ticket and the written arrays."""
    # XLA places all results of a call that writes host memory there, also the ticket of a store.
    ticket = _ticket_like(result_types(copy)[0], _WORDS * (1 + len(copy.written)))
    attributes: dict[str, FfiAttribute] = {}
    if selection.implementation == "dma":
        attributes["segments_ahead"] = np.int64(_segments_ahead(copy, ids, segment_buffers))
        attributes["deferred"] = False  # set by `buffer_lifetime` if the program waits for the copy
    return call_copy_handler(
        START_TARGETS[selection.implementation],
        copy,
        ids,
        plan,
        selection.num_sms,
        tickets=[ticket],
        segment_buffers=np.int64(segment_buffers),
        joined=True,  # cleared by `buffer_lifetime` if all buffers outlive the copy
        **attributes,
    )


def _segments_ahead(copy: BlockCopy, ids: IdPair, segment_buffers: int) -> int:
    """Number of segments that keep the copy engine busy until the next wait, at least 1."""
    blocks = num_ids_of(ids[0]) * segment_buffers
    runs = copy.geometry.block_bytes // copy.geometry.run_bytes
    of_bytes = -(-_BYTES_AHEAD // (blocks * copy.geometry.block_bytes))
    return min(of_bytes, -(-_DESCRIPTORS_AHEAD // (blocks * runs)))


def _move_ticket(ticket: jax.Array, like: jax.Array, operation: str) -> jax.Array:
    """Traces the move of a ticket to device memory, with the varying mesh axes of `like`."""
    on_device = jax.typeof(like).update(memory_space=jax.memory.Space.Device)
    call = jax.ffi.ffi_call(MOVE_TICKET_TARGET, _ticket_like(on_device, ticket.shape[0]))
    (ticket,) = analysed([call(ticket)], operation)
    return ticket


def _wait(
    arrays: list[jax.Array],
    operands: tuple[jax.Array, ...],
    *,
    timeout_s: float,
    like: jax.Array | None,
    segment: int = -1,
    places: tuple[int, ...] = (),
    retained: int = 0,
    last: int = -1,
    boundary: tuple[int, ...] = (),
    traced_segment: jax.Array | None = None,
) -> list[jax.Array]:
    """Traces a wait; returns the next ticket, unless `like` is None, and the arrays.

    Args:
      arrays: the arrays that are complete after the wait.
      operands: the ticket, the other arrays that the copy uses, and arrays to compute before.
      timeout_s: seconds until the wait times out and records an error.
      like: an array in the memory space of the next ticket.
      segment: the segment to wait for, one per layer in the order of the copy; -1 for none.
      places: positions of `arrays` among the arrays that the copy writes; empty if it reads them.
      retained: number of operands after the ticket that the copy uses.
      last: number of the last segment of the copy.
      boundary: segment of each array, for a wait that is removed if the program waits later;
        empty for other waits.
      traced_segment: int32 scalar on the device, the segment to wait for instead of `segment`.
    """
    if traced_segment is not None:
        operands = (*operands, traced_segment.astype(np.int32).reshape(1))
        segment = -1  # unknown: for the lifetime analysis this wait covers nothing
    results = [jax.typeof(array) for array in arrays]
    if like is None:
        tickets = []
        results = [result.update(memory_space=jax.memory.Space.Host) for result in results]
    else:
        # Outside `shard_map`, explicit mesh axes: sharded as before.
        sharding = jax.typeof(operands[0]).sharding
        tickets = [_ticket_like(jax.typeof(like), operands[0].shape[0]).update(sharding=sharding)]
    call = jax.ffi.ffi_call(
        WAIT_TARGET,
        [*tickets, *results],
        input_output_aliases={len(operands) + i: len(tickets) + i for i in range(len(arrays))},
    )
    with jax.named_scope("jaxkv.wait"):
        waited = call(
            *operands,
            *fusion_barrier(arrays),
            segment=np.int64(segment),
            timeout_ns=np.int64(math.ceil(timeout_s * 1e9)),
            first_array=np.int64(len(tickets)),
            places=np.array(places, np.int64),
            retained=np.int64(retained),
            last=np.int64(last),
            has_traced_segment=traced_segment is not None,
            boundary=np.array(boundary, np.int64),
            **scope_attribute(),
        )
    waited = analysed(waited, HANDLE_LEAVES if boundary else "wait")
    return waited[: len(tickets)] + fusion_barrier(waited[len(tickets) :])


def _ticket_like(result: ShapedArray, words: int) -> ShapedArray:
    """The type of a ticket, with the memory space and varying mesh axes of `result`."""
    return result.update(
        shape=(words,),
        dtype=np.dtype(np.int32),
        sharding=NamedSharding(result.sharding.mesh, PartitionSpec(None)),
    )
