"""metadata.ragged_paged against slow Python on random batches."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import BatchMetadata, ragged_paged
from tests.util.batches import FEW, Case, cases, every_batch
from tests.util.splits import Part, equal, slots


@functools.cache
def compiled(**options):
    return jax.jit(functools.partial(ragged_paged.build, **options))


@every_batch
@given(cases(), st.booleans(), st.sampled_from(["table", "flat", "packed"]))
def test_build(case: Case, ordered: bool, pages: str):
    case = case.decodes_first() if ordered else case
    size, everything = case.bounds, Part(case, 0, case.num_reqs)
    decodes = 0
    while decodes < case.num_reqs and case.query_lens[decodes] == 1:
        decodes += 1
    positions = np.zeros(size.max_num_tokens, np.int32)
    positions[: case.num_tokens] = [
        position
        for query, context in zip(case.query_lens, case.seq_lens, strict=True)
        for position in range(context - query, context)
    ]
    num_pages = [-(-tokens // size.block_size) for tokens in case.seq_lens]
    packed = np.zeros(size.max_num_reqs * size.max_blocks, np.int32)
    packed[: sum(num_pages)] = [
        page for table, n in zip(case.tables, num_pages, strict=True) for page in table[:n]
    ]
    table = everything.tables()
    want = {
        "input_positions": positions,
        "slot_mapping": slots(case),
        "kv_lens": everything.lens(case.seq_lens),
        "page_indices": {"table": table, "flat": table.ravel(), "packed": packed}[pages],
        "cu_q_lens": everything.starts(case.query_lens),
        "cu_kv_lens": everything.starts([n * size.block_size for n in num_pages]),
        "num_seqs": [case.num_reqs],
        "distribution": [decodes, decodes, case.num_reqs],
    }
    equal(compiled(pages=pages)(case.batch()), want)


ROWS = Case([1, 2], [9, 6], [[5, 6, 7], [8, 9]], FEW)


def test_sufficient_max_pages():
    got = compiled(pages="packed", max_pages=5)(ROWS.batch())
    np.testing.assert_array_equal(got.page_indices, [5, 6, 7, 8, 9])


@pytest.mark.cpu_only
@pytest.mark.parametrize("used", ["page_indices", "cu_kv_lens"])
def test_exceeded_max_pages_raises(used: str):
    """Also where a program uses only one of the truncated results."""
    build = functools.partial(ragged_paged.build, pages="packed", max_pages=4)
    step = jax.jit(lambda batch: getattr(build(batch), used))
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"ragged_paged.build: .* needs 5, .* max_pages = 4"
    ):
        jax.block_until_ready(step(ROWS.batch()))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pages": "ragged"}, '"table", "flat" or "packed", got \'ragged\''),
        ({"pages": "flat", "max_pages": 4}, 'requires pages="packed"'),
        ({"pages": "packed", "max_pages": 0}, "max_pages must be >= 1, got 0"),
        ({"pages": "packed", "max_pages": 2**29}, "536870912 pages of 4 tokens"),
    ],
)
def test_invalid_arguments_raise(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        ragged_paged.build(ROWS.batch(), **options)


def long_rows(num_reqs: int, max_blocks: int) -> BatchMetadata:
    """Rows of full contexts, in blocks of 2**26 tokens."""
    return BatchMetadata.from_host(
        [1] * num_reqs,
        [max_blocks * 2**26] * num_reqs,
        [range(max_blocks)] * num_reqs,
        max_num_reqs=num_reqs,
        max_num_tokens=num_reqs,
        max_blocks=max_blocks,
        block_size=2**26,
    )


@pytest.mark.parametrize("pages", ["table", "flat", "packed"])
def test_page_tokens_up_to_int32(pages: Literal["table", "flat", "packed"]):
    got = ragged_paged.build(long_rows(1, 31), pages=pages)
    assert got.cu_kv_lens.tolist() == [0, 31 * 2**26]


def test_packed_pages_whose_tokens_may_exceed_int32_raise():
    with pytest.raises(ValueError, match=r"48 pages of 67108864 tokens exceed .* reduce max_pages"):
        ragged_paged.build(long_rows(3, 16), pages="packed")


@pytest.mark.parametrize("pages", ["table", "flat"])
def test_large_bounds_of_tables(pages: Literal["table", "flat"]):
    """The kernels of these formats do not read the sums of tokens; those of a real batch fit."""
    batch = long_rows(3, 16)
    build = functools.partial(ragged_paged.build, pages=pages)
    got = jax.jit(lambda batch: build(batch).page_indices)(batch)
    np.testing.assert_array_equal(got.ravel(), batch.block_table.ravel())
    lens = jnp.array([2**26 + 1, 1, 29 * 2**26 // 3], jnp.int32)
    short = dataclasses.replace(batch, seq_lens=lens)
    got = jax.block_until_ready(jax.jit(build)(short))
    assert (got.cu_kv_lens // 2**26).tolist() == [0, 2, 3, 13]


@pytest.mark.cpu_only
@pytest.mark.parametrize("pages", ["table", "flat"])
def test_sums_of_tokens_above_int32_raise(pages: Literal["table", "flat"]):
    step = jax.jit(lambda batch: ragged_paged.build(batch, pages=pages).cu_kv_lens)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match=r"ragged_paged.build: .* needs 48, .* cu_kv_lens = 31"
    ):
        jax.block_until_ready(step(long_rows(3, 16)))
