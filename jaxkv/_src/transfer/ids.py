"""Page ids: `HostIds`, and validation of ids whose values are known on the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxkv._src.runtime import native
from jaxkv._src.runtime.devices import check_outside_jit, default_sharding, has_native_memory
from jaxkv._src.runtime.errors import PageIndexError
from jaxkv._src.runtime.held_arrays import hold
from jaxkv._src.runtime.sharding import check_is_sharding
from jaxkv._src.runtime.sync_guard import allow_host_sync
from jaxkv._src.runtime.upload import upload_replicated

_NEW = object()  # not None, which a transformation may pass as `data`
_INT32 = np.iinfo(np.int32)


# A registered dataclass, which JAX flattens without Python code in every call of a program. Slots,
# because each additional object is a cache miss when caches are cold.
@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=["part"])
class HostIds:
    """Page ids for the copy engine, whose descriptors the host writes.

        load = jax.jit(jaxkv.load_pages, donate_argnames="cache")
        cache = load(pool, cache, jaxkv.HostIds([7, 3, -1]), jaxkv.HostIds([0, 5, -1]))

    The FFI handler reads the ids when the call is enqueued, before the device executes it. They
    must therefore be written by the host: `HostIds` accepts only NumPy arrays and lists, and a call
    rejects ids that were not written by this constructor, such as the result of a computation. The
    check is best effort: it may accept a copy that is not complete yet, in the memory of freed ids
    of the same length. vLLM's `swap_blocks` takes its ids in a CPU tensor for the same reason.

    Attributes:
      data: int32[header + n] in pinned host memory (on platforms other than CPU and CUDA in device
        memory), or that of a `HostIdPair`; opaque.
      ids: the given ids, NumPy int32[n]; None for an object rebuilt by a JAX transformation.
      part: 0 or 1, the list of a `HostIdPair`; None without one.

    Args:
      ids: int[n]; negative entries are padding.
      sharding: placement of the ids, e.g. replicated over a mesh; None for all devices of the mesh
        of `jax.set_mesh`, or else the default device.
      data, part: reserved for JAX, which rebuilds objects from their leaves.

    Raises:
      TypeError: `ids` is missing, a JAX array, or not of integers; or `sharding` has another type.
      RuntimeError: called inside jit.
      ValueError: `ids` is not one-dimensional or exceeds int32, or `sharding` is not fully
        replicated.
    """

    __slots__ = ("__weakref__", "data", "ids", "part")
    data: jax.Array
    ids: np.ndarray | None
    part: int | None

    def __init__(
        self,
        ids: npt.ArrayLike | None = None,
        *,
        sharding: jax.sharding.Sharding | None = None,
        data: object = _NEW,
        part: int | None = None,
    ):
        if data is not _NEW:
            self.data, self.ids, self.part = cast(jax.Array, data), None, part
            return
        self.ids, self.part = as_host_ids(cast(npt.ArrayLike, ids), "HostIds: ids"), None
        self.data = _uploaded("HostIds", [self.ids], sharding)

    def __len__(self) -> int:
        words = self.data.shape[0] - native.extension().HOST_IDS_HEADER
        return words if self.part is None else words // 2


@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=[])
class HostIdPair:
    """The two id lists of a call in one array: one upload instead of two, and one jit argument.

    Unpack it in the call:

        ids = jaxkv.HostIdPair(host_pages, device_pages)
        load = jax.jit(lambda pool, cache, ids: jaxkv.load_pages(pool, cache, *ids))

    Attributes:
      data: int32[header + 2n] in the memory of `HostIds`; opaque.
      ids: the two given lists, NumPy int32[n]; None for an object rebuilt by a JAX transformation.

    Args:
      first, second: int[n], in the order of the call's arguments; negative entries are padding.
      sharding: as for `HostIds`.
      data: reserved for JAX, which rebuilds objects from their leaves.

    Raises:
      TypeError: a list is missing, a JAX array, or not of integers; or `sharding` has another type.
      RuntimeError: called inside jit.
      ValueError: the lists are not one-dimensional and of one length, or exceed int32; or
        `sharding` is not fully replicated.
    """

    __slots__ = ("__weakref__", "data", "ids")
    data: jax.Array
    ids: tuple[np.ndarray, np.ndarray] | None

    def __init__(
        self,
        first: npt.ArrayLike | None = None,
        second: npt.ArrayLike | None = None,
        *,
        sharding: jax.sharding.Sharding | None = None,
        data: object = _NEW,
    ):
        if data is not _NEW:
            self.data, self.ids = cast(jax.Array, data), None
            return
        if first is None or second is None:
            raise TypeError(
                "HostIdPair: first and second are required: NumPy arrays or lists of integers"
            )
        self.ids = (
            as_host_ids(first, "HostIdPair: first"),
            as_host_ids(second, "HostIdPair: second"),
        )
        if len(self.ids[0]) != len(self.ids[1]):
            raise ValueError(
                f"HostIdPair: first and second must have the same length, got {len(self.ids[0])} "
                f"and {len(self.ids[1])}"
            )
        self.data = _uploaded("HostIdPair", self.ids, sharding)

    def __iter__(self) -> Iterator[HostIds]:
        for part in range(2):
            one = HostIds(data=self.data, part=part)
            one.ids = self.ids and self.ids[part]
            yield one


def _uploaded(
    operation: str, lists: Sequence[np.ndarray], sharding: jax.sharding.Sharding | None
) -> jax.Array:
    """The lists after a header, in registered memory that the host has written."""
    extension = native.extension()
    words = np.concatenate([np.zeros(extension.HOST_IDS_HEADER, np.int32), *lists])
    extension.write_host_ids_header(words.ctypes.data, len(words))
    if sharding is None:
        sharding = default_sharding()
    check_is_sharding(operation, sharding)
    if not sharding.is_fully_replicated:
        raise ValueError(
            f"{operation}: sharding must be fully replicated, got {sharding}; pass "
            "NamedSharding(mesh, PartitionSpec())"
        )
    native_memory = all(map(has_native_memory, sharding.addressable_devices))
    if native_memory:
        sharding = sharding.with_memory_kind("pinned_host")
    array = upload_replicated(words, sharding)
    check_outside_jit(array)
    if not native_memory:
        return array
    devices: set[Any] = sharding.addressable_devices
    on_gpu = next(iter(devices)).platform == "gpu"
    if not on_gpu and not array.is_ready():  # type: ignore[attr-defined]
        with allow_host_sync("HostIds are copied in host memory, after no work of a device"):
            array.block_until_ready()
    for address in _addresses(array):
        # On GPUs, XLA's copy ends 0.07 ms later and writes the same words.
        extension.place_host_ids(address, words.ctypes.data, len(words))
    hold(array)
    return array


def _addresses(array: jax.Array) -> list[int]:
    """Address of each device's copy."""
    if isinstance(array.sharding, jax.sharding.SingleDeviceSharding):
        return [array.unsafe_buffer_pointer()]
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def position_of(ids: HostIds) -> int:
    """The position of the first id in `data`."""
    return native.extension().HOST_IDS_HEADER + (ids.part or 0) * len(ids)


def values_on_device(ids: HostIds) -> jax.Array:
    """The ids in device memory, int32[n]; traced."""
    words, first = jax.device_put(ids.data, jax.memory.Space.Device), position_of(ids)
    return words[first : first + len(ids)]


Ids: TypeAlias = HostIds | jax.Array | np.ndarray | Sequence[int]
CheckedIds: TypeAlias = HostIds | jax.Array | np.ndarray  # int32[n]
IdPair: TypeAlias = tuple[CheckedIds, CheckedIds]  # source and destination ids


def as_host_ids(ids: npt.ArrayLike, name: str) -> np.ndarray:
    """`ids` as int32[n]; raises a TypeError or ValueError for argument `name`."""
    if isinstance(ids, jax.Array):
        raise TypeError(f"{name} must be a NumPy array or a list, got a jax.Array")
    try:
        array = np.asarray(ids)
    except ValueError as error:  # nested lists of different lengths
        raise ValueError(f"{name} must be a list of integers: {error}") from None
    if array.ndim == 0 and not hasattr(ids, "dtype"):
        raise TypeError(f"{name} must be an array or a list of integers, got {ids!r}")
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must have an integer dtype, got {array.dtype}: pass array.astype(np.int32)"
        )
    may_exceed = not np.can_cast(array.dtype, np.int32)
    if may_exceed and (array.max() > _INT32.max or array.min() < _INT32.min):
        raise ValueError(f"{name} must fit int32, got values in [{array.min()}, {array.max()}]")
    return array.astype(np.int32)


def as_ids(ids: Ids, name: str) -> CheckedIds:
    """`ids` as HostIds or as a NumPy or JAX int32[n]; raises an error for argument `name`."""
    if isinstance(ids, HostIdPair):
        raise TypeError(f"{name} is a HostIdPair, which has both id lists: unpack it, *ids")
    if isinstance(ids, HostIds):
        header = native.extension().HOST_IDS_HEADER
        if ids.data.ndim != 1 or ids.data.dtype != jnp.int32 or ids.data.shape[0] < header:
            raise ValueError(
                f"{name}: the array of HostIds was replaced by {ids.data.dtype}"
                f"{list(ids.data.shape)}; create HostIds from a NumPy array"
            )
        return ids
    if isinstance(ids, list | tuple) and any(isinstance(i, jax.core.Tracer) for i in ids):
        raise TypeError(f"{name} is a list of tracers: jit flattens lists; pass an int32 array")
    if not hasattr(ids, "dtype") or isinstance(ids, np.ndarray):
        return as_host_ids(ids, name)
    array = cast(jax.Array, ids)
    if array.dtype != jnp.int32:
        raise TypeError(f"{name} must be int32, got {array.dtype}: pass array.astype(jnp.int32)")
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    return array


def num_ids_of(ids: CheckedIds) -> int:
    """Length of an id list, including padding."""
    return len(ids) if isinstance(ids, HostIds) else ids.shape[0]


def known_ids(ids: CheckedIds) -> np.ndarray | None:
    """The values, or None if traced or if reading them would wait for a device."""
    if isinstance(ids, HostIds):
        return ids.ids
    if isinstance(ids, jax.core.Tracer):
        return None
    if isinstance(ids, jax.Array):
        if any(device.platform != "cpu" for device in ids.devices()):
            return None
        with allow_host_sync("ids are checked on the CPU backend only, not on a GPU"):
            return np.asarray(ids)
    return ids


def upload_ids(ids: IdPair, arrays: Sequence[Any]) -> IdPair:
    """The ids; under a transfer guard, NumPy arrays on the devices of `arrays`.

    `jax.transfer_guard` may forbid implicit transfers, such as that of a NumPy argument of jit.
    Without a guard jit transfers them, in less host time than explicit transfers take.
    """
    guard = jax.config.jax_transfer_guard_host_to_device  # type: ignore[attr-defined]
    if guard in (None, "allow"):
        return ids
    like = next((array for array in arrays if isinstance(array, jax.Array)), None)
    first, second = (
        _upload_like(entry, like) if isinstance(entry, np.ndarray) else entry for entry in ids
    )
    return first, second


def _upload_like(ids: np.ndarray, like: jax.Array | None) -> CheckedIds:
    if like is None or not like.committed:
        return jax.device_put(ids)
    sharding = like.sharding
    if isinstance(sharding, jax.NamedSharding):
        sharding = jax.NamedSharding(sharding.mesh, jax.P())
    elif sharding.num_devices == 1:
        sharding = jax.sharding.SingleDeviceSharding(*sharding.device_set)
    else:
        return ids
    return upload_replicated(ids, sharding) if sharding.is_fully_addressable else ids


_SIDES = {
    "host_pages": "pages of the pool",
    "device_pages": "pages of the cache",
    "src_ids": "blocks of src",
    "dst_ids": "blocks of dst",
}


def check_page_ids(
    operation: str,
    ids: tuple[np.ndarray | None, np.ndarray | None],
    limits: tuple[int, int],
    names: tuple[str, str],
) -> None:
    """Raises PageIndexError for entries that the handlers would reject, if all ids are known.

    Both lists are required: an entry is padding if its counterpart is negative.

    Args:
      operation: name of the public function.
      ids: source and destination ids; None if not known on the host.
      limits: number of blocks on each side.
      names: names of the two arguments.
    """
    sources, destinations = ids
    if sources is None or destinations is None:
        return
    used = (sources >= 0) & (destinations >= 0)
    for entry, limit, name in zip((sources, destinations), limits, names, strict=True):
        outside = np.flatnonzero(used & (entry >= limit))
        if len(outside):
            raise PageIndexError(
                f"{operation}: {name}[{outside[0]}] = {entry[outside[0]]} is outside [0, {limit}), "
                f"the {_SIDES[name]} (of each shard, if sharded): {len(outside)} of {len(entry)} "
                f"ids are invalid, nothing was copied; use ids below {limit}, or below 0 for "
                "padding",
                operation=operation,
                argument=name,
                count=len(outside),
            )
    values, counts = np.unique(destinations[used], return_counts=True)
    if (counts > 1).any():
        repeated = values[counts > 1][0]
        first, second = np.flatnonzero(used & (destinations == repeated))[:2]
        raise PageIndexError(
            f"{operation}: {names[1]} has duplicate destination {repeated}, at positions {first} "
            f"and {second}: nothing was copied; give each destination once",
            operation=operation,
            argument=names[1],
            count=int(counts[counts > 1].sum()),
        )
