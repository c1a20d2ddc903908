"""Creation, contents and warm restart of large host pools: `python -m bench.host_pool`.

  - creation: seconds from the call until the pool is ready, and the peak memory in this time: the
    growth of this process's resident memory, sampled, in units of the pool. Also again after
    `close`, and the two parts: pages only (mapped, populated by threads), and pages page-locked.
  - both ends: each implementation stores a page into the first and the last page of the pool and
    loads both; all bytes are compared, in the pool by its view, and in the cache.
  - NUMA: the share of sampled pages on the node of the device, read back from the kernel.
  - baseline: `device_put` of `np.zeros`, last, since XLA keeps its memory.

`--restart` measures a warm restart instead: a process creates a shared pool of `--gib`, stores a
pattern into all its pages, and is killed; the next one attaches the pool, loads all pages, and
compares every byte. The pages are in /dev/shm, which must have room for them (mount option size).

Pools above the available memory are not measured. No environment variable is set.
"""

import argparse
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
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import timing
from bench.harness.blocks import IMPLEMENTATIONS, randomized
from bench.harness.records import Results
from bench.harness.timing import Figure
from jaxkv._src.cache.host_memory import _mem_available, numa_node
from jaxkv._src.cache.pinned_memory import nodes_of
from jaxkv._src.runtime import native

GIB = 1 << 30
SIZES = (48, 72, 100)  # GiB; XLA's own allocator ends at 64
CREATIONS = 3  # of the first size, so that there is an error
BASELINE_GIB = 4
MOST_SECONDS = 90  # after which no other pool is measured
QUICK_BYTES = 4 << 20  # of a "GiB" with --quick
RESTART_GIB, RESTART_SECONDS, CHUNK = 64, 20, 64  # CHUNK: pages stored or loaded by one call
SPEC = jaxkv.KVCacheSpec(
    num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16
)  # 8 MiB per page
QUICK_SPEC = jaxkv.KVCacheSpec(
    num_layers=2, page_size=16, num_kv_heads=2, head_dim=128, dtype=jnp.bfloat16
)


class Peak:
    """Largest resident memory above that at the start, sampled every 2 ms."""

    def __init__(self) -> None:
        self.bytes = 0
        self._before = resident_bytes()

    def note(self) -> None:
        self.bytes = max(self.bytes, resident_bytes() - self._before)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextlib.contextmanager
def peak_memory() -> Iterator[Peak]:
    peak, over = Peak(), threading.Event()

    def sample() -> None:
        while not over.wait(2e-3):
            peak.note()

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()
        peak.note()


def timed_pool(
    spec: jaxkv.KVCacheSpec, num_bytes: int, shared: str | None = None
) -> tuple[jaxkv.HostPool, float]:
    """A pool of at least `num_bytes`, and the seconds of its creation."""
    begin = time.perf_counter()
    num_pages = math.ceil(num_bytes / spec.page_bytes)
    pool = jaxkv.HostPool.create(spec, num_pages=num_pages, shared=shared)
    jax.block_until_ready(pool)
    return pool, time.perf_counter() - begin


def wrong_pages(pool: jaxkv.HostPool, name: str, seed: int) -> tuple[jaxkv.HostPool, int]:
    """The pool after a store into its first and last page, and the wrong pages of 4.

    The 4 are these two in the pool, and in the cache after a load of both.
    """
    spec = pool.spec
    assert isinstance(spec, jaxkv.KVCacheSpec)
    cache = randomized(jaxkv.DeviceCache.create(spec, num_pages=4), seed)
    on_host = np.array([0, pool.num_pages - 1], np.int32)
    stored, loaded = np.array([0, 1], np.int32), np.array([2, 3], np.int32)
    ids = jaxkv.HostIds if name == "dma" else np.asarray
    store = jax.jit(jaxkv.store_pages, donate_argnames="pool", static_argnames="implementation")
    load = jax.jit(jaxkv.load_pages, donate_argnames="cache", static_argnames="implementation")
    view = pool.view()
    written = store(pool, cache, ids(on_host), ids(stored), implementation=name)
    cache = load(written, cache, ids(on_host), ids(loaded), implementation=name)
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
    with peak_memory() as peak:
        pool, first = timed_pool(spec, num_bytes)
    size, seconds = pool.data.nbytes, [first]
    row(results, case, "peak memory", "of the pool", Figure(peak.bytes / size))
    if (share := share_on_node(pool.data)) is not None:
        row(results, case, "pages on the node of the device", "of a sample", Figure(share))
    wrong = 0
    for seed, name in enumerate(IMPLEMENTATIONS[jax.default_backend()]):
        pool, found = wrong_pages(pool, name, seed)
        wrong += found
    begin = time.perf_counter()
    pool.close()
    row(results, case, "close takes", "s", time.perf_counter() - begin)
    for _ in range(CREATIONS - 1 if gib == SIZES[0] else 0):
        again, taken = timed_pool(spec, num_bytes)
        seconds.append(taken)
        again.close()
    takes = timing.median(seconds)
    row(results, case, "creation", "GiB/s", size / takes / GIB)
    row(results, case, "creation takes", "s", takes)
    results.check(f"{case}: wrong pages at both ends, all implementations", wrong, "<=", 0, "pages")
    if gib == SIZES[0] and unit == GIB:
        results.target(f"{case}: creation", size / takes / GIB, ">=", 8, "GiB/s")
        results.target(f"{case}: creation takes", takes, "<=", 6, "s")
        results.check(f"{case}: peak memory", peak.bytes / size, "<=", 1.02, "of the pool")
        if share is not None:
            name = f"{case}: pages on the node of the device"
            results.check(name, share, ">=", 1, "of a sample")


def measure_parts(results: Results, unit: int) -> None:
    """The creation without page-locking, and XLA's creation of an array."""

    def rate(size: int, make: Any) -> Figure:
        def seconds() -> float:
            begin = time.perf_counter()
            made = jax.block_until_ready(make(size))
            taken = time.perf_counter() - begin
            if isinstance(made, jax.Array):
                made.delete()
            return taken

        return size / timing.median([seconds() for _ in range(CREATIONS)]) / GIB

    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    for gib, name, make in (
        (4 * BASELINE_GIB, "pages, not page-locked",
         lambda size: native.extension().PinnedMemory(size, -1, [])),
        (4 * BASELINE_GIB, "pinned_zeros", lambda size: jaxkv.pinned_zeros(size, np.uint8)),
        (BASELINE_GIB, "device_put of np.zeros",
         lambda size: jax.device_put(np.zeros(size, np.uint8), sharding)),
    ):  # fmt: skip
        row(results, f"{gib} GiB", name, "GiB/s", rate(gib * unit, make))


def row(results: Results, case: str, metric: str, unit: str, value: float) -> None:
    results.row(case, metric, unit, value)
    print(f"{case:14} {metric:36} {value:10.3f} {unit}", flush=True)


def measure(results: Results, quick: bool) -> None:
    spec, unit = (QUICK_SPEC, QUICK_BYTES) if quick else (SPEC, GIB)
    # The backend starts, and every program is compiled but for the size of the pool.
    small, _ = timed_pool(spec, 2 * spec.page_bytes)
    small, _ = wrong_pages(small, IMPLEMENTATIONS[jax.default_backend()][0], seed=9)
    small.close()
    begin = time.perf_counter()
    for gib in SIZES[:2] if quick else SIZES:
        if time.perf_counter() - begin > MOST_SECONDS:
            print(f"{gib} GiB pool: not measured after {MOST_SECONDS} s")
            continue
        if gib * unit * 1.05 > _mem_available():
            print(f"{gib} GiB pool: not measured, {_mem_available() / GIB:.0f} GiB available")
            continue
        measure_pool(results, spec, gib, unit)
    measure_parts(results, unit)


# Warm restart


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


def spec_and_bytes(gib: int, quick: bool) -> tuple[jaxkv.KVCacheSpec, int]:
    return (QUICK_SPEC, gib * QUICK_BYTES) if quick else (SPEC, gib * GIB)


def create_and_fill(name: str, gib: int, quick: bool) -> None:
    """Of the first process, which is then killed."""
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
    """Of the next process."""
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
    name = f"warm-restart-{uuid.uuid4().hex}"
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
    case, size = f"{gib} GiB shared pool", attached["bytes"] / GIB
    row(results, case, "creation", "GiB/s", size / created["create"])
    row(results, case, "attach takes", "s", attached["attach"])
    row(results, case, "attach since the start of the process", "s", attached["restart"])
    results.check(f"{case}: wrong elements after SIGKILL", attached["wrong"], "<=", 0, "elements")
    if gib == RESTART_GIB and not quick:
        results.target(f"{case}: warm restart", attached["restart"], "<=", RESTART_SECONDS, "s")


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="DIR", help="also write the JSON file below DIR")
    parser.add_argument("--quick", action="store_true", help="smaller pools")
    parser.add_argument("--restart", action="store_true", help="the warm restart instead")
    parser.add_argument("--gib", type=int, default=RESTART_GIB, help="of the warm restart")
    flags = parser.parse_args(argv)
    results = Results("warm_restart" if flags.restart else "host_pool")
    if flags.restart:
        measure_restart(results, flags.gib, flags.quick)
    else:
        measure(results, flags.quick)
    results.save(flags.out)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
