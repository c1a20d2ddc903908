"""`jax.device_put` of NumPy arrays that a step loop uploads, in less host time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxkv._src.runtime.sync_guard import allow_host_sync

if TYPE_CHECKING:
    from jax.core import ShapedArray

try:
    from jax._src.config import explicit_device_put_scope
    from jax._src.core import trace_state_clean
    from jax._src.lib import xla_client

    batched_device_put: Callable[..., jax.Array] | None = xla_client.batched_device_put
except (ImportError, AttributeError):  # another version of JAX
    batched_device_put = None


class _Type(NamedTuple):
    """The arguments of `batched_device_put` other than the values."""

    aval: ShapedArray
    devices: list[Any]


@functools.lru_cache(maxsize=1024)
def _type_of(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: jax.sharding.Sharding
) -> _Type:
    """Taken from an array of `jax.device_put`: another type would compile a program again."""
    like = jax.device_put(np.zeros(shape, dtype), sharding)
    with allow_host_sync("a new array, which no work uses"):
        like.block_until_ready()  # before its memory is used again
    return _Type(like.aval, [shard.device for shard in like.addressable_shards])


def upload_replicated(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """`jax.device_put(array, sharding)` for a fully replicated sharding.

    The copy is the same call of XLA. The Python code before that call in `jax.device_put` runs only
    for the first array of a shape, dtype and sharding. The result may share the memory of `array`,
    as with `jax.device_put`.
    """
    if batched_device_put is None or not (sharding.is_fully_addressable and trace_state_clean()):
        return jax.device_put(array, sharding)
    aval, devices = _type_of(array.shape, array.dtype, sharding)
    with explicit_device_put_scope():  # for jax.transfer_guard
        return batched_device_put(aval, sharding, [array] * len(devices), devices, True)
