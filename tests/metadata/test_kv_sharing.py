"""metadata.kv_sharing against tokens counted one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import common, kv_sharing
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import Case, assert_same, cases, every_batch


@functools.cache
def compiled():
    return jax.jit(kv_sharing.build)


@every_batch
@given(
    cases(),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["any", "last", "all", "none", "repeated"]),
)
def test_fast_prefill(case: Case, seed: int, style: str):
    rng = np.random.default_rng(seed)
    b = case.bounds
    wanted: list[int] = []
    counts: list[int] = []
    for row, query in enumerate(case.query_lens):
        most = {"last": min(query, 1), "none": 0}.get(style, query)
        count = int(rng.integers(0, most + 1)) if style in ("any", "repeated") else most
        wanted += range(case.starts[row + 1] - count, case.starts[row + 1])
        counts.append(count)
    repeats = np.ones(len(wanted), int)
    if style == "repeated" and wanted:
        more = rng.integers(0, b.max_num_tokens - len(wanted) + 1)
        repeats += np.bincount(rng.integers(0, len(wanted), more), minlength=len(wanted))
    given_indices = np.repeat(np.array(wanted, np.int32), repeats)
    # Values after the indices must not matter.
    indices = rng.integers(0, b.max_num_tokens, b.max_num_tokens, dtype=np.int32)
    indices[: len(given_indices)] = given_indices
    batch = case.batch()
    got = compiled()(batch, indices, np.int32(len(given_indices)))

    starts = np.full(b.max_num_reqs + 1, len(wanted))
    starts[: case.num_reqs + 1] = [sum(counts[:row]) for row in range(case.num_reqs + 1)]
    assert_same(got.batch.query_start_loc, starts)
    assert_same(got.batch.num_tokens, len(wanted))
    assert_same(got.num_logits_indices, len(wanted))
    padding = b.max_num_tokens - len(wanted)
    assert_same(got.logits_indices_padded, wanted + [wanted[-1] if wanted else 0] * padding)
    for name in ("seq_lens", "block_table", "num_reqs"):
        assert_same(getattr(got.batch, name), getattr(batch, name))
    # A batch whose tokens are all selected is returned unchanged.
    if style == "all":
        assert_same(got.batch.query_start_loc, batch.query_start_loc)


def batch_of(query: list[int]) -> BatchMetadata:
    return BatchMetadata.from_host(
        query, query, [[1, 2]] * len(query),
        max_num_reqs=4, max_num_tokens=28, max_blocks=2, block_size=16,
    )  # fmt: skip


def test_examples():
    got = kv_sharing.build(batch_of([15, 5, 8]), jnp.array([14, 18, 19, 27, 0, 0], jnp.int32), 4)
    assert_same(got.batch.query_start_loc, [0, 1, 3, 4, 4])
    assert_same(got.batch.query_lens, [1, 2, 1, 0])
    assert_same(got.batch.num_tokens, 4)
    assert got.batch.max_num_tokens == 6
    assert_same(got.logits_indices_padded, [14, 18, 19, 27, 27, 27])


def test_decodes_are_unchanged():
    batch = batch_of([1, 1, 1])
    got = kv_sharing.build(batch, common.logits_indices(batch), batch.num_reqs)
    assert_same(got.batch.query_start_loc, batch.query_start_loc)
    assert_same(got.batch.num_tokens, batch.num_tokens)


def test_a_row_without_tokens_repeats_no_token():
    """Of the decode before it, which would become two tokens, the first at another position."""
    batch = BatchMetadata.from_host(
        [0, 1, 0, 0, 2], [3, 9, 5, 4, 2], [[5], [1], [2], [3], [4]],
        max_num_reqs=6, max_num_tokens=8, max_blocks=1, block_size=16,
    )  # fmt: skip
    indices = common.logits_indices(batch)
    assert_same(indices, [0, 0, 0, 0, 2, 2])
    for given_indices in (indices, np.asarray(indices)):
        got = kv_sharing.build(batch, given_indices, batch.num_reqs)
        assert_same(got.batch.query_lens, [0, 1, 0, 0, 1, 0])
        assert_same(got.batch.num_tokens, 2)
        assert_same(got.num_logits_indices, 2)
        assert_same(got.logits_indices_padded, [0, 2, 2, 2, 2, 2])
        assert_same(common.token_positions(got.batch), [8, 1, 0, 0, 0, 0])
        assert_same(common.logits_indices(got.batch), [0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize("num_logits", [3, -1, np.int32(3), np.array(3)])
def test_num_logits_out_of_range_raises(num_logits):
    indices = np.zeros(2, np.int32)
    kv_sharing.build(batch_of([2]), indices, 2)
    with pytest.raises(ValueError, match=rf"num_logits must be in \[0, 2\], got {num_logits}"):
        kv_sharing.build(batch_of([2]), indices, num_logits)


def test_float_arguments_raise():
    with pytest.raises(ValueError, match="logits_indices must be int32, got float32"):
        kv_sharing.build(batch_of([2]), np.zeros(2, np.float32), 2)
    with pytest.raises(ValueError, match="num_logits must be int32, got float32"):
        kv_sharing.build(batch_of([2]), np.zeros(2, np.int32), jnp.float32(2))


@pytest.mark.parametrize("indices", [[0, 99], [1, 0], [-1, 1], [0, 28]])
def test_indices_out_of_order_or_range_raise(indices):
    with pytest.raises(ValueError, match=r"logits_indices .* in increasing order, in \[0, 28\)"):
        kv_sharing.build(batch_of([2]), np.array(indices), 2)
    kv_sharing.build(batch_of([2]), np.array([0, *indices]), 1)  # the others are padding


def test_indices_outside_int32_raise():
    with pytest.raises(ValueError, match="logits_indices must fit int32, got 0 "):
        kv_sharing.build(batch_of([2]), np.array([0, 2**32 + 2]), 2)


@pytest.mark.parametrize("shape", [(0,), (2, 2), ()])
def test_invalid_logits_indices_raise(shape):
    with pytest.raises(
        ValueError, match=r"logits_indices must be int32\[N\] with N >= 1, got shape"
    ):
        kv_sharing.build(batch_of([1]), jnp.zeros(shape, jnp.int32), 0)
