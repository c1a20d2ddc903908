"""metadata.common against slow Python on random batches."""

import functools

import jax
import numpy as np
from hypothesis import given

from jaxkv.metadata import common

from .batches import Case, cases, every_batch


@functools.cache
def compiled():
    return jax.jit(common.token_to_request, static_argnums=1)


@every_batch
@given(cases())
def test_token_to_request(case: Case):
    want = np.zeros(case.bounds.max_num_tokens, np.int32)
    want[: case.num_tokens] = np.repeat(np.arange(case.num_reqs), case.query_lens)
    got = compiled()(case.batch().query_start_loc, case.bounds.max_num_tokens)
    np.testing.assert_array_equal(got, want)
