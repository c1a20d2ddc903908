"""Pages between a pool and a cache, for every host layout: `python -m bench.pages`.

SGLang's published case of its page_first_direct layout: 32 layers, 8 heads of 128 elements, 64
tokens per page, 100 pages, fp16. One layer's K and V are 25 MiB in 200 runs of 128 KiB. CPU time is
that of the handlers in a program with this one copy, GPU time that between two events around it on
a busy stream (bench/harness/timestamps.py), and "submission" the host time of the whole call, from
Python until it returns: SGLang's published 0.169 ms is that of its call. All layers at once are
800 MiB. Then the same pages of all layers in the other layouts, with a layout conversion by the
kernel. Pools and caches have 32 GiB, where memory allows.

Every program is verified before it is timed: pages that are stored and loaded into other pages must
be the same, and a sample of the others unchanged. Other shapes than the published one, by flags,
are printed and not recorded.
"""

import argparse
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
from bench.harness.blocks import DIRECTIONS, HOST_IDS, Method, equal, methods, randomized
from bench.harness.records import Results
from jaxkv._src.autotune.pools import pool_bytes
from jaxkv._src.cache.host_layout import LAYOUTS, HostLayout, Layout

DIRECT: Layout = "page_first_direct"
# More descriptors per submission than this measure the host thread rather than the link.
MAX_DMA_DESCRIPTORS = 32768
MOST_MS = {"CPU time of the handlers": 0.03, "GPU time": 0.52, "submission": 0.169}
WANTED_SHARE = 0.92
UNTOUCHED = 16  # pages that must not change
CHOSEN = "as chosen"


class Size(NamedTuple):
    """Copied pages, their number and layouts; size of the contiguous copy."""

    spec: jaxkv.KVCacheSpec
    pages: int
    num_pages: int
    layouts: tuple[Layout, ...]
    peak_bytes: int


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    small = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", metavar="DIR", help="also write the JSON file below DIR")
    add("--quick", action="store_true", help="fewer pages and layouts")
    add("--layers", type=int, default=2 if small else 32)
    add("--heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--page-size", type=int, default=16 if small else 64, help="tokens")
    add("--dtype", default="float16")
    add("--count", type=int, default=4 if small else 100, help="copied pages")
    add("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS)
    flags = parser.parse_args(argv)
    shape = ("layers", "heads", "head_dim", "page_size", "dtype", "count", "layouts")
    flags.published = all(getattr(flags, name) == parser.get_default(name) for name in shape)
    if flags.quick and flags.published:
        flags.count, flags.layouts = min(flags.count, 20), LAYOUTS[:1]
    return flags


def size_of(flags: argparse.Namespace) -> Size:
    spec = jaxkv.KVCacheSpec(
        num_layers=flags.layers, page_size=flags.page_size, num_kv_heads=flags.heads,
        head_dim=flags.head_dim, dtype=jnp.dtype(flags.dtype),
    )  # fmt: skip
    room = pool_bytes((flags.count + flags.count // 4 + UNTOUCHED) * spec.page_bytes)
    peak_bytes = 1 << (20 if jax.default_backend() == "cpu" else 30)
    return Size(spec, flags.count, room // spec.page_bytes, tuple(flags.layouts), peak_bytes)


class Case:
    """A pool of one layout and a cache of random pages, and the ids of those that are copied."""

    def __init__(self, what: Size, layout: Layout):
        self.what = what
        self.pool = jaxkv.HostPool.create(
            what.spec, num_pages=what.num_pages, layout=layout, head_groups=groups_of(layout)
        )
        cache = jaxkv.DeviceCache.create(what.spec, num_pages=what.num_pages)
        self.cache = randomized(cache)
        rng = np.random.default_rng(0)

        def some(count: int) -> np.ndarray:
            return rng.choice(what.num_pages, count, replace=False).astype(np.int32)

        self.host_pages, self.device_pages = some(what.pages), some(what.pages)
        loaded = some(what.pages + UNTOUCHED)
        self.loaded_pages, self.untouched = loaded[: what.pages], loaded[what.pages :]

    def program(self, method: Method, direction: str, layers: int | None) -> Callable[[Any], Any]:
        """Step of the cache (load) or the pool (store), with stamps."""
        name: Any = None if method.name == CHOSEN else method.name
        options: dict[str, Any] = {"layers": layers, "implementation": name}

        @functools.partial(jax.jit, donate_argnums=0)
        def load(cache: Any, pool: Any, host_pages: Any, device_pages: Any) -> Any:
            cache = stamp_first(cache, 0)
            cache = jaxkv.load_pages(pool, cache, host_pages, device_pages, **options)
            return stamp_first(cache, 1)

        @functools.partial(jax.jit, donate_argnums=0)
        def store(pool: Any, cache: Any, host_pages: Any, device_pages: Any) -> Any:
            pool = stamp_first(pool, 0)
            pool = jaxkv.store_pages(pool, cache, host_pages, device_pages, **options)
            return stamp_first(pool, 1)

        as_ids = jaxkv.HostIds if method.ids == HOST_IDS else jnp.asarray
        host_pages, device_pages, loaded_pages = map(
            as_ids, (self.host_pages, self.device_pages, self.loaded_pages)
        )
        if direction == "load":
            return lambda cache: load(cache, self.pool, host_pages, loaded_pages)
        return lambda pool: store(pool, self.cache, host_pages, device_pages)

    def time(self, method: Method, direction: str, layers: int | None = None) -> timestamps.Timed:
        step = self.program(method, direction, layers)
        name = "cache" if direction == "load" else "pool"
        timed, state = timestamps.measure(step, step(getattr(self, name)))
        setattr(self, name, state)
        jaxkv.check_errors()
        if direction == "load" and not equal(gathered(self.cache, self.loaded_pages), self.wanted):
            raise AssertionError(f"{method}, {self.pool.layout}: wrong after timing")
        return timed

    def verify(self, method: Method) -> None:
        """Raises unless a load restores exactly the stored pages.

        Raises:
          NotImplementedError: the implementation does not support the call.
        """
        self.wanted = gathered(self.cache, self.device_pages)
        kept = gathered(self.cache, self.untouched)
        self.pool = self.program(method, "store", None)(self.pool)
        self.cache = self.program(method, "load", None)(self.cache)
        jaxkv.check_errors(self.cache)
        found = gathered(self.cache, self.loaded_pages), gathered(self.cache, self.untouched)
        if not equal(found, (self.wanted, kept)):
            raise AssertionError(f"{method}, {self.pool.layout}: wrong pages")


@jax.jit
def gathered(cache: Any, pages: Any) -> Any:
    return jax.tree.map(lambda array: array[pages], cache)


def stamp_first(state: Any, slot: int) -> Any:
    """Stamps the first array of a pytree: before or after the copies that write this array."""
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, [timestamps.stamp(leaves[0], slot), *leaves[1:]])


def groups_of(layout: str) -> int:
    return 2 if layout == "page_unified" else 1


def chosen_methods() -> list[Method]:
    return [Method(CHOSEN), Method(CHOSEN, HOST_IDS)]


def supported(case: Case) -> list[Method]:
    """The verified methods of a case."""
    found = []
    for method in (*methods(jax.default_backend()), *chosen_methods()):
        count = descriptors(case.what, case.pool.layout)
        if method.name == "dma" and count > MAX_DMA_DESCRIPTORS:
            print(f"{case.pool.layout}, dma: left out: {count} descriptors", flush=True)
            continue
        try:
            case.verify(method)
            found.append(method)
        except NotImplementedError as error:
            print(f"{case.pool.layout}, {method}: unsupported: {error}", flush=True)
    return found


def descriptors(what: Size, layout: Layout) -> int:
    host = HostLayout(what.spec, layout, what.num_pages, groups_of(layout))
    runs = math.prod(host.page_geometry().counts)
    return what.pages * what.spec.num_layers * what.spec.num_kv * runs


def one_layer(results: Results, case: Case, found: Sequence[Method]) -> None:
    """Load of one layer, as published; targets of jaxkv as chosen with ids on the host."""
    spec, what = case.what.spec, case.what
    mib = what.pages * spec.num_kv * spec.block_bytes / 2**20
    for method in found:
        timed = case.time(method, "load", layers=0)
        name = f"load, {DIRECT}, one layer of {mib:g} MiB, {method}"
        figures = {
            "CPU time of the handlers": timed.handlers, "submission": timed.returns,
            "GPU time": timed.gpu, "time per call (chained)": timed.total,
        }  # fmt: skip
        for metric, seconds in figures.items():
            if math.isnan(seconds):  # no GPU
                continue
            results.row(name, metric, "ms", seconds * 1e3)
            if method == Method(CHOSEN, HOST_IDS) and metric in MOST_MS:
                results.target(f"{name}: {metric}", seconds * 1e3, "<=", MOST_MS[metric], "ms")
        listed = ", ".join(f"{metric} {1e3 * taken:.4f} ms" for metric, taken in figures.items())
        print(f"{name}: {listed}", flush=True)


def all_layers(results: Results, case: Case, found: Sequence[Method]) -> None:
    what, layout = case.what, case.pool.layout
    nbytes = what.pages * what.spec.page_bytes
    shares = []
    for direction in DIRECTIONS:
        link = peak_bandwidth.contiguous_copy(direction, what.peak_bytes)
        for method in found:
            rate = nbytes / case.time(method, direction).total / 1e9
            name = f"{direction}, {layout}, {method}"
            results.row(name, "bandwidth", "GB/s", rate, link)
            print(f"{name:50} {rate:6.1f} GB/s {rate / link[1]:.1%} of {link[1]:.1f}", flush=True)
            if direction == "load" and method.name == CHOSEN:
                shares.append(rate / link[1])
    if layout == DIRECT:
        name = f"load, {DIRECT}, all layers at once, {CHOSEN}, slower form of ids"
        results.target(name, min(shares, default=None), ">=", WANTED_SHARE, "of peak")


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags = parse(argv)
    copy_baselines.library()  # compiles outside of any measurement
    results, what = Results("pages"), size_of(flags)
    for layout in dict.fromkeys((DIRECT, *what.layouts)):
        case = Case(what, layout)
        found = supported(case)
        if layout == DIRECT:
            one_layer(results, case, found)
        all_layers(results, case, found)
        case.pool.close()
        del case  # the next one needs its memory
    if flags.published:
        results.save(flags.out)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
