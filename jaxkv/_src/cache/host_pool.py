"""KV pages in pinned host memory, as a JAX array that is updated in place if donated."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv._src.cache.array_cache import (
    ArrayCache,
    ArrayHostLayout,
    check_arrays,
    layout_of_shape,
    pool_sharding,
)
from jaxkv._src.cache.array_spec import ArrayCacheSpec
from jaxkv._src.cache.device_cache import DeviceCache, check_num_arrays
from jaxkv._src.cache.host_layout import HostLayout, Layout
from jaxkv._src.cache.pinned_memory import PINNED, allocate, view_of
from jaxkv._src.cache.shared_memory import SharedPool, identity, unlink
from jaxkv._src.cache.spec import KVCacheSpec
from jaxkv._src.runtime import native
from jaxkv._src.runtime.devices import context_mesh, default_device, platform_of
from jaxkv._src.runtime.sharding import check_head_axis


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class HostPool:
    """KV pages in pinned host memory: a pytree around one array.

        pool = jaxkv.HostPool.create(spec, num_pages=4096)
        store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
        pool = store(pool, cache, host_pages, device_pages)   # in place: use the new object

    The counterpart of the host pools of SGLang's HiCache and of the CPU tensors of vLLM's
    offloading connector.

    Devices of this process with the same part of a replicated pool share one copy of it in host
    memory (near the first of them). Donate such a pool to every store: otherwise XLA copies it for
    each device. Stores of different devices are not ordered, see `docs/usage.md`.

    A pool created with `shared` is in POSIX shared memory: its pages outlive the process, even if
    it is killed, until `HostPool.unlink` or a restart of the machine. If a pool of this name
    exists, `create` attaches to it with its contents, even while other processes use it:

        pool = jaxkv.HostPool.create(spec, num_pages=4096, shared="kv")
        valid = index.pages if index.pool_id == jaxkv.HostPool.shared_id("kv") else []

    A page is valid if the engine waited for its store before recording it in its own index; later
    stores of a killed process may be incomplete.

    Attributes:
      data: with `memory_kind="pinned_host"`. For a `KVCacheSpec` `dtype[host_layout.shape]`; for an
        `ArrayCacheSpec` `uint8[num_pages, num_layers, bytes]`, or `[num_layers, num_pages, bytes]`
        for layer_first, of all shards together.
      spec: the `KVCacheSpec` or `ArrayCacheSpec`, of all shards together.
      layout: name of the layout, see `HostLayout`.
      head_groups: G of page_unified, otherwise 1.
    """

    data: jax.Array
    spec: KVCacheSpec | ArrayCacheSpec = dataclasses.field(metadata={"static": True})
    layout: Layout = dataclasses.field(metadata={"static": True})
    head_groups: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        spec: KVCacheSpec | ArrayCacheSpec,
        *,
        num_pages: int,
        layout: Layout = "page_first_direct",
        head_groups: int = 1,
        mesh: jax.sharding.Mesh | None = None,
        head_axis: str | None = None,
        shared: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> HostPool:
        """Allocates zeroed pages in pinned host memory, each shard near its device (NUMA).

            pool = jaxkv.HostPool.create(spec, num_pages=4096)

        Args:
          spec: the `KVCacheSpec`, or the `ArrayCacheSpec` of an engine's own arrays, whose devices
            and shardings the pool has.
          num_pages: number of pages, of all page shards together (`ArrayCacheSpec` over a data
            axis); page ids are below `num_pages` divided by the number of page shards.
          layout: see `HostLayout`; an `ArrayCacheSpec` supports page_first_direct and layer_first.
          head_groups: G of page_unified, otherwise 1.
          mesh: devices that use the pool; None for the mesh of `jax.set_mesh`, or else the default
            device.
          head_axis: mesh axis over which the KV heads (page_unified: the head groups) are sharded;
            None to replicate the pool.
          shared: name of a pool in shared memory, see above: up to 200 letters, digits, "_", "-"
            and ".", not beginning with "."; the same in the processes of all shards and replicas.
          progress: called as `progress(num_bytes, total_bytes)` while the pages of this process are
            allocated; each shard is page-locked after its last call. An exception cancels the
            creation. Not called on platforms other than CPU and CUDA.

        Returns:
          The `HostPool`.

        Raises:
          TypeError: `spec` or `mesh` has another type, or `progress` is not callable.
          RuntimeError: called inside jit, or the memory could not be allocated or page-locked.
          HostMemoryError: the pool exceeds the available host memory, or the size of /dev/shm;
            nothing is allocated.
          ValueError: the layout and the sizes do not match, or the pool has 2^60 elements or more;
            `head_axis` is given without a mesh or is not one of its axes; `mesh`, `head_axis` or
            `head_groups` is given for an `ArrayCacheSpec`; a device has no memory kind pinned_host;
            or `shared` is not a name, or that of a pool with another spec, layout, sharding, number
            of pages or size.
          PermissionError: the pool `shared` is not a file of this user with mode 0600.
          TimeoutError: another process has been creating a shard of the pool `shared` for 30 s plus
            1 s per GiB of the pool.
          NotImplementedError: `shared` on a platform other than CPU and CUDA.
        """
        if progress is not None and not callable(progress):
            raise TypeError(
                "HostPool.create: progress must be a function of (num_bytes, total_bytes), got "
                f"{progress!r}"
            )
        array = _array_of_pool(spec, num_pages, layout, head_groups, mesh, head_axis)
        objects = None
        if shared is not None:
            sizes = {"num_pages": str(num_pages), "layout": layout, "head_groups": str(head_groups)}
            objects = SharedPool(shared, sizes | description(spec))
        data = allocate(*array, objects, progress)
        return cls(data=data, spec=spec, layout=layout, head_groups=head_groups)

    @staticmethod
    def unlink(name: str) -> None:
        """Removes a shared pool of this machine; processes that use it keep its memory.

            jaxkv.HostPool.unlink("kv")

        Args:
          name: the `shared` of `create`.

        Raises:
          ValueError: not the name of a pool.
          FileNotFoundError: there is no pool of this name.
          PermissionError: the pool belongs to another user.
        """
        unlink(name)

    @staticmethod
    def shared_id(name: str) -> str:
        """Identity of the contents of a shared pool: random, chosen when it was created.

        An engine records it with its index of pages, once all processes have created or attached
        the pool. Another identity later means new pages, for example after a restart of the
        machine.

        Args:
          name: the `shared` of `create`.

        Returns:
          32 hexadecimal digits.

        Raises:
          ValueError: not the name of a pool, or it is still being created.
          FileNotFoundError: there is no pool of this name.
          PermissionError: it is not a file of this user with mode 0600.
        """
        return identity(name)

    @property
    def num_pages(self) -> int:
        """Number of pages of the pool, in all page shards; inside `shard_map`, of the shard."""
        return self.host_layout.num_pages

    @property
    def host_layout(self) -> Any:
        """The `HostLayout` of `data`; inside `shard_map`, that of the shard.

        For an `ArrayCacheSpec`, the layout inside `shard_map`; outside, it counts the pages of all
        page shards, but the bytes of one shard of a page.
        """
        if isinstance(self.spec, ArrayCacheSpec):
            return layout_of_shape(self.spec, self.layout, self.data.shape)
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

    def view(self, device: jax.Device | None = None) -> np.ndarray[Any, Any]:
        """The bytes of the pool as a read-only NumPy array, without a copy.

            pool = jax.block_until_ready(store(pool, cache, host_pages, device_pages))
            k, v = pool.view()[:, 7]                          # page 7, "page_first_direct"

        A view of the pinned memory itself: it shows later stores too, as long as the pool is
        donated to them, and keeps the memory allocated, also after `close`. Read it between
        `jax.block_until_ready` of the pool returned by a store (after `start_store`, of
        `StoreHandle.pool`) and the call of the next store; otherwise pages may be incomplete.

        Args:
          device: the device of the shard; None for a pool on one device.

        Returns:
          An array of the dtype of `data`, and of the shape of its shard on this device.

        Raises:
          RuntimeError: called inside jit, or the pool was closed or donated.
          ValueError: no such shard, `device` is None for a pool on several devices, the array is a
            copy that XLA made of a pool that was not donated or whose buffer a NumPy array of
            `np.asarray(pool.data)` held, or the platform is neither CPU nor CUDA.
        """
        return view_of(self.data, device)

    def close(self) -> None:
        """Frees the host memory after all work of the pool's devices; idempotent.

        Blocks until that work is complete. Later use of this pool, or of a pool that shares its
        array, is an error. Memory of a `view` is freed with the view. A shared pool keeps its
        pages, for the next process.

        Raises:
          RuntimeError: called inside jit.
        """
        if isinstance(self.data, jax.core.Tracer):
            raise RuntimeError("close: the pool is traced; call it outside of jit")
        if self.data.is_deleted():
            return
        self.data.block_until_ready()
        devices: set[jax.Device] = self.data.sharding.addressable_devices
        for device in devices:
            # A ready array has been written, but loads from it may still be in flight.
            if platform_of(device) == "gpu":
                native.extension().synchronize_device(device.local_hardware_id)
        self.data.delete()
        native.extension().wait_for_frees()
        object.__setattr__(self, "data", _ClosedData(self.data))


class _ClosedData:
    """The deleted array of a closed pool; as an argument of jit an error that names the pool."""

    def __init__(self, data: jax.Array) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if name == "__jax_array__":  # looked up by jit, before it rejects objects with it
            raise RuntimeError(
                "pool was closed, its host memory is freed: pass the pool that replaced it, or "
                "create a new one with HostPool.create"
            )
        if name.startswith("__"):  # also of copy and pickle, before `_data` is set
            raise AttributeError(name)
        return getattr(self._data, name)


def _array_of_pool(
    spec: KVCacheSpec | ArrayCacheSpec,
    num_pages: int,
    layout: Layout,
    head_groups: int,
    mesh: jax.sharding.Mesh | None,
    head_axis: str | None,
) -> tuple[tuple[int, ...], np.dtype[Any], jax.sharding.Sharding]:
    """Shape, dtype and sharding; arguments of `HostPool.create`."""
    if isinstance(spec, KVCacheSpec):
        host_layout = HostLayout(spec, layout, num_pages, head_groups)
        sharding = _pool_sharding(host_layout, mesh, head_axis)
        return host_layout.shape, np.dtype(spec.dtype), sharding
    if not isinstance(spec, ArrayCacheSpec):
        raise TypeError(
            "HostPool.create: spec must be a KVCacheSpec or an ArrayCacheSpec, got "
            f"{type(spec).__name__}; create one pool for each group of caches"
        )
    if (mesh, head_axis, head_groups) != (None, None, 1):
        raise ValueError(
            "mesh, head_axis and head_groups are for a KVCacheSpec: an ArrayCacheSpec has the "
            "shardings of its arrays"
        )
    sharding = pool_sharding(spec, layout)
    if isinstance(num_pages, int | np.integer) and num_pages % spec.num_page_shards:
        raise ValueError(
            f"num_pages={num_pages} must be a multiple of {spec.num_page_shards}, the page shards "
            f"over mesh axes {', '.join(spec.page_axes)}"
        )
    arrays_layout = ArrayHostLayout(spec, layout, num_pages, spec.num_block_shards)
    return arrays_layout.shape, np.dtype(np.uint8), sharding


def description(spec: KVCacheSpec | ArrayCacheSpec) -> dict[str, str]:
    """What decides the meaning of the bytes of a page, in any version of JAX."""
    if isinstance(spec, KVCacheSpec):
        return {
            field.name: str(getattr(spec, field.name)) for field in dataclasses.fields(KVCacheSpec)
        }
    arrays = zip(spec.array_names, spec.arrays, spec.blocks.shapes, strict=True)
    return {
        "num_layers": str(spec.num_layers),
        "arrays of a layer": ", ".join(
            f"{name}{array.dtype}{list(array.shape)} in blocks of {list(block)}"
            for name, array, block in arrays
        ),
        # Not the mesh axes: those of the next process may have other names or sizes.
        "blocks of each array by shard": str(spec.block_numbers),
    }


def _pool_sharding(
    host_layout: HostLayout, mesh: jax.sharding.Mesh | None, head_axis: str | None
) -> jax.sharding.Sharding:
    mesh = context_mesh() if mesh is None else mesh
    sharded_axis = "group" if host_layout.name == "page_unified" else "head"
    if sharded_axis == "group":
        check_head_axis(host_layout.head_groups, "head_groups", mesh, head_axis)
    else:
        check_head_axis(host_layout.spec.num_kv_heads, "num_kv_heads", mesh, head_axis)
    if mesh is None:
        return SingleDeviceSharding(default_device(), memory_kind=PINNED)
    axes = (head_axis if merged == (sharded_axis,) else None for merged in host_layout.axes)
    return NamedSharding(mesh, PartitionSpec(*axes), memory_kind=PINNED)


PASS_A_POOL = "pass a pool that HostPool.create or a store has returned"


def check_memory_kind(operation: str, data: Any) -> None:
    """Raises a ValueError for a concrete array that is not in pinned host memory."""
    if isinstance(data, np.ndarray):
        raise ValueError(
            f"{operation}: pool.data must be a jax.Array in memory kind pinned_host, got a NumPy "
            f"array: {PASS_A_POOL}"
        )
    concrete = isinstance(data, jax.Array) and not isinstance(data, jax.core.Tracer)
    if concrete and (kind := data.sharding.memory_kind) != "pinned_host":
        raise ValueError(
            f"{operation}: pool.data must be in memory kind pinned_host, got {kind}: {PASS_A_POOL}"
        )


def check_pair(operation: str, pool: HostPool, cache: DeviceCache | ArrayCache) -> None:
    """Raises a TypeError or ValueError unless the pool and the cache match."""
    if not isinstance(pool, HostPool):
        raise TypeError(f"{operation}: pool must be a jaxkv.HostPool, got {type(pool).__name__}")
    check_memory_kind(operation, pool.data)
    if isinstance(cache, ArrayCache):
        check_arrays(operation, pool, cache)
        return
    if not isinstance(cache, DeviceCache):
        raise TypeError(
            f"{operation}: cache must be a jaxkv.DeviceCache, since pool was created for a "
            f"KVCacheSpec, got {type(cache).__name__}; for an engine's own arrays create the pool "
            "with ArrayCacheSpec.from_arrays(cache)"
        )
    for field in dataclasses.fields(pool.spec):
        in_pool, in_cache = (getattr(owner.spec, field.name) for owner in (pool, cache))
        if in_pool != in_cache:
            raise ValueError(
                f"{operation}: pool and cache must have the same {field.name}, got {in_pool} and "
                f"{in_cache}"
            )
    layout = pool.host_layout
    if tuple(pool.data.shape) != layout.shape or pool.data.dtype != layout.spec.dtype:
        raise ValueError(
            f"{operation}: pool.data must be {layout.spec.dtype}{list(layout.shape)} for layout "
            f"{pool.layout}, got {pool.data.dtype}{list(pool.data.shape)}"
        )
    check_num_arrays(operation, cache)
    expected = (cache.num_pages, *layout.spec.block_shape)
    for layer, halves in enumerate(cache.layers):
        for array in halves:
            if tuple(array.shape) != expected or array.dtype != layout.spec.dtype:
                raise ValueError(
                    f"{operation}: cache.layers[{layer}] must be {layout.spec.dtype}"
                    f"{list(expected)} to match the pool, got {array.dtype}{list(array.shape)}"
                )
