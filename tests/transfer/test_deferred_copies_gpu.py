"""Loads of which the waits of the program enqueue a part, on a GPU: bytes, order and failures."""

import collections
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.transfer import async_calls
from tests.util.lowered_copies import Module
from tests.util.replays import plus
from tests.util.slow_streams import settle, slow_input, slow_zero
from tests.util.transfer_cases import Case, as_ids, assert_rejected, distinct_ids, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Some donated buffers")]

NAMED: Final = "dma"
ROUNDS, PAGES = 10, 40
# Copies that are still in flight when the next kernel runs.
LARGE = {"page_size": 64, "num_kv_heads": 8, "head_dim": 128, "host_pages": 64, "device_pages": 48}
LAYERS = 6
ORDERS = {
    "in order": range(LAYERS),
    "reversed": range(LAYERS - 1, -1, -1),
    "only the last": [LAYERS - 1],
    "no layer": [],
}


@pytest.fixture(autouse=True)
def one_layer_ahead(monkeypatch):
    monkeypatch.setattr(async_calls, "_DESCRIPTORS_AHEAD", 1)


def new_case(**options) -> Case:
    return make_case("page_first_direct", dtype="int8", num_layers=LAYERS, **{**LARGE, **options})


def ids_of(case: Case, seed: int):
    numpy_ids = distinct_ids(case, PAGES, seed)
    return numpy_ids, [as_ids(side, NAMED) for side in numpy_ids]


def start(pool, cache, ids) -> jaxkv.LoadHandle:
    return jaxkv.start_load(pool, cache, *ids, implementation=NAMED)


def use(array):
    """Read by compute now, not at the end of the program."""
    return array + np.int8(1)


def loaded(case: Case, numpy_ids) -> Case:
    return Case(case.layout, case.host, case.expected("load", *numpy_ids)["device"])


def assert_seen(case: Case, order, seen) -> None:
    want = plus(case, 1).device
    for layer, arrays in zip(order, seen, strict=True):
        for array, buffer in zip(arrays, want[layer], strict=True):
            np.testing.assert_array_equal(array, buffer)


@pytest.mark.parametrize("after_slow_work", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_layers_are_complete_after_their_waits(order, after_slow_work):
    case = new_case()

    @partial(jax.jit, donate_argnames="cache")
    def step(pool, cache, x, *ids):
        zero = slow_zero(x).astype("int8") if after_slow_work else jnp.int8(0)
        cache = jax.tree.map(lambda array: array + zero, cache)
        loading = start(pool, cache, ids)
        seen = [tuple(map(use, loading.wait(layer))) for layer in order]
        return loading.cache, seen

    x, pool, cache = slow_input(), case.pool(), case.cache()
    for seed in range(ROUNDS):
        numpy_ids, ids = ids_of(case, seed)
        if seed == 0:
            assert Module(step.lower(pool, cache, x, *ids)).deferred == [True]
        cache, seen = step(pool, cache, x, *ids)
        settle(seen, cache)
        case = loaded(case, numpy_ids)
        assert_seen(case, order, seen)
        case.assert_holds(pool, cache)
    jaxkv.check_errors()


def test_waits_in_another_program():
    case = new_case()
    begin = jax.jit(lambda pool, cache, *ids: start(pool, cache, ids), donate_argnums=1)

    @partial(jax.jit, donate_argnums=0)
    def finish(loading):
        seen = [tuple(map(use, loading.wait(layer))) for layer in range(LAYERS)]
        return loading.cache, seen

    pool, cache = case.pool(), case.cache()
    for seed in range(ROUNDS):
        numpy_ids, ids = ids_of(case, seed)
        if seed == 0:
            assert Module(begin.lower(pool, cache, *ids)).deferred == [False]
        cache, seen = finish(begin(pool, cache, *ids))
        settle(seen, cache)
        case = loaded(case, numpy_ids)
        assert_seen(case, range(LAYERS), seen)
        case.assert_holds(pool, cache)
    jaxkv.check_errors()


@pytest.mark.parametrize("waits_between", [0, 2])
def test_two_loads_of_a_program(waits_between):
    first, second = new_case(), new_case()

    @partial(jax.jit, donate_argnums=1)
    def step(pools, caches, *ids):
        one = start(pools[0], caches[0], ids[:2])
        seen: tuple[list, list] = [], []
        for layer in range(waits_between):
            seen[0].append(tuple(map(use, one.wait(layer))))
        other = start(pools[1], caches[1], ids[2:])
        for layer in range(LAYERS):
            if layer >= waits_between:
                seen[0].append(tuple(map(use, one.wait(layer))))
            seen[1].append(tuple(map(use, other.wait(layer))))
        return (one.cache, other.cache), seen

    cases = [first, second]
    pools, caches = [tuple(getattr(case, name)() for case in cases) for name in ("pool", "cache")]
    for seed in range(ROUNDS):
        numbers, ids = zip(
            *[ids_of(case, 2 * seed + i) for i, case in enumerate(cases)], strict=True
        )
        flat = [*ids[0], *ids[1]]
        if seed == 0:
            assert Module(step.lower(pools, caches, *flat)).deferred == [True, True]
        caches, seen = step(pools, caches, *flat)
        settle(seen, caches)
        cases = [loaded(case, given) for case, given in zip(cases, numbers, strict=True)]
        for case, arrays, pool, cache in zip(cases, seen, pools, caches, strict=True):
            assert_seen(case, range(LAYERS), arrays)
            case.assert_holds(pool, cache)
    jaxkv.check_errors()


def test_load_and_store_of_a_program():
    """The store reads each layer before the program overwrites it."""
    case, source = new_case(), new_case()

    @partial(jax.jit, donate_argnums=(1, 2, 3))
    def step(pool, cache, stored_pool, stored, *ids):
        loading = start(pool, cache, ids[:2])
        storing = jaxkv.start_store(stored_pool, stored, *ids[2:], implementation=NAMED)
        seen, changed = [], []
        for layer in range(LAYERS):
            seen.append(tuple(map(use, loading.wait(layer))))
            changed.append(tuple(map(use, storing.wait(layer))))
        stored = jaxkv.DeviceCache(tuple(changed), stored.spec)
        return loading.cache, storing.pool, stored, seen

    pool, cache, stored_pool, stored = case.pool(), case.cache(), source.pool(), source.cache()
    for seed in range(ROUNDS):
        load_numbers, load_ids = ids_of(case, seed)
        numbers, ids = ids_of(source, 100 + seed)
        out = step(pool, cache, stored_pool, stored, *load_ids, *ids)
        cache, stored_pool, stored, seen = out
        settle(out)
        case = loaded(case, load_numbers)
        assert_seen(case, range(LAYERS), seen)
        case.assert_holds(pool, cache)
        host = source.expected("store", *numbers)["host"]
        source = plus(Case(source.layout, host, source.device), 1)
        source.assert_holds(stored_pool, stored)
    jaxkv.check_errors()


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.multigpu)])
def test_programs_of_several_threads(devices):
    """Each may start its load while that of another is enqueued in part."""
    if len(jax.local_devices()) < devices:
        pytest.skip(f"needs {devices} devices")

    def run(seed: int) -> None:
        with jax.default_device(jax.local_devices()[seed % devices]):
            run_rounds(seed)

    def run_rounds(seed: int) -> None:
        case = new_case()

        @partial(jax.jit, donate_argnames="cache")
        def step(pool, cache, *ids):
            loading = start(pool, cache, ids)
            seen = [tuple(map(use, loading.wait(layer))) for layer in range(LAYERS)]
            return loading.cache, seen

        pool, cache = case.pool(), case.cache()
        for number in range(2 * ROUNDS):
            numpy_ids, ids = ids_of(case, 1000 * seed + number)
            cache, seen = step(pool, cache, *ids)
            case = loaded(case, numpy_ids)
            assert_seen(case, range(LAYERS), seen)
        case.assert_holds(pool, cache)

    with ThreadPoolExecutor(4) as workers:
        collections.deque(workers.map(run, range(4)), maxlen=0)
    jaxkv.check_errors()


def test_program_that_fails_between_start_and_last_wait():
    """Its arrays are freed, and later programs use their memory."""
    case = new_case()
    _, ids = ids_of(case, 0)
    forged = [jax.tree.map(lambda w: jax.device_put(np.array(w), w.sharding), side) for side in ids]

    @partial(jax.jit, donate_argnums=(1, 2))
    def step(pool, cache, other, ids, other_ids):
        loading = start(pool, cache, ids)
        first = loading.wait(0)[0]
        other = jax.tree.map(lambda array: array + first * 0, other)
        other = jaxkv.load_pages(pool, other, *other_ids, implementation=NAMED)
        seen = loading.wait(LAYERS - 1, after=other.layers[0][0])
        return loading.cache, other, tuple(map(use, seen))

    like = case.cache().layers[0][0]
    for _ in range(ROUNDS):
        pool = case.pool()

        def fails(pool=pool):
            settle(step(pool, case.cache(), case.cache(), ids, forged))

        assert_rejected(fails, (ValueError, RuntimeError), "HostIds", "NumPy")
        later = [jnp.full(like.shape, n, like.dtype) for n in range(64)]
        right = step(pool, case.cache(), case.cache(), ids, ids)
        settle(right, later)
        for n, array in enumerate(later):
            assert bool((array == n).all())
        want = loaded(case, ids_of(case, 0)[0])
        want.assert_holds(pool, right[0])
    jaxkv.check_errors()
