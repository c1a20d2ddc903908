"""Arguments that `jaxkv.start_swap` and its handle reject."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import _ext
from tests.util.block_trees import place, random_tree
from tests.util.swap_cases import IDS, MEMORIES, SwapCase
from tests.util.transfer_cases import assert_rejected


@pytest.fixture(params=[(a, b) for a in MEMORIES for b in MEMORIES], ids=" to ".join)
def case(request) -> SwapCase:
    return SwapCase(*request.param)


def test_src_of_a_swap_to_the_device_is_rejected():
    swapping = SwapCase("pinned_host", "device").start()
    assert_rejected(lambda: swapping.src, RuntimeError, "src", "pinned host", "start_swap")


@pytest.mark.parametrize("array", [3, -1])
def test_wait_for_another_array_is_rejected(array, case):
    swapping = case.start()
    assert_rejected(lambda: swapping.wait(array), ValueError, "array", "[0, 3)", array)


@pytest.mark.parametrize("array", [1.0, "x", [0, 1], True], ids=repr)
def test_wait_for_no_integer_is_rejected(array):
    swapping = SwapCase("pinned_host", "device").start()
    words = "wait: array must be an integer", "or None for all", f"got {array!r}"
    assert_rejected(lambda: swapping.wait(array), TypeError, *words)


@pytest.mark.parametrize("side", ["src", "dst"])
def test_several_memory_kinds_are_rejected(side):
    trees = {"src": random_tree(9, {"a": ((4,), "int8"), "b": ((4,), "int8")})}
    trees["dst"] = trees["src"]
    placed = {name: place(tree, "pinned_host") for name, tree in trees.items()}
    placed[side]["a"] = jnp.asarray(trees[side]["a"])
    call = partial(jaxkv.start_swap, placed["src"], placed["dst"], [0], [1])
    assert_rejected(call, ValueError, f"start_swap: all arrays of {side}", "memory kind")


def test_mistyped_destination_is_rejected():
    pinned = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    dst = jax.jit(lambda: jnp.ones((8, 16)), out_shardings=pinned)()
    call = partial(jaxkv.start_swap, jnp.ones((4, 16)), dst, [1], [2])
    assert_rejected(call, ValueError, "start_swap: an array of dst", "pinned_host", "pinned_zeros")


@pytest.mark.parametrize("timeout_s", [0, float("nan"), None], ids=repr)
def test_invalid_timeout_is_rejected(timeout_s, case):
    call = partial(case.start, timeout_s=timeout_s)
    assert_rejected(call, ValueError, "timeout_s", "seconds", repr(timeout_s))


def test_pallas_is_rejected(case):
    call = partial(case.start, implementation="pallas")
    assert_rejected(call, NotImplementedError, "start_swap: ", "pallas")


@pytest.mark.cpu_only
def test_explain(case):
    text = jaxkv.explain(jaxkv.start_swap, *case.arrays(), *IDS)
    assert text.startswith("start_swap: host")
    assert "overlapped" in text


def shapes(*shape):
    return jax.ShapeDtypeStruct(shape, np.int32)


def test_copies_with_more_arrays_than_a_cuda_handler_takes():
    """Rejected on any platform, when they are traced."""
    most, most_buffers = _ext.MAX_SEGMENTS, _ext.MAX_SEGMENT_BUFFERS

    def swap(number):
        src, dst = ([shapes(2, 4)] * number for _ in range(2))
        run = jax.jit(lambda s, d, ids: jaxkv.start_swap(s, d, ids, ids).wait(), donate_argnums=1)
        run.trace(src, dst, shapes(1))

    swap(most)
    assert_rejected(lambda: swap(most + 1), ValueError, "start_swap", most + 1, f"limit {most}")

    def load(number):
        cache = [[jnp.zeros((2, 4), jnp.int32)] * number]
        pool = jaxkv.HostPool.create(jaxkv.ArrayCacheSpec.from_arrays(cache), num_pages=2)
        jax.jit(jaxkv.start_load).trace(pool, cache, shapes(1), shapes(1))

    load(most_buffers)
    wanted = "start_load", most_buffers + 1, f"limit {most_buffers}"
    assert_rejected(lambda: load(most_buffers + 1), ValueError, *wanted)
