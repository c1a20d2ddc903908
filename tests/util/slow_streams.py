"""Negative controls of the ordering tests: unordered copies, and slow work."""

from unittest import mock

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv._src.runtime import native
from jaxkv._src.transfer import block_copy
from tests.util import hooks

SLOW_SIZE = 4096
SLOW_MATMULS = 40  # about 10 ms on a data-centre GPU: an unordered copy is done long before


def unordered_copy(direction: str, pool, cache, host_pages, device_pages):
    """`load_pages` or `store_pages` on a stream without order to any other."""
    hooks.require()
    operation = getattr(jaxkv, f"{direction}_pages")
    with mock.patch.dict(block_copy.TARGETS, dma="jaxkv_copy_blocks_unordered"):
        return operation(pool, cache, host_pages, device_pages, implementation="dma")


def settle(*outputs) -> None:
    """Waits for the outputs, and for streams unknown to JAX."""
    jax.block_until_ready(outputs)
    native.extension().synchronize_device(0)


def slow_input() -> jax.Array:
    """A matrix that is its own square, so that a chain of products neither grows nor decays."""
    return jnp.full((SLOW_SIZE, SLOW_SIZE), 1 / SLOW_SIZE, jnp.bfloat16)


def slow_zero(x: jax.Array) -> jax.Array:
    """int32 0, available only after a chain of products of `x`."""
    for _ in range(SLOW_MATMULS):
        x = x @ x
    return jnp.where(x[0, 0] > 1, 1, 0)
