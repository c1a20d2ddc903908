"""metadata.turboquant against slow Python on random batches."""

import functools

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import turboquant
from tests.util.batches import FEW, Case, cases, every_batch
from tests.util.splits import Part, counts, equal, parts, slots


@functools.cache
def compiled():
    return jax.jit(turboquant.build)


@every_batch
@given(cases(), st.booleans())
def test_build(case: Case, ordered: bool):
    case = case.decodes_first() if ordered else case
    everything = Part(case, 0, case.num_reqs)
    token_to_req, token_seq_lens = np.zeros((2, case.bounds.max_num_tokens), np.int32)
    token = 0
    for row, (query, context) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for seen in range(context - query + 1, context + 1):
            token_to_req[token], token_seq_lens[token] = row, seen
            token += 1
    split = counts(case)
    got = compiled()(case.batch())
    want = {
        **{name: split[name] for name in split if "prefill" not in name},
        "is_prefill": np.bool_(max(case.query_lens, default=0) > 1),
        "query_start_loc": everything.starts(case.query_lens),
        "seq_lens": everything.lens(case.seq_lens),
        "block_table": everything.tables(),
        "max_query_len": max(case.query_lens, default=0),
        "max_seq_len": max(case.seq_lens, default=0),
        "slot_mapping": slots(case),
        "token_to_req": token_to_req,
        "token_seq_lens": token_seq_lens,
    }
    equal(got, want)
    for part, view in zip(parts(case), (got.decode, got.prefill), strict=True):
        want = {
            "query_start_loc": part.starts(case.query_lens),
            "seq_lens": part.lens(case.seq_lens),
            "block_table": part.tables(),
            "max_query_len": part.lens(case.query_lens).max(),
            "max_seq_len": part.lens(case.seq_lens).max(),
        }
        equal(view, want)


def test_first_chunks_are_identified_by_prefill_lengths():
    """A long decode and a new prompt: the longest context is not the prompt's."""
    got = compiled()(Case([1, 5], [20, 5], [[1, 2, 3, 4, 5], [6, 7]], FEW).batch())
    assert got.max_seq_len == 20
    assert got.prefill.max_query_len == got.prefill.max_seq_len == 5
