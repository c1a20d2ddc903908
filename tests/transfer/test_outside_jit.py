"""Page copies outside jit: where JAX runs one operation at a time, and forbids transfers."""

import contextlib
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.transfer import ids as page_ids
from tests.util.async_cases import finish
from tests.util.transfer_cases import DIRECTIONS, assert_rejected, make_case, mesh_of

IDS = [1, 2], [3, 0]


def blocks():
    """Source, destination and the expected result of a swap."""
    src, dst = np.arange(8192, dtype=np.int32).reshape(4, 2048), np.zeros((5, 2048), np.int32)
    expected = dst.copy()
    expected[IDS[1]] = src[IDS[0]]
    return jnp.asarray(src), jnp.asarray(dst), expected


swap_by_pallas = partial(jaxkv.swap_blocks, implementation="pallas")


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "no jit"])
def test_pallas_under_disable_jit(jitted):
    src, dst, expected = blocks()
    run = jax.jit(swap_by_pallas) if jitted else swap_by_pallas
    with jax.disable_jit():
        out = run(src, dst, *map(jnp.array, IDS))
    np.testing.assert_array_equal(out, expected)


def test_pallas_in_a_checkpoint_requires_jit():
    src, dst, expected = blocks()
    run = jax.checkpoint(lambda src, dst: swap_by_pallas(src, dst, *map(np.array, IDS)))
    assert_rejected(lambda: run(src, dst), NotImplementedError, "pallas", "checkpoint", "jax.jit")
    np.testing.assert_array_equal(jax.jit(run)(src, dst), expected)


def check(direction, pool, cache, case, run=None) -> None:
    run = run or getattr(jaxkv, f"{direction}_pages")
    ids = [np.array(side, np.int32) for side in IDS]
    with jax.transfer_guard_host_to_device("disallow"):
        out = run(pool, cache, *IDS)
        jax.block_until_ready(out)
    pool, cache = (out, cache) if direction == "store" else (pool, out)
    case.assert_holds(pool, cache, **case.expected(direction, *ids))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_lists_of_ids_are_explicit_transfers(direction):
    case = make_case()
    check(direction, case.pool(), case.cache(), case)


@pytest.mark.multigpu
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_lists_of_ids_for_replicated_arrays(direction, axis_type):
    case, mesh = make_case(), mesh_of(2, axis_type)
    check(direction, case.pool(mesh=mesh), case.cache(mesh=mesh), case)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_lists_of_ids_of_a_start(direction):
    case = make_case()

    def run(*args):
        started = getattr(jaxkv, f"start_{direction}")(*args)
        pool, cache = finish(direction, started)
        return pool if direction == "store" else cache

    check(direction, case.pool(), case.cache(), case, run)


def test_swap_of_uncommitted_arrays_returns_an_uncommitted_array():
    src, dst, expected = blocks()
    with jax.transfer_guard_host_to_device("disallow"):
        out = jaxkv.swap_blocks(src, dst, *IDS)
    np.testing.assert_array_equal(out, expected)
    assert not out.committed


@contextlib.contextmanager
def guard_of_process(level):
    jax.config.update("jax_transfer_guard_host_to_device", level)
    try:
        yield
    finally:
        jax.config.update("jax_transfer_guard_host_to_device", None)


GUARDS = {
    "none": (contextlib.nullcontext, 0),
    "allow": (partial(jax.transfer_guard, "allow"), 0),
    "log": (partial(jax.transfer_guard_host_to_device, "log"), 2),
    "disallow": (partial(jax.transfer_guard_host_to_device, "disallow"), 2),
    "disallow for the process": (partial(guard_of_process, "disallow"), 2),
    "disallow other directions": (partial(jax.transfer_guard_device_to_host, "disallow"), 0),
}


@pytest.mark.parametrize("guard, uploads", GUARDS.values(), ids=GUARDS)
def test_ids_are_uploaded_explicitly_only_under_a_guard(monkeypatch, guard, uploads):
    """An explicit transfer takes more host time than that of an argument of jit."""
    src, dst, expected = blocks()
    upload = mock.Mock(wraps=page_ids._upload_like)
    monkeypatch.setattr(page_ids, "_upload_like", upload)
    with guard():
        out = jaxkv.swap_blocks(src, dst, *IDS)
    np.testing.assert_array_equal(out, expected)
    assert upload.call_count == uploads


DELETED = {
    "pool.data": lambda pool, cache, ids: pool.data,
    "cache.layers[1][0]": lambda pool, cache, ids: cache.layers[1][0],
    "host_pages": lambda pool, cache, ids: ids,
}


@pytest.mark.parametrize("name", DELETED)
@pytest.mark.parametrize("operation", ["load_pages", "store_pages", "start_load"])
def test_deleted_array_is_named(operation, name):
    case = make_case()
    pool, cache, ids = case.pool(), case.cache(), jnp.array([1], jnp.int32)
    DELETED[name](pool, cache, ids).delete()
    call = partial(getattr(jaxkv, operation), pool, cache, ids, [1])
    assert_rejected(
        call, ValueError, f"{operation}: the array {name} was closed, deleted or donated"
    )
