"""GPU-only behaviour of sparse rows: sizes of real models, replays, late ids, large offsets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import HostPool, KVCacheSpec, sparse
from tests.util.slow_streams import slow_input, slow_zero
from tests.util.sparse_cases import Pair, steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [656, 1152])
def test_streams_of_a_real_model_under_replay(width):
    """Equal shapes and donated arrays, so that a command buffer is replayed with new ids."""
    pair = Pair(batch=5, slots=3000, max_length=9000, page_size=64, width=width, seed=width)
    steps(pair, 24, k=2048, spread=4000, errors=0.01)


@pytest.mark.parametrize("k, slots", [(1, 1), (31, 33), (1025, 1025), (4096, 4096), (4096, 12288)])
def test_limits_of_shapes(k, slots):
    pair = Pair(batch=2, slots=slots, max_length=20000, page_size=64, width=16)
    for spread in (2 * k, k + 1, 20000):
        steps(pair, 6, k=k, spread=spread)


@pytest.mark.parametrize("batch", [1, 33, 700])
def test_batches(batch):
    """One request, more than warps of a block, more than threads of a block."""
    steps(Pair(batch=batch, slots=64, max_length=300, page_size=16, width=48), 8, k=40, spread=90)


def test_chained_layers_under_replay():
    """Every call reads what the previous one of the same program has left."""
    pair = Pair(batch=4, slots=512, max_length=4000, page_size=16, width=656)
    table, lengths = jnp.array(pair.table), jnp.full(4, 4000, jnp.int32)

    def chain(state, pool, ids):
        found = []
        for step in ids:
            rows, state = sparse.fetch(
                state, pool, step, layer=1, lengths=lengths, block_table=table
            )
            found.append((rows, state.rows[jnp.maximum(rows, 0)]))
        return found, state

    chain = jax.jit(chain, donate_argnums=0)
    for _ in range(8):
        ids = pair.rng.integers(0, 4000, (6, 4, 300)).astype(np.int32)
        found, pair.state = chain(pair.state, pair.pool, [*ids])
        for step, (rows, contents) in zip(ids, found, strict=True):
            want = pair.reference.fetch(step, np.full(4, 4000), pair.table)
            np.testing.assert_array_equal(rows, (4 + np.arange(4)[:, None]) * 512 + want)
            pages = pair.table[np.arange(4)[:, None], step // 16]
            np.testing.assert_array_equal(contents, pair.reference.pool[pages, step % 16])
        pair.check_buffer()


def test_ids_are_read_when_ready():
    pair = Pair(batch=4, slots=512, max_length=4000, page_size=16, width=656)
    late = jax.jit(
        lambda state, pool, ids, lengths, table, x: sparse.fetch(
            state, pool, ids + slow_zero(x), layer=1, lengths=lengths, block_table=table
        ),
        donate_argnums=0,
    )
    x, lengths = slow_input(), np.full(4, 4000, np.int32)
    for _ in range(5):
        ids = pair.rng.integers(0, 4000, (4, 300)).astype(np.int32)
        rows, pair.state = late(pair.state, pair.pool, ids, lengths, pair.table, x)
        pair.check_rows(rows, pair.reference.fetch(ids, lengths, pair.table))


def test_offsets_beyond_32_bits():
    """A pool of 5 GiB, of which the last pages are read and written."""
    page_size, width, num_pages = 64, 4096, 20480
    spec = KVCacheSpec(1, page_size, 1, width, np.uint8, kind="mla")
    pool = HostPool.create(spec, num_pages=num_pages)
    state = sparse.SparseState.create(spec, batch=1, slots=64, max_length=4 * page_size)
    table = np.array([[num_pages - 1, 0, num_pages - 2, 1]], np.int32)
    positions = np.arange(0, 4 * page_size, 5, dtype=np.int32)[None, :48]
    rows = np.random.default_rng(0).integers(0, 256, (1, 48, width), np.uint8)
    append = jax.jit(sparse.append, static_argnames="layer", donate_argnames=("state", "pool"))
    state, pool = append(state, pool, rows, positions, layer=0, block_table=table)
    state = sparse.release(state, np.array([True]))
    fetch = jax.jit(sparse.fetch, static_argnames="layer", donate_argnames="state")
    found, state = fetch(
        state, pool, positions, layer=0, lengths=np.array([256], np.int32), block_table=table
    )
    np.testing.assert_array_equal(state.rows[found], rows)
    pool.close()
