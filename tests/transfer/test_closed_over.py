"""Pools, caches and arrays that a traced function closes over: constants of its program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util.transfer_cases import assert_rejected, make_case

IDS = np.array([1, 2], np.int32)
OPERATIONS = ["load_pages", "store_pages", "start_load", "start_store"]


def call_with(operation, closed):
    """A jitted call that closes over the arguments named in `closed`, and its other arguments."""
    case = make_case()
    state = {"pool": case.pool(), "cache": case.cache()}
    constants = {name: state[name] for name in closed}
    rest = {name: value for name, value in state.items() if name not in closed}

    @jax.jit
    def step(rest):
        state = {**rest, **constants}
        return getattr(jaxkv, operation)(state["pool"], state["cache"], IDS, IDS)

    return lambda: step(rest)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "closed, named",
    [(("pool",), "pool"), (("cache",), "cache"), (("pool", "cache"), "pool")],
    ids=["pool", "cache", "both"],
)
def test_closed_over_state_is_rejected(operation, closed, named):
    """Otherwise the program keeps its pages, also after a donated store."""
    words = (f"{operation}: {named} is closed over", f"pass {named} as an argument")
    assert_rejected(call_with(operation, closed), ValueError, *words)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_closed_over_groups_are_rejected(operation):
    case = make_case()
    pools, ids = {"a": case.pool()}, {"a": IDS}
    step = jax.jit(lambda caches: getattr(jaxkv, operation)(pools, caches, ids, ids))
    assert_rejected(lambda: step({"a": case.cache()}), ValueError, "pool is closed over")


@pytest.mark.parametrize("operation", ["swap_blocks", "start_swap"])
@pytest.mark.parametrize("closed", ["src", "dst"])
def test_closed_over_blocks_are_rejected(closed, operation):
    blocks = jnp.zeros((3, 8))

    @jax.jit
    def step(passed):
        arrays = {"src": passed, "dst": passed, closed: blocks}
        return getattr(jaxkv, operation)(arrays["src"], arrays["dst"], IDS, IDS)

    assert_rejected(lambda: step(blocks), ValueError, f"{operation}: {closed} is closed over")


def test_closed_over_pool_in_a_loop_body_is_rejected():
    """The body of a loop is traced, also outside jit."""
    case = make_case()
    pool = case.pool()

    def body(_, cache):
        return jaxkv.load_pages(pool, cache, IDS, IDS)

    call = lambda: jax.lax.fori_loop(0, 1, body, case.cache())  # noqa: E731
    assert_rejected(call, ValueError, "load_pages: pool is closed over")


def test_explain_accepts_closed_over_state():
    case = make_case()
    pool, cache = case.pool(), case.cache()
    texts = []

    @jax.jit
    def step(x):
        texts.append(jaxkv.explain(jaxkv.load_pages, pool, cache, IDS, IDS))
        return x

    step(1)
    assert texts[0].startswith("load_pages: ")


def test_constant_ids_and_numpy_blocks_are_accepted():
    ids, blocks = jnp.array([1, 2], jnp.int32), np.arange(24.0, dtype=np.float32).reshape(3, 8)
    step = jax.jit(lambda dst: jaxkv.swap_blocks(blocks, dst, ids, ids))
    np.testing.assert_array_equal(step(jnp.zeros((3, 8)))[1:], blocks[1:])
