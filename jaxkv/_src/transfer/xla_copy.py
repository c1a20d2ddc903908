"""Block copies in plain JAX, for platforms without native handlers.

Pages move between memory spaces through a staging array of the pages of the call in device memory.
On the device side they are gathered or scattered by ids. On the host side a loop over the valid
pairs reads or updates one slice per page: XLA supports slices of arrays in host memory on every
platform. XLA:GPU fails to compile a gather there, or aborts for a scatter (openxla/xla#34565).

Only pages are reshaped, transposed and bitcast. A donated array is updated in place, and neither a
pool nor a cache is copied (`_with_integers` has the exception). Nothing counts errors on the
device: entries out of range and all entries of a duplicate destination are skipped, and raise only
if the host knows the ids.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv._src.runtime.sharding import match_varying_axes
from jaxkv._src.transfer.ids import HostIds, values_on_device

if TYPE_CHECKING:
    from jaxkv._src.cache.host_layout import PageGeometry
    from jaxkv._src.transfer.block_copy import BlockCopy
    from jaxkv._src.transfer.ids import IdPair

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def copy_blocks_xla(copy: BlockCopy, ids: IdPair) -> list[jax.Array]:
    """Traces the copy; returns the written arrays."""
    types = [jax.typeof(array).dtype for array in copy.written]
    copy = _with_integers(copy)
    pairs = _valid_pairs(copy, ids)
    dense, strided = _dense_side(copy), _strided_side(copy)
    read, write = (strided, dense) if copy.to_dense else (dense, strided)
    sources = copy.strided if copy.to_dense else copy.dense
    blocks: dict[int, jax.Array] = {}
    for box in read.boxes:
        pages = _read(sources[box.array], box, pairs.sources, pairs.num_valid)
        for buffer in box.buffers:
            blocks[buffer] = read.blocks_of(pages, box, buffer)
    written = list(copy.written)
    for box in write.boxes:
        array = written[box.array]
        pages = write.pages_of([blocks[buffer] for buffer in box.buffers], box, array.dtype)
        written[box.array] = _write(array, box, pages, pairs.destinations, pairs.num_valid)
    return [_bitcast(array, dtype) for array, dtype in zip(written, types, strict=True)]


def _with_integers(copy: BlockCopy) -> BlockCopy:
    """On CPUs the copy with small floats as integers of the same width.

    XLA:CPU computes with float32 instead, also in slices and updates: it would convert the entire
    arrays, and change NaNs. The bitcasts are free there, but not known to be elsewhere.
    """
    if jax.default_backend() != "cpu":
        return copy
    dense, strided = (
        [_bitcast(array, _integer_dtype(array.dtype)) for array in arrays]
        for arrays in (copy.dense, copy.strided)
    )
    return dataclasses.replace(copy, dense=dense, strided=strided)


def _integer_dtype(dtype: np.dtype) -> np.dtype:
    is_small = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return np.dtype(f"u{dtype.itemsize}") if is_small else dtype


def _bitcast(array: jax.Array, dtype: np.dtype) -> jax.Array:
    return array if array.dtype == dtype else lax.bitcast_convert_type(array, dtype)


# ---------------------------------------------------------------------------------------------
# Ids


class _Pairs(NamedTuple):
    """The valid pairs, then fillers: source 0 and a destination out of range."""

    sources: jax.Array
    destinations: jax.Array
    num_valid: jax.Array


def _valid_pairs(copy: BlockCopy, ids: IdPair) -> _Pairs:
    sources, destinations = (
        values_on_device(entry) if isinstance(entry, HostIds) else jnp.asarray(entry)
        for entry in ids
    )
    valid = (sources >= 0) & (sources < copy.num_sources)
    valid &= (destinations >= 0) & (destinations < copy.num_destinations)
    # Sorted by destination, with equal destinations side by side and invalid pairs last.
    keys = jnp.where(valid, destinations, np.iinfo(np.int32).max)
    keys, sources = lax.sort((keys, sources), num_keys=1)
    equal = keys[1:] == keys[:-1]
    no = jnp.zeros_like(equal, shape=1)
    unique = ~jnp.concatenate([no, equal]) & ~jnp.concatenate([equal, no])
    valid = unique & (keys < copy.num_destinations)
    # Not stable: the order of pairs does not matter.
    _, sources, destinations = lax.sort(
        (
            (~valid).astype(jnp.int32),
            jnp.where(valid, sources, 0),
            jnp.where(valid, keys, copy.num_destinations),
        ),
        num_keys=1,
        is_stable=False,
    )
    return _Pairs(sources, destinations, valid.sum(dtype=jnp.int32))


# ---------------------------------------------------------------------------------------------
# Position of blocks in an array


@dataclasses.dataclass(frozen=True)
class _Box:
    """The slice of an array with one page of some buffers.

    Attributes:
      array: index of the array.
      buffers: the buffers, all of which the slice contains.
      first: start of page 0 along each axis.
      sizes: size along each axis.
      page_axis: axis along which pages follow one another.
      page_step: distance of pages along that axis.
    """

    array: int
    buffers: tuple[int, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]
    page_axis: int
    page_step: int

    def starts(self, ids: jax.Array) -> jax.Array:
        """The starts of pages along each axis, `[*ids.shape, rank]`."""
        starts = jnp.broadcast_to(jnp.array(self.first, jnp.int32), (*ids.shape, len(self.first)))
        return starts.at[..., self.page_axis].add(ids * self.page_step)


@dataclasses.dataclass(frozen=True)
class _Side:
    """One side of a copy.

    Attributes:
      boxes: slices that contain the blocks of all buffers, each of them once.
      buffers: the slice of each buffer alone.
      runs: shape of a block in the order of its runs, (outer, inner, elements of a run).
      is_swapped: whether the array has the inner runs first.
      dtypes: dtype of the blocks of each buffer.
    """

    boxes: list[_Box]
    buffers: list[_Box]
    runs: tuple[int, int, int]
    is_swapped: bool
    dtypes: list[np.dtype]

    def blocks_of(self, pages: jax.Array, box: _Box, buffer: int) -> jax.Array:
        """The blocks of one buffer, `dtype[n, elements]`, from the pages of a slice."""
        starts, limits = self._place(box, buffer)
        count = pages.shape[0]
        blocks = lax.slice(pages, (0, *starts), (count, *limits))
        if self.is_swapped:
            outer, inner, run = self.runs
            blocks = blocks.reshape(count, inner, outer, run).swapaxes(1, 2)
        return _from_bytes(blocks.reshape(count, -1), self.dtypes[buffer])

    def pages_of(self, blocks: Sequence[jax.Array], box: _Box, dtype: np.dtype) -> jax.Array:
        """The pages of a slice, `dtype[n, *box.sizes]`, from the blocks of its buffers."""
        parts = []
        count = blocks[0].shape[0]
        for part, buffer in zip(blocks, box.buffers, strict=True):
            if dtype != self.dtypes[buffer]:
                part = _as_bytes(part)
            if self.is_swapped:
                part = part.reshape(count, *self.runs).swapaxes(1, 2)
            parts.append(part.reshape(count, *self.buffers[buffer].sizes))
        if len(parts) == 1:
            return parts[0]
        pages = match_varying_axes(jnp.zeros((count, *box.sizes), dtype), parts)
        for part, buffer in zip(parts, box.buffers, strict=True):
            starts, _ = self._place(box, buffer)
            pages = lax.dynamic_update_slice(pages, part, (0, *starts))
        return pages

    def _place(self, box: _Box, buffer: int) -> tuple[list[int], list[int]]:
        inner = self.buffers[buffer]
        starts = [mine - first for mine, first in zip(inner.first, box.first, strict=True)]
        limits = [start + size for start, size in zip(starts, inner.sizes, strict=True)]
        return starts, limits


def _dense_side(copy: BlockCopy) -> _Side:
    geometry = copy.geometry
    contiguous = geometry.contiguous(geometry.block_bytes, geometry.dense_stride_bytes)
    return _side(copy, copy.dense, copy.dense_offsets, contiguous)


def _strided_side(copy: BlockCopy) -> _Side:
    return _side(copy, copy.strided, copy.strided_offsets, copy.geometry)


def _side(
    copy: BlockCopy, arrays: Sequence[jax.Array], offsets: Sequence[int], geometry: PageGeometry
) -> _Side:
    buffers = [
        _box_of(buffer, buffer % len(arrays), arrays[buffer % len(arrays)], offset, geometry)
        for buffer, offset in enumerate(offsets)
    ]
    boxes = []
    for array in range(len(arrays)):
        own = buffers[array :: len(arrays)]
        joined = _joined(own)
        boxes += [joined] if joined else own
    (outer, inner), (outer_stride, inner_stride) = geometry.counts, geometry.strides_bytes
    return _Side(
        boxes=boxes,
        buffers=buffers,
        runs=(outer, inner, geometry.run_bytes // arrays[0].dtype.itemsize),
        is_swapped=outer > 1 and inner > 1 and outer_stride < inner_stride,
        dtypes=[copy.dense[buffer % len(copy.dense)].dtype for buffer in range(len(offsets))],
    )


def _box_of(buffer: int, index: int, array: jax.Array, offset: int, geometry: PageGeometry) -> _Box:
    """The slice of a buffer: its corners are its first and its last byte of page 0."""
    itemsize = array.dtype.itemsize
    past = sum(
        (count - 1) * stride
        for count, stride in zip(geometry.counts, geometry.strides_bytes, strict=True)
    )
    last = offset + past + geometry.run_bytes - itemsize
    first, end = (_unravel(entry // itemsize, array.shape) for entry in (offset, last))
    step = geometry.page_stride_bytes // itemsize
    strides = [math.prod(array.shape[axis + 1 :]) for axis in range(array.ndim)]
    axis = next(axis for axis, stride in enumerate(strides) if stride <= step)
    sizes = tuple(b - a + 1 for a, b in zip(first, end, strict=True))
    return _Box(index, (buffer,), first, sizes, axis, step // strides[axis])


def _unravel(element: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(element, shape))


def _joined(boxes: Sequence[_Box]) -> _Box | None:
    """One slice that consists of exactly these, if there is one."""
    first = tuple(map(min, zip(*(box.first for box in boxes), strict=True)))
    ends = [[a + n for a, n in zip(box.first, box.sizes, strict=True)] for box in boxes]
    end = map(max, zip(*ends, strict=True))
    sizes = tuple(b - a for a, b in zip(first, end, strict=True))
    if math.prod(sizes) != sum(math.prod(box.sizes) for box in boxes):
        return None
    buffers = tuple(buffer for box in boxes for buffer in box.buffers)
    return dataclasses.replace(boxes[0], buffers=buffers, first=first, sizes=sizes)


# ---------------------------------------------------------------------------------------------
# Pages of an array in either memory space


def _read(array: jax.Array, box: _Box, ids: jax.Array, num_valid: jax.Array) -> jax.Array:
    """The pages with these ids in device memory; those past `num_valid` are undefined."""
    starts = box.starts(ids)
    axes = tuple(range(array.ndim))
    if not _is_on_host(array):
        numbers = lax.GatherDimensionNumbers(
            offset_dims=tuple(axis + 1 for axis in axes),
            collapsed_slice_dims=(),
            start_index_map=axes,
        )
        return lax.gather(array, starts, numbers, box.sizes, mode="promise_in_bounds")

    def read_page(i: jax.Array, pages: jax.Array) -> jax.Array:
        page = lax.dynamic_slice(array, list(starts[i]), box.sizes)
        return lax.dynamic_update_index_in_dim(pages, jax.device_put(page, _DEVICE), i, 0)

    pages = jnp.zeros((ids.shape[0], *box.sizes), array.dtype)
    return lax.fori_loop(0, num_valid, read_page, match_varying_axes(pages, [array, ids]))


def _write(
    array: jax.Array, box: _Box, pages: jax.Array, ids: jax.Array, num_valid: jax.Array
) -> jax.Array:
    """The array with the first `num_valid` pages written to these ids."""
    starts = box.starts(ids)
    axes = tuple(range(array.ndim))
    if not _is_on_host(array):
        # In an array of one page, which may have no page axis, the id of a filler could be in
        # range: the next layer.
        is_valid = (jnp.arange(ids.shape[0]) < num_valid)[:, None]
        starts = jnp.where(is_valid, starts, jnp.array(array.shape, jnp.int32))
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=tuple(axis + 1 for axis in axes),
            inserted_window_dims=(),
            scatter_dims_to_operand_dims=axes,
        )
        return lax.scatter(array, starts, pages, numbers, mode="drop")

    def write_page(i: jax.Array, array: jax.Array) -> jax.Array:
        page = lax.dynamic_index_in_dim(pages, i, 0, keepdims=False)
        return lax.dynamic_update_slice(array, jax.device_put(page, _HOST), list(starts[i]))

    return lax.fori_loop(0, num_valid, write_page, array)


def _is_on_host(array: jax.Array) -> bool:
    return jax.typeof(array).memory_space == _HOST


# ---------------------------------------------------------------------------------------------
# Blocks as bytes, in the records of an `ArrayCacheSpec`


def _from_bytes(blocks: jax.Array, dtype: np.dtype) -> jax.Array:
    """Blocks of `dtype`; unchanged if they are."""
    if blocks.dtype == dtype:
        return blocks
    if dtype.kind == "b":
        return blocks.astype(dtype)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        parts = _from_bytes(blocks, part).reshape(blocks.shape[0], -1, 2)
        return lax.complex(parts[..., 0], parts[..., 1])
    if dtype.itemsize > 1:
        blocks = blocks.reshape(blocks.shape[0], -1, dtype.itemsize)
    return lax.bitcast_convert_type(blocks, dtype)


def _as_bytes(blocks: jax.Array) -> jax.Array:
    """Inverse of `_from_bytes`."""
    if blocks.dtype.kind == "b":
        return blocks.astype(jnp.uint8)
    if blocks.dtype.kind == "c":
        blocks = jnp.stack([blocks.real, blocks.imag], axis=-1)
    return lax.bitcast_convert_type(blocks, jnp.uint8).reshape(blocks.shape[0], -1)
