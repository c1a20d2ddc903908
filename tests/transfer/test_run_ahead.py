"""Copies that the host enqueues far ahead of the device, as a serving engine does.

No step is waited for. Ids are made for each step and released with its call, and counts are not
read, so that their memory is used again while earlier steps have yet to run.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.recurrent import DeferredCounts
from tests.util.slow_streams import slow_input, slow_zero
from tests.util.transfer_cases import Case, after, distinct_ids, donating, make_case

STEPS, STEPS_BETWEEN_SLOW_WORK = 200, 20
ON_A_GPU = jax.default_backend() == "gpu"
NAMED = ("kernel", "dma", "pallas") if ON_A_GPU else ("host",)
FORMS: dict[str, Callable[..., Iterable[Any]]] = {
    "pair": jaxkv.HostIdPair,
    "lists": lambda *ids: map(jaxkv.HostIds, ids),
    "device": lambda *ids: map(jnp.asarray, ids),
}

copy_of = cache(donating)  # compiled once for each direction, implementation and form of ids


@partial(jax.jit, donate_argnums=0)
def after_slow_work(device_cache, x):
    zero = slow_zero(x) if ON_A_GPU else x[0, 0]
    return jax.tree.map(lambda buffer: buffer + zero.astype(buffer.dtype), device_cache)


@jax.jit
def counts_of(number):
    counts = jnp.full(8, number, jnp.int32)  # as large as the ids of a step
    return DeferredCounts.start(counts, step=number, request_ids=counts)


@pytest.mark.parametrize("seed", range(3))
def test_random_copies(seed):
    rng = np.random.default_rng(seed)
    case = make_case(dtype="int8", seed=seed)
    x = slow_input() if ON_A_GPU else jnp.zeros((1, 1), jnp.int32)
    pool, device_cache, want = case.pool(), case.cache(), case
    for number in range(STEPS):
        if number % STEPS_BETWEEN_SLOW_WORK == 0:
            device_cache = after_slow_work(device_cache, x)
        direction, named = rng.choice(["load", "store"]), rng.choice(NAMED)
        form = rng.choice(["pair", "lists"] if named == "dma" else list(FORMS))
        ids = distinct_ids(case, 5, seed=number)
        step = copy_of(direction, implementation=named)
        out = step(pool, device_cache, *FORMS[form](*ids))
        pool, device_cache = after(direction, out, pool, device_cache)
        counts_of(number)
        changed = want.expected(direction, *ids)
        want = Case(case.layout, **{"host": want.host, "device": want.device, **changed})
    jaxkv.check_errors((pool, device_cache))
    want.assert_holds(pool, device_cache)
