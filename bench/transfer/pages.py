"""Pages between a pool and a cache, for every host layout: `python -m bench.transfer.pages`.

SGLang's published case of its page_first_direct layout: 32 layers, 8 heads of 128 elements, 64
tokens per page, 100 pages, fp16. One layer's K and V are 25 MiB in 200 runs of 128 KiB. CPU time is
that of the handlers in a program with this one copy and GPU time that between two events around it
on a busy stream (bench/harness/timestamps.py). All layers at once are 800 MiB.

Then the same pages of all layers in the other layouts, with a layout conversion by the kernel.
Every program is verified before it is timed: pages that are stored and loaded into other pages must
be the same, and all others unchanged.
"""

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import copy_baselines, peak_bandwidth, timestamps
from bench.harness.records import Results, arguments
from bench.transfer.blocks import DIRECTIONS, IMPLEMENTATIONS, equal
from jaxkv._src.cache.host_layout import LAYOUTS, HostLayout, Layout

DIRECT: Layout = "page_first_direct"
# More descriptors per submission than this measure the host thread rather than the link.
MAX_DMA_DESCRIPTORS = 32768
WANTED_CPU_MS, WANTED_GPU_MS, WANTED_SHARE = 0.03, 0.52, 0.92


class Size(NamedTuple):
    """Copied pages, their number and layouts; size of the contiguous copy."""

    spec: jaxkv.KVCacheSpec
    pages: int
    num_pages: int
    layouts: tuple[Layout, ...]
    peak_bytes: int


def size(platform: str, quick: bool) -> Size:
    small = platform == "cpu"
    spec = jaxkv.KVCacheSpec(
        num_layers=2 if small else 32, page_size=16 if small else 64, num_kv_heads=8, head_dim=128,
        dtype=jnp.float16,
    )  # fmt: skip
    pages = 4 if small else 20 if quick else 100
    layouts = ("page_first",) if quick else LAYOUTS
    peak_bytes = 1 << (20 if small else 30)
    return Size(spec, pages, pages + pages // 4 + 1, layouts, peak_bytes)


class Case:
    """A pool and a cache of random pages, and the ids of those that are copied."""

    def __init__(self, what: Size, layout: Layout, implementation: str):
        self.what, self.implementation = what, implementation
        self.pool = jaxkv.HostPool.create(
            what.spec, num_pages=what.num_pages, layout=layout, head_groups=_groups(layout)
        )
        self.cache = _random_cache(what)
        rng = np.random.default_rng(0)
        plain = [rng.permutation(what.num_pages)[: what.pages].astype(np.int32) for _ in range(3)]
        as_ids = jaxkv.HostIds if implementation == "dma" else jnp.asarray
        self.host_pages, self.device_pages, self.other_pages = map(as_ids, plain)
        self.plain = plain

    def program(self, direction: str, layers: int | None) -> Callable[[Any], Any]:
        """Step of the cache (load) or the pool (store), with stamps."""
        options: dict[str, Any] = {"layers": layers, "implementation": self.implementation}

        @functools.partial(jax.jit, donate_argnums=0)
        def load(
            cache: jaxkv.DeviceCache, pool: jaxkv.HostPool, host_pages: Any, device_pages: Any
        ) -> jaxkv.DeviceCache:
            cache = stamp_first(cache, 0)
            cache = jaxkv.load_pages(pool, cache, host_pages, device_pages, **options)
            return stamp_first(cache, 1)

        @functools.partial(jax.jit, donate_argnums=0)
        def store(
            pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, host_pages: Any, device_pages: Any
        ) -> jaxkv.HostPool:
            pool = stamp_first(pool, 0)
            pool = jaxkv.store_pages(pool, cache, host_pages, device_pages, **options)
            return stamp_first(pool, 1)

        if direction == "load":
            return lambda cache: load(cache, self.pool, self.host_pages, self.other_pages)
        return lambda pool: store(pool, self.cache, self.host_pages, self.device_pages)

    def time(self, direction: str, layers: int | None = None) -> timestamps.Timed:
        step = self.program(direction, layers)
        name = "cache" if direction == "load" else "pool"
        timed, state = timestamps.measure(step, step(getattr(self, name)))
        setattr(self, name, state)
        jaxkv.check_errors()
        if direction == "load" and not equal(self.cache, self.loaded):
            raise AssertionError(f"{self.implementation}, {self.pool.layout}: wrong after timing")
        return timed

    def verify(self) -> None:
        """Raises unless a load restores exactly the stored pages.

        Raises:
          NotImplementedError: the implementation does not support the call.
        """
        before = jax.tree.map(jnp.copy, self.cache)
        self.pool = self.program("store", None)(self.pool)
        self.cache = self.program("load", None)(self.cache)
        jaxkv.check_errors(self.cache)
        _, sources, destinations = self.plain
        wrong = _mismatches(self.cache, before, sources, destinations)
        if wrong:
            raise AssertionError(f"{self.implementation}, {self.pool.layout}: {wrong} elements")
        self.loaded = jax.tree.map(jnp.copy, self.cache)


def stamp_first(state: Any, slot: int) -> Any:
    """Stamps the first array of a pytree: before or after the copies that write this array."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [timestamps.stamp(leaves[0], slot), *leaves[1:]])


def _groups(layout: str) -> int:
    return 2 if layout == "page_unified" else 1


def _random_cache(what: Size) -> jaxkv.DeviceCache:
    cache = jaxkv.DeviceCache.create(what.spec, num_pages=what.num_pages)
    leaves, tree = jax.tree.flatten(cache)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    fresh = [
        jax.device_put(jax.random.normal(key, leaf.shape, leaf.dtype), leaf.sharding)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, fresh)


@jax.jit
def _mismatches(
    after: jaxkv.DeviceCache, before: jaxkv.DeviceCache, sources: jax.Array, destinations: jax.Array
) -> jax.Array:
    def differ(after: jax.Array, before: jax.Array) -> jax.Array:
        return jnp.sum(after != before.at[destinations].set(before[sources]))

    return jax.tree.reduce(jnp.add, jax.tree.map(differ, after, before))


def direct_case(results: Results, what: Size, platform: str) -> None:
    """Rows and targets of SGLang's case, from host to device."""
    layer_bytes = what.pages * what.spec.page_bytes // what.spec.num_layers
    link = peak_bandwidth.contiguous_copy("load", what.peak_bytes)
    best: tuple[float, float, float] | None = None
    shares = []
    for name in IMPLEMENTATIONS[platform]:
        case = Case(what, DIRECT, name)
        try:
            case.verify()
        except NotImplementedError as error:
            print(f"{DIRECT}, {name}: unsupported: {error}", flush=True)
            continue
        one, all_layers = case.time("load", layers=0), case.time("load")
        cpu, gpu = one.handlers * 1e3, one.gpu * 1e3
        label = f"load, {DIRECT}, one layer of {layer_bytes / 2**20:g} MiB, {name}"
        results.row(label, "CPU time of the handlers", "ms", cpu)
        if platform == "gpu":
            results.row(label, "GPU time", "ms", gpu)
            # The implementation that is nearest to both targets at once.
            distance = max(cpu / WANTED_CPU_MS, gpu / WANTED_GPU_MS)
            best = min(best or (distance, cpu, gpu), (distance, cpu, gpu))
        results.row(label, "time per call (chained)", "ms", one.total * 1e3)
        rate = what.pages * what.spec.page_bytes / all_layers.total / 1e9
        results.row(f"load, {DIRECT}, all layers, {name}", "bandwidth", "GB/s", rate, link)
        shares.append(rate / link[1])
        print(
            f"{label}: CPU {cpu:.4f} ms, GPU {gpu:.4f} ms, per call {one.total * 1e3:.4f} ms; "
            f"all layers {rate:.1f} GB/s, {shares[-1]:.1%} of {link[1]:.1f}",
            flush=True,
        )
        case.pool.close()
    if platform == "gpu":
        _, best_cpu, best_gpu = best or (None, None, None)
        name = f"{DIRECT} to layer_first, one layer of {layer_bytes / 2**20:g} MiB"
        results.target(f"{name}: CPU time of the handlers", best_cpu, "<=", WANTED_CPU_MS, "ms")
        results.target(
            f"{name}: GPU time, same implementation", best_gpu, "<=", WANTED_GPU_MS, "ms"
        )
        share = max(shares, default=None)
        results.target(f"{DIRECT}, all layers at once", share, ">=", WANTED_SHARE, "of peak")


def layouts(results: Results, what: Size, platform: str) -> None:
    """Rows for all layers at once, in every layout and both directions."""
    for layout in what.layouts:
        for name in IMPLEMENTATIONS[platform]:
            if name == "dma" and (count := _descriptors(what, layout)) > MAX_DMA_DESCRIPTORS:
                print(f"{layout}, dma: left out: {count} descriptors", flush=True)
                continue
            case = Case(what, layout, name)
            try:
                case.verify()
            except NotImplementedError as error:
                print(f"{layout}, {name}: unsupported: {error}", flush=True)
                continue
            for direction in DIRECTIONS:
                nbytes = what.pages * what.spec.page_bytes
                link = peak_bandwidth.contiguous_copy(direction, what.peak_bytes)
                rate = nbytes / case.time(direction).total / 1e9
                label = f"{direction}, {layout}, {name}"
                results.row(label, "bandwidth", "GB/s", rate, link)
                print(
                    f"{label:40} {rate:6.1f} GB/s {rate / link[1]:.1%} of {link[1]:.1f}", flush=True
                )
            case.pool.close()


def _descriptors(what: Size, layout: Layout) -> int:
    host = HostLayout(what.spec, layout, what.num_pages, _groups(layout))
    runs = math.prod(host.page_geometry().counts)
    return what.pages * what.spec.num_layers * what.spec.num_kv * runs


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform = jax.default_backend()
    copy_baselines.library()  # compiles outside of any measurement
    results = Results("pages")
    what = size(platform, flags.quick)
    direct_case(results, what, platform)
    layouts(results, what, platform)
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
