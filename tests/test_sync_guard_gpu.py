"""A guarded step makes no CUDA call that waits, counted below JAX by CUPTI."""

from functools import partial

import jax
import numpy as np
import pytest
from cases import as_ids, distinct_ids, make_case
from cuda_calls import count_cuda_calls, synchronisations
from gpu_controls import slow_input, slow_zero

import jaxkv

pytestmark = pytest.mark.gpu

STEPS = 8


@pytest.fixture
def step():
    """A compiled step that computes for long and moves pages both ways; call it for the next."""
    case = make_case("page_first_direct", dtype="int8")
    ids = [as_ids(side, None) for side in distinct_ids(case, 4)]
    state = [case.pool(), case.cache(), slow_input()]

    @partial(jax.jit, donate_argnums=(0, 1))
    def compiled(pool, cache, x, host_pages, device_pages):
        cache = jaxkv.load_pages(pool, cache, host_pages, device_pages)
        token = slow_zero(x)
        cache = jax.tree.map(lambda buffer: buffer + token.astype("int8"), cache)
        return jaxkv.store_pages(pool, cache, device_pages, host_pages), cache, token

    def step():
        *state[:2], token = compiled(*state, *ids)
        return token

    jax.block_until_ready([step(), step()])
    return step


def test_guarded_steps_make_no_synchronisation_call(step):
    with jaxkv.forbid_host_sync(), count_cuda_calls() as (own, others):
        for _ in range(STEPS):
            token = step()
            jaxkv.check_errors()
        ahead = not token.is_ready()
    assert ahead, "the device had ended all steps before the host had dispatched them"
    assert (own + others).total() >= STEPS, "no call was seen: nothing was counted"
    assert not synchronisations(own)


def test_a_read_makes_synchronisation_calls(step):
    token = step()
    with count_cuda_calls() as (own, _):
        np.asarray(token)
    assert synchronisations(own)
