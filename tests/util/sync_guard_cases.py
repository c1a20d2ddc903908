"""Small arrays and a fixture for the tests of the host-sync guard."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.runtime import sync_guard

double: Any = jax.jit(lambda x: x * 2)


def one() -> jax.Array:
    return double(jnp.asarray([2], jnp.int32)).reshape(())


def three() -> jax.Array:
    return double(jnp.arange(3, dtype=jnp.int32))


@pytest.fixture(autouse=True)
def no_hooks_left():
    before = sync_guard._points()
    yield
    assert sync_guard._points() == before
    with jaxkv.allow_host_sync("to see whether anything still watches") as report:
        np.asarray(three())
    assert report.syncs == []
    assert sync_guard._hooks._scopes == 0
    assert sync_guard._scopes.get() == ()
