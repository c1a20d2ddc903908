"""Waits of page copies: layers in every form, deleted arrays, transformations."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util.array_cases import LAYERS, random_arrays, stored_pool
from tests.util.async_cases import check, finish, ids_of, start
from tests.util.swap_cases import IDS, SwapCase
from tests.util.transfer_cases import DIRECTIONS, assert_rejected, make_case


def started_load(case, **options):
    return jaxkv.start_load(case.pool(), case.cache(), [1, 2], [3, 4], **options)


@pytest.mark.parametrize("layers", [np.array([0, 2]), np.array([], int), np.array([1], np.uint8)])
def test_layers_as_a_numpy_array(layers):
    case = make_case()
    got = started_load(case).wait(layers)
    want = started_load(case).wait(layers.tolist())
    assert isinstance(got, tuple) and len(got) == len(layers)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a.view(jnp.uint16), b.view(jnp.uint16))


def test_numpy_scalar_is_one_layer():
    for layer in (np.int64(1), np.array(1)):
        k, _ = started_load(make_case()).wait(layer)
        assert isinstance(k, jax.Array)


@pytest.mark.parametrize(
    "layer",
    [
        np.array([[0, 1]]),
        np.array([0.0]),
        np.array([True]),
        1.0,
        True,
        None,
        [0, "1"],
        [0, False],
        jnp.arange(2),
    ],
    ids=repr,
)
def test_other_layers_are_rejected(layer):
    loading = started_load(make_case())
    assert_rejected(lambda: loading.wait(layer), TypeError, "wait: layer", "integers", repr(layer))


def wait_for_traced(layer) -> None:
    pool, _ = stored_pool("fused", "page_first_direct", True)
    cache = jax.device_put(random_arrays("fused", stacked=True))

    def step(pool, cache, layer):
        return jaxkv.start_load(pool, cache, [0], [1]).wait(layer)

    jax.eval_shape(step, pool, cache, layer)


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32", "int64"])
def test_traced_layer_of_any_integer_dtype(dtype):
    with jax.enable_x64(dtype == "int64"):
        wait_for_traced(jnp.asarray(LAYERS - 1, dtype))


@pytest.mark.parametrize(
    "layer, dtype",
    [
        (jnp.float32(1.7), "float32[]"),
        (jnp.bool_(True), "bool[]"),
        (jnp.array([1], jnp.int32), "int32[1]"),
        (jax.random.key(0), "key<fry>[]"),
    ],
    ids=["float32", "bool", "rank 1", "key"],
)
def test_traced_layer_of_another_type_is_rejected(layer, dtype):
    words = "wait: a traced layer", "integer scalar", f"got {dtype}"
    assert_rejected(lambda: wait_for_traced(layer), TypeError, *words)


def test_load_is_waited_for_after_its_pool_was_closed():
    case = make_case()
    numpy_ids, ids = ids_of(case, 3, None)
    pool = case.pool()
    loading = start("load", pool, case.cache(), *ids)
    loading.wait(1)
    pool.close()
    check(case, "load", numpy_ids, finish("load", loading), case.pool())


def test_load_is_waited_for_after_its_pool_was_donated():
    case = make_case()
    numpy_ids, ids = ids_of(case, 3, None)
    pool = case.pool()
    loading = start("load", pool, case.cache(), *ids)
    while not loading.done():
        pass
    store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
    store(pool, case.cache(), np.array([-1]), np.array([-1]))
    check(case, "load", numpy_ids, finish("load", loading), case.pool())


def test_swap_is_waited_for_after_src_was_deleted():
    case = SwapCase("pinned_host", "device")
    src, dst = case.arrays()
    swapping = jaxkv.start_swap(src, dst, *IDS)
    while not swapping.done():
        pass
    for leaf in jax.tree.leaves(src):
        leaf.delete()
    case.check(case.finish(swapping))


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_wait_of_a_donated_handle_is_rejected(direction):
    case = make_case()
    _, ids = ids_of(case, 3, None)
    handle = start(direction, case.pool(), case.cache(), *ids)
    jax.jit(partial(finish, direction), donate_argnums=0)(handle)
    words = "wait: ", "the handle", "donated", "the program returned"
    assert_rejected(lambda: handle.wait(0), RuntimeError, *words)
    if direction == "store":
        assert_rejected(lambda: handle.pool, RuntimeError, *words)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_vmap_of_a_wait_is_rejected(direction):
    case = make_case()
    _, ids = ids_of(case, 3, None)
    handle = start(direction, case.pool(), case.cache(), *ids)
    call = partial(jax.vmap(lambda x: handle.wait(0, after=x)), jnp.zeros(2))
    assert_rejected(call, NotImplementedError, "wait: jax.vmap is not supported")


def test_vmap_of_a_wait_for_a_traced_layer_is_rejected():
    pool, _ = stored_pool("fused", "page_first_direct", True)
    loading = jaxkv.start_load(pool, random_arrays("fused", stacked=True), [0], [1])
    call = partial(jax.vmap(loading.wait), jnp.arange(2))
    assert_rejected(call, NotImplementedError, "wait: jax.vmap is not supported")


def test_vmap_of_a_wait_of_a_swap_is_rejected():
    swapping = SwapCase("device", "device").start()
    call = partial(jax.vmap(lambda x: swapping.wait(0, after=x)), jnp.zeros(2))
    assert_rejected(call, NotImplementedError, "wait: jax.vmap is not supported")


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "no jit"])
def test_handle_between_programs_without_donation_names_jax_debug_nans(jitted):
    """Otherwise the copies of its arrays are reported as if the caller had not donated them."""
    words = "jax_debug_nans", "donation", "in the program that starts the copy"
    case, begin = make_case(), partial(jaxkv.start_load, host_pages=[1], device_pages=[2])
    run: Any = jax.jit(begin, donate_argnames="cache") if jitted else begin
    before = run(case.pool(), cache=case.cache())
    with jax.debug_nans(True):
        uses = [
            lambda: run(case.pool(), cache=case.cache()),
            lambda: before.wait(0),
            lambda: jax.jit(lambda loading: loading.cache, donate_argnums=0)(before),
        ]
        for use in uses:
            assert_rejected(use, RuntimeError, *words)
    finish("load", before)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_copy_in_one_program_under_jax_debug_nans(direction):
    case = make_case(dtype="int8")
    numpy_ids, ids = ids_of(case, 5, None)

    @partial(jax.jit, donate_argnums=(0, 1) if direction == "store" else 1)
    def step(*args):
        started = jax.jit(lambda started: started)(start(direction, *args))
        return finish(direction, started)

    pool = case.pool()
    with jax.debug_nans(True):
        out = step(pool, case.cache(), *ids)
    check(case, direction, numpy_ids, out, pool)
