"""GPU-only behaviour of `all_reduce`: replayed CUDA graphs, and concurrent copies."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.tuning.all_reduce_table import WORLD_SIZES
from tests.util.ranks import (
    AXIS,
    METHODS,
    NATIVE,
    TILED,
    assert_sums,
    implementation_of,
    memory_of,
    on_ranks,
    operand,
    sums,
)

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]

CALLS = 6  # XLA captures graphs of five operations or more
ROUNDS = 24


def chain(memory, method):
    world_size = memory.world_size

    def step(x):
        for i in range(CALLS):
            x = (
                jaxkv.all_reduce(memory, x, AXIS, implementation=implementation_of(method))
                / world_size
                + i
            )
        return x

    return on_ranks(memory, step)


def expected(x: np.ndarray) -> np.ndarray:
    """After one all-reduce all ranks have equal values, whose mean is unchanged."""
    return np.broadcast_to(x.sum(0) / len(x) + sum(range(CALLS)), x.shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [100, 12_345])
@pytest.mark.parametrize("world_size", [2, 8])  # their means are exact
def test_graph_replay_reads_new_operands(world_size, method, n):
    with memory_of(world_size, max_bytes=1 << 20, method=method) as memory:
        step = chain(memory, method)
        for round_ in range(ROUNDS):
            x = operand(world_size, (n,), "float32", round_)
            assert np.array_equal(np.asarray(step(x)), expected(x)), round_
        memory.check_errors()
    with pytest.raises(jax.errors.JaxRuntimeError, match="SymmetricMemory was closed"):
        jax.block_until_ready(step(x))


@pytest.mark.parametrize("method", METHODS)
def test_graph_replays_alternate_with_other_steps(method):
    """Epochs and buffer halves continue from the state left by the other executable."""
    with memory_of(2, max_bytes=1 << 20, method=method) as memory:
        others = [name for name in NATIVE if method != TILED or name != "low_latency"]
        steps = [chain(memory, name) for name in (method, *others)]
        for round_ in range(ROUNDS):
            x = operand(2, (1 + 997 * (round_ % 5),), "float32", round_)
            outputs = [step(x) for step in steps]
            for output in outputs:
                assert np.array_equal(np.asarray(output), expected(x)), round_


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_bytes", [1 << 20, (8 << 20) + 6, 64 << 20])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_large_messages(world_size, dtype, num_bytes):
    with memory_of(world_size, max_bytes=64 << 20) as memory:
        x = operand(world_size, (num_bytes // np.dtype(jax.numpy.dtype(dtype)).itemsize,), dtype)
        reduce = on_ranks(
            memory, lambda x: jaxkv.all_reduce(memory, x, AXIS, implementation="two_shot")
        )
        for _ in range(3):
            assert_sums(reduce(x), x)


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # the ticket and the plan
@pytest.mark.parametrize("method, num_bytes", [("low_latency", 4 << 20), ("two_shot", 64 << 20)])
def test_all_reduce_overlaps_concurrent_copy(method, num_bytes):
    """All its thread blocks fit next to a copy's SMs: one that did not would block all ranks."""
    spec = jaxkv.KVCacheSpec(1, 64, 8, 128, jnp.bfloat16)
    pages = jnp.arange(4096)  # 1 GiB, some 20 ms
    pool = jaxkv.HostPool.create(spec, num_pages=len(pages))
    cache = jaxkv.DeviceCache.create(spec, num_pages=len(pages))
    start = jax.jit(partial(jaxkv.start_load, implementation="kernel"), donate_argnums=1)
    end = jax.jit(lambda loading: loading.cache, donate_argnums=0)
    x = operand(2, (num_bytes // 4,), "float32")
    with memory_of(2, max_bytes=num_bytes) as memory:
        reduce = sums(memory, method)
        # Placed in advance: its transfer from the host would share the link with the copy.
        rows = jax.device_put(x, NamedSharding(memory.mesh, PartitionSpec(AXIS)))
        for _ in range(2):  # the first iteration compiles
            loading = start(pool, cache, pages, pages)
            y = jax.block_until_ready(reduce(rows))
            cache = end(loading)  # only now: a wait for y may wait for everything enqueued
            time.sleep(1e-3)  # if it had waited for the copy, the cache is ready now, too
            copying = not jax.tree.leaves(cache)[0].is_ready()
            jax.block_until_ready(cache)
    assert copying
    assert_sums(y, x)
