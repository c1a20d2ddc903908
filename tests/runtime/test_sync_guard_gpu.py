"""No waits under a guard: steps are dispatched behind work that has not run.

XLA's own waits make no CUDA call (the device wakes the host through a host function), so one test
is not enough: previously queued work detects any wait, CUPTI those of handlers, and a copy to the
host by another thread a read. Each has a negative control.
"""

from collections import Counter
from functools import partial

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime import native
from tests.util.cuda_calls import count_cuda_calls
from tests.util.slow_streams import slow_input, slow_zero
from tests.util.transfer_cases import as_ids, distinct_ids, make_case

pytestmark = pytest.mark.gpu

QUEUED = 10  # few enough: XLA blocks the host with some tens of programs in flight


@pytest.fixture
def step():
    """Dispatches a step that copies pages both ways; returns its token, the result of slow work."""
    case = make_case("page_first_direct", dtype="int8")
    ids = [as_ids(side, None) for side in distinct_ids(case, 4)]
    state = [case.pool(), case.cache(), slow_input()]

    @partial(jax.jit, donate_argnums=(0, 1))
    def compiled(pool, cache, x, host_pages, device_pages):
        cache = jaxkv.load_pages(pool, cache, host_pages, device_pages)
        token = slow_zero(x)
        cache = jax.tree.map(lambda buffer: buffer + token.astype("int8"), cache)
        return jaxkv.store_pages(pool, cache, host_pages, device_pages), cache, token

    def step():
        *state[:2], token = compiled(*state, *ids)
        return token

    jax.block_until_ready([step(), step()])
    return step


@pytest.fixture
def queued(step) -> jax.Array:
    """Ready only when the device has completed the long work that was just enqueued."""
    return [step() for _ in range(QUEUED)][-1]


def synchronisations(calls: Counter[str]) -> dict[str, int]:
    """Calls that block their thread until the device is done."""
    return {
        function: number
        for function, number in calls.items()
        if "Synchronize" in function or ("Memcpy" in function and "Async" not in function)
    }


def copies_to_host(calls: Counter[str]) -> int:
    return sum(number for function, number in calls.items() if "DtoH" in function)


def test_steps_have_no_host_sync(step):
    with jaxkv.forbid_host_sync(), count_cuda_calls() as (own, others):
        tokens = []
        for _ in range(QUEUED):
            tokens.append(step())
            jaxkv.check_errors()
        behind = tokens[QUEUED // 2]  # ready if one of the later steps had waited
        assert not behind.is_ready()
    assert any("Launch" in function for function in own), "nothing was counted"
    assert not synchronisations(own)
    assert not copies_to_host(own + others)


def test_negative_control_read_synchronizes(step, queued):
    with count_cuda_calls() as (_, others):
        np.asarray(step())
    assert queued.is_ready()
    assert copies_to_host(others)


def test_negative_control_synchronization_is_counted(queued):
    with count_cuda_calls() as (own, _):
        native.extension().synchronize_device(0)
    queued.block_until_ready()  # JAX is notified by a thread of its own, maybe a moment later
    assert synchronisations(own)
