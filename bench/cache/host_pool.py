"""Creation and contents of large host pools: `python -m bench.cache.host_pool`.

  - creation: seconds from the call until the pool is ready, and the peak memory in this time: the
    growth of this process's resident memory, sampled, in units of the pool. Also again after
    `close`, and the two parts: pages only (mapped, populated by threads), and pages page-locked.
  - both ends: each implementation stores a page into the first and the last page of the pool and
    loads both; all bytes are compared, in the pool by its view, and in the cache.
  - NUMA: the share of sampled pages on the node of the device, read back from the kernel.
  - baseline: `device_put` of `np.zeros`, last, since XLA keeps its memory.

Pools above the available memory are not measured. No environment variable is set.
"""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness.records import Results, arguments
from bench.transfer.blocks import IMPLEMENTATIONS
from jaxkv._src.cache.host_memory import _mem_available, numa_node
from jaxkv._src.cache.pinned_memory import nodes_of
from jaxkv._src.runtime import native

GIB = 1 << 30
SIZES = (48, 72, 100)  # GiB; XLA's own allocator ends at 64
BASELINE_GIB = 4
MOST_SECONDS = 90  # after which no other pool is measured
QUICK_BYTES = 32 << 20  # of a "GiB" with --quick
SPEC = jaxkv.KVCacheSpec(
    num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16
)  # 8 MiB per page
QUICK_SPEC = jaxkv.KVCacheSpec(
    num_layers=2, page_size=16, num_kv_heads=2, head_dim=128, dtype=jnp.bfloat16
)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


class Peak:
    """Largest resident memory above that at the start, sampled every 2 ms."""

    def __init__(self) -> None:
        self.bytes = 0
        self._before = resident_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._over.wait(2e-3):
            self.note()

    def note(self) -> None:
        self.bytes = max(self.bytes, resident_bytes() - self._before)


@contextlib.contextmanager
def peak_memory() -> Iterator[Peak]:
    peak = Peak()
    peak._thread.start()
    try:
        yield peak
    finally:
        peak._over.set()
        peak._thread.join()
        peak.note()


def timed_pool(spec: jaxkv.KVCacheSpec, num_bytes: int) -> tuple[jaxkv.HostPool, float]:
    """A pool of at least `num_bytes`, and the seconds of its creation."""
    begin = time.perf_counter()
    pool = jaxkv.HostPool.create(spec, num_pages=math.ceil(num_bytes / spec.page_bytes))
    jax.block_until_ready(pool)
    return pool, time.perf_counter() - begin


def wrong_pages(pool: jaxkv.HostPool, name: str, seed: int) -> tuple[jaxkv.HostPool, int]:
    """The pool after a store into its first and last page, and the wrong pages of 4.

    The 4 are these two in the pool, and in the cache after a load of both.
    """
    spec = pool.spec
    assert isinstance(spec, jaxkv.KVCacheSpec)
    keys = iter(jax.random.split(jax.random.key(seed), 2 * spec.num_layers * spec.num_kv))
    blank = jaxkv.DeviceCache.create(spec, num_pages=4)
    cache = jax.tree.map(
        lambda a: jax.random.bits(next(keys), a.shape, jnp.uint16).view(np.dtype(spec.dtype)), blank
    )
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


def measure_pool(results: Results, spec: jaxkv.KVCacheSpec, gib: int, unit: int) -> None:
    case, num_bytes = f"{gib} GiB pool", gib * unit
    with peak_memory() as peak:
        pool, seconds = timed_pool(spec, num_bytes)
    size = pool.data.nbytes
    row(results, case, "creation", "GiB/s", size / seconds / GIB)
    row(results, case, "creation takes", "s", seconds)
    row(results, case, "peak memory", "of the pool", peak.bytes / size)
    share = share_on_node(pool.data)
    if share is not None:
        row(results, case, "pages on the node of the device", "of a sample", share)
    wrong = {}
    for seed, name in enumerate(IMPLEMENTATIONS[jax.default_backend()]):
        pool, wrong[name] = wrong_pages(pool, name, seed)
        row(results, case, f"wrong pages of 4 by {name}", "pages", wrong[name])
    begin = time.perf_counter()
    pool.close()
    row(results, case, "close takes", "s", time.perf_counter() - begin)
    if gib == SIZES[0]:
        again, seconds_again = timed_pool(spec, num_bytes)
        row(results, case, "creation again, after close", "GiB/s", size / seconds_again / GIB)
        again.close()
    results.check(f"{case}: wrong pages at both ends, {len(wrong)} implementations",
                  sum(wrong.values()), "<=", 0, "pages")  # fmt: skip
    if gib != SIZES[0] or unit != GIB:
        return
    results.target(f"{case}: creation", size / seconds / GIB, ">=", 8, "GiB/s")
    results.target(f"{case}: creation takes", seconds, "<=", 6, "s")
    results.check(f"{case}: peak memory", peak.bytes / size, "<=", 1.02, "of the pool")
    if share is not None:
        results.check(f"{case}: pages on the node of the device", share, ">=", 1, "of a sample")


def share_on_node(array: jax.Array) -> float | None:
    """Share of the sampled pages on the node of the device; None if it has none."""
    (device,) = array.devices()
    node = numa_node(device)
    if node is None:
        return None
    (found,) = nodes_of(array).values()
    return found.get(node, 0) / sum(found.values())


def measure_parts(results: Results, unit: int) -> None:
    """The creation without page-locking, and XLA's creation of the same array."""
    size = BASELINE_GIB * 4 * unit
    begin = time.perf_counter()
    memory = native.extension().PinnedMemory(size, -1, [])
    seconds = time.perf_counter() - begin
    row(results, f"{4 * BASELINE_GIB} GiB", "pages, not page-locked", "GiB/s", size / seconds / GIB)
    del memory
    begin = time.perf_counter()
    array = jaxkv.pinned_zeros(size, np.uint8)
    ours = size / (time.perf_counter() - begin) / GIB
    row(results, f"{4 * BASELINE_GIB} GiB", "pinned_zeros", "GiB/s", ours)
    array.delete()
    size = BASELINE_GIB * unit
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    begin = time.perf_counter()
    jax.device_put(np.zeros(size, np.uint8), sharding).block_until_ready()
    peer = size / (time.perf_counter() - begin) / GIB
    row(results, f"{BASELINE_GIB} GiB", "device_put of np.zeros", "GiB/s", peer)


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
    for gib in SIZES:
        if time.perf_counter() - begin > MOST_SECONDS:
            print(f"{gib} GiB pool: not measured after {MOST_SECONDS} s")
            continue
        if gib * unit * 1.05 > _mem_available():
            print(f"{gib} GiB pool: not measured, {_mem_available() / GIB:.0f} GiB available")
            continue
        measure_pool(results, spec, gib, unit)
    measure_parts(results, unit)


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = Results("host_pool")
    measure(results, flags.quick)
    results.save(flags.out)
    for target in (*results.targets, *results.checks):
        print(f"{'met' if target.met else 'MISSED':7} {target.name}: {target.got}")
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
