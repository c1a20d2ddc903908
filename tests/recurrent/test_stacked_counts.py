"""DeferredCounts of a loop or a batch of steps, and those that `jax.device_get` returns."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.recurrent import DeferredCounts

ACCEPTED = np.array([[1, 2], [30, 40], [500, 600]], np.int32)
IDS = np.array([5, 6], np.int32)


def start(accepted, step):
    return DeferredCounts.start(accepted, step=step, request_ids=IDS)


@jax.jit
def scanned(accepted):
    steps = jnp.arange(len(accepted))
    return jax.lax.scan(lambda c, s: (c, start(accepted[s], s)), 0, steps)[1]


@jax.jit
def mapped(accepted):
    return jax.vmap(start)(accepted, jnp.arange(len(accepted)))


@pytest.mark.parametrize("stacked", [scanned, mapped])
def test_stacked_counts_are_read_by_step(stacked):
    counts = stacked(ACCEPTED)
    message = re.escape("packed must be int32[1 + 2B], the counts of one step, got int32[3, 5]: ")
    for of_all in (counts, jax.device_get(counts)):
        with pytest.raises(ValueError, match=message + "index stacked counts"):
            of_all.read(step=0, request_ids=IDS)
    on_host = jax.device_get(counts)
    for step, wanted in enumerate(ACCEPTED):
        of_step = jax.tree.map(lambda x, i=step: x[i], on_host)
        np.testing.assert_array_equal(of_step.read(step=step, request_ids=IDS), wanted)


@pytest.mark.parametrize(
    "packed", [np.ones(5, np.float32), np.ones(5, np.int64), np.ones(2, np.int32)]
)
def test_counts_of_another_dtype_or_size_are_rejected(packed):
    with jax.enable_x64(True):
        arrays = packed, jnp.asarray(packed)
    for array in arrays:
        with pytest.raises(ValueError, match=rf"got {packed.dtype}\[{len(packed)}\]"):
            DeferredCounts(array).read(step=1, request_ids=IDS)


def test_counts_on_the_host_are_ready():
    counts = jax.device_get(jax.jit(start)(ACCEPTED[1], np.int32(7)))
    assert isinstance(counts.packed, np.ndarray) and counts.is_ready()
    np.testing.assert_array_equal(counts.read(step=7, request_ids=IDS), ACCEPTED[1])
