"""Host layouts of an engine's own arrays, and their view as a device cache."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv._src.cache.array_spec import ArrayCacheSpec
from jaxkv._src.cache.host_layout import PageGeometry
from jaxkv._src.cache.spec import check_size
from jaxkv._src.runtime.devices import default_sharding, device_of_id
from jaxkv._src.runtime.pytrees import structure_difference

if TYPE_CHECKING:
    from jaxkv._src.cache.device_cache import DeviceCache
    from jaxkv._src.cache.host_pool import HostPool

# The axes of a host pool; a record is the blocks of one page and layer.
_AXES = {
    "page_first_direct": ("page", "layer", "record"),
    "layer_first": ("layer", "page", "record"),
}


@dataclasses.dataclass(frozen=True)
class ArrayHostLayout:
    """A host layout of `num_pages` pages of an `ArrayCacheSpec`: bytes of one shard or of all.

    The blocks of one page and layer are contiguous, each padded to a multiple of 16 bytes. Shards
    of a page follow one another in the last axis.

    | layout            | shape                   |
    |-------------------|-------------------------|
    | page_first_direct | uint8[P, L, record]     |
    | layer_first       | uint8[L, P, record]     |

    Attributes:
      spec: the `ArrayCacheSpec`.
      name: "page_first_direct" or "layer_first".
      num_pages: number of pages P.
      num_shards: number of shards of a page; 1 inside `shard_map`.

    Raises:
      ValueError: unknown layout, or `num_pages` is not an integer in [1, 2^31).
    """

    spec: ArrayCacheSpec
    name: str
    num_pages: int
    num_shards: int = 1

    def __post_init__(self) -> None:
        if self.name not in _AXES:
            raise ValueError(
                f"layout of an ArrayCacheSpec must be one of {', '.join(_AXES)}, got {self.name!r}"
            )
        object.__setattr__(self, "num_pages", check_size(self.num_pages, "num_pages"))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the host array, uint8."""
        sizes = {
            "page": self.num_pages,
            "layer": self.spec.num_layers,
            "record": self.spec.blocks.nbytes * self.num_shards,
        }
        return tuple(sizes[axis] for axis in _AXES[self.name])

    @property
    def nbytes(self) -> int:
        """Size in bytes of the host array."""
        return int(np.prod(self.shape, dtype=np.int64))

    def page_geometry(self, array: int, tokens: range | None = None) -> PageGeometry:
        """The block of an array of a layer, or some tokens of it."""
        blocks = self.spec.blocks
        records = self.spec.num_layers if self.name == "page_first_direct" else 1
        whole = PageGeometry.contiguous(blocks.block_bytes[array], records * blocks.nbytes)
        if tokens is None:
            return whole
        part = len(tokens) * blocks.row_bytes(array)
        return dataclasses.replace(whole, block_bytes=part, run_bytes=part)

    def buffer_offset_bytes(self, array: int, layer: int, token: int = 0) -> int:
        """Byte offset of a token of page 0 of an array of a layer."""
        blocks = self.spec.blocks
        records = 1 if self.name == "page_first_direct" else self.num_pages
        start = layer * records * blocks.nbytes + blocks.offsets[array]
        return start + token * blocks.row_bytes(array)


def layout_of_shape(spec: ArrayCacheSpec, name: str, shape: tuple[int, ...]) -> ArrayHostLayout:
    """The layout of one shard whose host array has this shape."""
    axes = _AXES[name]
    if len(shape) != len(axes):
        raise ValueError(
            f"data of a pool with layout {name} must have {len(axes)} dimensions, got shape {shape}"
        )
    return ArrayHostLayout(spec, name, shape[axes.index("page")])


def pool_sharding(spec: ArrayCacheSpec, name: str) -> jax.sharding.Sharding:
    """The sharding of a pool, each shard on the devices of the arrays' shards.

    Raises:
      ValueError: unknown layout.
    """
    if name not in _AXES:
        raise ValueError(
            f"layout of an ArrayCacheSpec must be one of {', '.join(_AXES)}, got {name!r}"
        )
    if spec.mesh is None:
        if spec.device is None:
            return default_sharding().with_memory_kind("pinned_host")
        return SingleDeviceSharding(device_of_id(*spec.device), memory_kind="pinned_host")
    sharded = {"page": spec.page_axes, "layer": (), "record": spec.block_axes}
    entries = (sharded[axis] or None for axis in _AXES[name])
    return NamedSharding(spec.mesh, PartitionSpec(*entries), memory_kind="pinned_host")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ArrayCache:
    """An engine's arrays by layer; stacked arrays are one layer.

    Attributes:
      layers: the arrays of each layer.
      spec: the `ArrayCacheSpec`.
    """

    layers: tuple[tuple[jax.Array, ...], ...]
    spec: ArrayCacheSpec = dataclasses.field(metadata={"static": True})

    @property
    def num_pages(self) -> int:
        """Number of pages of the cache."""
        return self.layers[0][0].shape[1 if self.spec.stacked else 0]


def as_array_cache(operation: str, spec: ArrayCacheSpec, arrays: Any) -> ArrayCache:
    """An engine's arrays by layer.

    Raises:
      ValueError: the pytree structure is not that of the spec.
    """
    leaves, structure = jax.tree.flatten(arrays)
    if structure != spec.structure:
        raise ValueError(
            f"{operation}: cache must have the pytree structure of its spec: "
            + structure_difference(spec.structure, structure)
        )
    per_layer = len(spec.arrays)
    layers = (tuple(leaves[i : i + per_layer]) for i in range(0, len(leaves), per_layer))
    return ArrayCache(tuple(layers), spec)


def engine_arrays(cache: ArrayCache) -> Any:
    """The engine's pytree."""
    leaves = [array for layer in cache.layers for array in layer]
    return jax.tree.unflatten(cache.spec.structure, leaves)


def is_stacked(cache: DeviceCache | ArrayCache) -> bool:
    """Whether each array of the cache has all layers."""
    return isinstance(cache, ArrayCache) and cache.spec.stacked


def layer_arrays(cache: ArrayCache, layer: int) -> Any:
    """The pytree of a layer; of a stacked cache, the arrays of all layers."""
    if cache.spec.stacked:
        return engine_arrays(cache)
    structures = jax.tree_util.treedef_children(cache.spec.structure)
    return jax.tree.unflatten(structures[layer], cache.layers[layer])


def check_arrays(operation: str, pool: HostPool, cache: ArrayCache) -> None:
    """Raises a ValueError unless the pool and the arrays, of one shard, match their spec."""
    spec = cache.spec
    layout = pool.host_layout
    if tuple(pool.data.shape) != layout.shape or pool.data.dtype != np.uint8:
        sharded = (*spec.page_axes, *spec.block_axes)
        if sharded:
            raise ValueError(
                f"{operation}: pool is sharded over mesh axes {', '.join(sharded)}: call the "
                "operation inside a jax.shard_map that is manual over all mesh axes of the pool, "
                "with pool.partition_spec in its in_specs, where pool.data is "
                f"uint8[..., {layout.shape[-1]}], got {pool.data.dtype}{list(pool.data.shape)}"
            )
        raise ValueError(
            f"{operation}: pool.data must be uint8{list(layout.shape)} for layout {pool.layout}, "
            f"got {pool.data.dtype}{list(pool.data.shape)}"
        )
    num_pages = cache.num_pages
    leading = (spec.num_layers, num_pages) if spec.stacked else (num_pages,)
    for layer, arrays in enumerate(cache.layers):
        for index, array in enumerate(arrays):
            shape = (*leading, *spec.blocks.shapes[index])
            if tuple(array.shape) != shape or array.dtype != spec.blocks.dtypes[index]:
                where = f"array {index}" if spec.stacked else f"array {index} of layer {layer}"
                raise ValueError(
                    f"{operation}: cache: {where} must be {spec.blocks.dtypes[index]}{list(shape)} "
                    f"(of one shard) to match the pool, got {array.dtype}{list(array.shape)}; "
                    "create the pool with ArrayCacheSpec.from_arrays(cache)"
                )
