"""Asynchronous copies: every byte after its wait, for any use of a handle in a program."""

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.transfer.dispatch import force_implementation
from tests.util.async_cases import OVERLAPPED, STARTED, check, finish, ids_of, start
from tests.util.layout_reference import KIND_LAYOUTS
from tests.util.strategies import layer_selections, page_ids, reference_layouts
from tests.util.transfer_cases import (
    DIRECTIONS,
    Case,
    as_ids,
    assert_rejected,
    copied_shapes,
    make_case,
    mesh_of,
    pointers,
)


@pytest.fixture(params=[None, *STARTED], ids=lambda name: name or "default")
def started_by(request) -> str | None:
    return request.param


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind, layout", KIND_LAYOUTS)
@pytest.mark.parametrize("layers", [None, 1, (2, 0)], ids=["all", "one", "backwards"])
def test_layerwise_waits_in_one_program(kind, layout, direction, layers, started_by):
    case = make_case(layout, kind=kind)
    numpy_ids, ids = ids_of(case, 5, started_by)
    pool, cache = case.pool(), case.cache()
    before = pointers(cache if direction == "load" else pool)

    @partial(jax.jit, donate_argnames=("cache", "pool") if direction == "store" else "cache")
    def step(pool, cache, x, *ids):
        started = start(direction, pool, cache, *ids, layers=layers, implementation=started_by)
        chosen = case.spec.select_layers(layers)
        for layer in chosen:
            arrays = started.wait(layer, after=x)
            x = x + arrays[0].reshape(-1)[0].astype(x.dtype)
        return finish(direction, started), x

    out, _ = step(pool, cache, jnp.zeros((), np.dtype(case.spec.dtype)), *ids)
    jaxkv.check_errors(out)
    assert pointers(out[1] if direction == "load" else out[0]) == before
    check(case, direction, numpy_ids, out, pool, layers)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(("layers", "segment"), [(None, "2"), ((2, 0, 1), "1")])
def test_wait_for_several_layers_is_one_wait(direction, layers, segment, named):
    case = make_case()
    numpy_ids, ids = ids_of(case, 5, named)
    pool, cache = case.pool(), case.cache()

    @partial(jax.jit, donate_argnames=("cache", "pool") if direction == "store" else "cache")
    def step(pool, cache, *ids):
        started = start(direction, pool, cache, *ids, layers=layers, implementation=named)
        first, second, again = started.wait([0, 2, 0])
        assert again is first and first is started.wait(0) and second is started.wait(2)
        return finish(direction, started)

    # Layers 0 and 2, then what is left: layer 1 of a load, the pool of a store.
    waits = re.findall(r"\bsegment = (\d+)", step.lower(pool, cache, *ids).as_text())
    assert len(waits) == 2 and waits[0] == segment
    out = step(pool, cache, *ids)
    jaxkv.check_errors(out)
    check(case, direction, numpy_ids, out, pool, layers)


@pytest.mark.parametrize("grouped", [False, True], ids=["one by one", "grouped"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_program_has_no_copy_of_entire_arrays(direction, grouped, named):
    case = make_case()
    _, ids = ids_of(case, 5, named)

    @partial(jax.jit, donate_argnames=("cache", "pool") if direction == "store" else "cache")
    def step(pool, cache, *ids):
        started = start(direction, pool, cache, *ids, implementation=named)
        layers = range(case.spec.num_layers)
        for layer in [layers] if grouped else layers:
            started.wait(layer)
        return finish(direction, started)

    pool, cache = case.pool(), case.cache()
    entire_shapes = {leaf.shape for leaf in jax.tree.leaves((pool, cache))}
    assert not entire_shapes & copied_shapes(step, pool, cache, *ids)


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # the ticket and the plan
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_wait_in_another_program(direction, started_by):
    case = make_case()
    numpy_ids, ids = ids_of(case, 5, started_by)
    pool, cache = case.pool(), case.cache()
    begin = jax.jit(
        partial(start, direction, implementation=started_by),
        donate_argnums=(1,) if direction == "load" else (0, 1),
    )

    @partial(jax.jit, donate_argnums=0)
    def wait_for_one(started):
        started.wait(1)
        return started

    started = wait_for_one(begin(pool, cache, *ids))
    out = jax.jit(partial(finish, direction), donate_argnums=0)(started)
    jaxkv.check_errors(out)
    check(case, direction, numpy_ids, out, pool)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_start_outside_jit_preserves_arguments(direction, started_by):
    case = make_case()
    numpy_ids, ids = ids_of(case, 5, started_by)
    pool, cache = case.pool(), case.cache()
    started = start(direction, pool, cache, *ids, implementation=started_by)
    started.wait(2)
    out = finish(direction, started)
    jaxkv.check_errors(out)
    check(case, direction, numpy_ids, out, pool)
    case.assert_holds(pool, cache)


def test_handle_without_donation_raises(named):
    """XLA copies what it may not alias, before the wait: on a GPU those bytes have not arrived."""
    case = make_case()
    _, ids = ids_of(case, 5, named)
    begin = jax.jit(partial(start, "load", implementation=named), donate_argnums=1)
    loading = begin(case.pool(), case.cache(), *ids)
    cache = jax.jit(lambda loading: loading.cache)(loading)
    assert_rejected(lambda: jaxkv.check_errors(cache), jaxkv.TransferError, "donate")


def test_wait_after_a_differentiated_value(named):
    case = make_case()
    _, ids = ids_of(case, 5, named)

    @jax.jit
    def step(pool, cache, h, *ids):
        def loss(h):
            loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
            loading.wait(0, after=h)
            return (h * h).sum(), loading.cache

        return jax.grad(loss, has_aux=True)(h)

    gradient, _ = step(case.pool(), case.cache(), jnp.arange(3.0), *ids)
    np.testing.assert_array_equal(gradient, 2 * np.arange(3.0))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_several_copies_in_flight(direction, named):
    """Into separate caches, or into one pool sequentially."""
    case = make_case()
    sides = [ids_of(case, 5, named, seed) for seed in range(4)]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(pools, caches, *ids):
        started = [
            start(direction, pool, cache, *side, implementation=named)
            for pool, cache, side in zip(pools, caches, ids, strict=True)
        ]
        for layer in range(case.spec.num_layers):
            for one in started:
                one.wait(layer)
        outs = [finish(direction, one) for one in started]
        return [(new or pool, cache) for (new, cache), pool in zip(outs, pools, strict=True)]

    pools, caches = [case.pool() for _ in sides], [case.cache() for _ in sides]
    outs = step(pools, caches, *(ids for _, ids in sides))
    jaxkv.check_errors(outs)
    for (numpy_ids, _), out in zip(sides, outs, strict=True):
        check(case, direction, numpy_ids, out, None)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_more_pages_than_one_launch(direction):
    """The kernel on one SM takes several launches per layer; the last one signals."""
    case = make_case(
        host_pages=26_000,
        device_pages=25_500,
        num_layers=2,
        page_size=1,
        num_kv_heads=1,
        head_dim=8,
    )
    numpy_ids, ids = ids_of(case, 25_000, None)

    @partial(jax.jit, donate_argnames=("pool", "cache"))
    def step(pool, cache, *ids):
        started = start(direction, pool, cache, *ids)
        for layer in range(case.spec.num_layers):
            started.wait(layer)
        new_pool, cache = finish(direction, started)
        return pool if new_pool is None else new_pool, cache

    pool, cache = case.pool(), case.cache()
    on_gpu = jax.default_backend() == "gpu"
    with force_implementation("kernel", 1) if on_gpu else contextlib.nullcontext():
        out = step(pool, cache, *ids)
    jaxkv.check_errors(out)
    check(case, direction, numpy_ids, out, None)


def test_load_of_pages_just_stored(named):
    """Ordered by data alone: only the pool makes the load depend on the store."""
    case = make_case(host_pages=12, device_pages=12)
    numpy_ids, ids = ids_of(case, 5, named)
    numpy_other, other = ids_of(case, 5, named, seed=1)
    other_device = other[1]

    @partial(jax.jit, donate_argnames=("pool", "cache"))
    def step(pool, cache, ids, other_device):
        storing = jaxkv.start_store(pool, cache, ids[0], ids[1], implementation=named)
        pool, cache = storing.pool, storing.cache
        loading = jaxkv.start_load(pool, cache, ids[0], other_device, implementation=named)
        return pool, loading.cache

    pool, cache = step(case.pool(), case.cache(), ids, other_device)
    jaxkv.check_errors(cache)
    stored = case.expected("store", *numpy_ids)["host"]
    middle = Case(case.layout, stored, case.device)
    want = middle.expected("load", numpy_ids[0], numpy_other[1])
    middle.assert_holds(pool, cache, **want)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_layer_may_be_overwritten_after_its_wait(direction, named):
    case = make_case(dtype="int8")
    numpy_ids, ids = ids_of(case, 5, named)

    @partial(jax.jit, donate_argnames=("pool", "cache"))
    def step(pool, cache, *ids):
        started = start(direction, pool, cache, *ids, implementation=named)
        layers = [
            tuple(array + np.int8(1) for array in started.wait(layer))
            for layer in range(case.spec.num_layers)
        ]
        return started.pool if direction == "store" else pool, layers

    pool, layers = step(case.pool(), case.cache(), *ids)
    jaxkv.check_errors(layers)
    want = case.expected(direction, *numpy_ids)
    for got, buffers in zip(layers, want.get("device", case.device), strict=True):
        for array, buffer in zip(got, buffers, strict=True):
            np.testing.assert_array_equal(array, buffer + np.int8(1))
    case.assert_holds(pool, case.cache(), host=want.get("host", case.host))


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_layer_is_overwritten_in_place_after_its_wait(direction, named):
    case = make_case(dtype="int8")
    _, ids = ids_of(case, 5, named)

    @partial(jax.jit, donate_argnames=("pool", "cache"))
    def step(pool, cache, *ids):
        started = start(direction, pool, cache, *ids, implementation=named)
        layers = [
            tuple(array.at[0].set(1) for array in started.wait(layer))
            for layer in range(case.spec.num_layers)
        ]
        return started.pool if direction == "store" else pool, layers

    cache = case.cache()
    arrays = {leaf.shape for leaf in jax.tree.leaves(cache)}
    assert not arrays & copied_shapes(step, case.pool(), cache, *ids)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_each_device_copies_its_heads(direction, axis_type, named):
    case = make_case("page_first_direct", num_kv_heads=4)
    numpy_ids, ids = ids_of(case, 5, None)
    mesh = mesh_of(2, axis_type)
    ids = [as_ids(side, named, jax.NamedSharding(mesh, jax.P())) for side in numpy_ids]
    placed = {"mesh": mesh, "head_axis": "tp"}
    pool, cache = case.pool(**placed), case.cache(**placed)
    specs = pool.partition_spec, cache.partition_spec

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(pool, cache, *ids):
        def body(pool, cache, *ids):
            started = start(direction, pool, cache, *ids, implementation=named)
            for layer in range(case.spec.num_layers):
                started.wait(layer)
            new_pool, cache = finish(direction, started)
            return pool if new_pool is None else new_pool, cache

        return jax.shard_map(body, mesh=mesh, in_specs=(*specs, jax.P(), jax.P()), out_specs=specs)(
            pool, cache, *ids
        )

    out = step(pool, cache, *ids)
    jaxkv.check_errors(out)
    check(case, direction, numpy_ids, out, None)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("host, device", [([], []), ([-1, -2], [3, 4])], ids=["empty", "padding"])
def test_empty_copy(direction, host, device, named):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    sides = (np.array(side, np.int32) for side in (host, device))
    started = start(direction, pool, cache, *(as_ids(side, named) for side in sides))
    started.wait(0)
    out = finish(direction, started)
    jaxkv.check_errors(out)
    case.assert_holds(pool if out[0] is None else out[0], out[1])


def test_wait_for_another_layer_is_rejected():
    case = make_case()
    loading = jaxkv.start_load(case.pool(), case.cache(), [1], [2], layers=(0, 2))
    assert_rejected(lambda: loading.wait(1), ValueError, "1", "0, 2")
    assert_rejected(lambda: loading.wait(range(2)), ValueError, "1", "0, 2")
    assert loading.wait([]) == ()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_waits_have_the_timeout_of_their_start(direction, named):
    """Within the program of the start, past a pytree boundary, and in another program."""
    case = make_case()
    _, ids = ids_of(case, 5, named)
    begin = partial(start, direction, implementation=named, timeout_s=0.25)

    def step(pool, cache, *ids):
        started = begin(pool, cache, *ids)
        started.wait(0)
        started = jax.jit(lambda started: (started.wait(1), started)[1])(started)
        return finish(direction, started)

    args = case.pool(), case.cache(), *ids
    started = jax.eval_shape(begin, *args)
    programs = jax.jit(step).lower(*args), jax.jit(partial(finish, direction)).lower(started)
    for program in programs:
        timeouts = re.findall(r"timeout_ns = (\d+)", program.as_text())
        assert len(timeouts) >= 1 and set(timeouts) == {"250000000"}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan"), float("inf"), "1", None], ids=repr)
def test_invalid_timeout_is_rejected(direction, timeout_s):
    case = make_case()
    call = partial(start, direction, case.pool(), case.cache(), [0], [0], timeout_s=timeout_s)
    assert_rejected(call, ValueError, "timeout_s", "seconds", repr(timeout_s))


def test_asynchronous_pallas_is_rejected():
    case = make_case()
    ids = np.array([1], np.int32)
    call = partial(jaxkv.start_load, case.pool(), case.cache(), ids, ids, implementation="pallas")
    assert_rejected(call, NotImplementedError, "pallas")
    assert "pallas" in jaxkv.explain(jaxkv.start_load, case.pool(), case.cache(), ids, ids)


@given(data=st.data())
@settings(max_examples=30)
def test_random_layouts_layers_and_ids(data):
    layout = data.draw(reference_layouts())
    device_pages = data.draw(st.integers(1, 4))
    case = make_case(
        layout.name,
        host_pages=layout.num_pages,
        device_pages=device_pages,
        head_groups=layout.head_groups,
        **vars(layout.spec),
    )
    layers = data.draw(layer_selections(layout.spec.num_layers))
    direction = data.draw(st.sampled_from(DIRECTIONS))
    implementation = data.draw(st.sampled_from(STARTED))
    ids = [
        np.array(side, np.int32)
        for side in data.draw(page_ids(layout.num_pages, case.num_device_pages))
    ]
    sides = [as_ids(side, implementation) for side in ids]
    pool, cache = case.pool(), case.cache()
    started = start(direction, pool, cache, *sides, layers=layers, implementation=implementation)
    order = data.draw(st.permutations(layout.spec.select_layers(layers)))
    for layer in order[: data.draw(st.integers(0, len(order)))]:
        started.wait(layer)
    out = finish(direction, started)
    jaxkv.check_errors(out)
    check(case, direction, ids, out, pool, layers)
