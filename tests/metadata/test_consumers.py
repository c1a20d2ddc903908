"""Attention through metadata equals dense attention, in plain JAX and in JAX's own kernels."""

import functools
import warnings
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import flashinfer, ragged_paged, triton, turboquant
from jaxkv.metadata.common import BatchMetadata
from tests.util.attention_reference import (
    HEAD_DIM,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    Problem,
    attend,
    attend_pages,
    merge,
    written,
)
from tests.util.batches import FEW, ONE, Bounds, Case, cases

SMALL = (ONE, FEW, FEW)
some_batches = hypothesis.settings(max_examples=30)


def rows_of(starts: Any, tokens: Any) -> Any:
    """Row of each token, and its position in the row."""
    row = jnp.searchsorted(starts[1:], tokens, side="right")
    row = jnp.minimum(row, starts.shape[0] - 2)
    return row, tokens - starts[row]


def causal(starts: Any, seq_lens: Any, tables: Any, tokens: Any) -> tuple[Any, Any]:
    """Pages of each token's row, and the length of the context visible to the token."""
    row, number = rows_of(starts, tokens)
    return tables[row], seq_lens[row] - (starts[row + 1] - starts[row]) + number + 1


def pages_of(part: flashinfer.PagedPart, indices: Any, width: int, page_size: int):
    """Pages of each row, int32[B, W], and their number of tokens, int32[B]."""
    begin, end = part.paged_kv_indptr[:-1], part.paged_kv_indptr[1:]
    tables = indices.at[begin[:, None] + jnp.arange(width)].get(mode="clip")
    full = jnp.maximum(end - begin - 1, 0) * page_size
    return tables, full + part.paged_kv_last_page_len


@functools.cache
def compiled(function, **options):
    return jax.jit(functools.partial(function, **options))


def check(attention: Any, case: Case, **options: Any) -> None:
    problem = Problem.random(case)
    inputs = case.batch(), problem.queries, problem.new, problem.cache()
    problem.check(compiled(attention, **options)(*inputs))


def tokens_of(batch: BatchMetadata) -> Any:
    return jnp.arange(batch.max_num_tokens, dtype=jnp.int32)


def two_parts(metadata: Any, tokens: Any, attention: Any) -> Any:
    """Decodes and prefills, each with separate token numbers."""
    decodes = metadata.num_decode_tokens
    return jnp.where(
        (tokens < decodes)[:, None, None],
        attention(metadata.decode, tokens),
        attention(metadata.prefill, jnp.maximum(tokens - decodes, 0)),
    )


def through_lists_of_pages(batch, queries, new, cache, threshold):
    meta = flashinfer.build(batch, decode_threshold=threshold)
    cache = written(cache, new, meta.slot_mapping)

    def attention(part, tokens):
        tables, kv_lens = pages_of(part, meta.paged_kv_indices, batch.max_blocks, batch.block_size)
        pages, seen = causal(part.qo_indptr, kv_lens, tables, tokens)
        return attend_pages(queries, cache, pages, seen)[0]

    return two_parts(meta, tokens_of(batch), attention)


def through_dense_tables(batch, queries, new, cache, threshold):
    meta = flashinfer.build_dense(batch, decode_threshold=threshold)
    cache = written(cache, new, meta.slot_mapping)

    def attention(part, tokens):
        pages, seen = causal(part.cum_seq_lens_q, part.seq_lens, part.block_tables, tokens)
        return attend_pages(queries, cache, pages, seen)[0]

    return two_parts(meta, tokens_of(batch), attention)


@pytest.mark.parametrize("attention", [through_lists_of_pages, through_dense_tables])
@pytest.mark.parametrize("threshold", [1, 3])
@some_batches
@given(case=cases(bounds=SMALL))
def test_flashinfer(attention, threshold: int, case: Case):
    check(attention, case.decodes_first(threshold), threshold=threshold)


WORLD_SIZE, INTERLEAVE = 3, 2


@functools.cache
def of_a_rank():
    """Attention of all tokens over one rank's part; for prefills over earlier tokens only."""

    @jax.jit
    def attention(batch, queries, new, cache, rank):
        meta = flashinfer.build(
            batch, dcp_world_size=WORLD_SIZE, dcp_rank=rank, dcp_interleave=INTERLEAVE
        )
        cache = written(cache, new, meta.slot_mapping)
        results = []
        for part, first in (meta.decode, 0), (meta.prefill, meta.num_decode_tokens):
            row, _ = rows_of(part.qo_indptr, jnp.maximum(tokens_of(batch) - first, 0))
            tables, kv_lens = pages_of(
                part, meta.paged_kv_indices, batch.max_blocks, batch.block_size
            )
            results.append(attend_pages(queries, cache, tables[row], kv_lens[row]))
        is_decode = (tokens_of(batch) < meta.num_decode_tokens)[:, None]
        (decode, decode_sums), (prefill, prefill_sums) = results
        output = jnp.where(is_decode[..., None], decode, prefill)
        return output, jnp.where(is_decode, decode_sums, prefill_sums)

    return attention


@functools.cache
def of_new_tokens():
    """Attention of prefills over the tokens of this step."""

    @jax.jit
    def attention(batch, queries, new):
        meta = flashinfer.build(batch, dcp_world_size=WORLD_SIZE, dcp_interleave=INTERLEAVE)
        tokens = tokens_of(batch) - meta.num_decode_tokens
        row, _ = rows_of(meta.prefill.qo_indptr, jnp.maximum(tokens, 0))
        is_prefill = (tokens >= 0)[:, None]
        seen = is_prefill & (row[:, None] == row) & (tokens <= tokens[:, None]) & (tokens >= 0)
        entries = jnp.broadcast_to(new, (tokens.size, *new.shape))
        return attend(queries, entries, seen)

    return attention


@some_batches
@given(cases(bounds=SMALL))
def test_flashinfer_under_context_parallelism(case: Case):
    case = case.decodes_first()
    problem = Problem.random(case)
    parts = [
        of_a_rank()(
            case.batch(),
            problem.queries,
            problem.new,
            problem.cache(world_size=WORLD_SIZE, rank=rank, interleave=INTERLEAVE),
            rank,
        )
        for rank in range(WORLD_SIZE)
    ]
    parts.append(of_new_tokens()(case.batch(), problem.queries, problem.new))
    problem.check(merge(*parts))


def through_triton(batch, queries, new, cache):
    meta = triton.build(
        batch, num_q_heads=NUM_Q_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM
    )
    cache = written(cache, new, meta.slot_mapping)
    pages, seen = causal(meta.query_start_loc, meta.seq_lens, meta.block_table, tokens_of(batch))
    return attend_pages(queries, cache, pages, seen)[0]


def through_turboquant_parts(batch, queries, new, cache):
    meta = turboquant.build(batch)
    cache = written(cache, new, meta.slot_mapping)

    def attention(part, tokens):
        pages, seen = causal(part.query_start_loc, part.seq_lens, part.block_table, tokens)
        return attend_pages(queries, cache, pages, seen)[0]

    return two_parts(meta, tokens_of(batch), attention)


def through_turboquant_tokens(batch, queries, new, cache):
    meta = turboquant.build(batch)
    cache = written(cache, new, meta.slot_mapping)
    pages = meta.block_table[meta.token_to_req]
    return attend_pages(queries, cache, pages, meta.token_seq_lens)[0]


def through_ragged_pages(batch, queries, new, cache, pages):
    meta = ragged_paged.build(batch, pages=pages)
    cache = written(cache, new, meta.slot_mapping)
    column, rows = jnp.arange(batch.max_blocks), meta.kv_lens.shape[0]
    if pages == "packed":
        begin = meta.cu_kv_lens[:-1] // batch.block_size
        tables = meta.page_indices.at[begin[:, None] + column].get(mode="clip")
    else:
        tables = meta.page_indices.reshape(rows, -1)
    named, seen = causal(meta.cu_q_lens, meta.kv_lens, tables, tokens_of(batch))
    return attend_pages(queries, cache, named, seen)[0]


OTHERS = [through_triton, through_turboquant_parts, through_turboquant_tokens]


@pytest.mark.parametrize("attention", OTHERS)
@some_batches
@given(case=cases(bounds=SMALL), ordered=st.booleans())
def test_triton_and_turboquant(attention, case: Case, ordered: bool):
    check(attention, case.decodes_first() if ordered else case)


@pytest.mark.parametrize("pages", ["table", "flat", "packed"])
@some_batches
@given(case=cases(bounds=SMALL))
def test_ragged_pages(pages: str, case: Case):
    check(through_ragged_pages, case, pages=pages)


@hypothesis.settings(max_examples=3)
@given(cases(bounds=(Bounds(3, 12, 4, 4),), min_query=1, min_reqs=1))
def test_ragged_paged_attention_of_jax(case: Case):
    """The reference of JAX's kernel for TPUs."""
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as of_jax

    problem = Problem.random(case)
    meta = compiled(ragged_paged.build)(case.batch())
    cache = written(jnp.asarray(problem.cache()), problem.new, meta.slot_mapping)
    pages = cache.swapaxes(2, 3).reshape(*cache.shape[:2], 2 * NUM_KV_HEADS, HEAD_DIM)
    with jax.default_matmul_precision("highest"):
        got = of_jax.ref_ragged_paged_attention(
            jnp.asarray(problem.queries),
            pages,
            meta.kv_lens,
            meta.page_indices,
            meta.cu_q_lens,
            meta.num_seqs,
        )
    problem.check(got)


@functools.cache
def paged_attention_of_jax():
    with warnings.catch_warnings():
        # Since 0.11 its import warns that it is deprecated; 0.12 still has it.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    @jax.jit
    def attention(batch, queries, new, cache):
        meta = ragged_paged.build(batch)
        cache = written(cache, new, meta.slot_mapping)
        return paged_attention(
            queries,
            *(cache[:, :, kv].transpose(2, 0, 1, 3) for kv in (0, 1)),
            meta.page_indices,
            meta.kv_lens,
            pages_per_compute_block=2,
            k_splits=2,
            interpret=jax.default_backend() != "gpu",
        )

    return attention


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@hypothesis.settings(max_examples=10)
@given(cases(bounds=(Bounds(8, 8, 8, 16),), min_query=1, max_query=1))
def test_paged_attention_of_jax(case: Case):
    """JAX's kernel for GPUs, interpreted elsewhere; it multiplies in TF32."""
    problem = Problem.random(case, head_dim=64)
    got = paged_attention_of_jax()(case.batch(), problem.queries, problem.new, problem.cache())
    problem.check(got, tolerance=1e-2 if jax.default_backend() == "gpu" else 2e-5)
    assert not got[case.num_reqs :].any()
