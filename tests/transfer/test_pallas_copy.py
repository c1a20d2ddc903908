"""`pallas_copy`: the Pallas kernels, interpreted on cpu and compiled on a GPU, against NumPy.

The interpreter takes arrays in device memory only, so that on cpu the host side of a copy is
simulated; the treatment of host memory is checked in the lowered program, and on a GPU.
"""

import dataclasses
import re
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import SingleDeviceSharding

import jaxkv
from jaxkv._src.transfer import api, block_copy, pallas_chunks, pallas_copy, pallas_mosaic
from jaxkv._src.transfer.block_copy import BlockCopy
from jaxkv._src.transfer.dispatch import Selection, select_implementation
from jaxkv._src.transfer.ids import num_ids_of
from jaxkv._src.transfer.pallas_chunks import Ring
from jaxkv._src.transfer.pallas_copy import copy_blocks_pallas
from jaxkv._src.transfer.resolve import resolve
from tests.util.layout_reference import KIND_LAYOUTS, assert_same_bytes, random_array
from tests.util.pallas_cases import (
    BLOCKS,
    PAIRS,
    check_swap,
    host_sharding,
    plan,
    swap_arrays,
    words,
)
from tests.util.transfer_cases import (
    DIRECTIONS,
    after,
    copied_shapes,
    distinct_ids,
    make_case,
    pointers,
    put,
)

# One warpgroup: the interpreter of jax 0.10.2 takes seconds for each further one.
SMALL = dict(batch=1, threads=1, depth=3)


# ---------------------------------------------------------------------------------------------
# The kernel, interpreted on cpu


@given(st.lists(st.integers(1, 2**13).map(lambda units: 128 * units), min_size=1, max_size=4))
def test_ring_fits_any_block_size(sizes):
    ring = Ring.of(*sizes)
    for size in sizes:
        chunk, starts = pallas_chunks.split_block(size // 4, ring.chunk_words)
        assert chunk <= ring.chunk_words and chunk % 32 == 0
        covered = {start + i for start in starts for i in range(0, chunk, 32)}
        assert covered == set(range(0, size // 4, 32))
    slots = ring.threads * ring.depth
    assert slots <= 32 and slots * ring.batch * ring.chunk_words * 4 <= 192 * 1024
    assert 1 <= ring.threads <= 8 and 1 <= ring.lag < ring.depth


@pytest.mark.parametrize("to_dense", [True, False], ids=["load", "store"])
@pytest.mark.parametrize(
    "block, chunk, depth",
    [(32, 32, 2), (96, 32, 3), (160, 64, 4), (256, 256, 1)],
    ids=["one chunk", "three chunks", "overlapping", "one slot"],
)
def test_blocks_in_chunks(block, chunk, depth, to_dense):
    ring = Ring(chunk, batch=1, threads=1, depth=depth)
    check_swap([words(block)], to_dense=to_dense, num_sms=2, ring=ring)


@pytest.mark.parametrize("pairs", [[], [(8, 11)], PAIRS], ids=len)
@pytest.mark.parametrize("batch", [1, 4])
def test_more_workers_than_work(batch, pairs):
    check_swap([words(32)], pairs, num_sms=6, ring=Ring(32, batch, threads=1, depth=3))


def test_several_warpgroups():
    check_swap([words(64)], num_sms=1, ring=Ring(32, batch=1, threads=2, depth=2))


@pytest.mark.parametrize("to_dense", [True, False], ids=["load", "store"])
@pytest.mark.parametrize("batch", [2, 3, 5], ids=lambda batch: f"{batch} of 5")
def test_several_blocks_in_a_slot(batch, to_dense):
    """Batches that do or do not divide the pairs, with partial blocks and several arrays."""
    ring = Ring(32, batch, threads=1, depth=3)
    check_swap([words(32), words(32)], to_dense=to_dense, num_sms=1, ring=ring)
    check_swap([words(96)], to_dense=to_dense, num_sms=2, ring=ring)


@pytest.mark.parametrize("to_dense", [True, False], ids=["load", "store"])
@pytest.mark.parametrize("batch", [1, 2])
def test_arrays_of_any_dtype_and_size(batch, to_dense):
    """All share a launch; 64 words are one chunk, 160 are three that overlap."""
    shapes = [
        ((4, 2, 16), "bfloat16"),
        ((64,), "float32"),
        ((2, 128), "int8"),
        ((640,), "float8_e4m3fn"),
        ((8, 16), "uint16"),
        ((160,), "int32"),
    ]
    ring = Ring(64, batch, threads=1, depth=3)
    check_swap(shapes, to_dense=to_dense, num_sms=1, ring=ring)


@pytest.mark.cpu_only
def test_swap_blocks_is_one_launch():
    """Leaves of several block sizes in a pytree, and one that Pallas does not support."""
    rng = np.random.default_rng(0)
    shapes = {"k": ((64,), "float16"), "scale": ((2, 96), "float32"), "mask": ((128,), "bool")}
    src, dst = (
        {name: random_array(rng, (n, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        for n in BLOCKS
    )

    def choose_here(copy, ids, implementation):
        reason = pallas_chunks.unsupported_reason(copy, num_ids_of(ids[0]))
        return Selection("host" if reason else "pallas", 2, "")

    with (
        mock.patch.object(api, "select_implementation", choose_here),
        mock.patch.object(pallas_copy, "_run_mosaic", wraps=pallas_mosaic._run_mosaic) as launch,
    ):
        got = jaxkv.swap_blocks(src, dst, *zip(*PAIRS, (-1, 3), strict=True))
    assert launch.call_count == 1
    for name, array in got.items():
        for source, destination in PAIRS:
            dst[name][destination] = src[name][source]
        assert_same_bytes(array, dst[name], name)


def test_eight_byte_types():
    with jax.enable_x64(True):
        shapes = [((4, 4), "float64"), ((16,), "int64")]
        check_swap(shapes, num_sms=1, ring=Ring(32, **SMALL))


WHOLE_BLOCKS = ("layer_first", "page_first_direct", "page_unified")


@pytest.mark.cpu_only
@pytest.mark.parametrize("mosaic", [True, False], ids=["mosaic", "triton"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "kind, layout", [entry for entry in KIND_LAYOUTS if entry[1] in WHOLE_BLOCKS]
)
def test_pages_of_host_layouts(kind, layout, direction, mosaic, monkeypatch):
    """Some layers of a pool: the most address arithmetic in the kernel."""
    monkeypatch.setattr(pallas_copy, "_has_mosaic_kernel", lambda device: mosaic)
    case = make_case(layout, kind=kind, num_layers=3, page_size=8)
    on_device = SingleDeviceSharding(jax.devices()[0], memory_kind="device")
    pool, cache = case.pool(), case.cache()
    pool = dataclasses.replace(pool, data=put(case.host, on_device))
    host_pages, device_pages = distinct_ids(case, 4)
    ids = (host_pages, device_pages) if direction == "load" else (device_pages, host_pages)
    layers = range(1, 3)

    @jax.jit
    def step(pool, cache, pairs):
        call = resolve(f"{direction}_pages", (pool, cache), ids, layers)
        [copy] = call.copies
        assert pallas_chunks.unsupported_reason(copy, len(ids[0])) is None
        results = [[jax.typeof(array) for array in copy.written]]
        ring = Ring(32, **SMALL)
        return call.rebuild(copy_blocks_pallas(call.copies, pairs, results, num_sms=2, ring=ring))

    out = step(pool, cache, plan(list(zip(*ids, strict=True))))
    want = case.expected(direction, host_pages, device_pages, layers)
    case.assert_holds(*after(direction, out, pool, cache), **want)


def count_races(batch: int, lag_error: int) -> bool:
    """Whether the interpreter detects a race when waits omit `lag_error` stores."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter

    wait = plgpu.wait_smem_to_gmem

    def late(n: int, wait_read_only: bool = False) -> None:
        wait(n + lag_error if wait_read_only else n, wait_read_only=wait_read_only)

    # Copies by one simulated TMA thread are ordered: one thread per copy avoids that.
    params = dataclasses.replace(
        pallas_mosaic._interpreter(), detect_races=True, num_tma_threads_per_device=2 * BLOCKS[1]
    )
    pairs = [(i % BLOCKS[0], i) for i in range(BLOCKS[1])]
    with (
        mock.patch.object(plgpu, "wait_smem_to_gmem", late),
        mock.patch.object(pallas_mosaic, "_interpreter", lambda: params),
    ):
        try:
            ring = Ring(32, batch, threads=1, depth=4)
            jax.block_until_ready(check_swap([words(32)], pairs, num_sms=1, ring=ring))
            return interpreter.get_races().races_found
        except Exception as error:  # behaviour of jax 0.12
            if "RACE DETECTED" not in str(error):
                raise
            return True
        finally:
            interpreter.reset_gpu_interpret_mode_state()


@pytest.mark.cpu_only
@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="its interpreter sees no such race")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("lag_error", [0, 1])
def test_slots_are_reused_only_after_their_stores(lag_error, batch):
    """And no later: with one more store in flight there is a race."""
    assert count_races(batch, lag_error) == bool(lag_error)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("to_dense", [True, False], ids=["load", "store"])
@pytest.mark.parametrize("num_words", [32, 96, 1056], ids=str)
def test_triton_kernel(num_words, to_dense):
    shapes = [words(num_words), ((2 * num_words,), "bfloat16"), words(64)]
    with mock.patch.object(pallas_copy, "_has_mosaic_kernel", lambda device: False):
        check_swap(shapes, to_dense=to_dense, num_sms=2)


def test_mosaic_kernel_only_where_its_ring_fits_shared_memory():
    for text, fits in ("8.9", False), ("9.0", True), ("11.0", True), ("12.1", False):
        device = mock.Mock(platform="gpu", compute_capability=text)
        assert pallas_copy._has_mosaic_kernel(device) == fits


# ---------------------------------------------------------------------------------------------
# Rejected calls


def reason_of(shape=(64,), dtype="float32", num_ids=5, copies=None, **geometry) -> str:
    source, destination = (jax.ShapeDtypeStruct((n, *shape), dtype) for n in BLOCKS)
    ids = np.zeros(1, np.int32)
    [copy] = resolve("swap_blocks", (source, destination), (ids, ids), None).copies
    copy = dataclasses.replace(copy, **(copies or {}))
    copy = dataclasses.replace(copy, geometry=dataclasses.replace(copy.geometry, **geometry))
    return pallas_chunks.unsupported_reason(copy, num_ids) or ""


def test_unsupported_reasons():
    assert reason_of() == ""
    assert "100 bytes" in reason_of((25,)) and "128" in reason_of((25,))
    assert "runs of 64 bytes" in reason_of(run_bytes=64, counts=(4, 1))
    assert "multiples" in reason_of(page_stride_bytes=384)
    assert "multiples" in reason_of(copies=dict(strided_offsets=[128]))
    for dtype in ("bool", "complex64"):
        assert dtype in reason_of((1024,), dtype)
    assert f"the limit is {2**30 - 1}" in reason_of(num_ids=2**30)


# ---------------------------------------------------------------------------------------------
# Host memory


def lowered_for_cuda(direction: str) -> str:
    """StableHLO of a donating copy between a pool in host memory and three buffers."""
    case = make_case("page_first_direct", num_layers=3, page_size=8)
    names = "pool" if direction == "store" else "cache"

    @partial(jax.jit, donate_argnames=(names,))
    def step(pool, cache, pairs):
        ids = np.zeros(5, np.int32)
        call = resolve(f"{direction}_pages", (pool, cache), (ids, ids), range(2))
        [copy] = call.copies
        return call.rebuild(
            copy_blocks_pallas(call.copies, pairs, [block_copy.result_types(copy)], num_sms=2)
        )

    pairs = jnp.zeros(12, jnp.int32)
    with mock.patch.object(pallas_mosaic, "_interpreter", lambda: False):
        traced = step.trace(case.pool(), case.cache(), pairs)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_program_calls_the_kernel_on_the_arrays_themselves(direction):
    """Only reshapes between the arguments and the call, in either direction."""
    text = lowered_for_cuda(direction)
    found = re.findall(r"= \"?stablehlo\.(\w+)(?: @(\w+))?", text)
    assert set(found) <= {
        ("reshape", ""),
        ("bitcast_convert", ""),
        ("constant", ""),
        ("custom_call", "mosaic_gpu_v2"),
    }
    assert [name for name, _ in found].count("custom_call") == 1
    main = text[text.index("@main") :].splitlines()[0]
    arguments, results = main.split(" -> ")
    assert arguments.count('"pinned_host"') == 1
    assert results.count('"pinned_host"') == (direction == "store")
    written = 1 if direction == "store" else 4
    assert arguments.count("tf.aliasing_output") == (1 if direction == "store" else 6)
    assert text.count("#stablehlo.output_operand_alias") == written


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_relabelled_host_memory_is_written_in_place(direction):
    """The compiled program: XLA tracks host memory through JAX's types."""
    case = make_case("page_first_direct")
    host_pages, device_pages = distinct_ids(case, 4)
    ids = (host_pages, device_pages) if direction == "load" else (device_pages, host_pages)
    state = {"pool": case.pool(), "cache": case.cache()}
    written = "cache" if direction == "load" else "pool"
    before = pointers(state[written])

    def relabelled(copy: BlockCopy) -> BlockCopy:
        sides = [
            [pallas_copy._relabel(array) for array in side] for side in (copy.dense, copy.strided)
        ]
        return dataclasses.replace(copy, operation="swap_blocks", dense=sides[0], strided=sides[1])

    @partial(jax.jit, donate_argnames=(written,))
    def step(pool, cache, *ids):
        call = resolve(f"{direction}_pages", (pool, cache), ids, None)
        [copy] = call.copies
        choice = select_implementation(copy, ids)
        pairs = block_copy.plan_pairs(copy, ids)
        arrays = block_copy.copy_blocks(
            relabelled(copy), ids, pairs, choice.implementation, choice.num_sms
        )
        types = block_copy.result_types(copy)
        return call.rebuild(
            [[pallas_copy._relabel(a, t) for a, t in zip(arrays, types, strict=True)]]
        )

    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert not shapes & copied_shapes(step, *state.values(), *ids)
    out = step(*state.values(), *ids)
    assert pointers(out) == before
    case.assert_holds(
        *after(direction, out, *state.values()),
        **case.expected(direction, host_pages, device_pages),
    )


@pytest.mark.gpu
@pytest.mark.sanitizer
@pytest.mark.parametrize("memories", [("pinned_host", "device"), ("device", "pinned_host")])
@pytest.mark.parametrize("kib", [0.125, 0.625, 1, 2, 4, 8, 16, 28, 32, 64, 100.125])
def test_host_memory_on_a_gpu(kib, memories):
    check_swap([words(int(kib * 256))] * 3, memories=memories, to_dense=memories[1] == "device")


@pytest.mark.gpu
@pytest.mark.parametrize("memories", [("pinned_host", "device"), ("device", "pinned_host")])
@pytest.mark.parametrize("num_words", [(32,), (256,), (512, 64), (18432, 64, 2048)], ids=str)
def test_slot_reuse_on_a_gpu(num_words, memories):
    """Enough pairs on one SM that each slot takes several batches; the last is not full."""
    rng = np.random.default_rng(1)
    pairs = list(zip(rng.integers(0, 400, 997), rng.permutation(1000)[:997], strict=True))
    to_dense = memories[1] == "device"
    shapes = [words(size) for size in num_words]
    check_swap(shapes, pairs, to_dense, memories, blocks=(400, 1000), num_sms=1)


@pytest.mark.gpu
@pytest.mark.parametrize("memories", [("pinned_host", "device"), ("device", "pinned_host")])
def test_program_copies_no_host_memory(memories):
    arrays = [
        [jax.device_put(np.zeros((n, 256), np.int32), host_sharding().with_memory_kind(memory))]
        for n, memory in zip(BLOCKS, memories, strict=True)
    ]
    step = jax.jit(swap_arrays, donate_argnums=1)
    assert not copied_shapes(step, *arrays, plan(PAIRS))


@pytest.mark.gpu
def test_host_memory_as_loop_carry():
    """A pool that is read and written in each step of a scan: every block moves up by one."""
    rng = np.random.default_rng(0)
    pool, cache = (random_array(rng, (n, 256), "int32") for n in BLOCKS)
    steps = range(BLOCKS[0] - 1)
    loads, stores = (
        np.stack([plan([pair(i)]) for i in steps])
        for pair in (lambda i: (i + 1, 0), lambda i: (0, i))
    )

    @partial(jax.jit, donate_argnums=0)
    def move_up(pool, cache, loads, stores):
        def step(pool, pairs):
            cached = swap_arrays([pool], [cache], pairs[0])
            return swap_arrays(cached, [pool], pairs[1], to_dense=False)[0], None

        return jax.lax.scan(step, pool, (loads, stores))[0]

    placed = put(pool, host_sharding())
    before = pointers(placed)
    out = move_up(placed, cache, loads, stores)
    assert_same_bytes(out, np.concatenate([pool[1:], pool[-1:]]), "pool")
    assert pointers(out) == before
