"""The host pool benchmark: peak memory, bytes at both ends, and a process that is killed."""

import subprocess
import sys
import uuid

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from bench import host_pool
from bench.harness.blocks import methods, randomized
from bench.harness.records import Results

pytestmark = pytest.mark.end_to_end

METHOD = methods()[0]


def new_pool() -> jaxkv.HostPool:
    return jaxkv.HostPool.create(host_pool.QUICK_SPEC, num_pages=9)


def test_both_ends_are_written_in_place_and_right():
    pool = new_pool()
    view = pool.view()
    written, wrong = host_pool.wrong_pages(pool, METHOD, seed=0)
    assert wrong == 0
    pages = view.view(np.uint16).any(axis=(0, 2, 3, 4, 5))
    assert pages.tolist() == [True, *[False] * 7, True]
    written.close()


@pytest.mark.parametrize("operation, wrong", [("store_pages", 4), ("load_pages", 2)])
def test_pages_that_are_not_copied_are_wrong(monkeypatch, operation, wrong):
    argument = 0 if operation == "store_pages" else 1

    def nothing(*args, **_):
        return args[argument]

    real = jax.jit
    monkeypatch.setattr(jaxkv, operation, nothing)
    monkeypatch.setattr(
        jax, "jit", lambda f, **options: f if f.func is nothing else real(f, **options)
    )
    assert host_pool.wrong_pages(new_pool(), METHOD, seed=0)[1] == wrong


def test_a_pool_that_is_copied_is_an_error(monkeypatch):
    real = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **_: real(f))
    with pytest.raises(ValueError, match="copy"):
        host_pool.wrong_pages(new_pool(), METHOD, seed=0)


def test_peak_memory_counts_what_was_freed_again():
    """In a process of its own: in this one, JAX frees memory at any time."""
    size = 64 << 20
    program = (
        "import time\n"
        "import numpy as np\n"
        "from bench import host_pool\n"
        "with host_pool.peak_memory() as samples:\n"
        f"    array = np.ones({size}, np.uint8)\n"
        "    seen = len(samples)\n"
        "    while len(samples) < seen + 2:  # one whose sample began with the array\n"
        "        time.sleep(1e-3)\n"
        "    del array\n"
        "print(max(samples))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert size * 0.98 < int(ran.stdout) < size * 1.5


def test_a_pool_above_the_available_memory_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(host_pool, "_mem_available", lambda: 1 << 20)
    results = Results("host_pool")
    host_pool.measure_creation(results, quick=True)
    assert not results.rows and not results.targets
    assert capsys.readouterr().out.count("not measured, 0 GiB available") == 2


def test_all_bytes_are_right_after_a_restart():
    results = Results("warm_restart")
    host_pool.measure_restart(results, gib=1, quick=True)
    (check,) = results.checks
    assert check.met and check.got == 0
    restarts = [row for row in results.rows if row.metric.startswith("attach")]
    assert len(restarts) == 2 and all(row.error for row in restarts)


def test_wrong_bytes_are_found():
    spec, chunk = host_pool.QUICK_SPEC, host_pool.CHUNK
    pool = jaxkv.HostPool.create(spec, num_pages=2 * chunk)
    cache = jaxkv.DeviceCache.create(spec, num_pages=chunk)
    for first in (0, chunk):
        pool = host_pool.store_pattern(pool, cache, jnp.int32(first))
    wrong = [host_pool.wrong_elements(pool, cache, jnp.int32(i)) for i in (0, chunk)]
    assert wrong == [0, 0]
    # Page 3 and the page after it have each other's contents.
    other = randomized(jax.tree.map(jnp.copy, cache), 0)
    ids = np.array([4, 3], np.int32), np.array([3, 4], np.int32)
    pool = jaxkv.store_pages(pool, other, *ids)
    wrong = [int(host_pool.wrong_elements(pool, cache, jnp.int32(i))) for i in (0, chunk)]
    elements = 2 * spec.page_bytes // 2
    assert 0.99 * elements < wrong[0] <= elements and wrong[1] == 0


def test_a_failed_process_is_an_error(capfd):
    name = f"test-{uuid.uuid4().hex}"
    with pytest.raises(RuntimeError, match="create_and_fill failed: exit status 1"):
        host_pool.start("create_and_fill", name, 1 << 20, True)  # a PiB
    assert "HostMemoryError" in capfd.readouterr().err
