"""Arrays of blocks for measurements: contents, memory and verification."""

import types

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._src.autotune import pools

GIB = 1 << 30


@pytest.fixture(scope="module")
def made():
    return pools.Pools(1 << 16)


def test_arrays_on_the_host_are_views_of_the_same_memory(made):
    small, large = made.host(512), made.host(4096)
    assert small.shape == (128, 128) and large.shape == (16, 1024)
    assert small.unsafe_buffer_pointer() == large.unsafe_buffer_pointer()
    assert small.sharding.memory_kind == "pinned_host"
    assert np.array_equal(np.asarray(small).ravel(), np.asarray(large).ravel())
    assert made.host(514).dtype == np.int16 and made.host(513).dtype == np.int8


def test_no_two_blocks_are_equal(made):
    for array in (made.host(512), made.device(512), made.device(512, seed=1)):
        assert len(np.unique(np.asarray(array), axis=0)) == 128


@pytest.mark.parametrize("fault", [None, "not copied", "neighbour", "order"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_copies_are_verified(made, fault, direction):
    arrays = [made.host(512), made.device(512)]
    source, destination = arrays if direction == "load" else arrays[::-1]
    numbers = (([3, 9], [4, 7]), ([5], [7]))
    ids = [(np.array(f, np.int32), np.array(t, np.int32)) for f, t in numbers]
    done = {"order": ids[::-1], "not copied": ids[:1]}.get(str(fault), ids)

    def copy(array, source):
        for from_, to in done:
            array = jaxkv.swap_blocks(source, array, from_, to)
        if fault == "neighbour":
            array = jaxkv.swap_blocks(source, array, np.array([1]), np.array([8]))
        return array

    step = jax.jit(copy, donate_argnums=0)

    def verified():
        pools.verified(lambda array: step(array, source), source, destination, ids)

    if fault:
        with pytest.raises(AssertionError, match="1 blocks are wrong"):
            verified()
    else:
        verified()


@pytest.mark.parametrize(
    ("host", "limit", "in_use", "number", "expected"),
    [
        (256, 96, 0, 1, 32), (256, 48, 12, 1, 24), (40, 96, 0, 1, 20), (2, 96, 0, 1, 4),
        (256, 48, 0, 4, 8), (120, 144, 0, 6, 10),
    ],
)  # fmt: skip
def test_size_follows_from_free_memory(monkeypatch, host, limit, in_use, number, expected):
    stats = {"bytes_limit": limit * GIB, "bytes_in_use": in_use * GIB}
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(pools.host_memory, "_mem_available", lambda: host * GIB)
    monkeypatch.setattr(pools.host_memory, "_cgroup_limits", list)
    assert pools.pool_bytes(4 * GIB, number) == expected * GIB


def test_copy_that_was_done_before_is_verified_again(made):
    """Another implementation, with the same ids, must not profit from it."""
    source, destination = made.host(512), made.device(512)
    ids = [(np.array([3, 9], np.int32), np.array([4, 7], np.int32))]
    copy = jax.jit(jaxkv.swap_blocks, donate_argnames="dst")
    destination = pools.verified(
        lambda array: copy(source, array, *ids[0]), source, destination, ids
    )
    with pytest.raises(AssertionError, match="2 blocks are wrong"):
        pools.verified(lambda array: array, source, destination, ids)


@pytest.mark.parametrize("num_blocks", [6, 1 << 20])
def test_neighbours_and_others_were_not_written(num_blocks):
    written = np.array([0, 5, 3, 2], np.int32)
    others = pools._others(written, written, num_blocks, 1024)
    assert len(others) == 8 + 1024
    assert not {*others.tolist()} & {*written.tolist()}
    assert {*others[:8].tolist()} == {1, 4} | ({6} if num_blocks > 6 else set())
    assert (len(set(others[8:].tolist())) > 900) == (num_blocks > 6)
    assert others.min() >= 0 and others.max() < num_blocks


def test_fully_written_array_has_no_others():
    written = np.arange(4, dtype=np.int32)
    assert pools._others(written, written, 4, 1024).tolist() == []


@pytest.fixture
def taken(monkeypatch):
    """Numbers of blocks that are read, where two blocks of 4 KiB are compared."""
    monkeypatch.setattr(pools, "COMPARED_BYTES", 2 * 4096)
    taken = []
    rows = pools.rows

    def counted(array, ids):
        taken.append(len(ids))
        return rows(array, ids)

    monkeypatch.setattr(pools, "rows", counted)
    return taken


@pytest.mark.parametrize("count, compared", [(1, 1), (6, 2)])
def test_few_large_blocks_are_compared(made, taken, count, compared):
    """A thousand blocks of 64 MiB do not fit beside the arrays."""
    source, destination = made.host(4096), made.device(4096)
    ids = np.arange(3, 3 + count, dtype=np.int32), np.arange(0, 2 * count, 2, dtype=np.int32)
    copy = jax.jit(jaxkv.swap_blocks, donate_argnames="dst")
    pools.verified(lambda array: copy(source, array, *ids), source, destination, [ids])
    others = 2 * compared + 2  # neighbours and sample
    assert taken == [compared, others, compared + others]


def test_error_in_compared_blocks_is_found(made, taken):
    source, destination = made.host(4096), made.device(4096)
    ids = np.arange(3, 9, dtype=np.int32), np.arange(0, 12, 2, dtype=np.int32)
    with pytest.raises(AssertionError, match="2 blocks are wrong"):
        pools.verified(lambda array: array, source, destination, [ids])
