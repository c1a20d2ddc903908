"""Asynchronous copies of one case, and their expected results."""

import jax

import jaxkv
from tests.util.transfer_cases import Case, as_ids, distinct_ids

# Pallas kernels run at a point chosen by XLA, so they can't be started.
OVERLAPPED = {"cpu": ("host",), "gpu": ("kernel", "dma")}[jax.default_backend()]
STARTED = (*OVERLAPPED, "xla")


def start(direction: str, pool, cache, host_pages, device_pages, **options):
    """`start_load` or `start_store`."""
    if direction == "load":
        return jaxkv.start_load(pool, cache, host_pages, device_pages, **options)
    return jaxkv.start_store(pool, cache, host_pages, device_pages, **options)


def finish(direction: str, started):
    """(pool or None, cache) after all waits."""
    return (started.pool if direction == "store" else None), started.cache


def ids_of(case: Case, count: int, implementation: str | None, seed: int = 0):
    numpy_ids = distinct_ids(case, count, seed)
    return numpy_ids, [as_ids(side, implementation) for side in numpy_ids]


def check(case: Case, direction: str, ids, out, pool, layers=None, tokens=None) -> None:
    jaxkv.check_errors(out)
    new_pool, cache = out
    host_pages, device_pages = ids
    want = case.expected(direction, host_pages, device_pages, layers, tokens)
    case.assert_holds(pool if new_pool is None else new_pool, cache, **want)
