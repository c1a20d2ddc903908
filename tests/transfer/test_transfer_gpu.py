"""GPU-only behaviour: replayed command buffers, and stream order of copies.

Each ordering test runs twice: with the implementation, where every round must be right, and with
the same copy on an unordered stream, where a round must be wrong. Without this negative control the
first would prove nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.recurrent import DeferredCounts
from tests.util.replays import check_rounds, is_right, plus
from tests.util.slow_streams import settle, slow_input, slow_zero, unordered_copy
from tests.util.transfer_cases import Case, as_ids, assert_rejected, copy, distinct_ids, make_case

pytestmark = pytest.mark.gpu

ROUNDS = 20


def copies(implementation: str | None, direction: str):
    """The op of an implementation, or the unordered control."""
    if implementation == "unordered":
        return partial(unordered_copy, direction)
    return partial(copy, direction, implementation=implementation)


@pytest.fixture(params=["kernel", "dma", "unordered"])
def ordering(request) -> str:
    """Implementations that must keep order, and the control that does not."""
    return request.param


@pytest.mark.parametrize("one_program", [True, False], ids=["one jit", "two jits"])
def test_store_waits_for_a_slow_producer(one_program, ordering):
    """A page that is written at the end of a long chain, a new payload each round."""
    case = make_case("page_first_direct", dtype="int8")
    numpy_ids = distinct_ids(case, 5)
    ids = [as_ids(side, ordering) for side in numpy_ids]
    store = copies(ordering, "store")
    x = slow_input()

    def produce(cache, x):
        late_one = (slow_zero(x) + 1).astype("int8")
        return jax.tree.map(lambda buffer: buffer + late_one, cache)

    def produce_and_store(pool, cache, x, *ids):
        cache = produce(cache, x)
        return store(pool, cache, *ids), cache

    both = jax.jit(produce_and_store, donate_argnums=(0, 1))
    first, second = jax.jit(produce, donate_argnums=0), jax.jit(store, donate_argnums=0)
    pool, cache = case.pool(), case.cache()
    rights = []
    for _ in range(ROUNDS):
        if one_program:
            pool, cache = both(pool, cache, x, *ids)
        else:
            cache = first(cache, x)
            pool = second(pool, cache, *ids)
        settle(pool, cache)
        case = plus(case, 1)
        rights.append(is_right(case, pool, cache, **case.expected("store", *numpy_ids)))
    check_rounds(rights[1:], ordering)  # the first round compiles: nothing overlaps with it


def test_load_waits_for_a_slow_reader(ordering):
    """A program that reads pages at the end of a long chain, while the next one overwrites them."""
    case = make_case("page_first_direct", dtype="int8")
    load = jax.jit(copies(ordering, "load"), donate_argnums=1)
    x = slow_input()

    @jax.jit
    def read(cache, x):
        start = slow_zero(x)
        pages = cache.num_pages - 1
        return jax.tree.map(
            lambda buffer: jax.lax.dynamic_slice_in_dim(buffer, start, pages), cache
        )

    pool, cache = case.pool(), case.cache()
    rights = []
    for seed in range(ROUNDS):
        numpy_ids = distinct_ids(case, 5, seed)
        ids = [as_ids(side, ordering) for side in numpy_ids]
        seen = read(cache, x)
        cache = load(pool, cache, *ids)
        settle(seen, cache)
        before = [tuple(buffer[:-1] for buffer in buffers) for buffers in case.device]
        rights.append(is_right(case, pool, seen, device=before))
        loaded = case.expected("load", *numpy_ids)["device"]
        case = Case(case.layout, case.host, loaded)
        case.assert_holds(pool, cache)
    check_rounds(rights[1:], ordering)


OPS = 8  # well above the number of kernels from which XLA captures a command buffer


def test_replays_follow_new_ids_and_inputs():
    """All addresses stay the same from run to run, so the captured kernels must reread the ids.

    The ids of each round are from a table on the device. One round has an id out of range.
    """
    case = make_case("page_head", dtype="int8", host_pages=12, device_pages=12)
    rounds = ROUNDS + 5
    rng = np.random.default_rng(0)
    table = np.stack(
        [[[rng.permutation(12)[:4] for _ in range(2)] for _ in range(OPS)] for _ in range(rounds)]
    ).astype(np.int32)
    bad_round = rounds - 2
    table[bad_round, 0, 0, 0] = 12

    @partial(jax.jit, donate_argnames=("pool", "cache", "number"))
    def step(pool, cache, number, table):
        for op in range(OPS):
            host_ids, device_ids = table[number, op]
            if op % 2:
                pool = jaxkv.store_pages(pool, cache, host_ids, device_ids, implementation="kernel")
            else:
                cache = jaxkv.load_pages(pool, cache, host_ids, device_ids, implementation="kernel")
            cache = jax.tree.map(lambda buffer: buffer + np.int8(1), cache)
        return pool, cache, number + 1

    pool, cache, number = case.pool(), case.cache(), jax.numpy.int32(0)
    on_device = jax.device_put(table)
    for now in range(rounds):
        pool, cache, number = step(pool, cache, number, on_device)
        if now == bad_round:
            jax.block_until_ready(cache)
            assert_rejected(jaxkv.check_errors, jaxkv.PageIndexError, "1", "12")
        for op in range(OPS):
            host_ids, device_ids = np.where(table[now, op] < 12, table[now, op], -1)
            if op % 2:
                stored = case.expected("store", host_ids, device_ids)["host"]
                case = Case(case.layout, stored, case.device)
            else:
                loaded = case.expected("load", host_ids, device_ids)["device"]
                case = Case(case.layout, case.host, loaded)
            case = plus(case, 1)
        case.assert_holds(pool, cache)
    jaxkv.check_errors()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_dma_with_captured_kernels_follows_new_ids(direction):
    """XLA captures the surrounding kernels; a captured DMA copy would repeat the first ids."""
    case = make_case("page_first_direct", dtype="int8")

    @partial(jax.jit, donate_argnames=("pool", "cache"))
    def step(pool, cache, host_ids, device_ids):
        for _ in range(OPS):
            cache = jax.lax.optimization_barrier(
                jax.tree.map(lambda buffer: buffer + np.int8(1), cache)
            )
        out = copy(direction, pool, cache, host_ids, device_ids, implementation="dma")
        return (pool, out) if direction == "load" else (out, cache)

    pool, cache = case.pool(), case.cache()
    for seed in range(ROUNDS):
        ids = distinct_ids(case, 5, seed)
        pool, cache = step(pool, cache, *(as_ids(side, "dma") for side in ids))
        case = plus(case, OPS)
        want = case.expected(direction, *ids)
        case = Case(case.layout, want.get("host", case.host), want.get("device", case.device))
        case.assert_holds(pool, cache)


def test_thousands_of_descriptors_in_one_call():
    """page_head has a descriptor for each (head, token): more than the limit of a batch."""
    case = make_case(
        "page_head", page_size=16, num_kv_heads=8, head_dim=8, host_pages=32, device_pages=32
    )
    ids = distinct_ids(case, 30)
    pool, cache = case.pool(), case.cache()
    host_ids = [as_ids(side, "dma") for side in ids]
    for direction in ("load", "store"):
        out = copy(direction, pool, cache, *host_ids, implementation="dma")
        jaxkv.check_errors(out)
        after = (pool, out) if direction == "load" else (out, cache)
        case.assert_holds(*after, **case.expected(direction, *ids))


def test_kernel_follows_ids_computed_on_the_device():
    """Ids from a slow computation: the kernel must read them when it runs, not before."""
    case = make_case(dtype="int8")
    numpy_ids = distinct_ids(case, 5)
    x = slow_input()

    @partial(jax.jit, donate_argnames=("cache",))
    def step(pool, cache, x, host_ids, device_ids):
        zero = slow_zero(x)
        return jaxkv.load_pages(
            pool, cache, host_ids + zero, device_ids + zero, implementation="kernel"
        )

    pool = case.pool()
    for _ in range(3):
        cache = step(pool, case.cache(), x, *numpy_ids)
        jaxkv.check_errors(cache)
        case.assert_holds(pool, cache, **case.expected("load", *numpy_ids))


@pytest.mark.parametrize("named", ["kernel", "pallas", "dma"])  # others wait for the step
@pytest.mark.parametrize("kind", ["pair", "lists"])
def test_released_ids_are_kept_until_a_delayed_copy_has_read_them(kind, named):
    """New ids of the same length do not get their memory."""
    case = make_case(dtype="int8")
    numpy_ids, others = distinct_ids(case, 5), distinct_ids(case, 5, seed=1)
    x, pool = slow_input(), case.pool()
    make = jaxkv.HostIdPair if kind == "pair" else lambda *ids: tuple(map(jaxkv.HostIds, ids))

    @partial(jax.jit, donate_argnames="cache")
    def step(pool, cache, x, ids):
        zero = slow_zero(x).astype("int8")
        late = jax.tree.map(lambda buffer: buffer + zero, cache)
        return jaxkv.load_pages(pool, late, *ids, implementation=named)

    in_flight = 0
    for _ in range(4):
        cache = step(pool, jax.block_until_ready(case.cache()), x, make(*numpy_ids))
        new = [make(*others) for _ in range(20)]
        in_flight += not cache.layers[0][0].is_ready()
        settle(cache, new)
        case.assert_holds(pool, cache, **case.expected("load", *numpy_ids))
    assert in_flight, "all copies were over before the new ids: it proves nothing"


def test_counts_that_were_not_read_are_not_written_over_new_ids():
    """The memory of a released result of a step that has yet to run."""
    case = make_case(dtype="int8")
    ids, x, pool = distinct_ids(case, 5), slow_input(), case.pool()
    counts = np.zeros((8 + 2 * 5 - 1) // 2, np.int32)  # as large as the ids with their header

    @jax.jit
    def count(x):
        of_step = counts + slow_zero(x)
        return DeferredCounts.start(of_step, step=0, request_ids=counts), x.sum()

    load = jax.jit(partial(jaxkv.load_pages, implementation="kernel"), donate_argnums=1)
    in_flight = 0
    for _ in range(4):
        of_step, last = count(x)
        del of_step
        pairs = [jaxkv.HostIdPair(*ids) for _ in range(20)]
        in_flight += not last.is_ready()
        jax.block_until_ready(last)
        for pair in pairs:
            cache = load(pool, case.cache(), *pair)
            jaxkv.check_errors(cache)
            case.assert_holds(pool, cache, **case.expected("load", *ids))
    assert in_flight, "all steps were over before the new ids: it proves nothing"


def test_host_ahead_of_the_device_makes_new_ids_for_each_step():
    """Many more steps than lists that are kept: memory of ids is used again meanwhile."""
    case = make_case(dtype="int8")
    x, pool = slow_input(), case.pool()

    @partial(jax.jit, donate_argnames="cache")
    def step(pool, cache, x, ids):
        zero = jnp.where((x @ x)[0, 0] > 1, 1, 0).astype("int8")
        late = jax.tree.map(lambda buffer: buffer + zero, cache)
        return jaxkv.load_pages(pool, late, *ids, implementation="kernel")

    cache, want, addresses = case.cache(), case, set()
    for number in range(600):
        numpy_ids = distinct_ids(case, 3, seed=number)
        ids = jaxkv.HostIdPair(*numpy_ids)
        addresses.add(ids.data.unsafe_buffer_pointer())
        cache = step(pool, cache, x, ids)
        want = Case(case.layout, case.host, want.expected("load", *numpy_ids)["device"])
    settle(cache)
    want.assert_holds(pool, cache)
    assert len(addresses) < 400, "no memory was used again: it proves nothing"


@pytest.mark.parametrize("named", ["kernel", "dma"])
@pytest.mark.parametrize(
    "operation, names",
    [
        ("load_pages", ("host_pages", "device_pages")),
        ("store_pages", ("device_pages", "host_pages")),
    ],
)
def test_errors_counted_on_the_device_have_operation_and_argument(operation, names, named):
    case = make_case(dtype="int8")
    call = jax.jit(partial(getattr(jaxkv, operation), implementation=named))
    for argument, (source, destination) in zip(names, [(99, 1), (1, 99)], strict=True):
        ids = dict(zip(names, (as_ids([source], named), as_ids([destination], named)), strict=True))
        out = call(case.pool(), case.cache(), **ids)
        with pytest.raises(jaxkv.PageIndexError, match=rf"{argument}\[0\] = 99") as raised:
            jaxkv.check_errors(out)
        error = raised.value
        assert (error.operation, error.argument, error.count) == (operation, argument, 1)
