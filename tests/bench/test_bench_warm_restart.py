"""The warm restart benchmark: a process that is killed, and wrong bytes."""

import uuid

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from bench.cache import warm_restart
from bench.harness.records import Results

pytestmark = pytest.mark.end_to_end


def test_all_bytes_are_right_after_a_restart():
    results = Results("warm_restart")
    warm_restart.measure(results, gib=1, quick=True)
    (target,) = results.checks
    assert target.met and target.got == 0


def test_wrong_bytes_are_found():
    spec, chunk = warm_restart.QUICK_SPEC, warm_restart.CHUNK
    pool = jaxkv.HostPool.create(spec, num_pages=2 * chunk)
    cache = jaxkv.DeviceCache.create(spec, num_pages=chunk)
    for first in (0, chunk):
        pool = warm_restart.store_pattern(pool, cache, jnp.int32(first))
    wrong = [warm_restart.wrong_elements(pool, cache, jnp.int32(i)) for i in (0, chunk)]
    assert wrong == [0, 0]
    # Page 3 and the page after it have each other's contents.
    other = warm_restart.pattern(cache, jnp.int32(3))
    ids = np.array([4, 3], np.int32), np.array([0, 1], np.int32)
    pool = jaxkv.store_pages(pool, other, *ids)
    wrong = [int(warm_restart.wrong_elements(pool, cache, jnp.int32(i))) for i in (0, chunk)]
    elements = 2 * spec.page_bytes // 2
    assert 0.99 * elements < wrong[0] <= elements and wrong[1] == 0


def test_a_failed_process_is_an_error(capfd):
    name = f"test-{uuid.uuid4().hex}"
    with pytest.raises(RuntimeError, match="create_and_fill failed: exit status 1"):
        warm_restart.start("create_and_fill", name, 1 << 20, True)  # a PiB
    assert "HostMemoryError" in capfd.readouterr().err
