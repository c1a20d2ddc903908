"""Shared parts of the symmetric memory tests: meshes, steps on all ranks, and delays."""

import os
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv._src.collectives import symmetric_memory

AXIS = "tp"
MAX_BYTES = 1 << 14  # of the fixtures' memories
ON_CPU = jax.default_backend() == "cpu"
ORDERED = ("low_latency", "one_shot", "two_shot")  # reduce in the order of ranks
# With the fixture `multicast`. Running this on GPUs can take them out of service.
MULTICAST = ("multimem",) if ON_CPU or os.environ.get("JAXKV_MULTICAST") == "1" else ()
NATIVE = ORDERED + MULTICAST
TILED = "two_shot in tiles"  # for messages that exceed the LL buffers
METHODS = (*NATIVE, TILED)


def mesh_of(world_size: int) -> jax.sharding.Mesh:
    if jax.device_count() < world_size:
        pytest.skip(f"needs {world_size} devices, has {jax.device_count()}")
    return jax.sharding.Mesh(np.array(jax.devices()[:world_size]), (AXIS,))


def memory_of(
    world_size: int, *, max_bytes: int = 1 << 16, timeout_s: float = 30.0, method: str | None = None
):
    """Symmetric memory; for TILED with LL buffers so small that a few words take many tiles."""
    with pytest.MonkeyPatch.context() as patch:
        if method == TILED:
            patch.setattr(symmetric_memory, "LOW_LATENCY_BYTES", 64 * world_size)
            patch.setattr(symmetric_memory, "TILE_BYTES", 48 * world_size)
        return jaxkv.SymmetricMemory.create(
            mesh_of(world_size), AXIS, max_bytes=max_bytes, timeout_s=timeout_s
        )


def implementation_of(method: str | None) -> Any:
    return "two_shot" if method == TILED else method


def on_ranks(memory, body, *, check_vma: bool = False):
    """`body` jitted on every rank; operands and results have one row for each rank."""

    def run(*rows):
        return jax.tree.map(lambda y: y[None], body(*(row[0] for row in rows)))

    spec = P(AXIS)
    mapped = partial(jax.shard_map, mesh=memory.mesh, out_specs=spec, check_vma=check_vma)
    return jax.jit(lambda *rows: mapped(run, in_specs=(spec,) * len(rows))(*rows))


def sums(memory, method=None):
    implementation = implementation_of(method)
    return on_ranks(
        memory, lambda x: jaxkv.all_reduce(memory, x, AXIS, implementation=implementation)
    )


def late(x, late_rank, rounds: int = 200):
    """`x`, delayed on rank `late_rank` by a loop with a host decision in each iteration."""
    here = jnp.where(jax.lax.axis_index(AXIS) == late_rank, rounds, 1)
    side = jnp.ones((128, 128), jnp.float32) / 128
    waste = jax.lax.fori_loop(0, here, lambda _, y: y @ side, side)
    return x + (waste[0, 0] * 0).astype(x.dtype)


def operand(world_size: int, shape, dtype, seed: int = 0) -> np.ndarray:
    """Integers, whose sums are exact in every dtype."""
    values = np.random.default_rng(seed).integers(-15, 16, (world_size, *shape))
    return values.astype(jnp.dtype(dtype))


def assert_sums(got, x: np.ndarray) -> None:
    want = x.astype(np.float64).sum(0)
    assert np.array_equal(np.asarray(got).astype(np.float64), np.broadcast_to(want, x.shape))
