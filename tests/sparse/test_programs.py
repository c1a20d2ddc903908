"""Programs with sparse rows: several layers, batches sharded over devices."""

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv import sparse
from tests.util.sparse_cases import Pair, random_rows


@pytest.mark.multigpu
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_batch_is_sharded_by_shard_map():
    """Each device has some requests; the pool is replicated, in one memory that all write."""
    pair = Pair(batch=4, layers=1, layer=0)
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    pool = jaxkv.HostPool.create(pair.spec, num_pages=pair.pool.num_pages, mesh=mesh)
    of_batch = jax.P(None, "x")
    state = jax.device_put(pair.state, jax.NamedSharding(mesh, of_batch))
    positions = np.array([np.arange(8) + 2 * request for request in range(4)], np.int32)
    ids = np.array([[1, 2, 2], [5, -1, 9], [9, 11, 4], [13, 12, 13]], np.int32)
    lengths = np.full(4, 24, np.int32)
    rows = random_rows(pair.rng, 4, 8, 32)

    def step(state, pool, rows, positions, ids, lengths, table):
        state, pool = sparse.append(state, pool, rows, positions, layer=0, block_table=table)
        state = sparse.release(state, lengths > 0)
        found, state = sparse.fetch(state, pool, ids, layer=0, lengths=lengths, block_table=table)
        return found, state, pool

    requests = [jax.P("x")] * 5
    specs = of_batch, pool.partition_spec, *requests
    # The type of the pool varies over the devices, each of which writes other pages of one memory.
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=(jax.P("x"), *specs[:2]), check_vma=False
    )
    found, state, pool = jax.jit(mapped, donate_argnums=(0, 1))(
        state, pool, rows, positions, ids, lengths, pair.table
    )
    pair.reference.pool[:] = 0
    pair.contents[:] = 0
    pair.reference.append(rows, positions, pair.table)
    pair.reference.release([True] * 4)
    want = pair.reference.fetch(ids, lengths, pair.table)
    pair.state, pair.pool = state, pool
    pair.check_buffer()
    pair.check_pool()
    request = np.arange(4)[:, None] % 2  # rows are numbered on each device
    np.testing.assert_array_equal(found, np.where(want < 0, -1, request * 8 + want))


@pytest.mark.multigpu
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("operation", ["fetch", "append"])
@pytest.mark.parametrize("sharded", ["state", "pool"])
def test_sharded_arguments_outside_shard_map_raise(sharded, operation, traced):
    """With automatic mesh axes the type of a traced array has no sharding."""
    mesh = jax.make_mesh(
        (2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    axes = jax.P("x") if sharded == "pool" else jax.P()
    arrays = [jax.device_put(np.zeros((8, 2, 4), np.float32), jax.NamedSharding(mesh, axes))]
    spec = jaxkv.ArrayCacheSpec.from_arrays(arrays, page_size=2)
    pool = jaxkv.HostPool.create(spec, num_pages=8)
    state = sparse.SparseState.create(spec, batch=4, slots=4, max_length=8)
    axes = jax.P(None, "x") if sharded == "state" else jax.P()
    state = jax.device_put(state, jax.NamedSharding(mesh, axes))
    ids, table = np.zeros((4, 1), np.int32), np.zeros((4, 4), np.int32)

    def fetch(state, pool):
        lengths = np.full(4, 8, np.int32)
        return sparse.fetch(state, pool, ids, layer=0, lengths=lengths, block_table=table)[0]

    def append(state, pool):
        rows = np.ones((4, 1, 4), np.float32)
        return sparse.append(state, pool, rows, ids, layer=0, block_table=table)[0]

    call = fetch if operation == "fetch" else append
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        (jax.jit(call) if traced else call)(state, pool)


def test_jit_keeps_layers_apart():
    """Several layers in one program, each with its own ids."""
    pairs = [Pair(layer=layer, seed=7) for layer in (0, 1)]
    table, lengths = pairs[0].table, np.full(3, 24, np.int32)

    @jax.jit
    def step(state, pool, ids):
        found = []
        for layer in (0, 1):
            rows, state = sparse.fetch(
                state, pool, ids[layer], layer=layer, lengths=lengths, block_table=table
            )
            found.append(state.rows[rows])
        return found, state

    ids = np.array([[[1, 2]] * 3, [[7, 7]] * 3], np.int32)
    found, _ = step(pairs[0].state, pairs[0].pool, ids)
    for layer, rows in enumerate(found):
        pages = table[np.arange(3)[:, None], ids[layer] // 4]
        np.testing.assert_array_equal(rows, pairs[0].contents[layer][pages, ids[layer] % 4])
