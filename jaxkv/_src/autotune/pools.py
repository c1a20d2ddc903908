"""Pools of blocks as large as users': one in pinned host memory, others in device memory.

A copy within a few MiB finds all translations of its addresses cached and the host's memory in
few DRAM pages, and is up to a tenth faster than in a pool of tens of GiB. Blocks are therefore
scattered over all of a large pool. Only the blocks of a copy and their neighbours are filled and
compared; the pool of the host is allocated once, for blocks of all sizes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.cache import host_memory, pinned_memory

HOST_BYTES = {"cpu": 8 << 20, "gpu": 32 << 30}
DEVICE_BYTES = {"cpu": 8 << 20, "gpu": 8 << 30}
View = Callable[[tuple[int, ...], np.dtype], jax.Array]


@dataclasses.dataclass(frozen=True)
class Pools:
    """The host pool, and the size of pools in device memory.

    Attributes:
      device: the device of both.
      host_bytes, device_bytes: size of a pool.
      view: the host pool as an array of a shape and dtype. One may be in use at a time.
    """

    device: jax.Device
    host_bytes: int
    device_bytes: int
    view: View

    @classmethod
    def create(cls, device: jax.Device, least_bytes: int) -> Pools:
        """Pools of the sizes above, or of the memory that there is, but at least `least_bytes`.

        Raises:
          HostMemoryError: less than `least_bytes` of host memory.
        """
        _, available = host_memory.least_available()
        host_bytes = max(min(HOST_BYTES[device.platform], available // 2), least_bytes)
        limit = (device.memory_stats() or {}).get("bytes_limit", 1 << 60)
        device_bytes = max(min(DEVICE_BYTES[device.platform], limit // 4), least_bytes)
        return cls(device, host_bytes, device_bytes, pinned_memory.views(host_bytes, device))

    def array(self, memory: str, run_bytes: int) -> jax.Array:
        """Blocks of `run_bytes` bytes that fill a pool, with any contents: dtype[n, items]."""
        dtype = np.dtype({1: np.int8, 2: np.int16, 4: np.int32}[math.gcd(4, run_bytes)])
        size = self.host_bytes if memory == pinned_memory.PINNED else self.device_bytes
        shape = (size // run_bytes, run_bytes // dtype.itemsize)
        if memory == pinned_memory.PINNED:
            return self.view(shape, dtype)
        return jnp.zeros(shape, dtype, device=self.device)


def _on_host(array: jax.Array) -> np.ndarray:
    """The elements of an array in pinned memory, writable."""
    array.block_until_ready()
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.ctypeslib.as_array(memory).view(array.dtype).reshape(array.shape)


def write(array: jax.Array, rows: np.ndarray, values: np.ndarray) -> jax.Array:
    """The array with other values in some rows; written in place, as if donated."""
    if array.sharding.memory_kind == pinned_memory.PINNED:
        _on_host(array)[rows] = values
        return array
    return _write_on_device(array, rows, values)


@functools.partial(jax.jit, donate_argnums=0)
def _write_on_device(array: jax.Array, rows: jax.Array, values: jax.Array) -> jax.Array:
    return array.at[rows].set(values)


def read(array: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Some rows of the array."""
    if array.sharding.memory_kind == pinned_memory.PINNED:
        return _on_host(array)[rows]
    return np.asarray(_read_on_device(array, rows))


@jax.jit
def _read_on_device(array: jax.Array, rows: jax.Array) -> jax.Array:
    return array[rows]
