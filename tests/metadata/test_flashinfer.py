"""metadata.flashinfer against slow Python on random batches."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import flashinfer
from jaxkv.metadata.common import BatchMetadata
from tests.util.batches import FEW, ONE, SOME, Case, cases, every_batch
from tests.util.splits import counts, equal, parts, slots


@functools.cache
def compiled(build, **options):
    return jax.jit(functools.partial(build, **options))


@functools.cache
def compiled_for_ranks(world_size: int, interleave: int):
    def build(batch: BatchMetadata, rank: jax.Array):
        return flashinfer.build(
            batch, dcp_world_size=world_size, dcp_rank=rank, dcp_interleave=interleave
        )

    return jax.jit(build)


def paged(case: Case, threshold: int, lens: list[int], slot_mapping: np.ndarray) -> dict:
    """Output of `build`, with the lengths whose pages are counted."""
    size = case.bounds
    num_pages = [-(-tokens // size.block_size) for tokens in lens]
    indices = [page for table, n in zip(case.tables, num_pages, strict=True) for page in table[:n]]
    last_page_len = [
        tokens - (n - 1) * size.block_size if n else 0
        for tokens, n in zip(lens, num_pages, strict=True)
    ]
    padding = [0] * (size.max_num_reqs * size.max_blocks - len(indices))
    decode, prefill = (
        {
            "qo_indptr": part.starts(case.query_lens),
            "paged_kv_indptr": part.starts(num_pages, base=sum(num_pages[: part.first])),
            "paged_kv_last_page_len": part.lens(last_page_len),
        }
        for part in parts(case, threshold, uniform=True)
    )
    return {
        "all": {
            **counts(case, threshold, uniform=True),
            "slot_mapping": slot_mapping,
            "paged_kv_indices": [*indices, *padding],
        },
        "decode": decode,
        "prefill": prefill,
    }


def check(got, want: dict) -> None:
    equal(got, want["all"])
    equal(got.decode, want["decode"])
    equal(got.prefill, want["prefill"])


@every_batch
@given(cases(), st.booleans(), st.sampled_from([1, 3]))
def test_pages(case: Case, ordered: bool, threshold: int):
    case = case.decodes_first(threshold) if ordered else case
    got = compiled(flashinfer.build, decode_threshold=threshold)(case.batch())
    check(got, paged(case, threshold, case.seq_lens, slots(case)))


@every_batch
@given(cases(bounds=(ONE, FEW, FEW, SOME)), st.sampled_from([(2, 1), (3, 2), (1, 2)]), st.data())
def test_pages_of_one_rank(case: Case, group: tuple[int, int], data):
    case = case.decodes_first()
    world_size, interleave = group
    rank = data.draw(st.integers(0, world_size - 1))
    decode, _ = parts(case, uniform=True)
    context = [
        seq if row < decode.end or world_size == 1 else seq - query
        for row, (seq, query) in enumerate(zip(case.seq_lens, case.query_lens, strict=True))
    ]
    local = [sum(p // interleave % world_size == rank for p in range(tokens)) for tokens in context]
    got = compiled_for_ranks(world_size, interleave)(case.batch(), np.int32(rank))
    check(
        got,
        paged(case, 1, local, slots(case, world_size=world_size, rank=rank, interleave=interleave)),
    )


@every_batch
@given(cases(), st.booleans(), st.sampled_from([1, 3]))
def test_dense(case: Case, ordered: bool, threshold: int):
    case = case.decodes_first(threshold) if ordered else case
    got = compiled(flashinfer.build_dense, decode_threshold=threshold)(case.batch())
    equal(got, {**counts(case, threshold, uniform=True), "slot_mapping": slots(case)})
    num_pages = [-(-tokens // case.bounds.block_size) for tokens in case.seq_lens]
    for part, view in zip(
        parts(case, threshold, uniform=True), (got.decode, got.prefill), strict=True
    ):
        want = {
            "block_tables": part.tables(),
            "seq_lens": part.lens(case.seq_lens),
            "cum_seq_lens_q": part.starts(case.query_lens),
            "cum_seq_lens_kv": part.starts(num_pages),
            "max_q_len": part.lens(case.query_lens).max(),
            "max_seq_len": max(case.seq_lens, default=0),
        }
        equal(view, want)


def full_batch() -> Case:
    """Every row uses every block."""
    tokens = FEW.max_blocks * FEW.block_size
    tables = np.arange(1, 1 + FEW.max_num_reqs * FEW.max_blocks).reshape(FEW.max_num_reqs, -1)
    return Case([1] * FEW.max_num_reqs, [tokens] * FEW.max_num_reqs, tables.tolist(), FEW)


def test_full_batch_reaches_the_bound():
    case = full_batch()
    got = flashinfer.build(case.batch())
    np.testing.assert_array_equal(got.paged_kv_indices, np.ravel(case.tables))
    assert got.decode.paged_kv_indptr[-1] == got.paged_kv_indices.size


@pytest.mark.parametrize("spare", [0, 1])
def test_sufficient_max_pages(spare: int):
    case = Case([1, 2], [9, 6], [[5, 6, 7], [8, 9]], FEW)
    got = compiled(flashinfer.build, max_pages=5 + spare)(case.batch())
    np.testing.assert_array_equal(got.paged_kv_indices, [5, 6, 7, 8, 9] + [0] * spare)
    np.testing.assert_array_equal(got.prefill.paged_kv_indptr, [3, 5, 5, 5, 5, 5])


TRUNCATED = {
    "all": lambda got: got,
    "indices": lambda got: got.paged_kv_indices,
    "decode": lambda got: got.decode.paged_kv_indptr,
    "prefill": lambda got: got.prefill.paged_kv_indptr,
}


def too_few_pages(used: str):
    """Those results of a program without the others, which XLA eliminates."""
    build = functools.partial(flashinfer.build, max_pages=29)
    step = jax.jit(lambda batch: TRUNCATED[used](build(batch)))
    return jax.block_until_ready(step(full_batch().batch()))


def test_sum_of_context_and_block_size_may_exceed_int32():
    bounds = {"max_num_reqs": 2, "max_num_tokens": 2, "max_blocks": 2, "block_size": 2**30}
    batch = BatchMetadata.from_host([1, 1], [2**30 + 5, 3], [[1, 1], [1]], **bounds)
    got = flashinfer.build(batch)
    assert got.decode.paged_kv_indptr.tolist() == [0, 2, 3]
    assert got.decode.paged_kv_last_page_len.tolist() == [5, 3]
    assert got.paged_kv_indices.tolist() == [1, 1, 1, 0]


@pytest.mark.cpu_only
@pytest.mark.parametrize("used", TRUNCATED)
def test_exceeded_max_pages_raises(used: str):
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"flashinfer.build: .* needs 30, .* max_pages = 29"
    ):
        too_few_pages(used)


@pytest.mark.gpu
@pytest.mark.parametrize("used", TRUNCATED)
def test_exceeded_max_pages_raises_bound_error_on_gpu(used: str):
    import jaxkv

    got = too_few_pages(used)
    if used == "all":
        assert got.decode.paged_kv_indptr[-1] == got.paged_kv_indices.size == 29
    message = r"flashinfer.build: .* needs 30, .* max_pages = 29"
    with pytest.raises(jaxkv.BoundError, match=message) as raised:
        jaxkv.check_errors()
    assert raised.value.operation == "flashinfer.build"


def test_draft_tokens_under_context_parallelism_raise():
    with pytest.raises(ValueError, match="decode_threshold must be 1 with dcp_world_size=4, got 2"):
        flashinfer.build(full_batch().batch(), decode_threshold=2, dcp_world_size=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dcp_world_size": 2, "dcp_rank": 3}, r"dcp_rank must be in \[0, 2\), got 3"),
        ({"dcp_rank": 1}, r"dcp_rank must be in \[0, 1\), got 1"),
        ({"dcp_world_size": 0}, "dcp_world_size must be >= 1, got 0"),
        ({"dcp_interleave": 0}, "dcp_interleave must be >= 1, got 0"),
        ({"dcp_interleave": 3}, "dcp_interleave=3 tokens must divide block_size=4 tokens"),
    ],
)
def test_invalid_context_parallelism_raises(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        flashinfer.build(full_batch().batch(), **arguments)


def test_max_pages_below_one_raises():
    with pytest.raises(ValueError, match="max_pages must be >= 1, got 0"):
        flashinfer.build(full_batch().batch(), max_pages=0)
