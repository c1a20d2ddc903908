"""metadata.triton against slow Python on random batches."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given

from jaxkv.metadata import triton
from tests.util.batches import ONE, Case, cases, every_batch
from tests.util.splits import Part, equal, slots

HEADS = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 80}


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(triton.build, **options))


@every_batch
@given(cases())
def test_build(case: Case):
    everything = Part(case, 0, case.num_reqs)
    got = compiled(**HEADS)(case.batch())
    want = {
        "num_actual_tokens": case.num_tokens,
        "max_query_len": max(case.query_lens, default=0),
        "query_start_loc": everything.starts(case.query_lens),
        "max_seq_len": max(case.seq_lens, default=0),
        "seq_lens": everything.lens(case.seq_lens),
        "block_table": everything.tables(),
        "slot_mapping": slots(case),
    }
    equal(got, want)


def test_shapes_of_segments():
    got = compiled(**HEADS, num_softmax_segments=64)(Case([1], [3], [[2, 1]], ONE).batch())
    assert got.seq_threshold_3D == 64 and got.num_par_softmax_segments == 64
    assert got.softmax_segm_output == jax.ShapeDtypeStruct((64, 8, 64, 128), "float32")
    assert got.softmax_segm_max == jax.ShapeDtypeStruct((64, 8, 64), "float32")
    assert got.softmax_segm_expsum == jax.ShapeDtypeStruct((64, 8, 64), "float32")
    assert compiled(**HEADS | {"head_dim": 128})(
        Case([1], [3], [[2, 1]], ONE).batch()
    ).softmax_segm_output.shape == (64, 8, 16, 128)


def test_prefix_ranges_are_passed_through():
    batch = Case([1], [3], [[2, 1]], ONE).batch()
    ranges = np.array([[[0, 2], [0, 0]]], np.int32)
    got = compiled(**HEADS)(batch, mm_prefix_range=ranges)
    np.testing.assert_array_equal(got.mm_prefix_range, ranges)
    assert compiled(**HEADS)(batch).mm_prefix_range is None


@pytest.mark.parametrize("name", HEADS)
def test_size_below_one_raises(name: str):
    sizes: Any = HEADS | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        triton.build(Case([1], [3], [[2, 1]], ONE).batch(), **sizes)
