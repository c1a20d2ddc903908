"""In-flight copies: required waits found at lowering, and array lifetimes."""

import collections
import gc
import re
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime import native
from jaxkv._src.transfer import in_flight
from tests.util.async_cases import OVERLAPPED, check, finish, ids_of, start
from tests.util.transfer_cases import assert_rejected, make_case, mesh_of, pointers


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


def joins(step, *args) -> bool:
    """Whether the program waits for its copy immediately; it has one start."""
    text = step.lower(*args).as_text()
    assert text.count("jaxkv_start_copy") == 1
    return "joined = true" in text


@pytest.mark.filterwarnings("ignore:Some donated buffers")  # buffers that the programs drop
def test_unwaited_start_is_synchronous(named):
    case = make_case()
    numpy_ids, ids = ids_of(case, 5, named)

    @partial(jax.jit, donate_argnames="cache")
    def one_layer(pool, cache, *ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
        return loading.wait(1)

    @partial(jax.jit, donate_argnames="cache")
    def first_layer(pool, cache, *ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
        first, *_ = (loading.wait(layer) for layer in range(case.spec.num_layers))
        return first

    @partial(jax.jit, donate_argnames="cache")
    def all_layers(pool, cache, *ids):
        return jaxkv.start_load(pool, cache, *ids, implementation=named).cache

    args = case.pool(), case.cache(), *ids
    assert joins(one_layer, *args)
    assert joins(first_layer, *args)
    assert not joins(all_layers, *args)
    assert not joins(jax.jit(partial(start, "load", implementation=named)), *args)
    arrays = one_layer(*args)
    jaxkv.check_errors(arrays)
    for array, want in zip(arrays, case.expected("load", *numpy_ids)["device"][1], strict=True):
        assert np.asarray(array).tobytes() == want.tobytes()


def test_unused_copy_is_eliminated(named):
    case = make_case()
    _, ids = ids_of(case, 5, named)

    @jax.jit
    def step(pool, cache, *ids):
        jaxkv.start_load(pool, cache, *ids, implementation=named).wait(1)
        return ids

    assert "jaxkv" not in step.lower(case.pool(), case.cache(), *ids).as_text()


def is_kept_alive(addresses: set) -> bool:
    arrays = [array for entry in in_flight._in_flight for array in entry.arrays]
    return addresses <= set(pointers([one for one in arrays if not one.is_deleted()]))


@pytest.mark.parametrize("direction, waited", [("load", 0), ("load", 1), ("store", 0)])
def test_dropped_handle_keeps_memory_until_the_copy_ends(direction, waited, named):
    case = make_case()
    _, ids = ids_of(case, 5, named)
    donated = (1,) if direction == "load" else (0, 1)
    begin = jax.jit(partial(start, direction, implementation=named), donate_argnums=donated)
    started = begin(case.pool(), case.cache(), *ids)
    for layer in range(waited):
        started.wait(layer)
    assert (started._plan is None) == (named == "dma")
    addresses = set(pointers((started._plan, started._cache.layers[waited:])))

    del started
    gc.collect()
    assert is_kept_alive(addresses)
    if jax.default_backend() == "gpu":
        native.extension().synchronize_device(0)
    held = [array for entry in in_flight._in_flight for array in entry.arrays]
    jax.block_until_ready([array for array in held if not array.is_deleted()])
    del held
    in_flight.keep_alive(None)  # as each start and wait does
    assert not is_kept_alive(addresses)


def test_completed_copy_is_released(named):
    case = make_case()
    _, ids = ids_of(case, 5, named)
    storing = jaxkv.start_store(case.pool(), case.cache(), *ids, implementation=named)
    addresses = set(pointers(storing._cache))
    assert is_kept_alive(addresses)
    _ = storing.pool
    assert not is_kept_alive(addresses)


def test_threads_lose_no_in_flight_copy():
    class Ticket:
        def is_deleted(self) -> bool:
            return False

        def is_ready(self) -> bool:
            time.sleep(1e-5)  # yields to another thread
            return False

    tickets = [Ticket() for _ in range(40)]
    held = collections.deque(in_flight._InFlightCopy(ticket, [ticket]) for ticket in tickets)
    with mock.patch.object(in_flight, "_in_flight", held):
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda _: in_flight.keep_alive(None), range(64)))
        assert {id(entry.ticket) for entry in held} == {id(ticket) for ticket in tickets}


@pytest.mark.parametrize("inside", ["jit", "checkpoint", "scan", "argument of a jit in scan"])
def test_handle_of_another_trace_is_rejected(inside, named):
    case = make_case()
    _, ids = ids_of(case, 5, named)

    @jax.jit
    def step(pool, cache, *ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
        if inside == "jit":
            jax.jit(lambda x: (x, loading.wait(0)))(1.0)
        elif inside == "checkpoint":
            jax.checkpoint(lambda x: (x, loading.wait(0)))(1.0)
        elif inside == "scan":
            jax.lax.scan(lambda x, _: (x, loading.wait(0)), 1.0, length=2)
        else:
            wait = jax.jit(lambda loading: loading.wait(0))
            jax.lax.scan(lambda x, _: (x, wait(loading)), 1.0, length=2)
        return loading.cache

    call = partial(step, case.pool(), case.cache(), *ids)
    assert_rejected(call, RuntimeError, "another trace", "argument")


@pytest.mark.parametrize("direction", ["load", "store"])
def test_copy_without_jit(direction, named):
    """As in debugging: nothing is compiled but the start itself."""
    case = make_case()
    numpy_ids, ids = ids_of(case, 5, named)
    with jax.disable_jit():
        started = start(direction, case.pool(), case.cache(), *ids, implementation=named)
        pool, cache = finish(direction, started)
    check(case, direction, numpy_ids, (pool, cache), case.pool())


def test_copy_in_a_checkpoint_outside_jit(named):
    case = make_case()
    numpy_ids, ids = ids_of(case, 5, named)

    @jax.checkpoint
    def step(pool, cache, *ids):
        return start("load", pool, cache, *ids, implementation=named).cache

    pool = case.pool()
    check(case, "load", numpy_ids, (None, step(pool, case.cache(), *ids)), pool)


def test_non_integer_layer_is_rejected(named):
    case = make_case()
    loading = start("load", case.pool(), case.cache(), *ids_of(case, 2, named)[1])
    assert_rejected(lambda: loading.wait(1.0), TypeError, "1.0", "integer")


@pytest.mark.multigpu
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_wait_for_a_sharded_handle_requires_shard_map(axis_type, named):
    case, mesh = make_case(), mesh_of(2, axis_type)
    placed = {"mesh": mesh, "head_axis": "tp"}
    pool, cache = case.pool(**placed), case.cache(**placed)
    sharding = jax.NamedSharding(mesh, jax.P())
    make = partial(jaxkv.HostIds, sharding=sharding) if named == "dma" else np.asarray
    ids = [make(side) for side in ids_of(case, 5, None)[0]]
    begin = jax.shard_map(
        partial(jaxkv.start_load, implementation=named), mesh=mesh, out_specs=jax.P("tp"),
        in_specs=(pool.partition_spec, cache.partition_spec, jax.P(), jax.P()),
    )  # fmt: skip
    loading = jax.jit(begin, donate_argnums=1)(pool, cache, *ids)
    assert_rejected(lambda: loading.cache, ValueError, "sharded", "shard_map")


@pytest.mark.multigpu
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("kept", [True, False], ids=["same sharding", "other sharding"])
@pytest.mark.filterwarnings("ignore:Some donated buffers")  # those that are resharded
def test_sharding_constraint_is_transparent_unless_xla_reshards(kept, axis_type, named):
    """jax 0.11 constrains the results of a `shard_map` over explicit axes to their shardings."""
    case, mesh = make_case(), mesh_of(2, axis_type)
    placed = {"mesh": mesh, "head_axis": "tp"}
    pool, cache = case.pool(**placed), case.cache(**placed)
    sharding = jax.NamedSharding(mesh, jax.P())
    make = partial(jaxkv.HostIds, sharding=sharding) if named == "dma" else np.asarray
    ids = [make(side) for side in ids_of(case, 5, None)[0]]

    def start_on_shards(*args):
        return jax.tree.leaves(jaxkv.start_load(*args, implementation=named))

    begin = jax.shard_map(
        start_on_shards, mesh=mesh, out_specs=jax.P("tp"),
        in_specs=(pool.partition_spec, cache.partition_spec, jax.P(), jax.P()),
    )  # fmt: skip

    @partial(jax.jit, donate_argnums=1)
    def step(*args):
        to = jax.NamedSharding(mesh, jax.P("tp") if kept else jax.P())
        constrain = jax.lax.with_sharding_constraint if axis_type == "Auto" else jax.reshard
        return constrain(begin(*args), to)

    joined = joins(step, pool, cache, *ids)
    waits = "@jaxkv_wait_copy" in step.lower(pool, cache, *ids).as_text()
    assert (joined or waits) == (not kept)


def test_load_without_jit_keeps_its_pool(named):
    case = make_case()
    pool = case.pool()
    data = weakref.ref(pool.data)
    loading = start("load", pool, case.cache(), *ids_of(case, 5, named)[1], implementation=named)
    del pool
    gc.collect()
    assert data() is not None
    assert pointers(loading._pool) == pointers(data())
    del loading
    gc.collect()
    assert data() is not None  # until the copy is found to be complete


def calls_of(direction: str, use, named) -> tuple[list[str], list[str]]:
    """The starts and the waits of a program that starts a copy and applies `use` to it."""
    case = make_case()
    _, ids = ids_of(case, 5, named)

    def step(pool, cache, x, *ids):
        return use(start(direction, pool, cache, *ids, implementation=named), x)

    args = case.pool(), case.cache(), jnp.float32(0), *ids
    lines = jax.jit(step).lower(*args).as_text().splitlines()
    starts, waits = (
        [line for line in lines if f"custom_call @jaxkv_{name}_copy" in line]
        for name in ("start", "wait")
    )
    return starts, waits


def operand_types(call: str) -> list[str]:
    operands = re.search(r": \((.*)\) -> ", call)
    assert operands
    return operands[1].split(", ")


@pytest.mark.parametrize(
    "use, segment, places",
    [
        (lambda loading, x: (loading.wait(1), loading.cache), 1, [2, 3]),
        (lambda loading, x: (loading.wait(2), loading.cache), 2, [4, 5]),
        (lambda loading, x: loading.cache, 2, [0, 1, 2, 3, 4, 5]),
    ],
    ids=["a layer", "the last layer", "the cache"],
)
def test_wait_of_a_load_has_segment_and_places(use, segment, places, named):
    [begun], [wait, *_] = calls_of("load", use, named)
    assert "segment_buffers = 2 " in begun
    assert f"segment = {segment} " in wait
    assert f"places = dense<{places}>" in wait


@pytest.mark.parametrize(
    "use, segment",
    [
        (lambda storing, x: (storing.wait(1), storing.pool), 1),
        (lambda storing, x: storing.cache, 2),
        (lambda storing, x: storing.pool, 2),
    ],
    ids=["a layer", "the cache", "the pool"],
)
def test_wait_of_a_store_has_segment(use, segment, named):
    [begun], [wait, *_] = calls_of("store", use, named)
    assert "segment_buffers = 2 " in begun
    assert f"segment = {segment} " in wait


def test_wait_retains_the_sources(named):
    pages, pool = "tensor<9x4x2x16xbf16>", "tensor<2x12x3x4x2x16xbf16>"
    _, [wait, *_] = calls_of("load", lambda loading, x: (loading.wait(0), loading.cache), named)
    types = operand_types(wait)
    assert (types.count(pages), types.count(pool)) == (2, 1)
    _, [*_, wait] = calls_of("store", lambda storing, x: (storing.wait(0), storing.pool), named)
    types = operand_types(wait)
    assert (types.count(pages), types.count(pool)) == (4, 1)


@pytest.mark.parametrize("given", [True, False])
def test_wait_depends_on_after(given, named):
    def use(loading, x):
        return loading.wait(0, after={"x": x} if given else None)

    _, [wait] = calls_of("load", use, named)
    assert operand_types(wait).count("tensor<f32>") == given


@pytest.mark.parametrize("direction", ["load", "store"])
def test_xla_neither_merges_nor_eliminates_starts_and_waits(direction, named):
    starts, waits = calls_of(
        direction, lambda started, x: (started.wait(0), finish(direction, started)), named
    )
    assert len(starts) == 1 and len(waits) >= 2
    assert all("has_side_effect = true" in call for call in (*starts, *waits))
