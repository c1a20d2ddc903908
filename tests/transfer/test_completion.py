"""`LoadHandle.done` and `StoreHandle.done`."""

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from tests.util.async_cases import OVERLAPPED, check, finish, ids_of, start
from tests.util.transfer_cases import assert_rejected, make_case

# On a GPU about a second in few launches: while other processes keep the CPU busy, a GPU would be
# done with many small ones as soon as the last is launched.
SLOW_SIZE, SLOW_PRODUCTS = {"cpu": (1024, 32), "gpu": (8192, 40)}[jax.default_backend()]
ATTEMPTS = 5  # while other processes keep the CPU busy, the slow work may be over first


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


@pytest.fixture(params=["load", "store"])
def direction(request) -> str:
    return request.param


def started_by_jit(direction: str, named: str, **options):
    case = make_case(**options)
    numpy_ids, ids = ids_of(case, 5, named)
    pool = case.pool()
    donated = (1,) if direction == "load" else (0, 1)
    begin = jax.jit(partial(start, direction, implementation=named), donate_argnums=donated)
    return case, numpy_ids, ids, pool, begin


def wait_until_done(handle) -> None:
    deadline = time.monotonic() + 60
    while not handle.done():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def slow_zero(x: jax.Array) -> jax.Array:
    for _ in range(SLOW_PRODUCTS):
        x = jnp.matmul(x, x, precision="highest")
    return x[0, 0] * 0


def test_done_is_false_before_the_copy_and_true_after_it(direction, named):
    # An addition of 0 changes some NaNs of other dtypes.
    case, numpy_ids, ids, _, begin = started_by_jit(direction, named, dtype="int8")
    x = jnp.full((SLOW_SIZE, SLOW_SIZE), 1 / SLOW_SIZE)
    add = jax.jit(
        lambda cache, zero: jax.tree.map(lambda a: a + zero.astype(a.dtype), cache),
        donate_argnums=0,
    )
    for _ in range(3):  # in the end nothing is compiled, loaded or captured beside the slow work
        finish(direction, begin(case.pool(), add(case.cache(), jnp.zeros(())), *ids))
    for _ in range(ATTEMPTS):
        slow = jax.jit(slow_zero).lower(x).compile()  # called once: a second call captures a graph
        zero = slow(x)
        handle = begin(pool := case.pool(), add(case.cache(), zero), *ids)
        done = handle.done()
        if not zero.is_ready():
            break
    else:
        pytest.fail(f"the slow work ended before the copy was started, {ATTEMPTS} times")
    assert done is False
    with ThreadPoolExecutor(1) as worker:
        worker.submit(wait_until_done, handle).result()
    assert handle.done() is True
    check(case, direction, numpy_ids, finish(direction, handle), pool)


def test_done_remains_true_with_waits(direction, named):
    case, numpy_ids, ids, pool, begin = started_by_jit(direction, named)
    handle = begin(pool, case.cache(), *ids)
    handle.wait(1)
    wait_until_done(handle)
    out = finish(direction, handle)
    jax.block_until_ready(out)
    wait_until_done(handle)
    check(case, direction, numpy_ids, out, pool)


def test_done_of_a_copy_of_nothing(direction, named):
    case = make_case()
    _, ids = ids_of(case, 0, named)
    wait_until_done(start(direction, case.pool(), case.cache(), *ids, implementation=named))


def test_done_of_a_start_outside_of_jit(direction, named):
    case = make_case()
    numpy_ids, ids = ids_of(case, 5, named)
    pool = case.pool()
    handle = start(direction, pool, case.cache(), *ids, implementation=named)
    wait_until_done(handle)
    check(case, direction, numpy_ids, finish(direction, handle), pool)


def test_done_inside_of_jit_is_refused(direction, named):
    case = make_case()
    _, ids = ids_of(case, 5, named)

    @jax.jit
    def step(pool, cache, *ids):
        return start(direction, pool, cache, *ids, implementation=named).done()

    call = partial(step, case.pool(), case.cache(), *ids)
    assert_rejected(call, RuntimeError, "done", "traced", "outside of jit")


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_done_of_a_donated_handle_is_refused(direction, named):
    case, numpy_ids, ids, pool, begin = started_by_jit(direction, named)
    handle = begin(pool, case.cache(), *ids)
    out = jax.jit(partial(finish, direction), donate_argnums=0)(handle)
    assert_rejected(handle.done, RuntimeError, "done", "donated", "results")
    check(case, direction, numpy_ids, out, pool)


def test_done_of_a_handle_without_jax_arrays_is_refused(direction, named):
    _, _, ids, pool, begin = started_by_jit(direction, named)
    handle = jax.device_get(begin(pool, make_case().cache(), *ids))
    assert_rejected(handle.done, RuntimeError, "done", "device_get", "not JAX arrays")


def test_done_after_the_pool_was_closed_names_the_cause(named):
    case, _, ids, pool, begin = started_by_jit("store", named)
    handle = begin(pool, case.cache(), *ids)
    handle.pool.close()
    assert_rejected(handle.done, RuntimeError, "done", "closed or deleted")


def test_done_does_not_keep_the_arrays_of_a_copy():
    class Array:
        def is_deleted(self) -> bool:
            return False

        def is_ready(self) -> bool:
            return False

    import weakref

    from jaxkv._src.transfer.in_flight import Completion

    completion, array = Completion(), Array()
    gone = weakref.ref(array)
    assert completion.is_complete(array, [array]) is False
    del array
    assert gone() is None
