"""KV pages in pinned host memory, as a JAX array that is updated in place if donated."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv._src.cache.device_cache import DeviceCache
from jaxkv._src.cache.host_layout import HostLayout, Layout
from jaxkv._src.cache.host_memory import check_host_memory, numa_node, prefer_numa_node
from jaxkv._src.cache.spec import KVCacheSpec
from jaxkv._src.runtime import native
from jaxkv._src.runtime.devices import check_outside_jit, default_device
from jaxkv._src.runtime.sharding import check_head_axis
from jaxkv._src.runtime.sync_guard import allow_host_sync


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostPool:
    """KV pages in pinned host memory: a pytree around one array.

    Attributes:
      data: `dtype[host_layout.shape]` with `memory_kind="pinned_host"`.
      spec: the `KVCacheSpec`, of all shards together.
      layout: name of the layout, one of `host_layout.LAYOUTS`.
      head_groups: G of page_unified, otherwise 1.
    """

    data: jax.Array
    spec: KVCacheSpec = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    head_groups: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        spec: KVCacheSpec,
        *,
        num_pages: int,
        layout: Layout = "page_first_direct",
        head_groups: int = 1,
        mesh: jax.sharding.Mesh | None = None,
        head_axis: str | None = None,
    ) -> HostPool:
        """Allocates zeroed pages in pinned host memory, each shard near its device (NUMA).

        Args:
          spec: the `KVCacheSpec`.
          num_pages: number of pages of the pool.
          layout: see `host_layout`; page_first_direct suits the copy engine.
          head_groups: G of page_unified.
          mesh: devices that use the pool; None for the default device.
          head_axis: mesh axis over which the KV heads (page_unified: the head groups) are sharded;
            None to replicate the pool.

        Returns:
          The `HostPool`.

        Raises:
          RuntimeError: called inside jit.
          HostMemoryError: the pool exceeds the available host memory; nothing is allocated.
          ValueError: the layout and the sizes do not match, or `head_axis` is given without a mesh.
        """
        host_layout = HostLayout(spec, layout, num_pages, head_groups)
        sharding = _pool_sharding(host_layout, mesh, head_axis)
        shards = sharding.addressable_devices_indices_map(host_layout.shape)
        local_shape = sharding.shard_shape(host_layout.shape)
        local_bytes = int(np.prod(local_shape)) * np.dtype(spec.dtype).itemsize
        check_host_memory(local_bytes * len(shards))
        arrays = [_allocate(local_shape, np.dtype(spec.dtype), device) for device in shards]
        if mesh is None:
            (data,) = arrays
        else:
            data = jax.make_array_from_single_device_arrays(host_layout.shape, sharding, arrays)
        return cls(data=data, spec=spec, layout=layout, head_groups=head_groups)

    @property
    def num_pages(self) -> int:
        """Number of pages of the pool."""
        return self.host_layout.num_pages

    @property
    def host_layout(self) -> HostLayout:
        """The layout of `data`; inside `shard_map`, that of the shard."""
        axes = HostLayout(self.spec, self.layout, 1, self.head_groups).axes
        if self.data.ndim != len(axes):
            raise ValueError(
                f"data of a pool with layout {self.layout} must have {len(axes)} dimensions, "
                f"got shape {self.data.shape}"
            )
        sizes = dict(zip(axes, self.data.shape, strict=True))
        pages = sizes.get(("page",)) or sizes[("page", "token")] // self.spec.page_size
        groups = sizes.get(("group",), 1)
        heads = sizes.get(("head",), 1) * groups
        spec = dataclasses.replace(self.spec, num_kv_heads=heads)
        return HostLayout(spec, self.layout, pages, groups)

    @property
    def partition_spec(self) -> PartitionSpec:
        """Sharding of `data` over the mesh, for `in_specs` and `out_specs` of `shard_map`."""
        return getattr(self.data.sharding, "spec", PartitionSpec())

    def close(self) -> None:
        """Frees the host memory after all work of the pool's devices; idempotent.

        Blocks until that work is complete. Later use of this pool, or of a pool that shares its
        array, is an error.
        """
        if self.data.is_deleted():
            return
        self.data.block_until_ready()
        devices: set[jax.Device] = self.data.sharding.addressable_devices
        for device in devices:
            # A ready array has been written, but loads from it may still be in flight.
            if device.platform == "gpu":
                native.extension().synchronize_device(device.local_hardware_id)
        self.data.delete()


def _pool_sharding(
    host_layout: HostLayout, mesh: jax.sharding.Mesh | None, head_axis: str | None
) -> jax.sharding.Sharding:
    sharded_axis = "group" if host_layout.name == "page_unified" else "head"
    if sharded_axis == "group":
        check_head_axis(host_layout.head_groups, "head_groups", mesh, head_axis)
    else:
        check_head_axis(host_layout.spec.num_kv_heads, "num_kv_heads", mesh, head_axis)
    if mesh is None:
        return SingleDeviceSharding(default_device(), memory_kind="pinned_host")
    axes = (head_axis if merged == (sharded_axis,) else None for merged in host_layout.axes)
    return NamedSharding(mesh, PartitionSpec(*axes), memory_kind="pinned_host")


def _allocate(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    sharding = SingleDeviceSharding(device, memory_kind="pinned_host")
    with prefer_numa_node(numa_node(device)):
        if device.platform == "cpu":
            # Allocated by XLA: NumPy's memory may be used zero-copy, and a donation would copy it.
            zeros: jax.Array | np.ndarray = jnp.zeros(shape, dtype, device=device)
        else:
            # Ten times faster on an H200 host than zeros written by XLA.
            zeros = np.zeros(shape, dtype)
        # device_put, since out_shardings loses the memory space <host> of the array's type.
        with allow_host_sync("a new pool is uploaded, after no work of the device"):
            array = jax.device_put(zeros, sharding)
            check_outside_jit(array)
            return array.block_until_ready()


def check_pair(pool: HostPool, cache: DeviceCache) -> None:
    """Raises a TypeError or ValueError unless the pool and the cache match."""
    if not isinstance(pool, HostPool):
        raise TypeError(f"pool must be a jaxkv.HostPool, got {type(pool).__name__}")
    if not isinstance(cache, DeviceCache):
        raise TypeError(f"cache must be a jaxkv.DeviceCache, got {type(cache).__name__}")
    for field in dataclasses.fields(pool.spec):
        in_pool, in_cache = (getattr(owner.spec, field.name) for owner in (pool, cache))
        if in_pool != in_cache:
            raise ValueError(
                f"pool and cache must have the same {field.name}, got {in_pool} and {in_cache}"
            )
    layout = pool.host_layout
    if tuple(pool.data.shape) != layout.shape or pool.data.dtype != layout.spec.dtype:
        raise ValueError(
            f"pool.data must be {layout.spec.dtype}{list(layout.shape)} for layout {pool.layout}, "
            f"got {pool.data.dtype}{list(pool.data.shape)}"
        )
    concrete = isinstance(pool.data, jax.Array) and not isinstance(pool.data, jax.core.Tracer)
    if concrete and (kind := pool.data.sharding.memory_kind) != "pinned_host":
        raise ValueError(f"pool.data must have memory kind pinned_host, got {kind}")
    expected = (cache.num_pages, *layout.spec.block_shape)
    for layer, halves in enumerate(cache.layers):
        for array in halves:
            if tuple(array.shape) != expected or array.dtype != layout.spec.dtype:
                raise ValueError(
                    f"cache.layers[{layer}] must be {layout.spec.dtype}{list(expected)} to match "
                    f"the pool, got {array.dtype}{list(array.shape)}"
                )
