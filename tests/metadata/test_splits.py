"""metadata.splits: three sections, their batches and the order, against slow Python."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import reorder_batch, splits
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import FEW, Bounds, Case, assert_same, cases, every_batch

SEEDS = st.integers(0, 2**32 - 1)
FIELDS = ("query_start_loc", "seq_lens", "block_table", "num_reqs", "num_tokens")


def in_order(case: Case, threshold: int) -> Case:
    """Decodes, then long queries with a context, then the others."""

    def region(i: int) -> int:
        query, seq = case.query_lens[i], case.seq_lens[i]
        return 0 if query <= threshold else 1 if seq > query else 2

    return case.reordered(sorted(range(case.num_reqs), key=region))


@functools.cache
def compiled_split(threshold: int):
    def split(batch):
        found = splits.split_decodes_prefills_and_extends(batch, threshold)
        return found, splits.sections(batch, found)

    return jax.jit(split)


@every_batch
@given(cases(), st.sampled_from([0, 1, 3]), st.booleans(), SEEDS)
def test_split_decodes_prefills_and_extends(case: Case, threshold: int, ordered: bool, seed: int):
    if ordered:
        case = in_order(case, threshold)
    padding = int(np.random.default_rng(seed).integers(0, 3))
    total = min(case.num_tokens + padding, case.bounds.max_num_tokens)
    batch = dataclasses.replace(case.batch(), num_tokens=jnp.int32(total))
    rows = list(zip(case.query_lens, case.seq_lens, strict=True))
    long = [i for i, (query, _) in enumerate(rows) if query > threshold]
    fresh = [i for i in long if rows[i][0] == rows[i][1]]
    bounds = [0, min(long, default=case.num_reqs), min(fresh, default=case.num_reqs), case.num_reqs]
    # A section that begins after the last row begins after the padding.
    starts = [case.starts[row] if row < case.num_reqs else total for row in bounds[1:]]

    got, parts = compiled_split(threshold)(batch)
    for one, want in zip(got, [*np.diff(bounds), *np.diff([0, *starts])], strict=True):
        assert_same(one, want)
    for part, first, end, tokens in zip(parts, bounds, bounds[1:], got[3:], strict=False):
        of_rows = dataclasses.replace(case.reordered(range(first, end)).batch(), num_tokens=tokens)
        for name in FIELDS:
            assert_same(getattr(part, name), getattr(of_rows, name))


@pytest.mark.parametrize(
    ("query", "seq", "want"),
    [
        ([1, 1, 4, 3], [7, 3, 9, 3], (2, 1, 1, 2, 4, 3)),
        ([1, 1], [7, 1], (2, 0, 0, 2, 0, 0)),
        ([4, 3], [9, 5], (0, 2, 0, 0, 7, 0)),
        ([4, 3], [4, 3], (0, 0, 2, 0, 0, 7)),
        ([1, 2, 1, 5], [5, 2, 6, 9], (1, 0, 3, 1, 0, 8)),  # not in order: from the first prefill
        ([], [], (0,) * 6),
    ],
)
def test_split_examples(query, seq, want):
    batch = BatchMetadata.from_host(
        query, seq, [[1, 2]] * len(query), **Bounds(4, 16, 2, 8)._asdict()
    )
    assert splits.split_decodes_prefills_and_extends(batch) == want


@functools.cache
def compiled_reorder(threshold: int):
    return jax.jit(functools.partial(splits.reorder_batch_on_device, decode_threshold=threshold))


@every_batch
@given(cases(), st.sampled_from([0, 1, 3]), SEEDS)
def test_reorder_is_that_of_the_host(case: Case, threshold: int, seed: int):
    rng = np.random.default_rng(seed)
    num_rows = case.bounds.max_num_reqs
    prompt = rng.integers(0, case.bounds.max_blocks * case.bounds.block_size + 1, num_rows)
    computed = [s - q for q, s in zip(case.query_lens, case.seq_lens, strict=True)]
    order = reorder_batch(case.query_lens, computed, prompt[: case.num_reqs], threshold).tolist()

    got = compiled_reorder(threshold)(case.batch(), prompt.astype(np.int32))
    want = case.reordered(order).batch()
    for name in FIELDS:
        assert_same(getattr(got.batch, name), getattr(want, name))
    assert_same(got.rows, [*order, *range(case.num_reqs, num_rows)])
    tokens = [t for i in order for t in range(case.starts[i], case.starts[i + 1])]
    assert_same(got.tokens, [*tokens, *range(case.num_tokens, case.bounds.max_num_tokens)])


def test_reordered_sections_are_contiguous():
    # A decode, a prefill, a long extend, a decode, and a short extend.
    case = Case([1, 5, 4, 1, 1], [9, 5, 11, 3, 4], [[1, 2, 3], [4, 5], [6, 7, 8], [9], [10]], FEW)
    prompt = np.array([8, 5, 20, 2, 9], np.int32)
    batch, rows, tokens = splits.reorder_batch_on_device(case.batch(), prompt)
    assert rows.tolist() == [0, 3, 4, 2, 1]
    assert tokens[:12].tolist() == [0, 10, 11, 6, 7, 8, 9, 1, 2, 3, 4, 5]
    assert splits.split_decodes_prefills_and_extends(batch) == (3, 1, 1, 3, 4, 5)
    decode, extend, prefill = splits.sections(
        batch, splits.split_decodes_prefills_and_extends(batch)
    )
    assert [int(part.seq_lens.sum()) for part in (decode, extend, prefill)] == [16, 11, 5]


def test_invalid_arguments_raise():
    batch = BatchMetadata.from_host([1], [1], [[1]], **Bounds(2, 4, 3, 4)._asdict())
    prompt = np.ones(2, np.int32)
    with pytest.raises(ValueError, match="decode_threshold must be >= 0 tokens, got -1"):
        splits.split_decodes_prefills_and_extends(batch, -1)
    with pytest.raises(ValueError, match="decode_threshold must be >= 0 tokens, got -1"):
        splits.reorder_batch_on_device(batch, prompt, -1)
    with pytest.raises(ValueError, match=r"num_prompt must be \[2 rows\], got \(1,\)"):
        splits.reorder_batch_on_device(batch, prompt[:1])
    with pytest.raises(ValueError, match="num_prompt must fit int32, got 4294967296"):
        splits.reorder_batch_on_device(batch, np.array([2**32, 2**32]))
