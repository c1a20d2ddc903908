"""Whether steps store into the pages of the pool, rather than ignore them or write to a copy."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from jaxkv._src.cache.array_cache import ArrayHostLayout
from jaxkv._src.cache.host_layout import HostLayout
from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.cache.pinned_memory import view_of, writable
from jaxkv._src.offload.copies import CopyBatch
from jaxkv._src.runtime import native

MARK_BYTES = 16


class StoreCheck:
    """Marks the pages that a step is to store; a step that has ended must have overwritten them.

    A mark is at the first token of the first layer, and in the first page of a batch also at its
    other layers and tokens: a step may store some layers or tokens only. Only the first shard is
    marked. Does not own the memory of the pool.
    """

    def __init__(self, pool: HostPool) -> None:
        shard = pool.data.addressable_shards[0]
        address = view_of(pool.data, shard.device).ctypes.data
        self._memory = native.extension().pinned_ref(address)
        of_shard: Any = jax.ShapeDtypeStruct(shard.data.shape, shard.data.dtype)
        layout = dataclasses.replace(pool, data=of_shard).host_layout
        self._stride, self._offsets = _positions(layout)
        self._mark = np.frombuffer(os.urandom(MARK_BYTES), np.uint8)

    def mark(self, batch: CopyBatch) -> None:
        """Writes the marks of a batch that the next step is to store."""
        memory, pages = self._bytes(), _stored(batch)
        if memory is not None and len(pages):
            memory[_bytes_at(self._firsts(pages))] = self._mark
            memory[_bytes_at(pages[0] * self._stride + self._offsets)] = self._mark

    def error(self, batch: CopyBatch) -> RuntimeError | None:
        """The error of a step that has ended, if pages of its stores still have their mark."""
        memory, pages = self._bytes(), _stored(batch)
        if memory is None or not len(pages):
            return None
        marked = pages[self._is_marked(memory, self._firsts(pages))]
        if not len(marked):
            return None
        if marked[0] == pages[0]:
            others = pages[0] * self._stride + self._offsets
            if not self._is_marked(memory, others).all():
                return None  # other layers or tokens were stored
        return RuntimeError(
            f"poll: a step did not store host pages {marked[:4].tolist()}, whose blocks would be "
            "found: start its batch, and donate the pool to every step with stores, from that of "
            "the constructor on; if that was done, see check_errors for rejected pages"
        )

    def _firsts(self, pages: np.ndarray) -> np.ndarray:
        return pages * self._stride + self._offsets[0]

    def _is_marked(self, memory: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        found: np.ndarray = (memory[_bytes_at(offsets)] == self._mark).all(1)
        return found

    def _bytes(self) -> np.ndarray[Any, Any] | None:
        """The memory, unless it is no longer that of a pool."""
        extension = native.extension()
        view = None
        if extension.num_pinned_arrays(self._memory):
            view = extension.pinned_ref_view(self._memory)
        return None if view is None else writable(view)


def store_check(pool: HostPool | int) -> StoreCheck | None:
    """The check of a pool's stores; None where its pages, or some, are not in reach or too small.

    That is a number of pages, an abstract or deleted pool, one with page shards or shards in other
    processes, or one in memory of XLA.
    """
    if not isinstance(pool, HostPool) or not isinstance(pool.data, jax.Array):
        return None
    if pool.data.is_deleted() or not pool.data.is_fully_addressable:
        return None
    if getattr(pool.spec, "num_page_shards", 1) > 1:
        return None
    try:
        check = StoreCheck(pool)
    except ValueError:  # of `view_of`: not in memory of `HostPool.create`
        return None
    return check if len(check._offsets) else None


def _positions(layout: HostLayout | ArrayHostLayout) -> tuple[int, np.ndarray]:
    """Bytes from page to page, and the offsets of the marks in a page; none if they do not fit."""
    layers = [layout.buffer_offset_bytes(0, layer) for layer in range(layout.spec.num_layers)]
    if isinstance(layout, ArrayHostLayout):  # blocks are padded to the size of a mark
        stride = layout.page_geometry(0).page_stride_bytes
        num_tokens, row_bytes = layout.spec.blocks.shapes[0][0], layout.spec.blocks.row_bytes(0)
    else:
        stride = layout.page_geometry().page_stride_bytes
        num_tokens, row_bytes = layout.spec.page_size, layout.page_geometry(range(1)).run_bytes
        layers = layers if row_bytes >= MARK_BYTES else []
    tokens = range(1, num_tokens) if row_bytes >= MARK_BYTES else ()
    return stride, np.array(layers + [layout.buffer_offset_bytes(0, 0, i) for i in tokens])


def _stored(batch: CopyBatch) -> np.ndarray:
    pages: np.ndarray = batch.host_pages[batch.host_pages >= 0].astype(np.int64)
    return pages if batch.kind == "store" else pages[:0]


def _bytes_at(offsets: np.ndarray) -> np.ndarray:
    return offsets[:, None] + np.arange(MARK_BYTES)
