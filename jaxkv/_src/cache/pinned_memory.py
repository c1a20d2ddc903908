"""Zeroed arrays in pinned host memory, and NumPy views of their bytes.

The memory is allocated here and handed to JAX by DLPack. XLA's own allocator rounds up to a power
of two, ends at XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB (64 GiB unless set), keeps what is freed, takes
the NUMA node of the first device for all, and has one thread fill the pages.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxkv._src.cache.host_memory import check_host_memory, numa_node
from jaxkv._src.cache.shared_memory import SharedPool
from jaxkv._src.cache.spec import check_num_elements, checked_dtype
from jaxkv._src.runtime import native
from jaxkv._src.runtime.devices import check_outside_jit, default_sharding, has_native_memory
from jaxkv._src.runtime.sharding import check_is_sharding
from jaxkv._src.runtime.sync_guard import allow_host_sync

PINNED = "pinned_host"
Progress = Callable[[int, int], None]  # bytes so far, and of the whole array

# Type codes of DLPack: by the kind of a NumPy dtype, or by name for dtypes that NumPy lacks.
_KINDS = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_NAMES = {
    "bfloat16": 4,
    "float8_e3m4": 7,
    "float8_e4m3": 8,
    "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10,
    "float8_e4m3fnuz": 11,
    "float8_e5m2": 12,
    "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}
_CUDA_HOST = 3  # the device type of DLPack for pinned memory


def pinned_zeros(
    shape: int | Sequence[int], dtype: npt.DTypeLike, sharding: Sharding | None = None
) -> jax.Array:
    """Allocates a zeroed array in pinned host memory, each shard near its device (NUMA).

    For arrays of `swap_blocks`; `HostPool.create` allocates in the same way. The memory is as large
    as the array, rounded up to a page of the system, and is returned to the system when the array
    is deleted. Devices of this process to which the array is replicated share the memory. The
    counterpart of PyTorch's `torch.zeros(..., pin_memory=True)`, as in vLLM's CPU caches.

        on_host = jaxkv.pinned_zeros((1024, 16, 8, 128), jnp.bfloat16)
        store = jax.jit(jaxkv.swap_blocks, donate_argnames="dst")
        on_host = store(on_device, on_host, device_blocks, host_blocks)

    Args:
      shape: shape of the array; an int for one dimension.
      dtype: any byte-aligned dtype, including fp8 and int8; 64-bit only with jax_enable_x64.
      sharding: devices that use the array; None for all devices of the mesh of `jax.set_mesh`, or
        else the default device. Its memory kind is replaced by "pinned_host".

    Returns:
      The array, committed, with `memory_kind="pinned_host"`.

    Raises:
      RuntimeError: called inside jit, or the memory could not be allocated or page-locked.
      HostMemoryError: the array exceeds the available host memory; nothing is allocated.
      ValueError: a size that is negative or not an integer; a dtype that JAX does not support, that
        is not byte-aligned or not in native byte order; 2^60 elements or more; the sharding does
        not divide the shape; or a device has no memory kind pinned_host.
      TypeError: NumPy cannot interpret `dtype`, or `sharding` has another type.
    """
    if sharding is not None:
        check_is_sharding("pinned_zeros", sharding)
    return allocate(shape, dtype, sharding)


def allocate(
    shape: int | Sequence[int],
    dtype: npt.DTypeLike,
    sharding: Sharding | None,
    shared: SharedPool | None = None,
    progress: Progress | None = None,
) -> jax.Array:
    """`pinned_zeros`, or with `shared` an array in shared memory, with its contents."""
    shape = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if not all(isinstance(size, int | np.integer) and size >= 0 for size in shape):
        raise ValueError(f"shape must consist of integers >= 0, got {shape}")
    shape = tuple(map(int, shape))
    check_num_elements(shape, "an array in pinned memory")
    dtype = checked_dtype(dtype, "dtype")
    if sharding is None:
        sharding = default_sharding()
    _check_has_pinned_memory(sharding)
    sharding = sharding.with_memory_kind(PINNED)
    devices = sharding.addressable_devices_indices_map(shape)
    is_native = all(map(has_native_memory, devices))
    parts = _parts(sharding, shape)
    local_parts = {parts[device] for device in devices}
    part_bytes = math.prod(sharding.shard_shape(shape)) * dtype.itemsize
    native.extension().wait_for_frees()  # of memory that is counted as in use until then
    if shared:
        if not is_native:
            raise NotImplementedError(
                f"HostPool.create: shared={shared.name!r} is supported on CPUs and CUDA devices, "
                f"not on these devices: {', '.join(map(str, devices))}; omit it"
            )
        check_host_memory(shared.missing_bytes(sorted(local_parts), part_bytes), shared=True)
    else:
        check_host_memory(part_bytes * len(local_parts if is_native else devices))
    with allow_host_sync("new pinned memory is not used by any work yet"):
        check_outside_jit(jax.device_put(np.int8(0), next(iter(devices))))
        if not is_native:
            return jax.device_put(np.zeros(shape, dtype), sharding)
        shards = _shards(shape, dtype, sharding, parts, shared, progress)
        if isinstance(sharding, SingleDeviceSharding):
            array = _with_sharding(shards[0], sharding)
        else:
            array = jax.make_array_from_single_device_arrays(shape, sharding, shards)
        _check_not_copied(array)
        return array


def views(
    num_bytes: int, device: jax.Device
) -> Callable[[tuple[int, ...], npt.DTypeLike], jax.Array]:
    """Allocates memory as `pinned_zeros` does, for arrays of several shapes over the same bytes.

    For measurements: JAX does not know that the arrays share memory.

    Returns:
      A function of shape and dtype that returns an array of the first bytes.

    Raises:
      RuntimeError, HostMemoryError: as for `pinned_zeros`.
    """
    sharding = SingleDeviceSharding(device, memory_kind=PINNED)
    check_host_memory(num_bytes)
    _leave_memory_to_exit()
    memory = _pinned_memory(num_bytes, [device])

    def view(shape: tuple[int, ...], dtype: npt.DTypeLike) -> jax.Array:
        array = _with_sharding(_as_array(memory, shape, np.dtype(dtype), device), sharding)
        _check_not_copied(array)
        return array

    return view


def _check_has_pinned_memory(sharding: Sharding) -> None:
    """Raises a ValueError if the devices of a platform have no pinned host memory."""
    devices: set[Any] = sharding.addressable_devices
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED not in kinds:
            raise ValueError(
                f"pinned memory: device {device} has no memory kind {PINNED}, only "
                f"{', '.join(kinds)}: jaxkv keeps pages in host memory on platforms that have it"
            )


def _parts(sharding: Sharding, shape: tuple[int, ...]) -> dict[jax.Device, int]:
    """For each device, also of other processes, the number of its part of the array."""
    indices = {
        device: tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))
        for device, index in sharding.devices_indices_map(shape).items()
    }
    numbers = {index: number for number, index in enumerate(sorted(set(indices.values())))}
    return {device: numbers[index] for device, index in indices.items()}


def _shards(
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    sharding: Sharding,
    parts: dict[jax.Device, int],
    shared: SharedPool | None,
    progress: Progress | None,
) -> list[jax.Array]:
    """The shards of this process's devices; those with the same part share its memory."""
    _leave_memory_to_exit()
    local_shape = sharding.shard_shape(shape)
    part_bytes = math.prod(local_shape) * dtype.itemsize
    users: dict[int, list[jax.Device]] = {}
    for device in sharding.addressable_devices_indices_map(shape):
        users.setdefault(parts[device], []).append(device)
    shards: dict[jax.Device, jax.Array] = {}
    num_parts = len(set(parts.values()))
    # In the same order in every process: each holds the locks of its new parts, which become
    # complete together.
    with contextlib.ExitStack() as stack:
        for created, (part, devices) in enumerate(sorted(users.items())):
            file = -1, False
            if shared:
                where = {"shard": f"{part} of {num_parts}, {list(local_shape)}"}
                opened = shared.opened(part, part_bytes, where, num_parts)
                file = stack.enter_context(opened)
            report = progress and _progress_of_part(progress, created, part_bytes, len(users))
            memory = _pinned_memory(part_bytes, devices, *file, report)
            shards |= {device: _as_array(memory, local_shape, dtype, device) for device in devices}
    return [shards[device] for device in sharding.addressable_devices_indices_map(shape)]


def _pinned_memory(num_bytes: int, devices: Sequence[jax.Device], *options: Any) -> Any:
    """Memory on the NUMA node of the first device, page-locked for all that are CUDA devices."""
    node = numa_node(devices[0])
    ordinals = [device.local_hardware_id for device in devices if device.platform == "gpu"]
    return native.extension().PinnedMemory(
        num_bytes, -1 if node is None else node, ordinals, *options
    )


def _progress_of_part(
    progress: Progress, number: int, part_bytes: int, num_parts: int
) -> Callable[[int], None]:
    def report(num_bytes: int) -> None:  # of pages, which may be more than the part
        progress(number * part_bytes + min(num_bytes, part_bytes), num_parts * part_bytes)

    return report


def _as_array(
    memory: Any, shape: tuple[int, ...], dtype: np.dtype[Any], device: jax.Device
) -> jax.Array:
    ordinal = device.local_hardware_id if device.platform == "gpu" else -1
    code = _NAMES[dtype.name] if dtype.name in _NAMES else _KINDS[dtype.kind]
    capsule = memory.tensor(list(shape), code, 8 * dtype.itemsize, ordinal)
    if ordinal >= 0:
        return jax.dlpack.from_dlpack(_Tensor(capsule, ordinal), copy=False)
    # No public function places memory in pinned_host of the CPU backend. copy=True has XLA take
    # the memory over; otherwise it would copy the array when donated.
    from jax._src.lib import _jax

    return _jax.dlpack_managed_tensor_to_buffer(capsule, device, None, True, _CUDA_HOST)


def _check_not_copied(array: jax.Array) -> None:
    """Raises a RuntimeError if JAX has copied a new array to memory of its own."""
    find = native.extension().pinned_view
    found = [find(shard.data.unsafe_buffer_pointer()) for shard in array.addressable_shards]
    if array.size and any(view is None for view in found):
        raise RuntimeError(
            f"pinned memory: jax {jax.__version__} copied a new array instead of using its memory; "
            "jaxkv does not support this version of jax"
        )


class _Tensor:
    """A DLPack capsule as an argument of `from_dlpack`."""

    def __init__(self, capsule: Any, ordinal: int) -> None:
        self._capsule, self._ordinal = capsule, ordinal

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA_HOST, self._ordinal


def _with_sharding(array: jax.Array, sharding: SingleDeviceSharding) -> jax.Array:
    """The array, with a type that says host memory.

    If the type differs from the memory kind of the sharding, XLA aborts the process when the array
    is donated. Assembled arrays have the right type, and `device_put` of one does not copy it.
    """
    (device,) = sharding.device_set
    named = NamedSharding(Mesh(np.array([device]), "x"), PartitionSpec(), memory_kind=PINNED)
    assembled = jax.make_array_from_single_device_arrays(array.shape, named, [array])
    return jax.device_put(assembled, sharding)


@functools.cache
def _leave_memory_to_exit() -> None:
    # Registered after JAX's own function, which deletes arrays, and thus called before it.
    atexit.register(native.extension().stop_freeing)


def view_of(array: jax.Array, device: jax.Device | None) -> np.ndarray:
    """The bytes of a shard as a read-only NumPy array, without a copy.

    Args:
      array: an array of `pinned_zeros`, or one that replaced it by donation.
      device: the device of the shard; None if the array has one.

    Raises:
      RuntimeError: the array is traced, deleted or donated.
      ValueError: no such shard, or the array is not in memory of `pinned_zeros`.
    """
    if isinstance(array, jax.core.Tracer):
        raise RuntimeError("view: the pool is traced; call it outside of jit")
    if array.is_deleted():
        raise RuntimeError("view: the pool was closed or donated; use the pool that replaced it")
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    if device is None and len(shards) > 1:
        raise ValueError(f"view: the pool has shards on {len(shards)} devices, name one as device")
    if device is not None and device not in shards:
        raise ValueError(f"view: device must be one of {list(shards)}, got {device}")
    if not all(map(has_native_memory, shards)):
        raise ValueError("view: supported on CPUs and CUDA devices only; copy with np.asarray")
    shard = shards[device] if device is not None else next(iter(shards.values()))
    found = native.extension().pinned_view(shard.unsafe_buffer_pointer())
    if found is None:
        raise ValueError(
            "view: the array is a copy in XLA's memory, made by a store to which the pool was not "
            "donated, or whose buffer a NumPy array held: donate the pool "
            "(donate_argnames='pool'), and inspect it by view(), not by np.asarray(pool.data)"
        )
    return found[: shard.nbytes].view(shard.dtype).reshape(shard.shape)


def writable(view: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The memory of a view as bytes, which it keeps allocated."""
    memory: Any = (ctypes.c_ubyte * view.nbytes).from_address(view.ctypes.data)
    memory.owner = view
    return np.frombuffer(memory, np.uint8)


def nodes_of(array: jax.Array) -> dict[jax.Device, dict[int, int]]:
    """Number of pages of each shard on each NUMA node, of a sample of its pages.

    A negative node is an errno: -2 (ENOENT) for a page that is not present, -14 (EFAULT) for one
    that the kernel does not know.
    """
    nodes = {}
    for shard in array.addressable_shards:
        address, size = shard.data.unsafe_buffer_pointer(), shard.data.nbytes
        found = native.extension().nodes_of_pages(address, size)
        nodes[shard.device] = {node: found.count(node) for node in sorted(set(found))}
    return nodes
