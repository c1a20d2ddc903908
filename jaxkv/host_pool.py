"""KV pages in pinned host memory, as a JAX array that donated steps write in place."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxkv import _native
from jaxkv.device_cache import DeviceCache, check_head_axis, check_outside_jit, default_device
from jaxkv.errors import HostMemoryError
from jaxkv.layout import HostLayout, KVCacheSpec
from jaxkv.sync_guard import allow_host_sync


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HostPool:
    """KV pages in pinned host memory: a pytree around one array.

    Attributes:
      data: `dtype[host_layout.shape]` with `memory_kind="pinned_host"`.
      spec: what a token is made of (all shards together).
      layout: name of the layout, one of `jaxkv.layout.LAYOUTS`.
      head_groups: G of page_unified, else 1.
    """

    data: Any
    spec: KVCacheSpec = dataclasses.field(metadata={"static": True})
    layout: str = dataclasses.field(metadata={"static": True})
    head_groups: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def create(
        cls,
        spec: KVCacheSpec,
        *,
        num_pages: int,
        layout: str = "page_first_direct",
        head_groups: int = 1,
        mesh: jax.sharding.Mesh | None = None,
        head_axis: str | None = None,
    ) -> HostPool:
        """Zeroed pages, each device's shard pinned near that device.

        Args:
          spec: what a token is made of.
          num_pages: pages of the pool.
          layout: see `jaxkv.layout`; page_first_direct suits the copy engine.
          head_groups: G of page_unified.
          mesh: devices whose steps use the pool; None for the default device.
          head_axis: mesh axis that the KV heads (page_unified: the head groups) are split over;
            None for a copy of the pool for each device.

        Raises:
          RuntimeError: made inside of jit.
          HostMemoryError: the pool does not fit what the machine leaves; nothing was allocated.
          ValueError: a layout or sizes that do not go together, or a head_axis without a mesh.
        """
        whole = HostLayout(spec, layout, num_pages, head_groups)
        sharding = _pool_sharding(whole, mesh, head_axis)
        shards = sharding.addressable_devices_indices_map(whole.shape)
        local_shape = sharding.shard_shape(whole.shape)
        local_bytes = int(np.prod(local_shape)) * np.dtype(spec.dtype).itemsize
        check_host_memory(local_bytes * len(shards))
        arrays = [_allocate(local_shape, spec.dtype, device) for device in shards]
        if mesh is None:
            (data,) = arrays
        else:
            data = jax.make_array_from_single_device_arrays(whole.shape, sharding, arrays)
        return cls(data=data, spec=spec, layout=layout, head_groups=head_groups)

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.host_layout.num_pages

    @property
    def host_layout(self) -> HostLayout:
        """The layout of `data` as it is here: inside `shard_map`, that of the shard."""
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
        """How `data` is split over the mesh: for `in_specs` and `out_specs` of `shard_map`."""
        return getattr(self.data.sharding, "spec", PartitionSpec())

    def release(self) -> None:
        """Frees the host memory now, after all work that may still use it has ended.

        Blocks until then. Later uses of this pool, or of a pool that shares its array, are errors.
        """
        if self.data.is_deleted():
            return
        self.data.block_until_ready()
        for device in self.data.sharding.addressable_devices:
            # The array is ready once written, but loads that read it may still be in flight.
            if device.platform == "gpu":
                _native.extension().synchronize_device(device.local_hardware_id)
        self.data.delete()


def _pool_sharding(
    whole: HostLayout, mesh: jax.sharding.Mesh | None, head_axis: str | None
) -> jax.sharding.Sharding:
    split = "group" if whole.name == "page_unified" else "head"
    parts = whole.head_groups if split == "group" else whole.spec.num_kv_heads
    check_head_axis(parts, "head_groups" if split == "group" else "num_kv_heads", mesh, head_axis)
    if mesh is None:
        return SingleDeviceSharding(default_device(), memory_kind="pinned_host")
    axes = (head_axis if merged == (split,) else None for merged in whole.axes)
    return NamedSharding(mesh, PartitionSpec(*axes), memory_kind="pinned_host")


def _allocate(shape: tuple[int, ...], dtype: Any, device: jax.Device) -> jax.Array:
    sharding = SingleDeviceSharding(device, memory_kind="pinned_host")
    with prefer_numa_node(numa_node(device)):
        if device.platform == "cpu":
            # Through XLA's own memory: NumPy's could be lent, and the first donation would copy it.
            zeros: Any = jnp.zeros(shape, dtype, device=device)
        else:
            # Ten times faster on an H200 host than zeros that XLA writes.
            zeros = np.zeros(shape, dtype)
        # device_put and not out_shardings, which forgets that the type of the array is <host>.
        with allow_host_sync("a new pool is uploaded, after no work of the device"):
            array = jax.device_put(zeros, sharding)
            check_outside_jit(array)
            return array.block_until_ready()


def check_host_memory(needed_bytes: int) -> None:
    """Raises HostMemoryError if `needed_bytes` are more than the machine's limits leave.

    The tightest of the memory limits of this process's control groups and of what the kernel calls
    available memory counts. The locked-memory limit is not among them: the CUDA driver pins
    without regard to it, and the CPU backend does not pin at all.
    """
    limits = [("available memory (MemAvailable)", _mem_available()), *_cgroup_limits()]
    limit, available = min(limits, key=lambda entry: entry[1])
    available = max(available, 0)
    if needed_bytes > available:
        raise HostMemoryError(needed_bytes, available, limit)


def _cgroup_limits() -> Iterator[tuple[str, int]]:
    """(name, bytes left) of every finite memory limit above this process, v2 and v1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
            cache_field = "inactive_file"
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            cache_field = "total_inactive_file"
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory != root and root not in directory.parents:
                break
            left = _cgroup_bytes_left(directory, files, cache_field)
            if left is not None:
                yield f"{directory / files[0]}", left


def _cgroup_bytes_left(directory: Path, files: tuple[str, str], cache_field: str) -> int | None:
    try:
        limit, usage = ((directory / name).read_text().strip() for name in files)
        if limit == "max" or int(limit) >= 1 << 60:  # v1 writes "no limit" as a huge number
            return None
        fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        return int(limit) - int(usage) + int(fields.get(cache_field, 0))
    except (OSError, ValueError):
        return None


def _mem_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def numa_node(device: jax.Device) -> int | None:
    """NUMA node of a GPU, or None where the machine has one node or does not say."""
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    if device.platform != "gpu" or len(nodes) < 2:
        return None
    address = _native.extension().pci_address(device.local_hardware_id).lower()
    try:
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


# System call numbers of (get_mempolicy, set_mempolicy).
_MEMPOLICY_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_MPOL_PREFERRED = 1
_MAX_NODES = 1024


@contextlib.contextmanager
def prefer_numa_node(node: int | None) -> Iterator[None]:
    """New pages of this thread come from `node` while it has room; None changes nothing.

    A preference only: where the kernel refuses it, as containers often do, nothing changes.
    """
    if node is None or platform.machine() not in _MEMPOLICY_CALLS:
        yield
        return
    get_policy, set_policy = map(ctypes.c_long, _MEMPOLICY_CALLS[platform.machine()])
    node_mask = ctypes.c_ulong * (_MAX_NODES // 64)
    mode, nodes, wanted = ctypes.c_int(), node_mask(), node_mask()
    wanted[node // 64] = 1 << (node % 64)
    size, nothing = ctypes.c_ulong(_MAX_NODES), ctypes.c_ulong(0)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    known = syscall(get_policy, ctypes.byref(mode), nodes, size, nothing, nothing) == 0
    if known:
        syscall(set_policy, ctypes.c_int(_MPOL_PREFERRED), wanted, size)
    try:
        yield
    finally:
        if known:
            syscall(set_policy, mode, nodes, size)


def check_pair(pool: HostPool, cache: DeviceCache) -> None:
    """Raises a TypeError or ValueError unless pages can go between the two."""
    if not isinstance(pool, HostPool):
        raise TypeError(f"pool must be a jaxkv.HostPool, got {type(pool).__name__}")
    if not isinstance(cache, DeviceCache):
        raise TypeError(f"cache must be a jaxkv.DeviceCache, got {type(cache).__name__}")
    for field in dataclasses.fields(pool.spec):
        ours, theirs = (getattr(owner.spec, field.name) for owner in (pool, cache))
        if ours != theirs:
            raise ValueError(f"{field.name} of the pool is {ours}, of the cache {theirs}")
    layout = pool.host_layout
    if tuple(pool.data.shape) != layout.shape or pool.data.dtype != layout.spec.dtype:
        raise ValueError(
            f"pool.data must be {layout.spec.dtype}{list(layout.shape)} for layout {pool.layout}, "
            f"got {pool.data.dtype}{list(pool.data.shape)}"
        )
    concrete = isinstance(pool.data, jax.Array) and not isinstance(pool.data, jax.core.Tracer)
    if concrete and (kind := pool.data.sharding.memory_kind) != "pinned_host":
        raise ValueError(f"pool.data must be in pinned_host memory, is in {kind}")
    wanted = (cache.num_pages, *layout.spec.block_shape)
    for layer, halves in enumerate(cache.layers):
        for array in halves:
            if tuple(array.shape) != wanted or array.dtype != layout.spec.dtype:
                raise ValueError(
                    f"cache.layers[{layer}] must be {layout.spec.dtype}{list(wanted)} to match the "
                    f"pool, got {array.dtype}{list(array.shape)}"
                )
