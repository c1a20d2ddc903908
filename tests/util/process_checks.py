"""Checks made by each process of test_multiprocess.py; run by rank_process.py."""

import dataclasses
import os
import re
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from bench.collectives.soak import soak
from jaxkv._src.collectives.all_reduce import Implementation
from jaxkv._src.collectives.rendezvous import Rendezvous
from jaxkv._src.runtime import native as runtime_native
from jaxkv._src.tuning.all_reduce_table import VARIABLE, WORLD_SIZES, packaged_table
from tests.util.expectations import raises, warns
from tests.util import hooks
from tests.util.ranks import AXIS, late, on_ranks, sums

NATIVE: tuple[Implementation, ...] = ("low_latency", "one_shot", "two_shot")
RULES = ((0, "low_latency"), (999, "one_shot"))
ME = jax.process_index()
LAST = jax.process_count() - 1
FROM_HANDLER = (ValueError, jax.errors.JaxRuntimeError)  # while dispatching, or from a result


def mesh_of(order: list[int]) -> jax.sharding.Mesh:
    devices = sorted(jax.devices(), key=lambda device: device.id)
    return jax.sharding.Mesh(np.array([devices[i] for i in order]), (AXIS,))


def create(
    mesh: jax.sharding.Mesh,
    *,
    axis_name: str = AXIS,
    max_bytes: int = 1 << 14,
    timeout_s: float = 30.0,
) -> Any:
    return jaxkv.SymmetricMemory.create(mesh, axis_name, max_bytes=max_bytes, timeout_s=timeout_s)


def spread(memory: Any, x: np.ndarray, spec: P | None = None) -> jax.Array:
    """`x[world_size, ...]`, a row on each rank."""
    sharding = NamedSharding(memory.mesh, P(AXIS) if spec is None else spec)
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def here(y: jax.Array) -> list[np.ndarray]:
    """The rows of this process's ranks."""
    return [np.asarray(shard.data)[0] for shard in y.addressable_shards]


def assert_sums(y: jax.Array, x: np.ndarray) -> None:
    rows = here(y)
    assert len(rows) == jax.local_device_count()
    for row in rows:
        assert np.array_equal(row.astype(np.float64), x.astype(np.float64).sum(0))


def operand(world_size: int, n: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return (
        np.random.default_rng([n, seed]).integers(-15, 16, (world_size, n)).astype(jnp.dtype(dtype))
    )


def maps_symmetric_memory() -> bool:
    """Whether this process still maps any symmetric memory; supports platform cpu only."""
    with open("/proc/self/maps") as maps:
        return "memfd:jaxkv" in maps.read()
