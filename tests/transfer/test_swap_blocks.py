"""`jaxkv.swap_blocks` on plain `[num_blocks, ...]` arrays, in every direction."""

from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from tests.util.block_trees import place, random_tree, swapped
from tests.util.layout_reference import DTYPES, assert_same_bytes
from tests.util.transfer_cases import (
    as_ids,
    assert_not_copied,
    assert_rejected,
    copied_shapes,
    fails_at_once,
    mesh_of,
    pointers,
)

MEMORIES = ("device", "pinned_host")
IDS = [3, -1, 0, 8, 5], [11, 2, -1, 0, 4]


def assert_trees_equal(got, want) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert_same_bytes(got[name], want[name], name)


def check_swap(src, dst, ids, implementation=None, memories=("pinned_host", "device")) -> None:
    placed = [place(tree, memory) for tree, memory in zip((src, dst), memories, strict=True)]
    args = [as_ids(side, implementation) for side in ids]
    out = jaxkv.swap_blocks(*placed, *args, implementation=implementation)
    jaxkv.check_errors(out)
    assert_trees_equal(out, swapped(src, dst, *ids))
    assert {leaf.sharding.memory_kind for leaf in out.values()} == {memories[1]}
    for before, now in zip((src, dst), placed, strict=True):
        assert_trees_equal(now, before)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dst_memory", MEMORIES)
@pytest.mark.parametrize("src_memory", MEMORIES)
def test_every_direction(src_memory, dst_memory, implementation):
    src, dst = random_tree(9), random_tree(12, seed=1)
    check_swap(src, dst, IDS, implementation, (src_memory, dst_memory))


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "uint16", "int64", "complex64"], ids=str)
def test_every_dtype(dtype, implementation):
    with jax.enable_x64(True):
        blocks = {"x": ((5, 3), dtype)}
        src = random_tree(9, blocks)
        if dtype == "bool":  # any other byte is not a valid bool
            src = {"x": src["x"].view(np.uint8) % 2 == 1}
        dst = jax.tree.map(lambda array: np.zeros((12, *array.shape[1:]), array.dtype), src)
        check_swap(src, dst, IDS, implementation)


@pytest.mark.sanitizer
@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 8, 15, 16, 17, 48, 4095, 4096, 4097])
@pytest.mark.parametrize("memories", [MEMORIES, MEMORIES[::-1]], ids=["store", "load"])
def test_every_alignment(block_bytes, memories, implementation):
    """Blocks of any size, at any address: words of a copy must never exceed the block."""
    blocks = {"x": ((block_bytes,), "int8")}
    src, dst = random_tree(9, blocks), random_tree(12, blocks, seed=1)
    check_swap(src, dst, IDS, implementation, memories)


@pytest.mark.parametrize("ids", [([], []), ([-1, -1], [3, -1]), ([8], [11])], ids=str)
def test_empty_padding_and_single(ids, implementation):
    check_swap(random_tree(9), random_tree(12, seed=1), ids, implementation)


@st.composite
def swaps(draw):
    """Source and destination trees and ids with padding."""
    src_blocks, dst_blocks = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    shapes_and_dtypes = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=4)
    blocks = {str(i): block for i, block in enumerate(draw(shapes_and_dtypes))}
    dst_ids = draw(st.lists(st.integers(0, dst_blocks - 1), unique=True))
    dst_ids = [i if draw(st.integers(0, 4)) else -1 for i in dst_ids]
    src_ids = [draw(st.integers(-1, src_blocks - 1)) for _ in dst_ids]
    return random_tree(src_blocks, blocks), random_tree(dst_blocks, blocks, 1), (src_ids, dst_ids)


@given(swaps(), st.sampled_from(MEMORIES), st.sampled_from(MEMORIES))
@settings(max_examples=30, deadline=None)
def test_any_tree(implementation, args, src_memory, dst_memory):
    src, dst, ids = args
    check_swap(src, dst, ids, implementation, (src_memory, dst_memory))


@pytest.mark.parametrize("dst_memory", MEMORIES)
def test_without_compilation(dst_memory):
    src, dst = random_tree(9), random_tree(12, seed=1)
    with jax.disable_jit():
        check_swap(src, dst, IDS, memories=("device", dst_memory))


@pytest.mark.parametrize("dst_memory", MEMORIES)
def test_donation_writes_in_place(dst_memory, implementation):
    src, dst = random_tree(9), random_tree(12, seed=1)
    placed_src, placed_dst = place(src, "device"), place(dst, dst_memory)
    before = pointers(placed_dst)
    ids = [as_ids(side, implementation) for side in IDS]
    step = jax.jit(partial(jaxkv.swap_blocks, implementation=implementation), donate_argnames="dst")
    shapes = {array.shape for array in dst.values()}
    assert not shapes & copied_shapes(step, placed_src, placed_dst, *ids)
    out = step(placed_src, placed_dst, *ids)
    jaxkv.check_errors(out)
    assert pointers(out) == before
    assert all(leaf.is_deleted() for leaf in placed_dst.values())
    assert_trees_equal(out, swapped(src, dst, *IDS))
    assert_trees_equal(placed_src, src)


def test_chained_swaps_are_ordered(implementation):
    """Device to host and back within one program, and one array as source and destination."""
    tree, host = random_tree(9), random_tree(12, seed=1)
    ids = [as_ids(side, implementation) for side in ([0, 1, 2], [9, 10, 11], [5, 6, 7], [1, 2, 3])]

    @jax.jit
    def chain(tree, host, first, on_host, back, last):
        swap = partial(jaxkv.swap_blocks, implementation=implementation)
        host = swap(tree, host, first, on_host)
        tree = swap(host, tree, on_host, back)
        return swap(tree, tree, back, last), host

    got_tree, got_host = chain(place(tree, "device"), place(host, "pinned_host"), *ids)
    want_host = swapped(tree, host, [0, 1, 2], [9, 10, 11])
    want_tree = swapped(want_host, tree, [9, 10, 11], [5, 6, 7])
    assert_trees_equal(got_host, want_host)
    assert_trees_equal(got_tree, swapped(want_tree, want_tree, [5, 6, 7], [1, 2, 3]))


def with_leaf(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    return {**random_tree(12, seed=1), name: array}


@pytest.mark.parametrize(
    "dst, words",
    [
        ({"k": random_tree(12)["k"]}, ["structure"]),
        (with_leaf("k", np.zeros((12, 4, 2, 8), "bfloat16")), ["block", "[4, 2, 16]", "[4, 2, 8]"]),
        (with_leaf("scales", np.zeros((12, 3), "float16")), ["dtype", "float32", "float16"]),
        (with_leaf("bits", np.zeros((11,), "int8")), ["blocks", "12", "11"]),
    ],
    ids=["structure", "block shape", "dtype", "number of blocks"],
)
def test_mismatched_trees_are_rejected(dst, words):
    src, dst = place(random_tree(9), "device"), place(dst, "pinned_host")
    ids = [np.zeros(1, np.int32)] * 2
    assert_rejected(lambda: jaxkv.swap_blocks(src, dst, *ids), (TypeError, ValueError), *words)


@pytest.mark.parametrize(
    "dtype", ["int1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn"]
)
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
def test_sub_byte_dtypes_are_rejected(dtype, inside_jit):
    """NumPy stores one element per byte; XLA packs several into one."""
    src, dst = (np.zeros((n, 4), getattr(ml_dtypes, dtype)) for n in (6, 5))
    run = partial(jax.eval_shape, jaxkv.swap_blocks) if inside_jit else jaxkv.swap_blocks
    ids = np.array([5], np.int32), np.array([0], np.int32)
    assert_rejected(
        lambda: run(src, dst, *ids), ValueError, "leaf 0", dtype, "byte-aligned", "uint8"
    )


@pytest.mark.parametrize("form", [np.asarray, jaxkv.HostIds], ids=["NumPy", "HostIds"])
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    "src_shape, dst_shape, ids",
    [
        ((0, 4), (3, 4), ([0], [0])),
        ((3, 4), (0, 4), ([0], [7])),
        ((3, 0), (3, 0), ([2, 0], [1, 1])),
        ((3, 0), (3, 0), ([99], [1])),
    ],
    ids=["no sources", "no destinations", "duplicate", "out of range"],
)
def test_ids_of_an_empty_copy_are_not_checked(src_shape, dst_shape, ids, inside_jit, form):
    src, dst = (place({"k": np.zeros(s, np.float32)}, "device") for s in (src_shape, dst_shape))
    ids = [form(np.array(side, np.int32)) for side in ids]
    swap = jax.jit(jaxkv.swap_blocks) if inside_jit else jaxkv.swap_blocks
    out = swap(src, dst, *ids)
    jaxkv.check_errors(out)
    assert_trees_equal(out, {"k": np.zeros(dst_shape, np.float32)})


@pytest.mark.parametrize("side", ["src", "dst"])
def test_more_blocks_than_int32_ids_is_rejected(side):
    few, many = (jax.ShapeDtypeStruct((n, 1), np.int8) for n in (9, 2**31))
    arrays = (many, few) if side == "src" else (few, many)
    call = partial(jax.eval_shape, jaxkv.swap_blocks, *arrays, *map(np.array, IDS))
    assert_rejected(call, ValueError, side, 2**31, 2**31 - 1, "blocks")


@pytest.mark.multigpu
def test_replicated_leaf_next_to_a_sharded_leaf():
    """Each leaf varies over a mesh as its own source, independent of the other leaves."""
    mesh = mesh_of(2)
    blocks = {"k": ((4, 2), "float32"), "scales": ((4,), "float32")}
    src, dst = random_tree(9, blocks), random_tree(12, blocks, seed=1)
    specs = {"k": jax.P(None, None, "tp"), "scales": jax.P()}
    in_specs = specs, {"k": jax.P(), "scales": jax.P()}, jax.P(), jax.P()
    ids = [np.array(side, np.int32) for side in IDS]
    dst_of_shard = {"k": dst["k"][..., :1], "scales": dst["scales"]}
    step = jax.shard_map(jaxkv.swap_blocks, mesh=mesh, in_specs=in_specs, out_specs=specs)
    out = jax.jit(step)(src, dst_of_shard, *ids)
    unsharded = {"k": np.repeat(dst_of_shard["k"], 2, axis=2), "scales": dst["scales"]}
    assert_trees_equal(out, swapped(src, unsharded, *IDS))


@pytest.mark.multigpu
def test_array_written_with_varying_ids_is_not_replicated():
    mesh = mesh_of(2)
    src, dst = np.arange(6, dtype=np.int32), np.zeros(4, np.int32)
    ids = np.array([1, 2], np.int32)
    in_specs = jax.P(), jax.P(), jax.P("tp"), jax.P("tp")
    step = partial(jax.shard_map, jaxkv.swap_blocks, mesh=mesh, in_specs=in_specs)
    with pytest.raises(ValueError, match="replicat"):
        jax.eval_shape(step(out_specs=jax.P()), src, dst, ids, ids)
    out = jax.jit(step(out_specs=jax.P("tp")))(src, dst, ids, ids)
    np.testing.assert_array_equal(out, [0, 1, 0, 0, 0, 0, 2, 0])


@pytest.mark.parametrize("form", [np.asarray, jaxkv.HostIds], ids=["NumPy", "HostIds"])
@pytest.mark.parametrize("sizes, ids", [((0, 3), ([-1], [0])), ((3, 0), ([0], [-1]))], ids=str)
def test_padding_of_an_empty_array_is_accepted(sizes, ids, form):
    src, dst = (np.ones((size, 4), np.float32) for size in sizes)
    ids = [form(np.array(side, np.int32)) for side in ids]
    np.testing.assert_array_equal(jaxkv.swap_blocks(src, dst, *ids), dst)


@pytest.mark.parametrize("dtype", [">f4", ">i2"])
def test_arrays_in_another_byte_order_are_rejected(dtype):
    """Also after a call with native ones, to whose program JAX would pass the bytes as they are."""
    native = np.ones((3, 4), np.dtype(dtype).newbyteorder("="))
    jaxkv.swap_blocks(native, native, [0], [1])
    arrays = native, native.astype(dtype)
    for side, src, dst in (("src", *arrays[::-1]), ("dst", *arrays), ("src", *arrays[1:] * 2)):
        words = f"an array of {side}", dtype, "native byte order", "newbyteorder"
        call = partial(jaxkv.swap_blocks, src, dst, [0], [1])
        assert_rejected(call, ValueError, *words)


def test_tree_without_arrays_is_unchanged():
    assert jaxkv.swap_blocks({}, {}, [5], [7]) == {}


@pytest.mark.parametrize(
    "src_ids, dst_ids, error, words",
    [
        (np.zeros(2, np.float32), np.zeros(2, np.int32), TypeError, ["src_ids", "float32"]),
        (np.zeros(2, np.int32), np.zeros((2, 1), np.int32), ValueError, ["dst_ids", "(2, 1)"]),
        (np.zeros(2, np.int32), np.zeros(3, np.int32), ValueError, ["src_ids", "2", "3"]),
    ],
)
def test_ids_of_a_wrong_type_are_rejected(src_ids, dst_ids, error, words):
    src, dst = place(random_tree(9), "device"), place(random_tree(12), "pinned_host")
    assert_rejected(lambda: jaxkv.swap_blocks(src, dst, src_ids, dst_ids), error, *words)


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "ids, words, bad",
    [
        (([3, 9, 1], [2, 4, 5]), ["src_ids", "9"], [1]),
        (([3, 2, 1], [2, 4, 12]), ["dst_ids", "12"], [2]),
        (([3, 2, 1], [2, 4, 2]), ["dst_ids", "2", "duplicate"], [0, 2]),
    ],
    ids=["source", "destination", "duplicate"],
)
def test_invalid_ids_are_rejected(ids, words, bad, implementation):
    src, dst = random_tree(9), random_tree(12, seed=1)
    placed = place(src, "pinned_host"), place(dst, "device")
    args = [as_ids(side, implementation) for side in ids]

    def call():
        return jax.block_until_ready(
            jaxkv.swap_blocks(*placed, *args, implementation=implementation)
        )

    if fails_at_once(implementation, inside_jit=False):
        assert_rejected(call, jaxkv.PageIndexError, *words)
    else:
        out = call()
        if implementation != "xla":  # which counts no errors
            assert_not_copied(len(bad))
        good = [[-1 if i in bad else block for i, block in enumerate(side)] for side in ids]
        assert_trees_equal(out, swapped(src, dst, *good))
    assert_trees_equal(placed[1], dst)
