"""Page ids that the host may read when a call is enqueued."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxkv import _native


@jax.tree_util.register_pytree_node_class
class HostIds:
    """Page ids for the copy engine, whose descriptors the host writes.

    A handler reads them while the call is enqueued, long before the device gets there. So they must
    be written by the host: `HostIds` takes NumPy arrays (or lists) only, and a call refuses ids whose
    bytes did not come from this constructor, such as a copy that a computation made.

    Args:
      ids: int[n]; entries < 0 are padding.
      sharding: where the ids go, e.g. replicated over a mesh; None for the default device.

    Raises:
      TypeError: `ids` is a JAX array or not of integers.
      ValueError: `ids` is not one-dimensional or does not fit int32.
    """

    data: Any

    def __init__(self, ids: npt.ArrayLike, *, sharding: jax.sharding.Sharding | None = None):
        self.ids = as_host_ids(ids, "ids")
        extension = _native.extension()
        header = extension.HOST_IDS_HEADER
        words = np.zeros(header + len(self.ids), np.int32)
        words[header:] = self.ids
        extension.seal_host_ids(words.ctypes.data, len(words))
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(_default_device())
        data = jax.device_put(words, sharding.with_memory_kind("pinned_host"))
        data.block_until_ready()
        for shard in data.addressable_shards:
            extension.admit_host_ids(shard.data.unsafe_buffer_pointer(), len(words))
        self.data = data

    def __len__(self) -> int:
        return self.data.shape[0] - _native.extension().HOST_IDS_HEADER

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        return (self.data,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> HostIds:
        ids = object.__new__(cls)
        (ids.data,) = children
        ids.ids = None  # known to the object that was built from NumPy only
        return ids


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


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device
    return device if isinstance(device, jax.Device) else jax.local_devices()[0]
