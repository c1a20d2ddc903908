"""Below a guard, nothing waits: steps are dispatched behind work that has not run.

XLA's own waits make no CUDA call (the device wakes the host through a host function), so one test
is not enough: work queued before shows any wait, CUPTI shows those of handlers, and a copy to the
host that another thread makes shows a read. Each has its control.
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

QUEUED = 10  # few enough: XLA itself holds the host when some tens of programs are in flight


@pytest.fixture
def step():
    """Dispatches a step that moves pages both ways; gives its token, which it computed slowly."""
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
    """Ready only when the device has ended long work, which it has just been given."""
    return [step() for _ in range(QUEUED)][-1]


def synchronisations(calls: Counter[str]) -> dict[str, int]:
    """Calls that make their thread wait for the device."""
    return {
        function: number
        for function, number in calls.items()
        if "Synchronize" in function or ("Memcpy" in function and "Async" not in function)
    }


def copies_to_host(calls: Counter[str]) -> int:
    return sum(number for function, number in calls.items() if "DtoH" in function)


def test_guarded_steps_wait_for_nothing(step):
    with jaxkv.forbid_host_sync(), count_cuda_calls() as (own, others):
        tokens = []
        for _ in range(QUEUED):
            tokens.append(step())
            jaxkv.check_errors()
        behind = tokens[QUEUED // 2]  # had one of the later steps waited, it would be ready
        assert not behind.is_ready()
    assert any("Launch" in function for function in own), "nothing was counted"
    assert not synchronisations(own)
    assert not copies_to_host(own + others)


def test_control_a_read_waits_and_copies(step, queued):
    with count_cuda_calls() as (_, others):
        np.asarray(step())
    assert queued.is_ready()
    assert copies_to_host(others)


def test_control_a_synchronisation_is_counted(queued):
    with count_cuda_calls() as (own, _):
        native.extension().synchronize_device(0)
    queued.block_until_ready()  # JAX hears of it from a thread of its own, maybe a moment later
    assert synchronisations(own)
