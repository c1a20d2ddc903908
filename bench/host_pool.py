"""Creation, contents and warm restart of large host pools: `python -m bench.host_pool`.

  - creation: seconds from the call until the pool is ready, and the peak memory in this time: the
    growth of this process's resident memory, sampled, in units of the pool. The first size is
    created several times, each after the `close` of the one before.
  - both ends: each implementation stores a page into the first and the last page of the pool and
    loads both; all bytes are compared, in the pool by its view, and in the cache.
  - NUMA: the share of sampled pages on the node of the device, read back from the kernel.

`--restart` measures a warm restart instead: a process creates a shared pool of `--gib`, stores a
pattern into all its pages, and is killed; the next ones, one after the other, attach to the pool,
load all pages, and compare every byte. The pages are in /dev/shm, which must have room for them
(mount option size).

Pools above the available memory are not measured. No environment variable is set.
"""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import timing
from bench.harness.blocks import Method, methods, randomized
from bench.harness.main import Flags, benchmark
from bench.harness.records import Results
from bench.harness.timing import Figure
from jaxkv._src.cache.host_memory import _mem_available, numa_node
from jaxkv._src.cache.pinned_memory import nodes_of

GIB = 1 << 30
SIZES = (48, 72, 100)  # GiB; XLA's own allocator ends at 64
CREATIONS = 9  # of the first size, so that there is an error
MOST_SECONDS = 90  # after which no other pool is measured
QUICK_BYTES = 4 << 20  # of a "GiB" with --quick
RESTARTS = 5  # after one kill, so that there is an error
RESTART_GIB, RESTART_SECONDS, CHUNK = 64, 20, 64  # CHUNK: pages stored or loaded by one call
SPEC = jaxkv.KVCacheSpec(
    num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16
)  # 8 MiB per page
QUICK_SPEC = jaxkv.KVCacheSpec(
    num_layers=2, page_size=16, num_kv_heads=2, head_dim=128, dtype=jnp.bfloat16
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The resident memory above that at the start, sampled every 2 ms: all samples."""
    samples, over, before = [0], threading.Event(), resident_bytes()

    def sample() -> None:
        while not over.wait(2e-3):
            samples.append(resident_bytes() - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()
        samples.append(resident_bytes() - before)


def timed_pool(
    spec: jaxkv.KVCacheSpec, num_bytes: int, shared: str | None = None
) -> tuple[jaxkv.HostPool, float]:
    """A pool of at least `num_bytes`, and the seconds of its creation."""
    begin = time.perf_counter()
    num_pages = math.ceil(num_bytes / spec.page_bytes)
    pool = jaxkv.HostPool.create(spec, num_pages=num_pages, shared=shared)
    jax.block_until_ready(pool)
    return pool, time.perf_counter() - begin


def wrong_pages(pool: jaxkv.HostPool, method: Method, seed: int) -> tuple[jaxkv.HostPool, int]:
    """The pool after a store into its first and last page, and the wrong pages of 4.

    The 4 are these two in the pool, and in the cache after a load of both.
    """
    spec = pool.spec
    assert isinstance(spec, jaxkv.KVCacheSpec)
    cache = randomized(jaxkv.DeviceCache.create(spec, num_pages=4), seed)
    on_host = np.array([0, pool.num_pages - 1], np.int32)
    on_device = np.array([0, 1], np.int32), np.array([2, 3], np.int32)
    ids, stored, loaded = map(method.converted, (on_host, *on_device))
    options = {"implementation": method.implementation}
    store = jax.jit(partial(jaxkv.store_pages, **options), donate_argnames="pool")
    load = jax.jit(partial(jaxkv.load_pages, **options), donate_argnames="cache")
    view = pool.view()
    written = store(pool, cache, ids, stored)
    cache = load(written, cache, ids, loaded)
    jaxkv.check_errors(written, cache)
    if written.view().ctypes.data != view.ctypes.data:
        raise AssertionError("the pool was not written in place")
    return written, _wrong_of(view, cache, on_host)


def _wrong_of(view: np.ndarray, cache: jaxkv.DeviceCache, on_host: np.ndarray) -> int:
    wrong = np.zeros(4, bool)
    for layer, halves in enumerate(cache.layers):
        for kv, half in enumerate(halves):
            pages = np.asarray(half).view(np.uint16)
            for i, page in enumerate(on_host):
                in_pool = view[kv, page, layer].view(np.uint16)
                wrong[i] |= not np.array_equal(in_pool, pages[i])
                wrong[2 + i] |= not np.array_equal(pages[2 + i], pages[i])
    return int(wrong.sum())


def share_on_node(array: jax.Array) -> float | None:
    """Share of the sampled pages on the node of the device; None if it has none."""
    (device,) = array.devices()
    node = numa_node(device)
    if node is None:
        return None
    (found,) = nodes_of(array).values()
    return found.get(node, 0) / sum(found.values())


def measure_pool(results: Results, spec: jaxkv.KVCacheSpec, gib: int, unit: int) -> None:
    case, num_bytes = f"{gib} GiB pool", gib * unit
    first = gib == SIZES[0]
    with_limits = first and unit == GIB
    with peak_memory() as samples:
        pool, taken = timed_pool(spec, num_bytes)
    size, seconds = pool.data.nbytes, [taken]
    peak, share, wrong = max(samples) / size, share_on_node(pool.data), 0
    for seed, method in enumerate(methods()):
        pool, found = wrong_pages(pool, method, seed)
        wrong += found
    pool.close()
    for _ in range(CREATIONS - 1 if first else 0):
        again, taken = timed_pool(spec, num_bytes)
        seconds.append(taken)
        again.close()
    takes = timing.median(seconds)
    if first:
        results.row(case, "first creation takes", "s", seconds[0])
    want = {"creation": (">=", 8), "creation takes": ("<=", 6)} if with_limits else {}
    rate = size / takes / GIB
    results.row(case, "creation", "GiB/s", rate, want=want.get("creation"))
    results.row(case, "creation takes", "s", takes, want=want.get("creation takes"))
    results.check(f"{case}: wrong pages at both ends, all implementations", wrong, "<=", 0, "pages")
    for metric, of, value, op, limit in (
        ("peak memory", "of the pool", peak, "<=", 1.02),
        ("pages on the node of the device", "of a sample", share, ">=", 1),
    ):
        if value is not None:
            results.row(case, metric, of, Figure(value))
            if with_limits:
                results.check(f"{case}: {metric}", value, op, limit, of)


def measure_creation(results: Results, quick: bool) -> None:
    spec, unit = (QUICK_SPEC, QUICK_BYTES) if quick else (SPEC, GIB)
    # The backend starts, and every program is compiled but for the size of the pool.
    small, _ = timed_pool(spec, 2 * spec.page_bytes)
    small, _ = wrong_pages(small, methods()[0], seed=9)
    small.close()
    begin = time.perf_counter()
    for gib in SIZES[:2] if quick else SIZES:
        if time.perf_counter() - begin > MOST_SECONDS:
            print(f"{gib} GiB pool: not measured after {MOST_SECONDS} s")
        elif gib * unit * 1.05 > _mem_available():
            print(f"{gib} GiB pool: not measured, {_mem_available() / GIB:.0f} GiB available")
        else:
            measure_pool(results, spec, gib, unit)


# Warm restart


@partial(jax.jit, donate_argnames="pool")
def store_pattern(
    pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, first_page: jax.Array
) -> jaxkv.HostPool:
    rows = jnp.arange(CHUNK, dtype=jnp.int32)
    return jaxkv.store_pages(pool, randomized(cache, first_page), first_page + rows, rows)


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
        randomized(cache, first_page),
    )
    return sum(jax.tree.leaves(counts), start=jnp.int32(0))


def spec_and_bytes(gib: int, quick: bool) -> tuple[jaxkv.KVCacheSpec, int]:
    return (QUICK_SPEC, gib * QUICK_BYTES) if quick else (SPEC, gib * GIB)


def create_and_fill(name: str, gib: int, quick: bool) -> None:
    """The first process, which is then killed."""
    spec, num_bytes = spec_and_bytes(gib, quick)
    pool, seconds = timed_pool(spec, num_bytes, shared=name)
    cache = jaxkv.DeviceCache.create(spec, num_pages=CHUNK)
    for first in range(0, pool.num_pages, CHUNK):
        pool = store_pattern(pool, cache, jnp.int32(first))
    jax.block_until_ready(pool)
    jaxkv.check_errors()
    print(json.dumps({"create": seconds, "id": jaxkv.HostPool.shared_id(name)}), flush=True)
    signal.pause()


def attach_and_verify(name: str, gib: int, quick: bool, begin_of_process: float) -> None:
    """A later process."""
    spec, num_bytes = spec_and_bytes(gib, quick)
    pool, seconds = timed_pool(spec, num_bytes, shared=name)
    since_start = time.time() - begin_of_process
    cache = jaxkv.DeviceCache.create(spec, num_pages=CHUNK)
    wrong = sum(
        int(wrong_elements(pool, cache, jnp.int32(first)))
        for first in range(0, pool.num_pages, CHUNK)
    )
    jaxkv.check_errors()
    record = {"bytes": pool.data.nbytes, "attach": seconds, "restart": since_start, "wrong": wrong}
    print(json.dumps({**record, "id": jaxkv.HostPool.shared_id(name)}), flush=True)


def start(function: str, *args: object) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """A process that calls a function of this module, and its first record."""
    call = f"from bench import host_pool; host_pool.{function}(*{args!r})"
    process = subprocess.Popen([sys.executable, "-c", call], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        process.communicate()
        raise RuntimeError(f"{function} failed: exit status {process.returncode}")
    return process, json.loads(line)


def measure_restart(results: Results, gib: int, quick: bool) -> None:
    name, attached = f"warm-restart-{uuid.uuid4().hex}", []
    try:
        process, created = start("create_and_fill", name, gib, quick)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        for _ in range(2 if quick else RESTARTS):
            process, one = start("attach_and_verify", name, gib, quick, time.time())
            process.communicate()
            attached.append(one)
    finally:
        jaxkv.HostPool.unlink(name)
    if {created["id"]} != {one["id"] for one in attached}:
        raise AssertionError("the pool was created again instead of attached")
    attach, restart = (timing.median([one[k] for one in attached]) for k in ("attach", "restart"))
    case, size = f"{gib} GiB shared pool", attached[0]["bytes"] / GIB
    results.row(case, "creation", "GiB/s", size / created["create"])
    results.row(case, "attach takes", "s", attach)
    results.row(case, "attach since the start of the process", "s", restart)
    wrong = sum(one["wrong"] for one in attached)
    results.check(f"{case}: wrong elements after SIGKILL", wrong, "<=", 0, "elements")
    if gib == RESTART_GIB and not quick:
        results.target(f"{case}: warm restart", restart, "<=", RESTART_SECONDS, "s")


def measure(results: Results, flags: Flags) -> None:
    if flags.restart:
        results.name = "warm_restart"
        measure_restart(results, flags.gib, flags.quick)
    else:
        measure_creation(results, flags.quick)


main = benchmark(
    "host_pool",
    __doc__,
    measure,
    options={
        "--restart": {"action": "store_true", "help": "the warm restart instead"},
        "--gib": {"type": int, "default": RESTART_GIB, "help": "of the warm restart"},
    },
)

if __name__ == "__main__":
    sys.exit(main())
