"""Programs that fail, or time out, while their asynchronous copies are in flight, on a GPU.

XLA frees the arrays of such a program, and gives their memory to later ones.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.transfer import api, async_calls
from tests.util.slow_streams import settle
from tests.util.transfer_cases import Case, as_ids, distinct_ids, make_case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Some donated buffers")]

ROUNDS, LAYERS, PAGES = 4, 6, 40
# 480 MiB: about 10 ms in flight.
LARGE = {"num_layers": LAYERS, "page_size": 1024, "num_kv_heads": 8, "head_dim": 128}


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case("page_first_direct", dtype="int8", host_pages=48, device_pages=PAGES, **LARGE)


@pytest.fixture(scope="module")
def other() -> Case:
    return make_case("page_first_direct", dtype="int8", num_layers=1)


@pytest.mark.parametrize("fails", ["load_pages", "start_load"])
@pytest.mark.parametrize("named", ["dma", "kernel"])
def test_copies_in_flight_are_joined_when_a_later_call_fails(
    monkeypatch, case, other, named, fails
):
    """The ids of the later call are arrays that are no HostIds, which the handler rejects."""
    monkeypatch.setattr(async_calls, "_BYTES_AHEAD", 1 << 40)  # the whole copy at its start
    numpy_ids = distinct_ids(case, PAGES)
    ids = [as_ids(side, named) for side in numpy_ids]
    small = [as_ids(side, "dma") for side in distinct_ids(other, 4)]
    forged = [
        jax.tree.map(lambda words: jax.device_put(np.array(words), words.sharding), side)
        for side in small
    ]

    @partial(jax.jit, donate_argnames=("cache", "small"))
    def step(pool, cache, other_pool, small, ids, small_ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
        if fails == "load_pages":
            small = jaxkv.load_pages(other_pool, small, *small_ids, implementation="dma")
        else:
            second = jaxkv.start_load(other_pool, small, *small_ids, implementation="dma")
            second.wait(0)
            small = second.cache
        loading.wait(LAYERS - 1)
        return loading.cache, small

    def new_arrays() -> list[jax.Array]:
        return [jnp.full(like.shape, n, like.dtype) for n in range(2 * LAYERS)]

    pool, other_pool, cache = case.pool(), other.pool(), case.cache()
    like = jax.typeof(cache.layers[0][0])
    settle(step(pool, cache, other_pool, other.cache(), ids, small), new_arrays())
    for _ in range(ROUNDS):
        cache, other_cache = case.cache(), other.cache()
        settle(cache, other_cache)
        with pytest.raises((ValueError, RuntimeError), match="HostIds"):
            jax.block_until_ready(step(pool, cache, other_pool, other_cache, ids, forged))
        del cache, other_cache
        later = new_arrays()
        settle(later)
        for n, array in enumerate(later):
            assert bool((array == n).all()), f"array {n} was overwritten"
        del later
    jaxkv.check_errors()


@pytest.mark.parametrize("garbage", [[2, -7], [-7, 1], [2, 1 << 30], [1 << 30, 1]])
def test_pairs_of_a_reused_plan_stay_inside_the_arrays(monkeypatch, garbage):
    """As if XLA had reused the plan before the copy began: an error, but no other memory."""
    case = make_case("page_first_direct", dtype="int8")
    plan = jnp.array([1 << 20, 0, 1, 0, *garbage, 3, 2], np.int32)
    monkeypatch.setattr(api, "needs_plan", lambda ids: True)
    monkeypatch.setattr(api, "plan_pairs", lambda copy, ids: plan)

    @partial(jax.jit, donate_argnames="cache")
    def step(pool, cache, *ids):
        return jaxkv.load_pages(pool, cache, *ids, implementation="kernel")

    ids = jnp.arange(3, dtype=np.int32)
    pool = case.pool()
    cache = step(pool, case.cache(), ids, ids)
    want = case.expected("load", np.array([1, 3]), np.array([0, 2]))
    case.assert_holds(pool, cache, **want)
