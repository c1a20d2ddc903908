"""`HostIds`: the implementation that requires them, and copies that it must reject."""

import jax
import numpy as np

from jaxkv._src.tuning.copy_table import Implementation


def host_implementation() -> Implementation:
    """The implementation that reads its ids on the host."""
    return "dma" if jax.default_backend() == "gpu" else "host"


def made_by_a_computation(ids):
    """The same words, including the header, but written by a device."""

    def remake(words):
        on_device = jax.device_put(words, words.sharding.with_memory_kind("device"))
        shifted = jax.jit(lambda x: x + 1)(on_device)
        return jax.device_put(jax.jit(lambda x: x - 1)(shifted), words.sharding)

    return jax.tree.map(remake, ids)


def copied(ids):
    """A bitwise copy elsewhere: the words are right, but their origin is not known."""
    return jax.tree.map(lambda words: jax.device_put(np.array(words), words.sharding), ids)
