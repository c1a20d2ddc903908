"""The host pool benchmark: peak memory, and bytes at both ends."""

import jax
import numpy as np
import pytest

import jaxkv
from bench.cache import host_pool
from bench.harness.records import Results

pytestmark = pytest.mark.end_to_end

NAME = {"cpu": "host", "gpu": "kernel"}[jax.default_backend()]


def new_pool() -> jaxkv.HostPool:
    return jaxkv.HostPool.create(host_pool.QUICK_SPEC, num_pages=9)


def test_both_ends_are_written_in_place_and_right():
    pool = new_pool()
    view = pool.view()
    written, wrong = host_pool.wrong_pages(pool, NAME, seed=0)
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
    monkeypatch.setattr(jax, "jit", lambda f, **options: f if f is nothing else real(f, **options))
    assert host_pool.wrong_pages(new_pool(), NAME, seed=0)[1] == wrong


def test_a_pool_that_is_copied_is_an_error(monkeypatch):
    real = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **options: real(f, static_argnames="implementation"))
    with pytest.raises(ValueError, match="copy"):
        host_pool.wrong_pages(new_pool(), NAME, seed=0)


def test_peak_memory_counts_what_was_freed_again():
    size = 256 << 20
    with host_pool.peak_memory() as peak:
        array = np.ones(size, np.uint8)
        peak.note()
        del array
    assert size * 0.98 < peak.bytes < size * 1.2


def test_a_pool_above_the_available_memory_is_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(host_pool, "_mem_available", lambda: 1 << 20)
    monkeypatch.setattr(host_pool, "measure_parts", lambda *_: None)
    results = Results("host_pool")
    host_pool.measure(results, quick=True)
    assert not results.rows and not results.targets
    assert capsys.readouterr().out.count("not measured, 0 GiB available") == len(host_pool.SIZES)
