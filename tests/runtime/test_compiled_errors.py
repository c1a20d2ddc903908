"""Errors of compiled calls on the CPU backend: cold, warm, and asynchronous.

Which of two types JAX raises depends on the path of the call: JaxRuntimeError from Python, at the
first call of a program and in a wait, ValueError from C++. The documentation tells users to catch
both. On a GPU, these errors are counted instead.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime.bounds import check_bounds
from tests.util.ranks import AXIS, memory_of, on_ranks
from tests.util.transfer_cases import make_case

pytestmark = pytest.mark.cpu_only

OF_COMPILED_CALLS = (jax.errors.JaxRuntimeError, ValueError)
GOOD, BAD = np.array([1, 2], np.int32), np.array([1, 99], np.int32)


@dataclasses.dataclass(frozen=True)
class Call:
    """A step of a state and ids, or another argument that may be wrong.

    Attributes:
      step: to be jitted; returns the state.
      state: makes a new state.
      good: the argument with which it succeeds.
      bad: the one with which it fails.
      message: of the error.
    """

    step: Callable[[Any, Any], Any]
    state: Callable[[], Any]
    good: Any
    bad: Any
    message: str


def copies() -> Iterator[tuple[str, Call]]:
    case = make_case()

    def state():
        return case.pool(), case.cache()

    def load(state, ids):
        return state[0], jaxkv.load_pages(state[0], state[1], ids, jnp.asarray(GOOD))

    def store(state, ids):
        return jaxkv.store_pages(state[0], state[1], ids, jnp.asarray(GOOD)), state[1]

    def start(state, ids):
        return state[0], jaxkv.start_load(state[0], state[1], ids, jnp.asarray(GOOD)).cache

    def groups(state, ids):
        pools, caches = ({"a": side, "b": side} for side in state)
        pages = {"a": ids, "b": jnp.asarray(GOOD)}
        return state[0], jaxkv.load_pages(pools, caches, pages, pages)["a"]

    def host_ids(state, ids):
        return state[0], jaxkv.load_pages(state[0], state[1], ids, ids)

    for name, step in {"load": load, "store": store, "start": start, "groups": groups}.items():
        yield name, Call(step, state, GOOD, BAD, r"PageIndexError: .*\[1\] = 99")
    ids = jaxkv.HostIds(GOOD)
    other = jax.tree.map(lambda data: jax.device_put(np.zeros_like(data), data.sharding), ids)
    yield "HostIds", Call(host_ids, state, ids, other, "HostIds of the source")


def swap() -> Call:
    def step(state, ids):
        return state[0], jaxkv.swap_blocks(state[0], state[1], ids, jnp.asarray(GOOD))

    def state():
        return jnp.ones((4, 8)), jnp.zeros((4, 8))

    return Call(step, state, GOOD, BAD, r"PageIndexError: .*src_ids\[1\] = 99")


def bound() -> Call:
    def step(state, rows):
        return check_bounds("test.step", state, rows=(rows, 5))

    message = "BoundError: test.step: the batch needs 6, more than the bound rows = 5"
    return Call(step, lambda: jnp.arange(9), np.int32(5), np.int32(6), message)


CALLS = {**dict(copies()), "swap": swap(), "bound": bound()}
every_call = pytest.mark.parametrize("name", CALLS)


def fails(call: Call, step, *args) -> None:
    with pytest.raises(OF_COMPILED_CALLS, match=call.message):
        jax.block_until_ready(step(*args))
    jaxkv.check_errors()  # raised once


@every_call
@pytest.mark.parametrize("donated", [False, True], ids=["kept", "donated"])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_error_of_one_device(name, donated, cold):
    call = CALLS[name]
    step = jax.jit(call.step, donate_argnums=0 if donated else ())
    if not cold:  # JAX's path in C++ begins after a call without an error
        jax.block_until_ready(step(call.state(), call.good))
    for _ in range(2):
        fails(call, step, call.state(), call.bad)
        jax.block_until_ready(step(call.state(), call.good))


@pytest.mark.parametrize("name", ["swap", "bound"])
@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_error_of_one_of_several_devices(name, cold):
    """XLA runs the program of each device in a thread of its own: a wait raises the error."""
    call = CALLS[name]
    mesh = jax.make_mesh((4,), ("x",))

    @jax.jit
    def step(state, good, bad):
        def on_device(state, good, bad):
            flag = jnp.where(jax.lax.axis_index("x") == 2, bad, good)
            return jax.tree.map(lambda x: x[None], call.step(state, flag))

        mapped = jax.shard_map(
            on_device, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("x"), check_vma=False
        )
        return mapped(state, good, bad)

    if not cold:
        jax.block_until_ready(step(call.state(), call.good, call.good))
    for _ in range(2):
        fails(call, step, call.state(), call.good, call.bad)
        jax.block_until_ready(step(call.state(), call.good, call.good))


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
@pytest.mark.parametrize("error", ["PeerTimeoutError", "SymmetricMemory was closed"])
def test_error_of_an_all_reduce(error, cold):
    rows = np.ones((2, 4), np.float32)
    calls = np.array([True, error != "PeerTimeoutError"])

    def body(x, calls):
        def reduced(x):
            return jaxkv.all_reduce(memory, x, AXIS, implementation="one_shot")

        return jax.lax.cond(calls, reduced, lambda x: x, x)

    # The call that warms up must end before the timeout.
    timeout_s = 3.0 if error == "PeerTimeoutError" else 30.0
    with memory_of(2, timeout_s=timeout_s) as memory:
        step = on_ranks(memory, body)
        if cold:
            step = step.lower(rows, calls).compile()
        else:
            jax.block_until_ready(step(rows, np.array([True, True])))
        if error != "PeerTimeoutError":
            memory.close()
        for _ in range(3):
            with pytest.raises(OF_COMPILED_CALLS, match=error):
                jax.block_until_ready(step(rows, calls))
