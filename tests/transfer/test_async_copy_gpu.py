"""GPU-only behaviour of asynchronous copies: order, replays, and timeouts of waits.

As in test_transfer_gpu.py, each ordering test runs a second time with non-blocking waits, and then
some round must be wrong.
"""

import gc
from functools import partial
from unittest import mock

import jax
import numpy as np
import pytest
from jax.extend.mlir import ir

import jaxkv
from jaxkv._src.runtime import native as runtime_native
from jaxkv._src.transfer import buffer_lifetime
from jaxkv._src.transfer import in_flight as transfer_in_flight
from tests.util.block_trees import swapped
from tests.util.lowered_copies import always_beside
from tests.util.replays import check_rounds, is_right, plus
from tests.util.slow_streams import settle, slow_input, slow_zero
from tests.util.swap_cases import IDS as SWAP_IDS
from tests.util.swap_cases import SwapCase, ids_for
from tests.util.transfer_cases import (
    Case,
    as_ids,
    assert_rejected,
    distinct_ids,
    make_case,
    pointers,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Some donated buffers")]

ROUNDS = 20
# Large enough that a copy is still in flight when the next kernel runs.
LARGE = {"page_size": 64, "num_kv_heads": 8, "head_dim": 128, "host_pages": 64, "device_pages": 48}
# 1 GiB in pages of 1 MiB: so few descriptors that the copy far outlasts their submission.
SLOW = jaxkv.KVCacheSpec(num_layers=16, page_size=1024, num_kv_heads=8, head_dim=128, dtype="int8")
SLOW_PAGES = 32


@pytest.fixture(params=["kernel", "dma"])
def named(request) -> str:
    return request.param


def waits_for_nothing():
    """Negative control: waits return arrays immediately."""
    decide = buffer_lifetime._decide

    def without_waits(program):
        decide(program)
        for wait in program.waits:
            integer = ir.IntegerType.get_signless(64)
            buffer_lifetime.configure(wait, segment=ir.IntegerAttr.get(integer, -1))

    return mock.patch.object(buffer_lifetime, "_decide", without_waits)


def beside_whatever_follows():
    """Negative control: starts overlap with the program, and no pytree boundary waits."""
    return mock.patch.object(buffer_lifetime, "_decide", always_beside)


@pytest.mark.parametrize("control", [False, True], ids=["wait", "no wait"])
def test_layer_is_complete_after_its_wait(named, control):
    case = make_case("page_first_direct", dtype="int8", **LARGE)
    layers = range(case.spec.num_layers)

    @partial(jax.jit, donate_argnames="cache")
    def step(pool, cache, x, *ids):
        # Slow work first: the copy and what does not wait for it begin together, however late the
        # host enqueues them.
        zero = slow_zero(x).astype("int8")
        cache = jax.tree.map(lambda buffer: buffer + zero, cache)
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
        # Computed from the current contents, not at the end of the program.
        seen = [tuple(array + np.int8(1) for array in loading.wait(layer)) for layer in layers]
        return seen, loading.cache

    x, pool, cache = slow_input(), case.pool(), case.cache()
    rights = []
    for seed in range(ROUNDS):
        ids = distinct_ids(case, 40, seed)
        with waits_for_nothing() if control else mock.MagicMock():
            seen, cache = step(pool, cache, x, *(as_ids(side, named) for side in ids))
        settle(seen, cache)
        case = Case(case.layout, case.host, case.expected("load", *ids)["device"])
        want = plus(case, 1).device
        rights.append(
            all(
                np.array_equal(array, buffer)
                for arrays, buffers in zip(seen, want, strict=True)
                for array, buffer in zip(arrays, buffers, strict=True)
            )
        )
        case.assert_holds(pool, cache)
    check_rounds(rights[1:], "unordered" if control else named)


@pytest.mark.parametrize("control", [False, True], ids=["wait", "no wait"])
def test_array_of_a_swap_is_complete_after_its_wait(named, control):
    blocks = {"shape": (256, 8, 128), "src_blocks": 64, "dst_blocks": 48}  # 30 MiB are copied
    case = SwapCase("pinned_host", "device", "int8", **blocks)

    @partial(jax.jit, donate_argnums=1)
    def step(src, dst, *ids):
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        # Computed from the current contents, not at the end of the program.
        seen = [swapping.wait(array) + np.int8(1) for array in range(3)]
        return seen, swapping.wait()

    src, dst = case.arrays()
    rights = []
    for seed in range(ROUNDS):
        rng = np.random.default_rng(seed)
        ids = [rng.permutation(count)[:40] for count in (64, 48)]
        with waits_for_nothing() if control else mock.MagicMock():
            seen, dst = step(src, dst, *ids_for(named, ids))
        settle(seen, dst)
        case.dst = swapped(case.src, case.dst, *ids)
        want = [array + np.int8(1) for array in case.dst.values()]
        rights.append(all(map(np.array_equal, seen, want)))
        case.check((src, dst), ([], []))
    check_rounds(rights[1:], "unordered" if control else named)


def test_swap_into_host_memory_waits_for_a_slow_producer(named):
    case = SwapCase("device", "pinned_host", "int8")
    x = slow_input()

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(src, dst, x, *ids):
        late_one = (slow_zero(x) + 1).astype("int8")
        src = jax.tree.map(lambda array: array + late_one, src)
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        return swapping.src, swapping.wait()

    src, dst = case.arrays()
    for _ in range(ROUNDS):
        src, dst = step(src, dst, x, *ids_for(named))
        settle(src, dst)
        case.src = {name: array + np.int8(1) for name, array in case.src.items()}
        case.dst = swapped(case.src, case.dst, *SWAP_IDS)
        case.check((src, dst), ([], []))


@pytest.mark.parametrize("one_program", [True, False], ids=["one jit", "two jits"])
def test_start_waits_for_a_slow_producer(one_program, named):
    case = make_case("page_first_direct", dtype="int8")
    numpy_ids = distinct_ids(case, 5)
    ids = [as_ids(side, named) for side in numpy_ids]
    x = slow_input()

    def produce(cache, x):
        late_one = (slow_zero(x) + 1).astype("int8")
        return jax.tree.map(lambda buffer: buffer + late_one, cache)

    def store(pool, cache, host_pages, device_pages):
        storing = jaxkv.start_store(pool, cache, host_pages, device_pages, implementation=named)
        return storing.pool, storing.cache

    both = jax.jit(
        lambda pool, cache, x, *ids: store(pool, produce(cache, x), *ids), donate_argnums=(0, 1)
    )
    first, second = jax.jit(produce, donate_argnums=0), jax.jit(store, donate_argnums=(0, 1))
    pool, cache = case.pool(), case.cache()
    for _ in range(ROUNDS):
        if one_program:
            pool, cache = both(pool, cache, x, *ids)
        else:
            pool, cache = second(pool, first(cache, x), *ids)
        settle(pool, cache)
        case = plus(case, 1)
        assert is_right(case, pool, cache, **case.expected("store", *numpy_ids))


def test_store_behind_a_slow_producer_leaves_later_host_arrays_intact(named):
    """XLA frees host memory of a program once it is enqueued: its ticket must not be written later.

    The arrays have the size of the ticket, and are allocated from the same memory of XLA.
    """
    case = make_case("page_first_direct", dtype="int8")
    ids = [as_ids(side, named) for side in distinct_ids(case, 5)]
    x = slow_input()
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(pool, cache, x, *ids):
        late_one = (slow_zero(x) + 1).astype("int8")
        cache = jax.tree.map(lambda buffer: buffer + late_one, cache)
        storing = jaxkv.start_store(pool, cache, *ids, implementation=named)
        return storing.pool, storing.cache

    pool, cache = case.pool(), case.cache()
    for _ in range(ROUNDS):
        pool, cache = step(pool, cache, x, *ids)
        later = [jax.device_put(np.full(4, 7, np.int32), pinned) for _ in range(64)]
        settle(pool, cache)
        assert all((np.asarray(array) == 7).all() for array in later)


def test_later_program_is_ordered_after_the_copy(named):
    """Memory of a load without a wait in its program: the next one may write it immediately."""
    case = make_case("page_first_direct", dtype="int8", **LARGE)
    numpy_ids = distinct_ids(case, 40)
    ids = [as_ids(side, named) for side in numpy_ids]

    @partial(jax.jit, donate_argnames="cache")
    def forgetful(pool, cache, *ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
        arrays = loading.wait(0)
        # Lets XLA reuse the memory of layers without a wait.
        scratch = [jax.numpy.full(arrays[0].shape, n, "int8") for n in range(8)]
        return arrays, jax.lax.optimization_barrier(scratch)

    for _ in range(3):
        arrays, scratch = forgetful(case.pool(), case.cache(), *ids)
        settle(arrays, scratch)
        for n, array in enumerate(scratch):
            assert (np.asarray(array) == n).all()
        for array, want in zip(arrays, case.expected("load", *numpy_ids)["device"][0], strict=True):
            np.testing.assert_array_equal(array, want)


@pytest.mark.parametrize("control", [False, True], ids=["analysed", "not analysed"])
def test_memory_is_not_reused_during_a_copy_across_programs(named, control):
    """A slow load with waits for two layers, beyond an inner jit; and 28 new arrays."""
    spec, num_pages = SLOW, SLOW_PAGES
    pool = jaxkv.HostPool.create(spec, num_pages=num_pages)
    ids = [as_ids(np.arange(num_pages), named) for _ in range(2)]
    shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)

    @partial(jax.jit, donate_argnames="cache")
    def step(pool, cache, *ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
        loading = jax.jit(lambda loading: (loading.wait(0), loading)[1])(loading)
        seen = loading.wait(1)[0].reshape(-1)[0]
        return seen, [jax.numpy.full(shape, n + 1, "int8") for n in range(28)]

    wrong = []
    with beside_whatever_follows() if control else mock.MagicMock():
        for _ in range(ROUNDS):
            seen, arrays = step(pool, jaxkv.DeviceCache.create(spec, num_pages=num_pages), *ids)
            settle(seen, arrays)
            wrong.append(sum(bool((array != n + 1).any()) for n, array in enumerate(arrays)))
            del arrays
    jaxkv.check_errors()
    assert (max(wrong) > 0) == control, wrong


@pytest.mark.parametrize("control", [False, True], ids=["analysed", "not analysed"])
def test_memory_of_a_donated_handle_is_not_reused(named, control):
    """Two programs: the second takes a slow load, waits for one layer and drops the others."""
    spec, num_pages = SLOW, SLOW_PAGES
    pool = jaxkv.HostPool.create(spec, num_pages=num_pages)
    ids = [as_ids(np.arange(num_pages), named) for _ in range(2)]
    shape = (num_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    begin = jax.jit(partial(jaxkv.start_load, implementation=named), donate_argnums=1)

    @partial(jax.jit, donate_argnums=0)
    def step(loading):
        loading = jax.lax.optimization_barrier(loading)
        seen = loading.wait(0)[0].reshape(-1)[0]
        return seen, [jax.numpy.full(shape, n + 1, "int8") for n in range(28)]

    wrong = []
    with beside_whatever_follows() if control else mock.MagicMock():
        for _ in range(ROUNDS):
            cache = jaxkv.DeviceCache.create(spec, num_pages=num_pages)
            seen, arrays = step(begin(pool, cache, *ids))
            settle(seen, arrays)
            wrong.append(sum(bool((array != n + 1).any()) for n, array in enumerate(arrays)))
            del arrays
    jaxkv.check_errors()
    assert (max(wrong) > 0) == control, wrong


def test_replayed_waits_follow_their_copies(named):
    """The waits are captured, the starts are not; new ids and contents each time."""
    case = make_case("page_first_direct", dtype="int8", host_pages=12, device_pages=12)
    layers = range(case.spec.num_layers)

    @partial(jax.jit, donate_argnames=("pool", "cache"))
    def step(pool, cache, load_ids, store_ids):
        storing = jaxkv.start_store(pool, cache, *store_ids, implementation=named)
        halves = [tuple(a + np.int8(1) for a in storing.wait(layer)) for layer in layers]
        cache = jaxkv.DeviceCache(tuple(halves), cache.spec)
        pool = storing.pool
        loading = jaxkv.start_load(pool, cache, *load_ids, implementation=named)
        for layer in layers:
            loading.wait(layer)
        return pool, loading.cache

    pool, cache = case.pool(), case.cache()
    for seed in range(ROUNDS + 5):
        load_ids, store_ids = distinct_ids(case, 5, seed), distinct_ids(case, 5, 1000 + seed)
        given = [[as_ids(side, named) for side in ids] for ids in (load_ids, store_ids)]
        pool, cache = step(pool, cache, *given)
        stored = case.expected("store", *store_ids)["host"]
        case = plus(Case(case.layout, stored, case.device), 1)
        case = Case(case.layout, case.host, case.expected("load", *load_ids)["device"])
        case.assert_holds(pool, cache)
    jaxkv.check_errors()


def test_wait_timeout_raises(named):
    case = make_case("page_first_direct", dtype="int8", **LARGE)
    ids = [as_ids(side, named) for side in distinct_ids(case, 40)]

    @partial(jax.jit, donate_argnames="cache")
    def step(pool, cache, x, *ids):
        late_zero = slow_zero(x).astype("int8")  # all waits are enqueued before the first copy runs
        cache = jax.tree.map(lambda buffer: buffer + late_zero, cache)
        for _ in range(4):
            loading = jaxkv.start_load(pool, cache, *ids, implementation=named, timeout_s=1e-6)
            cache = loading.cache
        return cache

    cache = step(case.pool(), case.cache(), slow_input(), *ids)
    settle(cache)
    assert_rejected(jaxkv.check_errors, jaxkv.TransferError, "wait for layer")
    jaxkv.check_errors()


@pytest.mark.parametrize("dst_memory", ["device", "pinned_host"])
def test_wait_timeout_of_a_swap_names_the_operation(dst_memory, named):
    blocks = {"shape": (128, 64, 128), "src_blocks": 64, "dst_blocks": 48}  # 48 MiB: 24 us in HBM
    case = SwapCase("device", dst_memory, "int8", **blocks)
    ids = [np.arange(48), np.arange(48)]

    @partial(jax.jit, donate_argnums=1)
    def step(src, dst, x, *ids):
        late_zero = slow_zero(x).astype("int8")  # all waits are enqueued before the first copy runs
        src = jax.tree.map(lambda array: array + late_zero, src)
        for _ in range(4):  # not more: see host_memory_paths
            swapping = jaxkv.start_swap(src, dst, *ids, implementation=named, timeout_s=1e-6)
            dst = swapping.wait()
        return dst

    settle(step(*case.arrays(), slow_input(), *ids_for(named, ids)))
    assert_rejected(jaxkv.check_errors, jaxkv.TransferError, "start_swap: wait for array")
    jaxkv.check_errors()


def test_rejected_ids_do_not_block_a_wait(named):
    case = make_case()
    host_pages, device_pages = np.array([1, 99], np.int32), np.array([2, 3], np.int32)
    step = jax.jit(
        lambda pool, cache, *ids: jaxkv.start_load(pool, cache, *ids, implementation=named).cache,
        donate_argnums=1,
    )
    pool = case.pool()
    cache = step(pool, case.cache(), *(as_ids(side, named) for side in (host_pages, device_pages)))
    settle(cache)
    assert_rejected(jaxkv.check_errors, jaxkv.PageIndexError, "99")
    case.assert_holds(pool, cache, **case.expected("load", host_pages[:1], device_pages[:1]))


@pytest.mark.parametrize("direction", ["load", "store"])
def test_dropped_handle_keeps_buffers_until_the_copy_ends(direction, named):
    case = make_case("page_first_direct", dtype="int8", **LARGE)
    ids = [as_ids(side, named) for side in distinct_ids(case, 40)]
    native = runtime_native.extension()
    for _ in range(ROUNDS):
        pool, cache = case.pool(), case.cache()
        started: jaxkv.LoadHandle | jaxkv.StoreHandle
        if direction == "load":
            started = jaxkv.start_load(pool, cache, *ids, implementation=named)
            started.wait(0)
        else:
            started = jaxkv.start_store(pool, cache, *ids, implementation=named)
        del pool, cache
        jax.block_until_ready(started._ticket)
        addresses = set(pointers(started._cache.layers[1:]))
        counts = native.started_copies()
        del started
        gc.collect()
        transfer_in_flight.keep_alive(None)
        arrays = [array for entry in transfer_in_flight._in_flight for array in entry.arrays]
        alive = set(pointers([array for array in arrays if not array.is_deleted()]))
        assert addresses <= alive or native.copies_ended(counts)
        native.synchronize_device(0)
        assert native.copies_ended(counts)
