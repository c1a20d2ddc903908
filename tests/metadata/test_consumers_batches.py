"""Attention through batches derived from a batch: local attention, cascade, fast prefill."""

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxkv import metadata
from jaxkv.metadata import BatchMetadata
from tests.util.attention_reference import Problem, attend_pages, merge, written
from tests.util.batches import FEW, ONE, Case, cases

CHUNK = 8  # tokens of local attention; a multiple of both block sizes
some_batches = hypothesis.settings(max_examples=60)


def rows_and_seen(batch: BatchMetadata) -> tuple[Any, Any]:
    """Row of each token, and its visible context length under a causal mask."""
    row = metadata.token_to_request(batch.query_start_loc, batch.max_num_tokens)
    return row, metadata.token_positions(batch) + 1


@jax.jit
def through_local_batches(batch, queries, new, cache):
    cache = written(cache, new, metadata.slot_mapping(batch, metadata.token_positions(batch)))
    local = metadata.local_attention.build(batch, CHUNK).batch
    row, seen = rows_and_seen(local)
    return attend_pages(queries, cache, local.block_table[row], seen)[0]


@some_batches
@given(cases(bounds=(ONE, FEW)))
def test_local_attention(case: Case):
    problem = Problem.random(case)
    inputs = case.batch(), problem.queries, problem.new, problem.cache()
    problem.check(through_local_batches(*inputs), chunk=CHUNK)


@jax.jit
def through_cascade(batch, queries, new, cache, num_common_blocks):
    cache = written(cache, new, metadata.slot_mapping(batch, metadata.token_positions(batch)))
    levels = metadata.cascade.build(batch, num_common_blocks)
    tokens = jnp.zeros(batch.max_num_tokens, jnp.int32)
    prefix = levels.prefix.block_table[tokens], levels.prefix.seq_lens[tokens]
    row, seen = rows_and_seen(levels.suffix)
    suffix = levels.suffix.block_table[row], seen
    return merge(*(attend_pages(queries, cache, *level) for level in (prefix, suffix)))


@some_batches
@given(cases(bounds=(FEW,), min_reqs=1), st.integers(0, 6))
def test_cascade(case: Case, num_shared: int):
    computed = np.subtract(case.seq_lens, case.query_lens)
    size = case.bounds.block_size
    blocks = metadata.cascade.common_prefix_blocks(num_shared, computed, size)
    shared = case.tables[0][:blocks]
    case = dataclasses.replace(case, tables=[shared + table[blocks:] for table in case.tables])
    problem = Problem.random(case)
    for context in problem.contexts:
        context[: blocks * size] = problem.contexts[0][: blocks * size]
    inputs = case.batch(), problem.queries, problem.new, problem.cache()
    problem.check(through_cascade(*inputs, blocks))


@functools.partial(jax.jit, static_argnames="max_tokens")
def last_tokens(batch, queries, new, cache, max_tokens):
    """Attention of each row's last token only, where all tokens of the row were written."""
    cache = written(cache, new, metadata.slot_mapping(batch, metadata.token_positions(batch)))
    cut = metadata.kv_sharing.build(
        batch, metadata.logits_indices(batch)[:max_tokens], batch.num_reqs
    )
    row, seen = rows_and_seen(cut.batch)
    pages = cut.batch.block_table[row]
    out = attend_pages(queries[cut.logits_indices_padded], cache, pages, seen)[0]
    return out[metadata.logits_indices(cut.batch)]


@some_batches
@given(cases(bounds=(FEW,)))
def test_fast_prefill(case: Case):
    problem = Problem.random(case)
    inputs = case.batch(), problem.queries, problem.new, problem.cache()
    got = np.asarray(last_tokens(*inputs, max_tokens=FEW.max_num_reqs))[: case.num_reqs]
    last, some = np.array(case.starts[1:], int) - 1, np.array(case.query_lens, int) > 0
    want = problem.attention()[last[some]]
    np.testing.assert_allclose(got[some], want, rtol=2e-5, atol=2e-5)
