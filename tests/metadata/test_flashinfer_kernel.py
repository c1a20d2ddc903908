"""The CUDA kernel of FlashInfer's metadata on the host: threads of a block are coroutines.

Not a substitute for a GPU, where test_flashinfer.py runs it, but every line of the kernel runs
against plain JAX, in two opposite orders of the threads.
"""

import ctypes
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxkv._src.runtime.bounds import check_bounds
from jaxkv.metadata import flashinfer, flashinfer_kernel
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import FEW, MANY, ONE, SOME, Bounds, Case, cases
from tests.util.native_program import load_kernels

SINGLE = Bounds(3, 6, 6, 1)  # pages of one token
UNIFORM = Case([3, 3, 3, 0], [9, 3, 5, 4], [[3, 4, 5], [1], [2, 6], [7]], FEW)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return load_kernels("flashinfer_on_host", tmp_path_factory.mktemp("kernels"))


@functools.cache
def plain(threshold: int):
    build = functools.partial(
        flashinfer._build,
        decode_threshold=threshold,
        max_pages=None,
        dcp_world_size=1,
        dcp_rank=0,
        dcp_interleave=1,
    )
    return jax.jit(build)


def on_host(library, batch: BatchMetadata, threshold: int, max_pages: int, blocks, descending):
    """The results of the kernel, in the order of the handler."""
    rows, columns = batch.block_table.shape
    part = [rows + 1, rows + 1, rows]
    sizes = [batch.max_num_tokens, max_pages, *[1] * 5, *part, *part]
    results = [np.full(size, -99, np.int32) for size in sizes]
    operands = [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(batch)]
    numbers = np.array(
        [blocks, descending, rows, columns, batch.max_num_tokens, max_pages, batch.block_size,
         threshold], np.int64,
    )  # fmt: skip
    arrays = [*operands, *results]
    addresses = (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
    library.run(ctypes.c_void_p(numbers.ctypes.data), addresses)
    return results


@pytest.mark.cpu_only
@settings(max_examples=30)  # of 256 coroutines each
@given(
    case=cases(bounds=(ONE, FEW, FEW, SOME)),
    ordered=st.booleans(),
    threshold=st.sampled_from([0, 1, 3]),
    blocks=st.sampled_from([1, 2]),
    descending=st.booleans(),
    truncated=st.booleans(),
)
@example(UNIFORM, False, 3, 1, False, False)
@example(UNIFORM, False, 1, 1, True, True)
@example(Case([0, 1, 1], [4, 3, 5], [[3], [1], [2, 6]], FEW), False, 1, 1, False, False)
@example(Case([0, 1], [2, 1], [[3, 4], [1]], SINGLE), False, 1, 1, False, False)
@example(Case([1] * 999, [40] * 999, [[5, 6, 7]] * 999, MANY), False, 1, 2, True, False)
@example(Case([1] * 700 + [2], [40] * 701, [[5, 6, 7]] * 701, MANY), False, 1, 1, False, False)
def test_equals_plain_jax(library, case, ordered, threshold, blocks, descending, truncated):
    batch = (case.decodes_first(threshold) if ordered else case).batch()
    want = jax.tree.map(np.asarray, plain(threshold)(batch))
    total = int(sum(-(-tokens // batch.block_size) for tokens in case.seq_lens))
    limit = max(1, total - 1) if truncated else batch.block_table.size
    slots, pages, *numbers = on_host(library, batch, threshold, limit, blocks, descending)
    np.testing.assert_array_equal(slots, want.slot_mapping)
    np.testing.assert_array_equal(pages, want.paged_kv_indices[:limit])
    names = ("num_decodes", "num_prefills", "num_decode_tokens", "num_prefill_tokens")
    assert [int(n[0]) for n in numbers[:4]] == [int(getattr(want, name)) for name in names]
    assert numbers[4] == total
    for part, first in ((want.decode, 5), (want.prefill, 8)):
        np.testing.assert_array_equal(numbers[first], part.qo_indptr)
        starts = np.minimum(part.paged_kv_indptr, limit)
        np.testing.assert_array_equal(numbers[first + 1], starts)
        np.testing.assert_array_equal(numbers[first + 2], part.paged_kv_last_page_len)


@pytest.mark.cpu_only
def test_contexts_shorter_than_queries_have_no_slots(library):
    """Of a batch that is computed on the device: from_host rejects it."""
    batch = dataclasses.replace(UNIFORM.batch(), seq_lens=jnp.array([9, 1, 5, 4, 0]))
    slots, *_ = on_host(library, batch, 1, batch.block_table.size, 1, False)
    np.testing.assert_array_equal(slots, plain(1)(batch).slot_mapping)
    assert (slots[3:5] == -1).all()


@pytest.fixture
def with_cuda(monkeypatch):
    """An extension with CUDA handlers, as far as tracing is concerned."""
    extension = types.SimpleNamespace(CUDA=True, FLASHINFER_ROWS=4095)
    monkeypatch.setattr(
        flashinfer_kernel, "native", types.SimpleNamespace(extension=lambda: extension)
    )


def lowered(platform: str, batch, **options) -> str:
    build = jax.jit(functools.partial(flashinfer.build, **options))
    return build.trace(batch).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("platform, expected", [("cuda", 1), ("cpu", 0), ("rocm", 0)])
def test_kernel_is_called_on_cuda_only(with_cuda, platform, expected):
    text = lowered(platform, UNIFORM.batch())
    assert text.count("@jaxkv_flashinfer") == expected
    assert ("dot_general" in text or "reduce" in text) == (not expected)  # nothing else


@pytest.mark.parametrize("max_pages, checks", [(30, 0), (29, 1)])
def test_bound_is_checked_behind_the_kernel(with_cuda, max_pages, checks):
    text = lowered("cuda", UNIFORM.batch(), max_pages=max_pages)
    assert (text.count("@jaxkv_flashinfer"), text.count("@jaxkv_check_bounds")) == (1, checks)


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_check_is_in_programs_that_use_only_starts(with_cuda, part):
    build = functools.partial(flashinfer.build, max_pages=29)
    starts = jax.jit(lambda batch: getattr(build(batch), part).paged_kv_indptr)
    text = starts.trace(UNIFORM.batch()).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@jaxkv_check_bounds") == 1


@pytest.mark.cpu_only
@pytest.mark.parametrize("page", [0, 7, 2**31 - 1, -1])
def test_starts_carry_the_check(page):
    """Of any page ids, unchanged, and not eliminated by XLA."""

    @jax.jit
    def starts(total, pages, part):
        pages = check_bounds("test.step", pages, max_pages=(total, 4))
        return flashinfer_kernel._behind(pages, part).paged_kv_indptr

    pages, indptr = jnp.full(4, page, jnp.int32), jnp.array([0, 2, 2, 4], jnp.int32)
    part = flashinfer_kernel.Part(indptr, indptr, indptr)
    np.testing.assert_array_equal(starts(4, pages, part), indptr)
    with pytest.raises(Exception, match=r"needs 5, .* max_pages = 4"):
        jax.block_until_ready(starts(5, pages, part))


@pytest.mark.parametrize("options", [{"dcp_world_size": 2}, {}], ids=["ranks", "rows"])
def test_other_batches_use_plain_jax(with_cuda, options):
    batch = UNIFORM.batch()
    if not options:
        rows = 4096
        batch = BatchMetadata.from_host(
            [1] * rows, [1] * rows, [[1]] * rows, max_num_reqs=rows, max_num_tokens=rows,
            max_blocks=1, block_size=4,
        )  # fmt: skip
    assert "@jaxkv_flashinfer" not in lowered("cuda", batch, **options)


def test_results_of_both_platforms_have_equal_types(with_cuda):
    """Also those of the executed one: a program for several platforms selects at run time."""
    batch = UNIFORM.batch()
    text = (
        jax.jit(flashinfer.build).trace(batch).lower(lowering_platforms=("cpu", "cuda")).as_text()
    )
    assert "@jaxkv_flashinfer" in text
    got = jax.jit(flashinfer.build)(batch)
    jax.tree.map(np.testing.assert_array_equal, got, plain(1)(batch))


def test_arguments_are_checked_as_in_plain_jax(with_cuda):
    batch = UNIFORM.batch()
    with pytest.raises(ValueError, match="max_pages must be >= 1, got 0"):
        flashinfer.build(batch, max_pages=0)
    with pytest.raises(ValueError, match="decode_threshold must be >= 0 tokens, got -1"):
        flashinfer.build(batch, decode_threshold=-1)


def test_varying_batches_use_plain_jax(with_cuda):
    """Within shard_map, where outputs are declared as replicated or not."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    batches = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], UNIFORM.batch())

    def build(batch):
        return jax.tree.map(
            lambda leaf: leaf[None], flashinfer.build(jax.tree.map(lambda leaf: leaf[0], batch))
        )

    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.jit(jax.shard_map(build, mesh=mesh, in_specs=spec, out_specs=spec))
    text = mapped.trace(batches).lower(lowering_platforms=("cuda",)).as_text()
    assert "@jaxkv_flashinfer" not in text
    replicated = jax.jit(
        jax.shard_map(
            flashinfer.build, mesh=mesh, in_specs=jax.sharding.PartitionSpec(),
            out_specs=jax.sharding.PartitionSpec(),
        )
    )  # fmt: skip
    text = replicated.trace(UNIFORM.batch()).lower(lowering_platforms=("cuda",)).as_text()
    assert "@jaxkv_flashinfer" in text


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_replicated_batch_on_a_mesh(with_cuda, axis_type):
    """Types with a mesh of explicit axes, which the results of both platforms must share."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(getattr(jax.sharding.AxisType, axis_type),))
    everywhere = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    batch = jax.device_put(UNIFORM.batch(), everywhere)
    with jax.set_mesh(mesh):
        assert "@jaxkv_flashinfer" in lowered("cuda", batch)
        got = jax.jit(flashinfer.build)(batch)
    jax.tree.map(np.testing.assert_array_equal, got, plain(1)(UNIFORM.batch()))
