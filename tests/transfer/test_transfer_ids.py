"""Checks of long id lists: rejected and copied entries, for all kernels.

A copy checks its ids itself or takes pairs that were checked before. On platform cpu one wrong
entry fails the call; a GPU skips and counts it.
"""

import contextlib
from collections import Counter
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.runtime import native
from jaxkv._src.transfer import block_copy, dispatch
from tests.util.block_trees import place, random_tree, swapped
from tests.util.layout_reference import assert_same_bytes
from tests.util.transfer_cases import as_ids, assert_not_copied, assert_rejected, make_case

ID_CHECKS = {"checks ids": False, "takes pairs": True}


def refused_entries(src_ids, dst_ids, num_src: int, num_dst: int) -> set[int]:
    """The reference: non-padding entries that are out of range or have a duplicate destination."""
    used = [i for i, pair in enumerate(zip(src_ids, dst_ids, strict=True)) if min(pair) >= 0]
    outside = {i for i in used if src_ids[i] >= num_src or dst_ids[i] >= num_dst}
    named = Counter(int(dst_ids[i]) for i in used if i not in outside)
    return outside | {i for i in used if named[int(dst_ids[i])] > 1}


def check_ids(
    src_ids, dst_ids, *, num_src: int, num_dst: int, blocks, memory="pinned_host", on_host=()
) -> None:
    """Swaps inside jit, so that the host checks nothing; compares bytes and rejected entries."""
    src, dst = random_tree(num_src, blocks), random_tree(num_dst, blocks, seed=1)
    ids = [
        jaxkv.HostIds(side) if i in on_host else as_ids(side, None)
        for i, side in enumerate((src_ids, dst_ids))
    ]
    args = place(src, memory), place(dst, "device"), *ids
    bad = refused_entries(src_ids, dst_ids, num_src, num_dst)
    step = jax.jit(lambda *args: jaxkv.swap_blocks(*args), donate_argnums=1)
    if bad and jax.default_backend() == "cpu":
        words = "PageIndexError", f"entries rejected: {len(bad)}"
        assert_rejected(
            lambda: jax.block_until_ready(step(*args)), jax.errors.JaxRuntimeError, *words
        )
        return
    out = jax.block_until_ready(step(*args))
    if bad:
        assert_not_copied(len(bad))
    jaxkv.check_errors()
    good = [
        np.where(np.isin(np.arange(len(side)), [*bad]), -1, side) for side in (src_ids, dst_ids)
    ]
    want = swapped(src, dst, *good)
    for name in want:
        assert_same_bytes(out[name], want[name], name)


@st.composite
def id_lists(draw) -> dict:
    """Long lists, most of them with padding, out-of-range ids and duplicates at random."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 700))
    num_src, num_dst = draw(st.integers(1, 800)), n + draw(st.integers(0, 99))
    src_ids = rng.integers(num_src, size=n).astype(np.int32)
    dst_ids = rng.permutation(num_dst)[:n].astype(np.int32)

    def some(most: float) -> np.ndarray:
        return rng.random(n) < draw(st.sampled_from([0, 0, most / 20, most]))

    dst_ids = np.where(some(0.2), rng.choice(dst_ids, n), dst_ids)
    src_ids[some(0.1)] = num_src
    dst_ids[some(0.1)] = 2**31 - 1
    src_ids[some(0.9)] = -1
    dst_ids[some(0.5)] = -(2**31)
    return {"src_ids": src_ids, "dst_ids": dst_ids, "num_src": num_src, "num_dst": num_dst}


@pytest.mark.parametrize("id_check", ID_CHECKS)
@given(id_lists(), st.integers(1, 40), st.sampled_from(["pinned_host", "device"]))
@settings(max_examples=25, deadline=None)
def test_random_ids(id_check, ids, block_bytes, memory):
    with mock.patch("jaxkv._src.transfer.api.needs_plan", return_value=ID_CHECKS[id_check]):
        check_ids(**ids, blocks={"x": ((block_bytes,), "int8")}, memory=memory)


@pytest.mark.sanitizer
@pytest.mark.parametrize("id_check", ID_CHECKS)
@pytest.mark.parametrize(
    "wrong", [{}, {0: -1}, {7: -1, 2999: 3}, {2999: 4000}, {1: 2, 1500: 2998}], ids=str
)
def test_few_invalid_ids_among_thousands(id_check, wrong):
    """Wrong entries in the shares of different thread blocks, with work for each of them."""
    n = 3000
    dst_ids = np.random.default_rng(0).permutation(n).astype(np.int32)
    for i, what in wrong.items():
        dst_ids[i] = dst_ids[what] if 0 <= what < n else what
    with mock.patch("jaxkv._src.transfer.api.needs_plan", return_value=ID_CHECKS[id_check]):
        blocks = {"x": ((64,), "int32")}
        check_ids(np.arange(n), dst_ids, num_src=n, num_dst=n, blocks=blocks)


@pytest.mark.parametrize("unknown", ["source", "destination"])
def test_padding_in_device_ids(unknown):
    """The host knows 999 to be out of range, but not that the other list has padding there."""
    src, dst = random_tree(9), random_tree(12, seed=1)
    known, other = np.array([0, 999, 3], np.int32), np.array([4, -1, 5], np.int32)
    rebuilt = jax.tree.map(lambda words: words, jaxkv.HostIds(other))
    assert rebuilt.ids is None
    args, ids = (
        ([rebuilt, known], [other, known])
        if unknown == "source"
        else ([known, rebuilt], [known, other])
    )
    out = jaxkv.swap_blocks(place(src, "pinned_host"), place(dst, "device"), *args)
    jaxkv.check_errors(out)
    want = swapped(src, dst, *ids)
    for name in want:
        assert_same_bytes(out[name], want[name], name)


@pytest.mark.parametrize("past_the_limit", [0, 1])
@pytest.mark.parametrize("on_host", [False, True], ids=["device ids", "HostIds"])
def test_ids_above_the_inline_limit_use_a_plan(past_the_limit, on_host):
    most = block_copy._INLINE_HOST_IDS if on_host else native.extension().INLINE_IDS
    n = most + past_the_limit
    src, dst = ({"x": np.arange(n, dtype=np.int16) * sign} for sign in (1, -1))
    ids = np.arange(n), np.roll(np.arange(n), 5)
    placed = place(src, "device"), place(dst, "device")
    args = [jaxkv.HostIds(side) if on_host else as_ids(side, None) for side in ids]
    step = jax.jit(jaxkv.swap_blocks)
    targets = step.lower(*placed, *args).as_text()
    assert ("jaxkv_plan_pairs" in targets) == ("jaxkv_copy_pairs" in targets) == past_the_limit
    out = step(*placed, *args)
    jaxkv.check_errors(out)
    assert_same_bytes(out["x"], swapped(src, dst, *ids)["x"], "x")


@pytest.mark.parametrize("on_host", [(0, 1), (0,), (1,)], ids=["both", "source", "destination"])
@pytest.mark.parametrize("wrong", [False, True])
def test_plan_of_many_host_ids(on_host, wrong):
    """So many that the plan moves them to its scratch memory."""
    n = block_copy._UNSTAGED_HOST_IDS + 1
    rng = np.random.default_rng(0)
    ids = [rng.permutation(n).astype(np.int32) for _ in range(2)]
    ids[0][rng.random(n) < 0.1] = -1
    if wrong:
        ids[0][[0, 7, n - 1]], ids[1][n - 1] = [1, n, 2], ids[1][0]
    check_ids(*ids, num_src=n, num_dst=n, blocks={"x": ((16,), "int8")}, on_host=on_host)


@pytest.mark.parametrize("past_the_limit", [0, 1])
def test_scratch_memory_of_a_plan(past_the_limit):
    n = block_copy._UNSTAGED_HOST_IDS + past_the_limit
    array, ids = place({"x": np.zeros(n, np.int16)}, "device"), jaxkv.HostIds(np.arange(n))
    text = jax.jit(jaxkv.swap_blocks).lower(array, array, ids, ids).as_text()
    plan = next(line for line in text.splitlines() if "jaxkv_plan_pairs" in line)
    assert (f"tensor<{2 * n}xi32>" in plan) == past_the_limit


@pytest.mark.parametrize("memory", ["pinned_host", "device"])
def test_more_pairs_than_one_launch(memory):
    """The kernel on one SM takes several launches, the last of them without work."""
    n = 40_000
    rng = np.random.default_rng(0)
    ids = [rng.permutation(n).astype(np.int32) for _ in range(2)]
    ids[0][rng.random(n) < 0.3] = -1
    on_gpu = jax.default_backend() == "gpu"
    with dispatch.force_implementation("kernel", 1) if on_gpu else contextlib.nullcontext():
        check_ids(*ids, num_src=n, num_dst=n, blocks={"x": ((16,), "int8")}, memory=memory)


@pytest.mark.parametrize("geometries", [1, 2])
def test_entry_rejected_for_many_arrays_is_counted_once(geometries):
    """So many arrays that the kernel is launched twice; two geometries are two copies of a call."""
    blocks = {str(i): ((3 + i % geometries,), "int8") for i in range(300)}
    ids = {"src_ids": [0, 1, 2, 3], "dst_ids": [4, 5, 4, 1]}
    check_ids(**ids, num_src=5, num_dst=6, blocks=blocks)


@pytest.mark.parametrize("operation", ["load_pages", "store_pages", "start_load", "start_store"])
def test_device_ids_outside_jit_are_no_host_sync(operation):
    """A GPU does not read them; the CPU backend, which does, must not forbid the call."""
    case = make_case()
    args = case.pool(), case.cache(), jax.numpy.array([0, 1]), jax.numpy.array([1, 2])
    with jaxkv.forbid_host_sync():
        out = getattr(jaxkv, operation)(*args)
    jax.block_until_ready(out)
