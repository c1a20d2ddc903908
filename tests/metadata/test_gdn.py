"""metadata.gdn against slow Python on random batches."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import gdn
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import (
    FEW,
    ONE,
    SOME,
    Bounds,
    Case,
    assert_same,
    cases,
    every_batch,
    padded,
)

NUM_SPEC = 2
STEPS = ("no drafts", "drafts", "align")


@functools.cache
def compiled(step: str):
    def build(batch, drafts, accepted):
        return gdn.build(
            batch,
            num_draft_tokens=None if step == "no drafts" else drafts,
            num_accepted_tokens=None if step == "no drafts" else accepted,
            num_spec_tokens=NUM_SPEC,
            mode="align" if step == "align" else "none",
            chunk_size=3,
        )

    return jax.jit(build)


def states_of(case: Case, row: int, align: bool) -> list[int]:
    table = case.tables[row] + [0] * 2 * case.bounds.max_blocks
    first = max((case.seq_lens[row] - 1) // case.bounds.block_size, 0) if align else 0
    return table[first : first + 1 + NUM_SPEC]


def padded_rows(values, shape, fill: int) -> np.ndarray:
    out = np.full(shape, fill, np.int32)
    if len(values):
        out[: len(values)] = values
    return out


def packed_starts(lens: list[int], size: int) -> np.ndarray:
    return padded(np.cumsum([0, *lens]), size + 1, sum(lens))


def tokens_of(case: Case, rows: list[int]) -> np.ndarray:
    tokens = [t for row in rows for t in range(case.starts[row], case.starts[row + 1])]
    return padded(tokens, case.bounds.max_num_tokens, case.bounds.max_num_tokens)


def assert_fields(got: gdn.GDNMetadata, want: dict) -> None:
    for name, value in want.items():
        field = np.asarray(getattr(got, name))
        assert (field.dtype == bool) == (name in BOOLEAN)
        np.testing.assert_array_equal(field, value, err_msg=name)


BOOLEAN = {"spec_sequence_masks", "has_initial_state", "prefill_has_initial_state"}


@every_batch
@given(
    cases(bounds=(ONE, FEW, FEW, SOME)),
    st.sampled_from(STEPS),
    st.sampled_from(["mixed", "pure", "none"]),
    st.integers(0, 2**32 - 1),
)
def test_build(case: Case, step: str, kind: str, seed: int):
    rng = np.random.default_rng(seed)
    case = case.decodes_first()
    size, num = case.bounds.max_num_reqs, case.num_reqs
    low, high = {"mixed": (-1, NUM_SPEC), "pure": (0, NUM_SPEC), "none": (-1, 0)}[kind]
    drafts = rng.integers(low, high + 1, size).astype(np.int32)
    accepted = rng.integers(1, NUM_SPEC + 2, size).astype(np.int32)
    got = compiled(step)(case.batch(), drafts, accepted)

    query, align = case.query_lens, step == "align"
    spec = [r for r in range(num) if drafts[r] >= 0]
    if step == "no drafts" or not any(drafts[r] > 0 for r in spec):
        spec = []
    others = [r for r in range(num) if r not in set(spec) and (query[r] or not spec)]
    decodes = 0 if spec else sum(q <= 1 for q in query)
    prefills = others[decodes:]
    lens, computed = [query[r] for r in prefills], np.subtract(case.seq_lens, query)
    chunks = [(i, j) for i, n in enumerate(lens) for j in range(-(-n // 3))]
    limit = got.chunk_indices.shape[0]
    wide = (size, 1 + NUM_SPEC)
    want = {
        "num_prefills": len(prefills),
        "num_prefill_tokens": sum(lens),
        "num_decodes": decodes,
        "num_decode_tokens": sum(query[r] for r in others[:decodes]),
        "num_spec_decodes": len(spec),
        "num_spec_decode_tokens": sum(query[r] for r in spec),
        "spec_sequence_masks": np.isin(np.arange(size), spec),
        "spec_query_start_loc": packed_starts([query[r] for r in spec], size),
        "spec_state_indices_tensor": padded_rows(
            [states_of(case, r, align) for r in spec], wide, 0
        ),
        "spec_token_indx": tokens_of(case, spec),
        "num_accepted_tokens": padded(accepted[spec], size, 1),
        "non_spec_query_start_loc": packed_starts([query[r] for r in others], size),
        "non_spec_state_indices_tensor": padded(
            [states_of(case, r, align)[0] for r in others], size
        ),
        "non_spec_token_indx": tokens_of(case, others),
        "has_initial_state": padded([computed[r] > 0 for r in others], size).astype(bool),
        "prefill_query_start_loc": packed_starts(lens, size),
        "prefill_state_indices": padded([states_of(case, r, align)[0] for r in prefills], size),
        "prefill_has_initial_state": padded([computed[r] > 0 for r in prefills], size).astype(bool),
        "chunk_indices": padded_rows(chunks, (limit, 2), -1),
        "chunk_offsets": packed_starts([-(-n // 3) for n in lens], size),
    }
    assert want.keys() | {"conv1d"} == {f.name for f in dataclasses.fields(got)}
    assert_fields(got, want)
    programs = [(i, j) for i, r in enumerate(others) for j in range(-(-query[r] // 8))]
    for pointers, of in zip(got.conv1d, (0, 1), strict=True):
        assert_same(pointers, padded([p[of] for p in programs], len(pointers), -1))


@every_batch
@given(cases(), st.booleans())
def test_build_linear(case: Case, align: bool):
    case = case.decodes_first()
    got = compiled_linear("align" if align else "none")(case.batch())
    decodes = sum(q <= 1 for q in case.query_lens)
    assert_same(got.num_decodes, decodes)
    assert_same(got.num_prefills, case.num_reqs - decodes)
    assert_same(got.num_decode_tokens, case.starts[decodes])
    assert_same(got.num_prefill_tokens, case.num_tokens - case.starts[decodes])
    states = [states_of(case, r, align)[0] for r in range(case.num_reqs)]
    assert_same(got.state_indices_tensor, padded(states, case.bounds.max_num_reqs))
    assert_same(got.query_start_loc, case.batch().query_start_loc)
    assert_same(got.seq_lens, case.batch().seq_lens)


@functools.cache
def compiled_linear(mode):
    return jax.jit(functools.partial(gdn.build_linear, mode=mode))


@pytest.mark.parametrize("new", [[4, 1, 1], [7, 4, 1], [6]])
def test_bound_of_chunks_is_reached(new):
    tables = [[1, 2, 3] for _ in new]
    bounds = Bounds(len(new), sum(new), 3, 8)
    batch = BatchMetadata.from_host(new, new, tables, **bounds._asdict())
    assert np.all(gdn.build(batch, chunk_size=3).chunk_indices >= 0)


def test_invalid_arguments_raise():
    batch = Case([1], [1], [[1]], FEW).batch()
    rows = np.ones(FEW.max_num_reqs, np.int32)
    with pytest.raises(ValueError, match="num_draft_tokens requires num_accepted_tokens"):
        gdn.build(batch, num_draft_tokens=rows)
    with pytest.raises(ValueError, match=r"num_draft_tokens must be \[5 rows\], got \(1,\)"):
        gdn.build(batch, num_draft_tokens=rows[:1], num_accepted_tokens=rows)
    with pytest.raises(ValueError, match=r"num_accepted_tokens must be \[5 rows\], got \(1,\)"):
        gdn.build(batch, num_draft_tokens=rows, num_accepted_tokens=rows[:1])
    with pytest.raises(ValueError, match=r"mode must be one of \('none', 'align'\), got 'all'"):
        gdn.build(batch, mode="all")
    with pytest.raises(ValueError, match=r"mode must be one of \('none', 'align'\), got 'all'"):
        gdn.build_linear(batch, mode="all")
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        gdn.build(batch, chunk_size=0)
    with pytest.raises(ValueError, match="num_draft_tokens requires num_spec_tokens >= 1, got 0"):
        gdn.build(batch, num_draft_tokens=rows, num_accepted_tokens=rows)
    with pytest.raises(ValueError, match="num_draft_tokens requires num_spec_tokens >= 2, got 1"):
        gdn.build(batch, num_draft_tokens=2 * rows, num_accepted_tokens=rows, num_spec_tokens=1)
    for count in (0, -5, 3):
        accepted = rows.copy()
        accepted[1:] = 0  # padding rows
        gdn.build(batch, num_draft_tokens=rows, num_accepted_tokens=accepted, num_spec_tokens=1)
        accepted[0] = count
        with pytest.raises(ValueError, match=rf"tokens of row 0 .* in \[1, 2\], .* got {count}"):
            gdn.build(batch, num_draft_tokens=rows, num_accepted_tokens=accepted, num_spec_tokens=1)


@pytest.mark.parametrize("name", ["num_draft_tokens", "num_accepted_tokens"])
@pytest.mark.parametrize(
    "value, message",
    [(1.9, "must be int32, got float32"), (2**32 + 1, "must fit int32, got 4294967297")],
)
def test_counts_that_are_not_int32_raise(name, value, message):
    batch = Case([1], [1], [[1]], FEW).batch()
    counts = dict.fromkeys(["num_draft_tokens", "num_accepted_tokens"], np.ones(5, np.int32))
    with pytest.raises(ValueError, match=f"{name} {message}"):
        gdn.build(batch, **counts | {name: np.full(5, value)}, num_spec_tokens=1)


def test_rows_without_tokens_count_as_prefills_unless_there_are_drafts():
    batch = Case([1, 5, 0], [4, 5, 3], [[1], [2, 3], [4]], FEW).batch()
    without = gdn.build(batch)
    assert (without.num_decodes, without.num_prefills) == (1, 2)
    drafts = np.array([1, -1, -1, -1, -1], np.int32)
    accepted = np.ones(5, np.int32)
    spec = gdn.build(
        batch, num_draft_tokens=drafts, num_accepted_tokens=accepted, num_spec_tokens=1
    )
    assert (spec.num_spec_decodes, spec.num_prefills) == (1, 1)
