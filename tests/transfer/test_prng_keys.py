"""PRNG keys among the arrays of a swap: `jax.Array`s without some of its methods."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv._src.transfer import in_flight
from tests.util.async_cases import OVERLAPPED
from tests.util.swap_cases import IDS, assert_trees_equal, ids_for


@pytest.fixture(params=OVERLAPPED)
def named(request) -> str:
    return request.param


def trees() -> list:
    """Source and destination."""
    return [
        {"key": jax.random.split(jax.random.key(seed), 12), "x": jnp.full((12, 2), float(seed))}
        for seed in range(2)
    ]


def bits(tree):
    return jax.device_get({"key": jax.random.key_data(tree["key"]), "x": tree["x"]})


def wait(swapping):
    return swapping.wait()


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("programs", ["no jit", "one", "two"])
def test_keys_are_copied(programs, named):
    start, ids = partial(jaxkv.start_swap, implementation=named), ids_for(named)
    if programs == "no jit":
        out = wait(start(*trees(), *ids))
    elif programs == "one":
        out = jax.jit(lambda *args: wait(start(*args)), donate_argnums=1)(*trees(), *ids)
    else:
        swapping = jax.jit(start, donate_argnums=1)(*trees(), *ids)
        assert swapping.done() in (True, False)
        out = jax.jit(wait, donate_argnums=0)(swapping)
    jaxkv.check_errors(out)
    src, dst = trees()
    assert_trees_equal(bits(out), bits(jaxkv.swap_blocks(src, dst, IDS[0], IDS[1])))


def test_keys_in_flight_do_not_break_other_copies(named):
    """Also if they became leaves of a handle while a program is traced."""
    key = jax.random.key(0)
    swapping = jaxkv.start_swap(*trees(), *ids_for(named), implementation=named)

    @jax.jit
    def program(x):
        jax.tree.map(lambda leaf: key, swapping)
        return x

    program(1.0)
    in_flight.keep_alive(None)  # as each start and wait does
    wait(swapping)
