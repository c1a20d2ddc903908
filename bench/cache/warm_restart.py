"""Warm restart of a shared host pool after SIGKILL: `python -m bench.cache.warm_restart --gib 64`.

  - a process creates a shared pool, stores a pattern into all its pages, and is killed;
  - the next process attaches the pool, loads all pages, and compares every byte with the pattern.
    Measured: seconds of `HostPool.create`, and those since the start of the process, which include
    Python, JAX and the driver.

The pages are in /dev/shm, which must have room for them (mount option size).
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.cache.host_pool import GIB, QUICK_BYTES, QUICK_SPEC, SPEC, row
from bench.harness.records import Results, arguments

CHUNK = 64  # pages that are stored or loaded by one call
DEFAULT_GIB = 64
MOST_SECONDS = 20  # of a restart with that many


def size_of(gib: int, quick: bool) -> tuple[jaxkv.KVCacheSpec, int]:
    """The spec and the number of pages."""
    spec, unit = (QUICK_SPEC, QUICK_BYTES) if quick else (SPEC, GIB)
    return spec, gib * unit // spec.page_bytes


def pattern(cache: jaxkv.DeviceCache, first_page: jax.Array) -> jaxkv.DeviceCache:
    """The contents of the pages from `first_page` on: a hash of page, array and position."""
    leaves, structure = jax.tree.flatten(cache)
    return jax.tree.unflatten(
        structure, [_hashed(array, first_page, i) for i, array in enumerate(leaves)]
    )


def _hashed(array: jax.Array, first_page: jax.Array, index: int) -> jax.Array:
    pages = first_page.astype(jnp.uint32) + jnp.arange(len(array), dtype=jnp.uint32)
    position = jnp.arange(array[0].size, dtype=jnp.uint32).reshape(array.shape[1:])
    seed = (pages * np.uint32(0x9E3779B1) + np.uint32(index << 24)).reshape(
        -1, *[1] * position.ndim
    )
    mixed = (position ^ seed) * np.uint32(0xC2B2AE35)
    mixed = (mixed ^ (mixed >> 15)) * np.uint32(0x27D4EB2F)
    return (mixed >> 16).astype(jnp.uint16).view(array.dtype)


@partial(jax.jit, donate_argnames="pool")
def store_pattern(
    pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, first_page: jax.Array
) -> jaxkv.HostPool:
    rows = jnp.arange(CHUNK, dtype=jnp.int32)
    return jaxkv.store_pages(pool, pattern(cache, first_page), first_page + rows, rows)


@jax.jit
def wrong_elements(
    pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, first_page: jax.Array
) -> jax.Array:
    """Number of wrong elements, of the two bytes each, of `CHUNK` pages."""
    rows = jnp.arange(CHUNK, dtype=jnp.int32)
    got = jaxkv.load_pages(pool, cache, first_page + rows, rows)
    counts = jax.tree.map(
        lambda a, b: (a.view(jnp.uint16) != b.view(jnp.uint16)).sum(),
        got,
        pattern(cache, first_page),
    )
    return sum(jax.tree.leaves(counts), start=jnp.int32(0))


def create_and_fill(name: str, gib: int, quick: bool) -> None:
    """Of the first process, which is then killed."""
    spec, num_pages = size_of(gib, quick)
    begin = time.perf_counter()
    pool = jaxkv.HostPool.create(spec, num_pages=num_pages, shared=name)
    seconds = time.perf_counter() - begin
    cache = jaxkv.DeviceCache.create(spec, num_pages=CHUNK)
    for first in range(0, num_pages, CHUNK):
        pool = store_pattern(pool, cache, jnp.int32(first))
    jax.block_until_ready(pool)
    jaxkv.check_errors()
    print(json.dumps({"create": seconds, "id": jaxkv.HostPool.shared_id(name)}), flush=True)
    signal.pause()


def attach_and_verify(name: str, gib: int, quick: bool, begin_of_process: float) -> None:
    """Of the next process."""
    spec, num_pages = size_of(gib, quick)
    begin = time.time()
    pool = jaxkv.HostPool.create(spec, num_pages=num_pages, shared=name)
    end = time.time()
    cache = jaxkv.DeviceCache.create(spec, num_pages=CHUNK)
    wrong = sum(
        int(wrong_elements(pool, cache, jnp.int32(first))) for first in range(0, num_pages, CHUNK)
    )
    jaxkv.check_errors()
    record = {
        "bytes": pool.data.nbytes,
        "attach": end - begin,
        "restart": end - begin_of_process,
        "wrong": wrong,
        "id": jaxkv.HostPool.shared_id(name),
    }
    print(json.dumps(record), flush=True)


def start(function: str, *args: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A process that calls a function of this module, and its first record."""
    call = f"from bench.cache import warm_restart; warm_restart.{function}(*{args!r})"
    process = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.communicate()
        raise RuntimeError(f"{function} failed: exit status {process.returncode}")
    return process, json.loads(line)


def restart(name: str, gib: int, quick: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The records of a process that is killed and of the next one."""
    try:
        process, created = start("create_and_fill", name, gib, quick)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process, attached = start("attach_and_verify", name, gib, quick, time.time())
        process.communicate()
    finally:
        jaxkv.HostPool.unlink(name)
    if created["id"] != attached["id"]:
        raise AssertionError("the pool was created again instead of attached")
    return created, attached


def measure(results: Results, gib: int, quick: bool) -> None:
    created, attached = restart(f"warm-restart-{uuid.uuid4().hex}", gib, quick)
    case, size = f"{gib} GiB shared pool", attached["bytes"] / GIB
    row(results, case, "creation", "GiB/s", size / created["create"])
    row(results, case, "attach", "GiB/s", size / attached["attach"])
    row(results, case, "attach takes", "s", attached["attach"])
    row(results, case, "attach since the start of the process", "s", attached["restart"])
    row(results, case, "wrong elements after the restart", "elements", attached["wrong"])
    results.check(f"{case}: wrong elements after SIGKILL", attached["wrong"], "<=", 0, "elements")
    if gib == DEFAULT_GIB and not quick:
        results.target(f"{case}: warm restart", attached["restart"], "<=", MOST_SECONDS, "s")


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv, gib=DEFAULT_GIB)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = Results("warm_restart")
    measure(results, flags.gib, flags.quick)
    results.save(flags.out)
    for target in (*results.targets, *results.checks):
        print(f"{'met' if target.met else 'MISSED':7} {target.name}: {target.got}")
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
