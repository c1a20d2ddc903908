"""metadata.segments against slow Python on random rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import segments
from tests.util.batches import FEW, ONE, SOME, Case, assert_same, cases, padded

SEEDS = st.integers(0, 2**32 - 1)


@functools.cache
def jitted(function):
    return jax.jit(function)


@pytest.mark.parametrize(
    "values, bounds",
    [
        (np.array([2**32 + 1, 3]), r"3 \.\. 4294967297"),
        (np.array([5, 2**31], np.uint32), r"5 \.\. 2147483648"),
        (np.int64(-(2**31) - 1), r"-2147483649 \.\. -2147483649"),
        (2**31, r"2147483648 \.\. 2147483648"),
        ([1, 2**70], rf"1 \.\. {2**70}"),
        ([np.int32(1), jnp.int32(2), 2**31], r"2147483648 \.\. 2147483648"),
    ],
)
def test_host_values_outside_int32_raise(values, bounds):
    """JAX would truncate those of arrays."""
    with pytest.raises(ValueError, match=f"count must fit int32, got {bounds}"):
        segments.int32_on_device("count", values)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_host_values_become_int32(dtype):
    most = np.array([0, min(np.iinfo(dtype).max, 2**31 - 1)], dtype)
    assert_same(segments.int32_on_device("count", most), most.astype(np.int32))
    assert segments.int32_on_device("count", np.zeros(0, dtype)).dtype == np.int32


@given(st.sampled_from([1, 5, 64]), SEEDS)
def test_prefix_sum(size: int, seed: int):
    values = np.random.default_rng(seed).integers(0, 9, size, dtype=np.int32)
    for x in (values, values > 4):
        want = [sum(x[:i].tolist()) for i in range(size + 1)]
        assert_same(jitted(segments.prefix_sum)(x), want)


@given(cases())
def test_row_of(case: Case):
    b = case.bounds
    got = jitted(segments.row_of)(
        case.batch().query_start_loc, jnp.arange(b.max_num_tokens + 2, dtype=jnp.int32)
    )
    want = [row for row, length in enumerate(case.query_lens) for _ in range(length)]
    assert_same(got, padded(want, b.max_num_tokens + 2, b.max_num_reqs))


@given(cases(bounds=(ONE, FEW, SOME)), SEEDS)
def test_rows_and_starts_from(case: Case, seed: int):
    rng = np.random.default_rng(seed)
    rows = case.bounds.max_num_reqs
    first = int(rng.integers(0, rows + 1))
    count = int(rng.integers(0, rows - first + 1))
    batch = case.batch()
    device = jnp.int32(first), jnp.int32(count)
    wanted = slice(first, first + count)

    got = jitted(segments.rows_from)(batch.seq_lens, *device)
    assert_same(got, padded(batch.seq_lens[wanted], rows))
    table = np.full_like(batch.block_table, 7)
    table[:count] = batch.block_table[wanted]
    assert_same(jitted(segments.rows_from)(batch.block_table, *device, fill=7), table)

    starts = [start - batch.query_start_loc[first] for start in batch.query_start_loc[wanted]]
    end = int(batch.query_start_loc[first + count] - batch.query_start_loc[first])
    got = jitted(segments.starts_from)(batch.query_start_loc, *device)
    assert_same(got, padded(starts, rows + 1, end))
