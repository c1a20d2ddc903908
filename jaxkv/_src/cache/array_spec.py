"""Caches that consist of an engine's own arrays, described as pages.

A cache is a sequence of layers with the same arrays, such as one fused array of K and V, separate
arrays of K and V, or quantized pages with their scales. In a stacked cache one array has all
layers. Layers that differ, for example sliding-window and full attention, are separate caches:
pass them as a dict, with a dict of pools and of ids.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxkv._src.cache.spec import check_size, checked_dtype, select_layers, select_tokens

# Blocks in a host pool start at multiples of the widest word of the copy kernel.
_ALIGNMENT_BYTES = 16

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
    """Description of an engine's own KV cache; created by `from_arrays`.

    Attributes:
      num_layers: number of layers L.
      arrays: the arrays of one layer, in the order of its pytree.
      structure: pytree structure of the cache.
      stacked: whether each array has all layers, `[L, num_pages, ...]`.
      page_axes: mesh axes over which the pages are sharded.
      mesh: the devices of the cache, or None for one device.
      page_size: tokens per page, the first dimension of a page; None if unknown.
      device: platform and id of the device, if there is no mesh; None for the default device.
    """

    num_layers: int
    arrays: tuple[PageArray, ...]
    structure: Any
    stacked: bool
    page_axes: AxisNames
    mesh: Mesh | None
    page_size: int | None = None
    device: tuple[str, int] | None = None  # a jax.Device can be neither copied nor pickled

    @classmethod
    def from_arrays(
        cls, arrays: Any, *, stacked: bool = False, page_size: int | None = None
    ) -> ArrayCacheSpec:
        """Describes a cache by its arrays, which keep their shapes, dtypes and shardings.

            caches = [jnp.zeros((num_pages, 16, 2 * heads, 128), jnp.bfloat16) for _ in range(32)]
            spec = jaxkv.ArrayCacheSpec.from_arrays(caches)
            pool = jaxkv.HostPool.create(spec, num_pages=4096)
            caches = load(pool, caches, host_pages, device_pages)

        This is the cache of tpu-inference and sglang-jax, one fused array per layer; vLLM registers
        caches with its offloading connector in the same way.

        Args:
          arrays: a list or tuple of layers, each a pytree of `dtype[num_pages, ...]` arrays or
            `jax.ShapeDtypeStruct`s of byte-aligned dtypes. All layers must match.
          stacked: `arrays` is instead an array, a tuple or a dict of
            `dtype[num_layers, num_pages, ...]` arrays.
          page_size: tokens per page of arrays `[num_pages, page_size, ...]`; required by copies
            with `tokens`.

        Returns:
          The `ArrayCacheSpec`.

        Raises:
          TypeError: a leaf is not an array, is traced or has an abstract mesh; `arrays` has no
            layers, or is not a list or tuple; or a list is stacked.
          ValueError: layers that differ; arrays with too few dimensions, without elements or with
            different numbers of pages; a dtype that JAX does not support, that is not byte-aligned
            or not in native byte order; a `page_size` that is not an integer in [1, 2^31), or not
            the first dimension of the pages of any array;
            shardings over different meshes, of some arrays only, or of the layer axis; or arrays
            on several devices without a mesh.
        """
        if page_size is not None:
            page_size = check_size(page_size, "page_size")
        leaves, structure = jax.tree.flatten(arrays)
        _check_leaves(arrays, stacked)
        mesh, partitions = _partitions(leaves)
        first = 2 if stacked else 1  # of the dimensions of a page
        _common("number of pages", [leaf.shape[first - 1] for leaf in leaves])
        page_axes = _common("sharding of the pages", [entry[first - 1] for entry in partitions])
        pages = tuple(
            PageArray(tuple(leaf.shape[first:]), np.dtype(leaf.dtype), partition[first:])
            for leaf, partition in zip(leaves, partitions, strict=True)
        )
        if stacked:
            num_layers, of_layer = _num_stacked_layers(arrays, leaves, partitions), len(pages)
        else:
            num_layers, of_layer = _num_equal_layers(arrays, structure, pages)
        layer = pages[:of_layer]
        if page_size is not None:
            _check_page_size(page_size, layer)
        device = None if mesh else _device(leaves)
        return cls(num_layers, layer, structure, stacked, page_axes, mesh, page_size, device)

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
    def blocks(self) -> BlockRecord:
        """The blocks of a page and layer of one shard."""
        shapes = []
        for array in self.arrays:
            sizes = (_size(self.mesh, axes) for axes in array.sharding)
            shapes.append(tuple(n // size for n, size in zip(array.shape, sizes, strict=True)))
        return BlockRecord(tuple(shapes), tuple(array.dtype for array in self.arrays))

    @property
    def block_numbers(self) -> list[list[int]]:
        """For each array, which of its blocks each shard of a page in a host pool has.

        Blocks are numbered in row-major order.
        """
        axes = self.block_axes
        shards = itertools.product(*(range(_size(self.mesh, (axis,))) for axis in axes))
        places = [dict(zip(axes, shard, strict=True)) for shard in shards]
        return [
            [_block_number(self.mesh, array, place) for place in places] for array in self.arrays
        ]

    @property
    def array_names(self) -> tuple[str, ...]:
        """Names of the arrays of one layer in its pytree, empty for a layer of one array."""
        layer = self.structure
        if not self.stacked:
            layer = jax.tree_util.treedef_children(layer)[0]
        paths, _ = jax.tree_util.tree_flatten_with_path(layer.unflatten(self.arrays))
        return tuple(jax.tree_util.keystr(path) for path, _ in paths)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers and shards in a host pool."""
        return self.num_layers * self.num_block_shards * self.blocks.nbytes

    def select_layers(self, layers: int | Sequence[int] | None) -> tuple[int, ...]:
        """Selected layer numbers, as `KVCacheSpec.select_layers`."""
        return select_layers(self.num_layers, layers)

    def select_tokens(self, tokens: range | None) -> range | None:
        """Selected token positions of each page, as `KVCacheSpec.select_tokens`.

        Raises:
          TypeError: as for `KVCacheSpec.select_tokens`.
          ValueError: the page size is unknown, the tokens of an array are not the first dimension
            of its pages or are sharded, or as for `KVCacheSpec.select_tokens`.
        """
        return select_array_tokens(self, tokens)


@dataclasses.dataclass(frozen=True)
class BlockRecord:
    """The blocks of all arrays of a layer, one after the other.

    Attributes:
      shapes: shape of each block.
      dtypes: dtype of each block.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[np.dtype, ...]

    @functools.cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of each block."""
        return tuple(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def row_bytes(self, array: int) -> int:
        """Bytes of one row of a block, a token if the first dimension is the tokens of a page."""
        return self.block_bytes[array] // self.shapes[array][0]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each block, then the size of the record."""
        padded = (-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in self.block_bytes)
        return (0, *itertools.accumulate(padded))

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return self.offsets[-1]


def select_array_tokens(
    spec: ArrayCacheSpec, tokens: range | None, name: str = "tokens"
) -> range | None:
    """`ArrayCacheSpec.select_tokens`; `name` begins the error messages."""
    if tokens is None:
        return None
    if spec.page_size is None:
        raise ValueError(
            f"{name} requires the page size of the cache: pass page_size to "
            "ArrayCacheSpec.from_arrays"
        )
    for index, array in enumerate(spec.arrays):
        if array.shape[0] != spec.page_size or array.sharding[0]:
            sharded = f", sharded over {array.sharding[0]}" if array.sharding[0] else ""
            raise ValueError(
                f"{name} requires pages of shape [page_size={spec.page_size}, ...], not "
                f"sharded over tokens: array {index} of a layer has pages of {array.dtype}"
                f"{list(array.shape)}{sharded}; make a cache of the arrays without tokens, "
                "and pass both as a dict"
            )
    return select_tokens(spec.page_size, tokens, name)


def _check_page_size(page_size: int, pages: Sequence[PageArray]) -> None:
    """Raises a ValueError if no array has pages of this many tokens; some may have no tokens."""
    if all(page.shape[0] != page_size for page in pages):
        raise ValueError(
            f"page_size={page_size} must be the first dimension of a page, got arrays "
            f"{_show_pages(pages)}"
        )


def _check_leaves(arrays: Any, stacked: bool) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    if not leaves:
        raise TypeError("arrays must have at least one layer with an array")
    dims = "3 dimensions, [num_layers, num_pages," if stacked else "2 dimensions, [num_pages,"
    for path, leaf in leaves:
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise TypeError(f"arrays must be a pytree of arrays, got {type(leaf).__name__}")
        if isinstance(leaf, jax.core.Tracer):  # its sharding would be lost
            raise TypeError(
                "ArrayCacheSpec.from_arrays must be called outside jit: the sharding of a traced "
                "array is not known"
            )
        if len(leaf.shape) < (3 if stacked else 2) or 0 in leaf.shape:
            raise ValueError(
                f"arrays{jax.tree_util.keystr(path)} must have at least {dims} ...], none of them "
                f"empty, got shape {tuple(leaf.shape)}"
            )
        checked_dtype(leaf.dtype, "dtype of an array")


def _partitions(leaves: Sequence[Any]) -> tuple[Mesh | None, list[tuple[AxisNames, ...]]]:
    """The common mesh, and for each array and dimension the mesh axes that shard it."""
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]
    if named and len(named) < len(leaves):
        raise ValueError("arrays must all have a NamedSharding, or none of them")
    mesh = _common("mesh", [sharding.mesh for sharding in named]) if named else None
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise TypeError("arrays must be concrete, or ShapeDtypeStructs with a concrete mesh")
    partitions = []
    for leaf, sharding in zip(leaves, shardings, strict=True):
        entries = list(sharding.spec) if isinstance(sharding, NamedSharding) else []
        entries += [None] * (len(leaf.shape) - len(entries))
        partitions.append(tuple(_axis_names(entry) for entry in entries))
    return mesh, partitions


def _device(leaves: Sequence[Any]) -> tuple[str, int] | None:
    """Platform and id of the device of committed arrays; others follow them in a call."""
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves if _is_committed(leaf)]
    devices = {device for sharding in shardings if sharding for device in sharding.device_set}
    if len(devices) > 1:
        raise ValueError(
            "arrays must all be on one device, or all have a NamedSharding, got "
            f"{', '.join(sorted(map(str, devices)))}; make a cache of the arrays of each device"
        )
    return next(((device.platform, device.id) for device in devices), None)


def _is_committed(leaf: Any) -> bool:
    return getattr(leaf, "committed", True)  # a ShapeDtypeStruct has the sharding it was given


def _num_stacked_layers(
    arrays: Any, leaves: Sequence[Any], partitions: Sequence[tuple[AxisNames, ...]]
) -> int:
    if isinstance(arrays, list):
        raise TypeError(
            "stacked arrays must be an array, a tuple or a dict, got a list, which is a list of "
            "layers: leave out stacked=True"
        )
    num_layers = _common("number of layers", [leaf.shape[0] for leaf in leaves])
    if any(partition[0] for partition in partitions):
        raise ValueError("the layer axis of stacked arrays must not be sharded")
    return int(num_layers)


def _num_equal_layers(arrays: Any, structure: Any, pages: Sequence[PageArray]) -> tuple[int, int]:
    """Number of layers, and of arrays in each."""
    if not isinstance(arrays, list | tuple):
        raise TypeError(
            f"arrays must be a list or tuple of layers, got {type(arrays).__name__}; set "
            "stacked=True if each array has all layers"
        )
    layers = jax.tree_util.treedef_children(structure)
    _common("pytree structure of a layer", layers)
    of_layer = len(pages) // len(layers)
    of_layers = [pages[i : i + of_layer] for i in range(0, len(pages), of_layer)]
    _common("shapes, dtypes and shardings in each layer", of_layers, show=_show_pages)
    return len(layers), of_layer


def _axis_names(entry: Any) -> AxisNames:
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _show_pages(pages: Sequence[PageArray]) -> str:
    return ", ".join(
        f"{page.dtype}[num_pages, {', '.join(map(str, page.shape))}]"
        + (f" sharded over {page.sharding}" if any(page.sharding) else "")
        for page in pages
    )


def _common(what: str, values: Sequence[Any], show: Callable[[Any], str] = str) -> Any:
    """The value that all `values` have; otherwise raises a ValueError."""
    for value in values:
        if value != values[0]:
            raise ValueError(
                f"arrays must all have the same {what}, got {show(values[0])} and {show(value)}; "
                "make a cache of each kind of layer, and pass them as a dict"
            )
    return values[0]


def _block_number(mesh: Mesh | None, array: PageArray, place: dict[str, int]) -> int:
    """Number of the block at this place along each mesh axis."""
    number = 0
    for axis in itertools.chain(*array.sharding):  # major to minor
        number = number * _size(mesh, (axis,)) + place[axis]
    return number


def _size(mesh: Mesh | None, axes: AxisNames) -> int:
    return math.prod(mesh.shape[axis] for axis in axes) if mesh else 1
