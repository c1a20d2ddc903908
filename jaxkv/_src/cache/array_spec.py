"""Caches that consist of an engine's own arrays, described as pages.

A cache is a sequence of layers with the same arrays, such as one fused array of K and V, separate
arrays of K and V, or quantized pages with their scales. In a stacked cache one array has all
layers. Layers that differ, for example sliding-window and full attention, are separate caches:
pass them as a dict, with a dict of pools and of ids.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxkv._src.runtime.dtypes import check_byte_dtype, check_canonical_dtype

# Blocks start at multiples of the widest word of the copy kernel.
BLOCK_ALIGNMENT = 16

AxisNames = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PageArray:
    """The pages of one array of a layer.

    Attributes:
      shape: shape of a page, of all shards together.
      dtype: dtype of the array.
      sharding: for each dimension of `shape`, the mesh axes over which it is sharded.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: tuple[AxisNames, ...]


@dataclasses.dataclass(frozen=True)
class ArrayCacheSpec:
    """An engine's KV cache as it is; made by `from_arrays`.

    Attributes:
      num_layers: number of layers L.
      arrays: the arrays of one layer, in the order of its pytree.
      structure: pytree structure of the cache.
      stacked: whether each array has all layers, `[L, num_pages, ...]`.
      page_axes: mesh axes over which the pages are sharded.
      mesh: the devices of the cache, or None for one device.
    """

    num_layers: int
    arrays: tuple[PageArray, ...]
    structure: Any
    stacked: bool
    page_axes: AxisNames
    mesh: Mesh | None

    @classmethod
    def from_arrays(cls, arrays: Any, *, stacked: bool = False) -> ArrayCacheSpec:
        """Describes a cache by its arrays, which keep their shapes, dtypes and shardings.

            caches = [jnp.zeros((num_pages, 16, 2 * heads, 128), jnp.bfloat16) for _ in range(32)]
            spec = jaxkv.ArrayCacheSpec.from_arrays(caches)
            pool = jaxkv.HostPool.create(spec, num_pages=4096)
            caches = load(pool, caches, host_pages, device_pages)

        This is the cache of tpu-inference and sglang-jax, one fused array per layer; vLLM registers
        caches with its offloading connector in the same way.

        Args:
          arrays: a sequence of layers, each a pytree of `dtype[num_pages, ...]` arrays or
            `jax.ShapeDtypeStruct`s of byte-aligned dtypes. All layers are alike.
          stacked: `arrays` is instead one pytree of `dtype[num_layers, num_pages, ...]` arrays.

        Returns:
          The `ArrayCacheSpec`.

        Raises:
          TypeError: a leaf is not an array, or `arrays` has no layers.
          ValueError: layers that differ, arrays with different numbers of pages, pages without
            elements, or shardings over different meshes or a sharded layer axis.
        """
        leaves, structure = jax.tree.flatten(arrays)
        _check_leaves(leaves, 2 if stacked else 1)
        mesh, partitions = _partitions(leaves)
        if stacked:
            num_layers = _common("number of layers", [leaf.shape[0] for leaf in leaves])
            if any(partition[0] for partition in partitions):
                raise ValueError("arrays: the layer axis of a stacked cache must not be sharded")
            partitions = [partition[1:] for partition in partitions]
        else:
            children = structure.children()
            num_layers = len(children)
            _common("pytree structure of a layer", children)
        first = 2 if stacked else 1
        pages = [
            PageArray(tuple(leaf.shape[first:]), np.dtype(leaf.dtype), partition[1:])
            for leaf, partition in zip(leaves, partitions, strict=True)
        ]
        page_axes = _common("sharding of the pages", [partition[0] for partition in partitions])
        _common("number of pages", [leaf.shape[first - 1] for leaf in leaves])
        per_layer = len(pages) if stacked else len(pages) // num_layers
        for layer in range(len(pages) // per_layer):
            _common(
                "arrays of a layer",
                [tuple(pages[:per_layer]), tuple(pages[layer * per_layer :][:per_layer])],
            )
        return cls(num_layers, tuple(pages[:per_layer]), structure, stacked, page_axes, mesh)

    @property
    def block_axes(self) -> AxisNames:
        """The mesh axes over which the contents of pages are sharded, in the order of the mesh."""
        used = {axis for array in self.arrays for axes in array.sharding for axis in axes}
        return tuple(axis for axis in (self.mesh.axis_names if self.mesh else ()) if axis in used)

    @property
    def num_page_shards(self) -> int:
        """Number of shards of the pages."""
        return _size(self.mesh, self.page_axes)

    @property
    def num_block_shards(self) -> int:
        """Number of shards of a page."""
        return _size(self.mesh, self.block_axes)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers and shards in a host pool."""
        local = record_bytes(
            tuple(self._local_shape(array) for array in self.arrays),
            tuple(array.dtype for array in self.arrays),
        )
        return self.num_layers * self.num_block_shards * local[-1]

    def _local_shape(self, array: PageArray) -> tuple[int, ...]:
        sizes = (_size(self.mesh, axes) for axes in array.sharding)
        return tuple(n // size for n, size in zip(array.shape, sizes, strict=True))


def record_bytes(
    shapes: tuple[tuple[int, ...], ...], dtypes: tuple[np.dtype, ...]
) -> tuple[int, ...]:
    """Byte offset of each block in the record of a layer, then the size of the record."""
    offsets = [0]
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        offsets.append(offsets[-1] + -(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT)
    return tuple(offsets)
