"""Pages between a pool and a cache, for every host layout: `python -m bench.pages`.

SGLang's published case of its page_first_direct layout: 32 layers, 8 heads of 128 elements, 64
tokens per page, 100 pages, fp16. One layer's K and V are 25 MiB in 200 runs of 128 KiB. CPU time is
that of the handlers in a program with this one copy, GPU time that between two events around it on
a busy stream (bench/harness/timestamps.py), and "submission" the host time of the whole call, from
Python until it returns, also of the same program without the copy: SGLang's published 0.169 ms is
that of its call, which has no other arrays. All layers at once are 800 MiB. Then the same pages of
all layers in the other layouts, with a layout conversion by the kernel. Last, consecutive pages in
both, which the copy engine copies in rows. All methods run in the same rounds; pools and caches
have 32 GiB, where memory allows.

Every program is verified before it is timed: pages that are stored and loaded into other pages must
be the same, and a sample of the others unchanged. Other shapes than the published one, by flags,
are printed and not recorded.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import copy_baselines, peak_bandwidth, timestamps, timing
from bench.harness.blocks import (
    CHOICES,
    CHOSEN,
    DIRECTIONS,
    HOST_IDS,
    Method,
    Program,
    copy_pages,
    equal,
    gathered,
    methods,
    randomized,
)
from bench.harness.main import Flags, on_gpu
from bench.harness.records import Results, arguments
from jaxkv._src.autotune.pools import pool_bytes
from jaxkv._src.cache.host_layout import LAYOUTS, HostLayout, Layout

DIRECT: Layout = "page_first_direct"
# More descriptors per submission than this measure the host thread rather than the link.
MAX_DMA_DESCRIPTORS = 32768
MOST_MS = {"CPU time of the handlers": 0.03, "GPU time": 0.52, "submission": 0.169}
WANTED_SHARE = 0.92
WANTED_STORES = {"page_unified": 50, DIRECT: 50}  # GB/s
UNTOUCHED = 16  # pages that must not change
NO_COPY = Method("without a copy", HOST_IDS)
# Shape: on a GPU that published by SGLang, and on a CPU.
SHAPE = {
    "layers": (32, 2), "heads": (8, 8), "head_dim": (128, 128), "page_size": (64, 16),
    "dtype": ("float16", "float16"), "count": (100, 4),
}  # fmt: skip


class Size(NamedTuple):
    """Copied pages, their number and layouts; size of the contiguous copy."""

    spec: jaxkv.KVCacheSpec
    pages: int
    num_pages: int
    layouts: tuple[Layout, ...]
    peak_bytes: int


def parse(argv: Sequence[str] | None) -> Flags:
    published = {name: of_gpu if on_gpu() else of_cpu for name, (of_gpu, of_cpu) in SHAPE.items()}
    options: dict[str, dict[str, Any]] = {
        f"--{name.replace('_', '-')}": {"type": type(default), "default": default}
        for name, default in published.items()
    }
    options["--layouts"] = {"nargs": "+", "choices": LAYOUTS, "default": LAYOUTS}
    flags = arguments(__doc__, argv, options)
    given = {name: getattr(flags, name) for name in published}
    flags.published = given == published and flags.layouts == LAYOUTS
    if flags.quick and flags.published:
        flags.count, flags.layouts = min(flags.count, 20), LAYOUTS[:1]
    return flags


def size_of(flags: Flags) -> Size:
    spec = jaxkv.KVCacheSpec(
        num_layers=flags.layers, page_size=flags.page_size, num_kv_heads=flags.heads,
        head_dim=flags.head_dim, dtype=jnp.dtype(flags.dtype),
    )  # fmt: skip
    room = pool_bytes((2 * flags.count + UNTOUCHED) * spec.page_bytes)
    layouts = tuple(dict.fromkeys((DIRECT, *flags.layouts)))
    return Size(spec, flags.count, room // spec.page_bytes, layouts, 1 << (30 if on_gpu() else 20))


class Case:
    """A pool of one layout and a cache of random pages, and the ids of those that are copied."""

    def __init__(self, what: Size, layout: Layout):
        self.what, self.layout = what, layout
        head_groups = groups_of(layout)
        self.pool = jaxkv.HostPool.create(
            what.spec, num_pages=what.num_pages, layout=layout, head_groups=head_groups
        )
        cache = randomized(jaxkv.DeviceCache.create(what.spec, num_pages=what.num_pages))
        self.ends: dict[str, Any] = {"host": self.pool, "device": cache}
        rng = np.random.default_rng(0)

        def some(count: int) -> np.ndarray:
            return rng.choice(what.num_pages, count, replace=False).astype(np.int32)

        self.host_pages, self.stored = some(what.pages), some(what.pages)
        others = some(what.pages + UNTOUCHED)
        self.loaded, self.untouched = others[: what.pages], others[what.pages :]

    def use_consecutive_pages(self) -> None:
        count = self.what.pages
        self.host_pages = self.stored = np.arange(count, dtype=np.int32)
        self.loaded = self.stored + count
        self.untouched = np.arange(UNTOUCHED, dtype=np.int32) + 2 * count

    def program(self, method: Method, direction: str, layers: int | None = None) -> Program:
        copy: Callable[[Any, Any, Any], Any] = unchanged
        if method != NO_COPY:
            copy = copy_pages(direction, layers=layers, implementation=method.implementation)
        device_pages = self.loaded if direction == "load" else self.stored
        ids = method.converted(self.host_pages), method.converted(device_pages)
        return Program(self.ends, direction, copy, ids, stamped=True)

    def times(
        self, found: Sequence[Method], direction: str, layers: int | None = None
    ) -> dict[Method, timestamps.Timed]:
        """Times of each method, in the same rounds."""
        programs = {method: self.program(method, direction, layers) for method in found}
        for program in programs.values():
            program.prepare()
        runs = {method: program.sample for method, program in programs.items()}
        samples = timing.rounds(runs, timestamps.REPEATS)
        if direction == "load" and not equal(self.pages(self.loaded), self.wanted):
            raise AssertionError(f"{self.layout}: wrong after timing")
        return {method: timestamps.timed(taken) for method, taken in samples.items()}

    def verify(self, method: Method) -> None:
        """Raises unless a load restores exactly the stored pages.

        Raises:
          NotImplementedError: the implementation does not support the call.
        """
        self.wanted, kept = self.pages(self.stored), self.pages(self.untouched)
        self.program(method, "store").run()
        self.program(method, "load").run()
        if not equal((self.pages(self.loaded), self.pages(self.untouched)), (self.wanted, kept)):
            raise AssertionError(f"{method}, {self.layout}: wrong pages")

    def pages(self, ids: np.ndarray) -> Any:
        return gathered(self.ends["device"], ids)

    def supported(self) -> list[Method]:
        """The methods, verified."""
        found = []
        for method in (*methods(), *CHOICES):
            if method.name == "dma" and (count := self.descriptors()) > MAX_DMA_DESCRIPTORS:
                print(f"{self.layout}, dma: left out: {count} descriptors", flush=True)
                continue
            try:
                self.verify(method)
                found.append(method)
            except NotImplementedError as error:
                print(f"{self.layout}, {method}: unsupported: {error}", flush=True)
        return found

    def descriptors(self) -> int:
        spec, layout = self.what.spec, self.layout
        host = HostLayout(spec, layout, self.what.num_pages, groups_of(layout))
        runs = math.prod(host.page_geometry().counts)
        return self.what.pages * spec.num_layers * spec.num_kv * runs


def unchanged(source: Any, destination: Any, ids: Any) -> Any:
    return destination


def groups_of(layout: str) -> int:
    return 2 if layout == "page_unified" else 1


def one_layer(results: Results, case: Case, found: Sequence[Method]) -> None:
    """Load of one layer, as published; targets of jaxkv as chosen with ids on the host."""
    spec = case.what.spec
    mib = case.what.pages * spec.num_kv * spec.block_bytes / 2**20
    times = case.times([*found, NO_COPY], "load", layers=0)
    others = {"submission": {"the program without the copy": times.pop(NO_COPY).returns * 1e3}}
    for method, timed in times.items():
        figures = {
            "CPU time of the handlers": timed.handlers, "submission": timed.returns,
            "GPU time": timed.gpu, "time per call (chained)": timed.total,
        }  # fmt: skip
        for metric, seconds in figures.items():
            if math.isnan(seconds):  # no GPU
                continue
            name, peers = f"load, {DIRECT}, one layer of {mib:g} MiB, {method}", others.get(metric)
            results.row(name, metric, "ms", seconds * 1e3, None, peers)
            if method == CHOICES[1] and metric in MOST_MS:
                bound = min(peers.values()) if peers else None
                wanted = "<=", MOST_MS[metric], "ms", bound
                results.target(f"{name}: {metric}", seconds * 1e3, *wanted)


def all_layers(results: Results, case: Case, found: Sequence[Method]) -> None:
    what = case.what
    nbytes = what.pages * what.spec.page_bytes
    for direction in DIRECTIONS:
        chosen = []
        link = peak_bandwidth.contiguous_copy(direction, what.peak_bytes)
        times = case.times(found, direction)
        for method in found:
            rate = nbytes / times[method].total / 1e9
            results.row(f"{direction}, {case.layout}, {method}", "bandwidth", "GB/s", rate, link)
            if method.name == CHOSEN:
                chosen.append(rate)
        slowest = min(chosen, default=None)
        slower = f"{direction}, {case.layout}, all layers at once, {CHOSEN}, slower form of ids"
        if direction == "load" and case.layout == DIRECT:
            results.target(slower, slowest and slowest / link[1], ">=", WANTED_SHARE, "of peak")
        if direction == "store" and (want := WANTED_STORES.get(case.layout)):
            results.target(slower, slowest, ">=", want, "GB/s", link[1])


def consecutive_pages(results: Results, case: Case, found: Sequence[Method]) -> None:
    """All layers of consecutive pages, by the copy engine."""
    what = case.what
    case.use_consecutive_pages()
    for method in [method for method in found if method.name == "dma"]:
        case.verify(method)
        for direction in DIRECTIONS:
            link = peak_bandwidth.contiguous_copy(direction, what.peak_bytes)
            timed = case.times([method], direction)[method]
            rate = what.pages * what.spec.page_bytes / timed.total / 1e9
            name = f"{direction}, {case.layout}, {method}, consecutive pages"
            results.row(name, "bandwidth", "GB/s", rate, link)
            results.row(name, "submission", "ms", timed.returns * 1e3)


def main(argv: Sequence[str] | None = None) -> int:
    flags = parse(argv)
    copy_baselines.library()  # compiles outside of any measurement
    results, what = Results("pages", log=True), size_of(flags)
    for layout in what.layouts:
        case = Case(what, layout)
        found = case.supported()
        if layout == DIRECT:
            one_layer(results, case, found)
        all_layers(results, case, found)
        if layout == DIRECT:
            consecutive_pages(results, case, found)
        case.ends["host"].close()
        del case  # the next one needs its memory
    if flags.published:
        results.save(flags.out)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
