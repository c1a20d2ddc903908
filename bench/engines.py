"""Comparison with `device_put`, the copy method of JAX engines: `python -m bench.engines`.

32 layers with one array each, 256 pages of 64 KiB or 4096 of 8 KiB per layer, at random positions
of a pool and a cache of 32 GiB each, where memory allows.

Baselines, as in tpu-inference and sglang-jax, in plain JAX:
  - store: a jitted gather over all layers for 64 pages at a time, stacked so that a page of all
    layers is one array, then a `device_put` to pinned memory for each page. sglang-jax waits once
    for all gathers before its first `device_put`;
  - load: a `device_put` for each page, one wait for all, then a jitted scatter into the donated
    arrays. sglang-jax copies on a worker thread, and scatters up to 512 pages at a time;
  - "one device_put of all pages": the same with one array, and one `device_put`, for all pages.
Stores go to new host memory, as in an engine whose host tier is filling up, or to that of
previously dropped pages ("host memory reused"), as in one whose tier is full.

Both methods need HBM for a second copy of the pages; bytes are from XLA's memory analysis of its
programs. jaxkv copies "as chosen", with device ids as the baselines have, and with HostIds.

"Latency" is the time until the data is available, "host time" the time until the host can continue,
both on an idle device. "Host time added by the copy", of jaxkv, is the difference to the same call
without the copy: its median, from more rounds with these two calls only, as it is close to the
noise.
"""

import functools
import gc
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import peak_bandwidth, timestamps, timing
from bench.harness.blocks import (
    CHOICES,
    DIRECTIONS,
    Method,
    Program,
    copy_pages,
    equal,
    gathered,
    randomized,
)
from bench.harness.main import Flags, benchmark, on_gpu
from bench.harness.records import Results
from bench.harness.timing import Call, Figure, Samples
from jaxkv._src.autotune.pools import pool_bytes

PAGES_AT_A_TIME, SGLANG_PAGES = 64, 512
TPU_INFERENCE, SGLANG = "tpu-inference", "sglang-jax"
ALL_PAGES = "one device_put of all pages"
BASELINES = (TPU_INFERENCE, SGLANG, ALL_PAGES)
LATENCY, HOST_TIME = "latency (data available)", "host time (blocking)"
ADDED, STAGING = "host time added by the copy", "staging memory (HBM)"
PER_PAGE = "one device_put per page"
REUSED, NO_COPY = ", host memory reused", ", no copy"
WANTED = {"load": {PER_PAGE: 1.6, ALL_PAGES: 1.2}, "store": {ALL_PAGES: 1.2}}
MOST_STAGING_MIB, MOST_ADDED_MS = 0.1, 0.05
WARMUP = 2  # rounds: the first compiles, the second may capture a graph
HOST_ROUNDS = 16  # of jaxkv's calls, for each round of all methods


class Size(NamedTuple):
    num_layers: int
    pages: int
    block_bytes: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.num_layers} layers x {self.pages} pages of {self.block_bytes // 1024} KiB"

    @property
    def spec(self) -> jaxkv.KVCacheSpec:
        """Latents of one array per layer; 512 elements of 2 bytes per token."""
        return jaxkv.KVCacheSpec(
            num_layers=self.num_layers, page_size=self.block_bytes // 1024, num_kv_heads=1,
            head_dim=512, dtype=jnp.bfloat16, kind="mla",
        )  # fmt: skip


FULL = (Size(32, 256, 64 << 10, 11), Size(32, 4096, 8 << 10, 9))
QUICK = (Size(2, 8, 8 << 10, 2),)


class Engine:
    """A cache of random pages that all methods copy, and a pool.

    Attributes:
      staging: bytes of HBM in addition to the cache, by method.
    """

    def __init__(self, size: Size):
        self.size = size
        least = (size.pages + size.pages // 8) * size.spec.page_bytes
        self.num_pages = pool_bytes(least) // size.spec.page_bytes
        cache = randomized(jaxkv.DeviceCache.create(size.spec, num_pages=self.num_pages))
        pool = jaxkv.HostPool.create(size.spec, num_pages=self.num_pages)
        self.ends: dict[str, Any] = {"host": pool, "device": cache}
        self.rng = np.random.default_rng(0)
        self.pages, self.others = np.split(self.some_pages(size.pages // 8), [size.pages])
        self.original = self.sampled()
        device = jax.local_devices()[0]
        self.on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self.on_device = jax.sharding.SingleDeviceSharding(device)
        self.staging: dict[str, int] = {}

    def some_pages(self, more: int = 0) -> np.ndarray:
        return self.rng.permutation(self.num_pages)[: self.size.pages + more].astype(np.int32)

    def sampled(self) -> Any:
        """Contents of the copied pages, and of others."""
        return gathered(self.ends["device"], np.concatenate([self.pages, self.others]))

    def measure(self) -> list["Comparison"]:
        """Comparisons of each direction; all methods are verified first."""
        ways: dict[str, Jaxkv | Baseline] = {str(m): Jaxkv(self, m) for m in CHOICES}
        ways |= {name: Baseline(self, name) for name in BASELINES}
        again = {name: Baseline(self, name, reuse=True) for name in BASELINES}
        for name, way in ways.items():
            way.store()
            # So that a missing load is detected.
            self.ends["device"] = _forget(self.ends["device"], self.pages)
            way.load()
            if not equal(self.sampled(), self.original):
                raise AssertionError(f"{name}: pages differ after a store and a load")
            self.staging[name] = way.staging()
        found = []
        for direction in DIRECTIONS:
            runs: dict[str, Callable[[], Call]] = {}
            returns: dict[str, Callable[[], float]] = {}
            for name, way in ways.items():
                runs[name] = getattr(way, direction)
                if isinstance(way, Jaxkv):
                    for label, programs in ((name, way.programs), (name + NO_COPY, way.empty)):
                        returns[label] = functools.partial(way.host_time, programs, direction)
                elif direction == "store":
                    runs[name + REUSED] = again[name].store
            calls = timing.rounds(runs, WARMUP + self.size.rounds)
            calls = {name: taken[WARMUP:] for name, taken in calls.items()}
            host = timing.compare(returns, HOST_ROUNDS * self.size.rounds, warmup=WARMUP)
            found.append(Comparison(self, direction, calls, host))
        self.ends["host"].close()
        return found


class Jaxkv:
    """One copy of all pages by jaxkv."""

    def __init__(self, engine: Engine, method: Method):
        # Each method has its own host pages: those of another one would hide a missing store.
        ids = method.converted(engine.some_pages()), method.converted(engine.pages)
        self.programs = {way: Program(engine.ends, way, copy_pages(way), ids) for way in DIRECTIONS}
        # Without the stamp, JAX would not run it at all.
        self.empty = {
            way: Program(engine.ends, way, lambda _, state, ids: timestamps.stamp(state, 0), ids)
            for way in DIRECTIONS
        }

    def store(self) -> Call:
        return self.programs["store"].idle_calls(1)

    def load(self) -> Call:
        return self.programs["load"].idle_calls(1)

    def host_time(self, programs: dict[str, Program], direction: str) -> float:
        """Seconds until a call returns."""
        self.programs[direction].run()  # a host that has waited less is faster
        return programs[direction].idle_calls(1).returns

    def staging(self) -> int:
        return max(map(temporary_bytes, self.programs.values()))


def temporary_bytes(program: Program) -> int:
    analysis = program.jitted.lower(*program.arguments()).compile().memory_analysis()
    return analysis.temp_size_in_bytes if analysis else 0


class Baseline:
    """One copy of all pages by `device_put`."""

    def __init__(self, engine: Engine, name: str, *, reuse: bool = False):
        """`reuse`: a store frees what the one before has written, and XLA uses it again."""
        self.engine, self.name, self.reuse, size = engine, name, reuse, engine.size
        self.stored: list[list[jax.Array]] = []
        self.kept: list[Any] = []  # forces XLA to allocate new memory
        everything = name == ALL_PAGES
        # 64 arrays of one page each, or one of all pages.
        self.chunks = self._chunks(size.pages if everything else PAGES_AT_A_TIME)
        split = (lambda pages: [pages]) if everything else list

        @jax.jit
        def gather(cache: jaxkv.DeviceCache, ids: jax.Array) -> list[jax.Array]:
            return split(jnp.stack([leaf[ids] for leaf in jax.tree.leaves(cache)], axis=1))

        @functools.partial(jax.jit, donate_argnums=0)
        def scatter(cache: Any, staged: list[jax.Array], ids: jax.Array) -> Any:
            pages = staged[0] if everything else jnp.stack(staged)
            leaves, tree = jax.tree.flatten(cache)
            written = [leaf.at[ids].set(pages[:, layer]) for layer, leaf in enumerate(leaves)]
            return jax.tree.unflatten(tree, written)

        self._gather, self._scatter = gather, scatter
        self._worker = ThreadPoolExecutor(1) if name == SGLANG else None

    def _chunks(self, pages: int) -> list[jax.Array]:
        ids = self.engine.pages
        return [
            jax.device_put(ids[i : i + pages], self.engine.on_device)
            for i in range(0, len(ids), pages)
        ]

    def store(self) -> Call:
        if not self.reuse:
            self.kept.append(self.stored)
        self.stored = []
        call, self.stored = timing.single_call(lambda _: self._store(), None, repeats=1)
        return call

    def _store(self) -> list[list[jax.Array]]:
        gathered = (self._gather(self.engine.ends["device"], ids) for ids in self.chunks)
        if self.name == SGLANG:  # the others copy the first chunk while the next is gathered
            gathered = iter(jax.block_until_ready([*gathered]))
        return [
            [jax.device_put(block, self.engine.on_host) for block in blocks] for blocks in gathered
        ]

    def load(self) -> Call:
        call, _ = timing.single_call(lambda _: self._load(), None, repeats=1)
        return call

    def _load(self) -> None:
        ends = self.engine.ends
        arrived = self._worker.submit(self._arrived).result() if self._worker else self._arrived()
        chunks = self.chunks
        if self.name == SGLANG:
            blocks = [block for of_chunk in arrived for block in of_chunk]
            starts = range(0, len(blocks), SGLANG_PAGES)
            arrived = [blocks[i : i + SGLANG_PAGES] for i in starts]
            chunks = self._chunks(SGLANG_PAGES)
        for blocks, ids in zip(arrived, chunks, strict=True):
            ends["device"] = self._scatter(ends["device"], blocks, ids)
        # The baseline engines wait here, before the step; no later point shows when the host
        # can continue.
        jax.block_until_ready(ends["device"])

    def _arrived(self) -> list[list[jax.Array]]:
        put = functools.partial(jax.device_put, device=self.engine.on_device)
        return jax.block_until_ready([[*map(put, blocks)] for blocks in self.stored])

    def staging(self) -> int:
        lowered = self._gather.lower(self.engine.ends["device"], self.chunks[0])
        analysis = lowered.compile().memory_analysis()
        payload = self.engine.size.pages * self.engine.size.spec.page_bytes
        return payload + (analysis.temp_size_in_bytes if analysis else 0)


@functools.partial(jax.jit, donate_argnums=0)
def _forget(cache: jaxkv.DeviceCache, pages: np.ndarray) -> jaxkv.DeviceCache:
    return jax.tree.map(lambda leaf: leaf.at[pages].set(0), cache)


class Comparison:
    """Rows and targets of one direction and size."""

    def __init__(
        self,
        engine: Engine,
        direction: str,
        calls: dict[str, list[Call]],
        host: Samples[str],
    ):
        self.engine, self.direction = engine, direction
        self.case = f"{direction}, {engine.size}"
        self.done = Samples({name: [call.done for call in taken] for name, taken in calls.items()})
        self.host = Samples(
            {name: [call.returns for call in taken] for name, taken in calls.items()}
        )
        self.host |= host
        self.peers = [name for name in calls if name.startswith(BASELINES)]

    def blocked(self, name: str) -> Figure:
        return self.host.median(name) * 1e3

    def added(self, name: str) -> Figure:
        """Milliseconds."""
        pairs = zip(self.host[name], self.host[name + NO_COPY], strict=True)
        return timing.median([a - b for a, b in pairs]) * 1e3

    def latency(self, name: str) -> Figure:
        return self.done.median(name) * 1e3

    def staging_mib(self, name: str) -> Figure:
        return Figure(self.engine.staging[name.removesuffix(REUSED)] / 2**20)

    def record(self, results: Results) -> None:
        for name in map(str, CHOICES):
            case = f"{self.case}, {name}"
            for metric, unit, of in (
                (LATENCY, "ms", self.latency),
                (HOST_TIME, "ms", self.blocked),
                (STAGING, "MiB", self.staging_mib),
            ):
                others = {peer: of(peer) for peer in self.peers}
                results.row(case, metric, unit, of(name), None, others)
            results.row(case, ADDED, "ms", self.added(name), want=("<=", MOST_ADDED_MS))
            self.targets(results, name)
            staging = float(self.staging_mib(name))
            results.check(f"{case}: {STAGING}", staging, "<=", MOST_STAGING_MIB, "MiB")

    def targets(self, results: Results, name: str) -> None:
        """Speedups; the bound is that of a copy at peak bandwidth."""
        size = self.engine.size
        peak_bytes = 1 << (30 if on_gpu() else 20)
        _, link = peak_bandwidth.contiguous_copy(self.direction, peak_bytes)
        at_peak = size.pages * size.spec.page_bytes / (link * 1e9)
        for memory in ("", REUSED) if self.direction == "store" else ("",):
            per_page = [TPU_INFERENCE + memory, SGLANG + memory]
            for what, wanted in WANTED[self.direction].items():
                peers = per_page if what == PER_PAGE else [ALL_PAGES + memory]
                peer = min(peers, key=self.done.median)
                speedup, bound = self.done.ratio(peer, name), self.done.median(peer) / at_peak
                target = f"{self.case}, {name}: speedup over {what}{memory}"
                results.target(target, speedup, ">=", wanted, "x", bound)


def measure(results: Results, flags: Flags) -> None:
    for size in QUICK if flags.quick else FULL:
        for comparison in Engine(size).measure():
            comparison.record(results)
        del comparison
        gc.collect()  # the next caches need its memory


main = benchmark("engines", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
