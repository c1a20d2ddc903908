"""flex.update: equal to flex.build of the same batch, whatever the batches before it."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import flex
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import FEW, SOME, Bounds, num_blocks_of

NEXT = ("same", "decode", "shrink", "replace a block", "swap two blocks", "swap two rows", "any")


@functools.cache
def builders(num_blocks: int):
    build = functools.partial(flex.build, num_blocks=num_blocks, updatable=True)
    return jax.jit(build), jax.jit(flex.update, donate_argnums=0)


def batch_of(tables: np.ndarray, seq_lens: np.ndarray, bounds: Bounds) -> BatchMetadata:
    rows, last = np.arange(len(tables)), np.maximum(seq_lens - 1, 0) // bounds.block_size
    tables = tables.copy()
    tables[rows, last] = np.maximum(tables[rows, last], 1)  # each query token has a block
    return BatchMetadata.from_host(
        np.minimum(seq_lens, bounds.max_num_tokens // bounds.max_num_reqs),
        seq_lens,
        tables,
        **bounds._asdict(),
    )


@st.composite
def steps(draw) -> list[BatchMetadata]:
    """Batches of successive steps. Blocks may be shared, repeated within a row, or NULL_BLOCK."""
    bounds = draw(st.sampled_from([FEW, SOME]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = bounds.max_num_reqs, bounds.max_blocks
    blocks = draw(st.sampled_from([3, num_blocks_of(bounds)]))
    longest = bounds.max_blocks * bounds.block_size
    tables = rng.integers(0, blocks, shape)
    seq_lens = rng.integers(0, longest + 1, shape[0])
    batches = [batch_of(tables, seq_lens, bounds)]
    for change in draw(st.lists(st.sampled_from(NEXT), min_size=1, max_size=4)):
        tables, seq_lens = tables.copy(), seq_lens.copy()
        row, other = rng.integers(0, shape[0], 2)
        column, another = rng.integers(0, shape[1], 2)
        match change:
            case "decode":
                seq_lens = np.minimum(seq_lens + 1, longest)
            case "shrink":
                seq_lens[row] //= 2
            case "replace a block":
                tables[row, column] = rng.integers(0, blocks)
            case "swap two blocks":
                tables[row, [column, another]] = tables[row, [another, column]]
            case "swap two rows":
                tables[[row, other]] = tables[[other, row]]
                seq_lens[[row, other]] = seq_lens[[other, row]]
            case "any":
                tables = rng.integers(0, blocks, shape)
                seq_lens = rng.integers(0, longest + 1, shape[0])
        batches.append(batch_of(tables, seq_lens, bounds))
    return batches


@given(steps())
def test_update_equals_build(batches: list[BatchMetadata]):
    rows, width = batches[0].block_table.shape
    build, update = builders(1 + rows * width)
    metadata = build(batches[0])
    for batch in batches[1:]:
        metadata, wanted = update(metadata, batch), build(batch)
        for field in dataclasses.fields(metadata):
            got, want = getattr(metadata, field.name), getattr(wanted, field.name)
            np.testing.assert_array_equal(got, want, err_msg=field.name)


def test_map_is_updated_in_place():
    batch = batch_of(np.ones((5, 6), int), np.full(5, 3), FEW)
    build, update = builders(num_blocks_of(FEW))
    metadata = build(batch)
    address = metadata.physical_to_logical.unsafe_buffer_pointer()
    updated = update(metadata, dataclasses.replace(batch, seq_lens=batch.seq_lens + 8))
    assert updated.physical_to_logical.unsafe_buffer_pointer() == address
    assert metadata.physical_to_logical.is_deleted()


def test_window_and_ranges_are_those_of_a_build():
    batch = batch_of(np.arange(30).reshape(5, 6), np.arange(5) * 6, FEW)
    ranges = np.full((5, 1, 2), [1, 9], np.int32)
    build = functools.partial(
        flex.build, num_blocks=num_blocks_of(FEW), causal=False, sliding_window=3, updatable=True
    )
    longer = dataclasses.replace(batch, seq_lens=batch.seq_lens + 1)
    got = jax.jit(flex.update)(jax.jit(build)(batch), longer, mm_prefix_range=ranges)
    want = jax.jit(build)(longer, mm_prefix_range=ranges)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_no_ranges_equal_none():
    """A step without images, of a model with ranges: R = 0."""
    batch = batch_of(np.arange(30).reshape(5, 6), np.arange(5) * 4, FEW)
    build = functools.partial(flex.build, num_blocks=num_blocks_of(FEW), updatable=True)
    ranges = np.zeros((5, 0, 2), np.int32)
    want = build(batch)
    for got in (
        build(batch, mm_prefix_range=ranges),
        flex.update(want, batch, mm_prefix_range=ranges),
    ):
        assert got.mm_prefix_range is not None and got.mm_prefix_range.shape == ranges.shape
        jax.tree.map(
            np.testing.assert_array_equal, dataclasses.replace(got, mm_prefix_range=None), want
        )
        query, slot = np.arange(24)[:, None], np.arange(124)
        np.testing.assert_array_equal(got.mask(query, slot), want.mask(query, slot))


def test_errors():
    batch = batch_of(np.ones((5, 6), int), np.full(5, 3), FEW)
    build = functools.partial(flex.build, num_blocks=num_blocks_of(FEW))
    with pytest.raises(ValueError, match=r"must be of flex.build\(..., updatable=True\)"):
        flex.update(build(batch), batch)
    metadata = build(batch, updatable=True)
    other = batch_of(np.ones((4, 6), int), np.full(4, 3), FEW._replace(max_num_reqs=4))
    with pytest.raises(ValueError, match=r"\(5, 6, 4\), must have those of the batch, \(4, 6, 4\)"):
        flex.update(metadata, other)
    with pytest.raises(ValueError, match="mm_prefix_range"):
        flex.update(metadata, batch, mm_prefix_range=np.zeros((1, 1, 2), np.int32))
