"""Page ids: checked as far as the host knows them, and those it may read when enqueuing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxkv._src.runtime import native
from jaxkv._src.runtime.devices import check_outside_jit, default_device
from jaxkv._src.runtime.errors import PageIndexError
from jaxkv._src.runtime.sync_guard import allow_host_sync

_NEW = object()  # None may be what a transformation puts in the place of `data`


# So JAX takes it apart without running any Python: a call of a program does so with all its ids.
# Slots, because each further object to look into is a miss where caches are cold.
@functools.partial(jax.tree_util.register_dataclass, data_fields=["data"], meta_fields=[])
class HostIds:
    """Page ids for the copy engine, whose descriptors the host writes.

    A handler reads them while the call is enqueued, long before the device gets there. So they
    must be written by the host: `HostIds` takes NumPy arrays (or lists) only, and a call refuses
    ids whose bytes did not come from this constructor, such as a copy that a computation made. That
    is best effort: a copy that has not arrived yet, in the memory of freed ids of the same length,
    can be taken for those.

    Attributes:
      data: int32[header + n] in pinned host memory; opaque.
      ids: the ids as given, or None for an object that came out of a transformation.

    Args:
      ids: int[n]; entries < 0 are padding.
      sharding: where the ids go, e.g. replicated over a mesh; None for the default device.
      data: for JAX only, which puts an object together again after a transformation.

    Raises:
      TypeError: `ids` is missing, a JAX array, or not of integers.
      RuntimeError: made inside of jit.
      ValueError: `ids` is not one-dimensional or does not fit int32, or `sharding` splits them.
    """

    __slots__ = ("__weakref__", "data", "ids")
    data: Any
    ids: np.ndarray | None

    def __init__(
        self,
        ids: npt.ArrayLike | None = None,
        *,
        sharding: jax.sharding.Sharding | None = None,
        data: Any = _NEW,
    ):
        if data is not _NEW:
            self.data, self.ids = data, None
            return
        if ids is None:
            raise TypeError("ids must be given: a NumPy array or a list of integers")
        host_ids = as_host_ids(ids, "ids")
        extension = native.extension()
        header = extension.HOST_IDS_HEADER
        words = np.zeros(header + len(host_ids), np.int32)
        words[header:] = host_ids
        extension.write_host_ids_header(words.ctypes.data, len(words))
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(default_device())
        if not sharding.is_fully_replicated:
            raise ValueError(f"sharding must be fully replicated, got {sharding}")
        data = jax.device_put(words, sharding.with_memory_kind("pinned_host"))
        check_outside_jit(data)
        with allow_host_sync("HostIds are uploaded, after no work of the device"):
            data.block_until_ready()
        for shard in data.addressable_shards:
            extension.register_host_ids(shard.data.unsafe_buffer_pointer(), len(words))
        self.data = data
        self.ids = host_ids

    def __len__(self) -> int:
        return self.data.shape[0] - native.extension().HOST_IDS_HEADER


def as_host_ids(ids: npt.ArrayLike, name: str) -> np.ndarray:
    """`ids` as int32[n], or a TypeError or ValueError that names the argument `name`."""
    if isinstance(ids, jax.Array):
        raise TypeError(f"{name} must be made by the host (NumPy or a list), got a jax.Array")
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
    if array.size == 0:
        return array.astype(np.int32)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got dtype {array.dtype}")
    if array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min:
        raise ValueError(f"{name} must fit int32, got {array.min()} .. {array.max()}")
    return array.astype(np.int32)


def as_ids(ids: Any, name: str) -> Any:
    """`ids` as HostIds, int32[n] of NumPy or int32[n] of JAX, or an error that names `name`."""
    if isinstance(ids, HostIds):
        header = native.extension().HOST_IDS_HEADER
        if ids.data.ndim != 1 or ids.data.dtype != jnp.int32 or ids.data.shape[0] < header:
            raise ValueError(f"{name} holds no HostIds any more: build them from NumPy")
        return ids
    if isinstance(ids, list | tuple) and any(isinstance(i, jax.core.Tracer) for i in ids):
        raise TypeError(f"{name} is a list that jit took apart; pass it an array of int32")
    if not hasattr(ids, "dtype") or isinstance(ids, np.ndarray):
        return as_host_ids(ids, name)
    if ids.dtype != jnp.int32:
        raise TypeError(f"{name} must be int32, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {ids.shape}")
    return ids


def num_ids_of(ids: Any) -> int:
    """Entries of an id list, padding included."""
    return len(ids) if isinstance(ids, HostIds) else ids.shape[0]


def known_ids(ids: Any) -> np.ndarray | None:
    """The values, if they can be had without waiting for a GPU."""
    if isinstance(ids, HostIds):
        return ids.ids
    if isinstance(ids, jax.Array):
        on_cpu = all(device.platform == "cpu" for device in ids.devices())
        return np.asarray(ids) if on_cpu else None
    return ids


def check_page_ids(
    operation: str,
    ids: tuple[np.ndarray | None, np.ndarray | None],
    limits: tuple[int, int],
    names: tuple[str, str],
) -> None:
    """Raises PageIndexError for what the handlers would refuse, if all ids are known.

    Of one list alone nothing can be said: an entry may be padding by what the other says.

    Args:
      operation: name of the public function.
      ids: source and destination ids; None where the host does not know them.
      limits: blocks on either side.
      names: of its arguments.
    """
    sources, destinations = ids
    if sources is None or destinations is None:
        return
    used = (sources >= 0) & (destinations >= 0)
    for entry, limit, name in zip((sources, destinations), limits, names, strict=True):
        outside = np.flatnonzero(used & (entry >= limit))
        if len(outside):
            raise PageIndexError(
                f"{operation}: {name}[{outside[0]}] is {entry[outside[0]]}, outside "
                f"[0, {limit}) pages",
                operation=operation,
                argument=name,
                count=len(outside),
            )
    named, times = np.unique(destinations[used], return_counts=True)
    if (times > 1).any():
        repeated = named[times > 1][0]
        first, second = np.flatnonzero(used & (destinations == repeated))[:2]
        raise PageIndexError(
            f"{operation}: {names[1]} names page {repeated} twice, at positions {first} and "
            f"{second}",
            operation=operation,
            argument=names[1],
            count=int(times[times > 1].sum()),
        )
