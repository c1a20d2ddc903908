"""`jaxkv.start_swap`: every byte after its wait, and the lifetime of its arrays."""

import gc
import time
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.runtime import native
from jaxkv._src.transfer import in_flight
from tests.util.async_cases import OVERLAPPED, STARTED
from tests.util.block_trees import place, random_tree, swapped
from tests.util.lowered_copies import Module
from tests.util.swap_cases import (
    IDS,
    MEMORIES,
    NAMES,
    SwapCase,
    assert_trees_equal,
    ids_for,
)
from tests.util.transfer_cases import assert_rejected, copied_shapes, mesh_of, pointers

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers")


@pytest.fixture(params=[None, *STARTED], ids=lambda name: name or "default")
def started_by(request) -> str | None:
    return request.param


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


@pytest.fixture(params=[(a, b) for a in MEMORIES for b in MEMORIES], ids=" to ".join)
def case(request) -> SwapCase:
    return SwapCase(*request.param)


@pytest.mark.parametrize("wait_each", [False, True], ids=["wait for all", "wait for each"])
def test_waits_in_one_program(case, wait_each, started_by):
    src, dst = case.arrays()
    before = pointers(dst)

    @partial(jax.jit, donate_argnums=case.donated)
    def step(src, dst, *ids):
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=started_by)
        if wait_each:
            for array in (1, 0, 2):
                swapping.wait(array, after=ids[0] if started_by != "dma" else None)
        return case.finish(swapping)

    out = step(src, dst, *ids_for(started_by))
    case.check(out)
    assert pointers(out[1]) == before
    if not case.to_host:
        assert_trees_equal(src, case.src)


@pytest.mark.parametrize("wait_each", [False, True], ids=["wait for all", "wait for each"])
@pytest.mark.parametrize("memories", [(a, b) for a in MEMORIES for b in MEMORIES], ids=" to ".join)
def test_blocks_of_several_sizes(memories, wait_each, named):
    trees = random_tree(9), random_tree(12, seed=1)
    src, dst = (place(tree, kind) for tree, kind in zip(trees, memories, strict=True))

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(src, dst, *ids):
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        if wait_each:
            for array in reversed(range(len(dst))):
                swapping.wait(array)
        return (swapping.src if memories[1] == "pinned_host" else None), swapping.wait()

    src, got = step(src, dst, *ids_for(named))
    jaxkv.check_errors(got)
    assert_trees_equal(got, swapped(*trees, *IDS))
    if src is not None:
        assert_trees_equal(src, trees[0])


def test_array_of_a_wait(case, named):
    @partial(jax.jit, donate_argnums=case.donated)
    def step(src, dst, *ids):
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        first = swapping.wait(1)
        return {"b": first, "a": swapping.wait(0), "c": swapping.wait(2)}

    got = step(*case.arrays(), *ids_for(named))
    jaxkv.check_errors(got)
    assert_trees_equal(got, swapped(case.src, case.dst, *IDS))


def test_program_is_asynchronous_and_copies_no_array(case, named):
    @partial(jax.jit, donate_argnums=case.donated)
    def step(src, dst, *ids):
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        for array in range(3):
            swapping.wait(array)
        return case.finish(swapping)

    args = *case.arrays(), *ids_for(named)
    module = Module(step.lower(*args))
    assert module.joined == [False] and not module.violations(0)
    shapes = {leaf.shape for leaf in jax.tree.leaves(args[:2])}
    assert not shapes & copied_shapes(step, *args)


def test_wait_in_another_program(case, started_by):
    @partial(jax.jit, donate_argnums=0)
    def wait_for_one(swapping):
        swapping.wait(1)
        return swapping

    src, dst = case.arrays()
    swapping = wait_for_one(case.begin(started_by)(src, dst, *ids_for(started_by)))
    out = jax.jit(case.finish, donate_argnums=0)(swapping)
    case.check(out)


def test_start_outside_jit_preserves_arguments(case, started_by):
    src, dst = case.arrays()
    swapping = jaxkv.start_swap(src, dst, *ids_for(started_by), implementation=started_by)
    swapping.wait(2)
    case.check(case.finish(swapping))
    assert_trees_equal(src, case.src)
    assert_trees_equal(dst, case.dst)


def test_start_without_jit(case, named):
    with jax.disable_jit():
        swapping = jaxkv.start_swap(*case.arrays(), *ids_for(named), implementation=named)
        out = case.finish(swapping)
    case.check(out)


def test_several_copies_in_flight(case, named):
    """Into separate destinations; to the device from one source."""
    sides = [IDS, ([1, 2], [3, 4]), ([8, 0], [0, 8])]

    @partial(jax.jit, donate_argnums=case.donated)
    def step(sources, destinations, ids):
        started = [
            jaxkv.start_swap(src, dst, *side, implementation=named)
            for src, dst, side in zip(sources, destinations, ids, strict=True)
        ]
        for array in range(3):
            for swapping in started:
                swapping.wait(array)
        return [case.finish(swapping) for swapping in started]

    pairs = [case.arrays() for _ in sides]
    sources, destinations = ([pair[side] for pair in pairs] for side in (0, 1))
    if not case.to_host:
        sources = [sources[0]] * 3
    ids = [ids_for(named, side) for side in sides]
    assert Module(step.lower(sources, destinations, ids)).joined == [False] * 3
    for out, side in zip(step(sources, destinations, ids), sides, strict=True):
        case.check(out, side)


def test_swap_there_and_back_is_ordered_by_data(named):
    case = SwapCase("device", "pinned_host")
    ids = [0, 1, 2], [9, 10, 11], [6, 7, 8]

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(on_device, on_host, *ids):
        storing = jaxkv.start_swap(on_device, on_host, *ids[:2], implementation=named)
        on_host, on_device = storing.wait(), storing.src
        loading = jaxkv.start_swap(on_host, on_device, *ids[1:], implementation=named)
        return loading.wait(), on_host

    got, on_host = step(*case.arrays(), *ids_for(named, ids))
    jaxkv.check_errors(got)
    stored = swapped(case.src, case.dst, *ids[:2])
    assert_trees_equal(on_host, stored)
    assert_trees_equal(got, swapped(stored, case.src, *ids[1:]))


@pytest.mark.parametrize("dst_memory", MEMORIES)
def test_arrays_may_be_overwritten_after_their_wait(dst_memory, named):
    """A destination on the device after `wait`, a source after `.src`: in place."""
    case = SwapCase("device", dst_memory, "int8")

    @partial(jax.jit, donate_argnums=case.donated)
    def step(src, dst, *ids):
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        if case.to_host:
            dst = swapping.wait()
            return {name: array.at[0].set(1) for name, array in swapping.src.items()}, dst
        return None, {name: swapping.wait(i).at[1].set(1) for i, name in enumerate(NAMES)}

    args = *case.arrays(), *ids_for(named)
    shapes = {leaf.shape for leaf in jax.tree.leaves(args[:2])}
    assert not shapes & copied_shapes(step, *args)
    src, dst = step(*args)
    jaxkv.check_errors(dst)
    want = swapped(case.src, case.dst, *IDS)
    if case.to_host:
        for name, array in src.items():
            np.testing.assert_array_equal(array[1:], case.src[name][1:])
    else:
        for array in want.values():
            array[1] = 1
    assert_trees_equal(dst, want)


def test_partial_wait_completes_the_copy_at_its_start(case, named):
    @partial(jax.jit, donate_argnums=(0, 1))
    def step(src, dst, *ids):
        return jaxkv.start_swap(src, dst, *ids, implementation=named).wait(0)

    args = *case.arrays(), *ids_for(named)
    module = Module(step.lower(*args))
    assert module.joined == [True] and not module.violations(0)
    first = step(*args)
    jaxkv.check_errors(first)
    assert_trees_equal({"a": first}, {"a": swapped(case.src, case.dst, *IDS)["a"]})


def test_overwritten_source_on_the_device_completes_the_copy_at_its_start(named):
    """The handle does not own it, and it has no wait in the program."""
    case = SwapCase("device", "device")

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(src, dst, *ids):
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        return swapping, jax.tree.map(lambda array: array.at[:].set(0), src)

    args = *case.arrays(), *ids_for(named)
    module = Module(step.lower(*args))
    assert module.joined == [True] and not module.violations(0)
    swapping, _ = step(*args)
    case.check((None, swapping.wait()))


def test_handle_without_donation_raises(named):
    """With the operation in the error."""
    case = SwapCase("pinned_host", "device")
    swapping = case.begin(named)(*case.arrays(), *ids_for(named))
    dst = jax.jit(lambda swapping: swapping.wait())(swapping)
    assert_rejected(
        lambda: jaxkv.check_errors(dst), jaxkv.TransferError, "start_swap: ", "donate the handle"
    )


@pytest.mark.parametrize("bad, words", [((0, 99), "dst_ids"), ((99, 0), "src_ids")])
def test_invalid_ids_name_the_operation(bad, words, case):
    args = *case.arrays(), [bad[0]], [bad[1]]
    assert_rejected(
        lambda: jaxkv.start_swap(*args), jaxkv.PageIndexError, "start_swap: ", words, "99"
    )


def wait_until_done(swapping) -> None:
    deadline = time.monotonic() + 60
    while not swapping.done():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def test_done(case, named):
    swapping = case.begin(named)(*case.arrays(), *ids_for(named))
    wait_until_done(swapping)
    swapping.wait(1)
    wait_until_done(swapping)
    out = jax.jit(case.finish, donate_argnums=0)(swapping)
    assert_rejected(swapping.done, RuntimeError, "done", "donated")
    case.check(out)


def is_kept_alive(addresses: set) -> bool:
    arrays = [array for entry in in_flight._in_flight for array in entry.arrays]
    return addresses <= set(pointers([one for one in arrays if not one.is_deleted()]))


@pytest.mark.parametrize("eager", [False, True], ids=["jit", "eager"])
def test_dropped_handle_keeps_memory_until_the_copy_ends(case, eager, named):
    src, dst = case.arrays()
    start = partial(jaxkv.start_swap, implementation=named) if eager else case.begin(named)
    swapping = start(src, dst, *ids_for(named))
    held = [swapping._plan, swapping._dst["b"]]
    if case.to_host or eager:
        held.append(swapping._src["b"])
    swapping.wait(0)
    addresses = set(pointers(held))
    del swapping, held, src, dst
    gc.collect()
    assert is_kept_alive(addresses)
    if jax.default_backend() == "gpu":
        native.extension().synchronize_device(0)
    for entry in list(in_flight._in_flight):
        jax.block_until_ready([array for array in entry.arrays if not array.is_deleted()])
    in_flight.keep_alive(None)
    assert not is_kept_alive(addresses)


def test_handle_of_another_trace_is_rejected(case, named):
    @jax.jit
    def step(src, dst, *ids):
        swapping = jaxkv.start_swap(src, dst, *ids, implementation=named)
        jax.jit(lambda x: (x, swapping.wait(0)))(1.0)
        return swapping.wait()

    call = partial(step, *case.arrays(), *ids_for(named))
    assert_rejected(call, RuntimeError, "another trace", "argument")


@pytest.mark.parametrize("ids", [([], []), ([-1, -1], [3, -1])], ids=["empty", "padding"])
def test_empty_copy(case, ids, named):
    swapping = jaxkv.start_swap(*case.arrays(), *ids_for(named, ids), implementation=named)
    case.check(case.finish(swapping), ids)


@pytest.mark.parametrize("dst_memory", MEMORIES)
def test_arrays_without_bytes_are_returned(dst_memory):
    blocks = {"a": ((0, 3), "float32"), "b": ((4,), "float32"), "c": ((4,), "float32")}
    src, dst = random_tree(9, blocks), random_tree(12, blocks, seed=1)
    swapping = jaxkv.start_swap(place(src, "device"), place(dst, dst_memory), *IDS)
    assert swapping.wait(0).shape == (12, 0, 3)
    assert swapping._segments == (1, 2)
    assert_trees_equal(swapping.wait(), swapped(src, dst, *IDS))


@given(
    st.sampled_from(MEMORIES),
    st.sampled_from(MEMORIES),
    st.sampled_from(STARTED),
    st.permutations(range(12)),
    st.lists(st.integers(-1, 8), max_size=12),
    st.permutations(range(3)),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_random_ids_and_waits(src_memory, dst_memory, started_by, dst_ids, src_ids, order, waits):
    case = SwapCase(src_memory, dst_memory)
    ids = src_ids, dst_ids[: len(src_ids)]
    options = {"implementation": started_by}
    swapping = jaxkv.start_swap(*case.arrays(), *ids_for(started_by, ids), **options)
    for array in order[:waits]:
        swapping.wait(array)
    case.check(case.finish(swapping), ids)


def test_groups_have_a_handle_each():
    cases = {"x": SwapCase("pinned_host", "device"), "y": SwapCase("device", "pinned_host")}
    pairs = {name: case.arrays() for name, case in cases.items()}
    src, dst = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
    ids = [dict.fromkeys(cases, side) for side in IDS]
    swapping = jaxkv.start_swap(src, dst, *ids)
    assert swapping.keys() == cases.keys()
    for name, case in cases.items():
        case.check(case.finish(swapping[name]))


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_each_device_copies_its_shard(axis_type, named):
    mesh = mesh_of(2, axis_type)
    src, dst = np.arange(2 * 9 * 8).reshape(9, 16), np.zeros((12, 16), int)
    src, dst = src.astype(np.float32), dst.astype(np.float32)
    sharding = jax.NamedSharding(mesh, jax.P(None, "tp"))
    placed = jax.device_put(src, sharding.with_memory_kind("pinned_host"))
    replicated = jax.NamedSharding(mesh, jax.P())
    numpy_ids = [np.array(side, np.int32) for side in IDS]
    make = partial(jaxkv.HostIds, sharding=replicated) if named == "dma" else np.asarray

    @partial(jax.jit, donate_argnums=1)
    @jax.shard_map(
        mesh=mesh,
        in_specs=(jax.P(None, "tp"), jax.P(None, "tp"), jax.P(), jax.P()),
        out_specs=jax.P(None, "tp"),
    )
    def step(src, dst, *ids):
        return jaxkv.start_swap(src, dst, *ids, implementation=named).wait()

    got = step(placed, jax.device_put(dst, sharding), *map(make, numpy_ids))
    jaxkv.check_errors(got)
    assert_trees_equal({"": got}, swapped({"": src}, {"": dst}, *IDS))
