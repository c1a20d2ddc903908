"""Fetched, appended and released rows against a model of LRU; adversarial streams of ids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from tests.util.sparse_cases import Pair, steps


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([1, 4, 9, 24]),
    errors=st.sampled_from([0.0, 0.2]),
)
def test_random_streams(seed, spread, errors):
    """Few shapes, so that programs are compiled once."""
    steps(Pair(seed=seed), 12, k=6, spread=spread, errors=errors)


@pytest.mark.parametrize(
    "layout", ["layer_first", "page_first", "page_first_direct", "page_unified"]
)
@pytest.mark.parametrize("width", [16, 656])
def test_layouts_and_rows(layout, width):
    pair = Pair(layout=layout, width=width, layer=0)
    steps(pair, 6, k=6, spread=9)


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_arrays_of_an_engine(layout):
    steps(Pair(layout=layout, of_arrays=True), 8, k=6, spread=9)


def test_distinct_misses_in_each_step():
    """As many ids as slots: every call replaces all rows of the previous one."""
    pair = Pair()
    for step in range(6):
        first = step * 8 % 24
        pair.fetch(np.broadcast_to(np.arange(first, first + 8), (3, 8)))
    assert pair.reference.misses == 6 * 3 * 8


def test_hits_move_nothing():
    pair = Pair()
    ids = np.broadcast_to(np.arange(8), (3, 8))
    first = pair.fetch(ids)
    misses = pair.reference.misses
    for _ in range(3):
        reordered = pair.rng.permutation(8)
        np.testing.assert_array_equal(pair.fetch(ids[:, reordered]), first[:, reordered])
    assert pair.reference.misses == misses


def test_one_id_many_times():
    pair = Pair()
    for position in (5, 5, 23, 0):
        pair.fetch(np.full((3, 8), position))
    assert pair.reference.misses == 3 * 3


def test_heads_share_rows():
    """Ids of several heads of a request: any shape behind the batch."""
    pair = Pair()
    ids = np.array([[[1, 2], [2, 3], [-1, 1]]] * 3)
    pair.fetch(ids)
    assert pair.reference.misses == 3 * 3


def test_least_recently_used_row_is_replaced():
    pair = Pair(batch=1, slots=3)
    for ids in ([0, 1], [2, 0], [1, -1]):
        pair.fetch([ids])
    pair.fetch([[9, -1]])  # last use of 2 and 0 is the same call: the lower slot goes
    np.testing.assert_array_equal(pair.state.positions[1, 0], [9, 1, 2])
    pair.fetch([[8, 7]])
    np.testing.assert_array_equal(pair.state.positions[1, 0], [9, 8, 7])


def test_requests_do_not_share_rows():
    pair = Pair()
    found = pair.fetch([[3, 4], [3, 4], [4, 3]])
    assert pair.reference.misses == 6
    np.testing.assert_array_equal(found, [[0, 1]] * 3)


def test_released_rows_are_never_found():
    """The places of ended requests get other pages: a stale row would be of the old ones."""
    pair = Pair()
    for _ in range(4):
        pair.fetch(np.broadcast_to(np.arange(8), (3, 8)))
        pair.release([True, False, True])
        pair.table[[0, 2]] = pair.table[[2, 0]]
        pair.fetch([[7, 6, 0, 1]] * 3)


def test_appended_rows_are_found_and_survive_replacement():
    pair = Pair()
    pair.append([[20], [21], [-1]])
    misses = pair.reference.misses
    pair.fetch([[20, -1], [21, -1], [-1, -1]])
    assert pair.reference.misses == misses
    pair.fetch(np.broadcast_to(np.arange(8), (3, 8)))  # replaces them
    pair.fetch([[20, -1], [21, -1], [20, 21]])
    pair.append([[20], [21], [-1]])  # in place of a rejected draft token
    pair.fetch([[20, 20], [21, 21], [-1, -1]])


def test_undonated_arguments_are_unchanged():
    pair = Pair()
    pair.fetch([[1, 2], [3, 4], [5, 6]])
    before = jax.tree.map(np.array, (pair.state, pair.pool))
    ids, table = np.array([[9], [9], [9]], np.int32), pair.table
    lengths = np.full(3, 24, np.int32)
    jaxkv.sparse.fetch(pair.state, pair.pool, ids, layer=1, lengths=lengths, block_table=table)
    rows = np.zeros((3, 1, 32), np.uint8)
    jaxkv.sparse.append(pair.state, pair.pool, rows, ids, layer=1, block_table=table)
    jax.tree.map(np.testing.assert_array_equal, (pair.state, pair.pool), before)


def test_donated_arrays_are_written_in_place():
    pair = Pair()

    def addresses():
        arrays = jax.tree.leaves((pair.state, pair.pool))
        return [array.unsafe_buffer_pointer() for array in arrays]

    before = addresses()
    pair.append([[1], [2], [3]])
    pair.fetch([[1, 2], [3, 4], [5, 6]])
    assert addresses() == before
    assert pair.pool.data.sharding.memory_kind == "pinned_host"


def test_empty_calls():
    pair = Pair()
    pair.fetch(np.zeros((3, 0)))
    pair.fetch(np.full((3, 2), -1))
    pair.append(np.zeros((3, 0)))
    pair.append(np.full((3, 1), -1))
    assert pair.reference.misses == 0


@pytest.mark.parametrize("start", [2**31 - 3, -2])
def test_clock_wraps_around(start):
    """After 2^31 and 2^32 calls."""
    pair = Pair()
    clock = jnp.full_like(pair.state.clock, start)
    pair.state = dataclasses.replace(pair.state, clock=clock)
    steps(pair, 8, k=6, spread=12)
    assert (np.asarray(pair.state.clock)[1] != start).all()
