"""Comparison with `device_put`, the copy method of JAX engines: `python -m bench.engines`.

32 layers with one array each, 256 pages of 64 KiB or 4096 of 8 KiB per layer, at random positions.

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
both on an idle device and in the same rounds; host time of jaxkv is reduced by that of the same
call without the copy.
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import peak_bandwidth, timing
from bench.harness.blocks import DIRECTIONS, equal, randomized
from bench.harness.records import Results, arguments
from bench.harness.timing import Figure
from bench.pages import stamp_first

PAGES_AT_A_TIME, SGLANG_PAGES = 64, 512
PEAK_BYTES = 1 << 30
TPU_INFERENCE, SGLANG = "tpu-inference", "sglang-jax"
ALL_PAGES = "one device_put of all pages"
BASELINES = (TPU_INFERENCE, SGLANG, ALL_PAGES)
JAXKV: dict[str, Callable[[np.ndarray], Any]] = {
    "as chosen": jnp.asarray,
    "as chosen HostIds": jaxkv.HostIds,
}
LATENCY, HOST_TIME = "latency (data available)", "host time (blocking)"
PER_PAGE = "one device_put per page"
REUSED = ", host memory reused"
WANTED = {"load": {PER_PAGE: 1.6, ALL_PAGES: 1.2}, "store": {ALL_PAGES: 1.2}}
MOST_STAGING_MIB, MOST_BLOCKED_MS = 0.1, 0.05
WARMUP = 2  # rounds: the first compiles, the second may capture a graph
Sample = tuple[float, float]  # seconds until the data is available, and until the host continues


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


def sizes(platform: str, quick: bool) -> list[Size]:
    if platform == "cpu":
        return [Size(2, 8, 8 << 10, 2)]
    if quick:
        return [Size(4, 128, 64 << 10, 3)]
    return [Size(32, 256, 64 << 10, 11), Size(32, 4096, 8 << 10, 7)]


def timed(move: Callable[[], Any]) -> tuple[Any, Sample]:
    start = time.perf_counter()
    result = move()
    returned = time.perf_counter()
    jax.block_until_ready(result)
    return result, (time.perf_counter() - start, returned - start)


class Engine:
    """A cache of random pages that all methods copy.

    Attributes:
      staging: bytes of HBM in addition to the cache, by method.
    """

    def __init__(self, size: Size):
        self.size = size
        self.num_pages = size.pages + size.pages // 8
        self.cache = randomized(jaxkv.DeviceCache.create(size.spec, num_pages=self.num_pages))
        self.original = jax.tree.map(jnp.copy, self.cache)
        rng = np.random.default_rng(0)
        self.pages = rng.permutation(self.num_pages)[: size.pages].astype(np.int32)
        self.host_pages = rng.permutation(self.num_pages)[: size.pages].astype(np.int32)
        device = jax.local_devices()[0]
        self.on_host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self.on_device = jax.sharding.SingleDeviceSharding(device)
        self.staging: dict[str, int] = {}

    def check(self, method: str) -> None:
        if not equal(self.cache, self.original):
            raise AssertionError(f"{method}: pages differ after a store and a load")

    def measure(self) -> dict[tuple[str, str], list[Sample]]:
        """Samples by direction and method; all methods are verified first."""
        ways = {name: Jaxkv(self, as_ids) for name, as_ids in JAXKV.items()}
        peers = {name: Baseline(self, name) for name in BASELINES}
        every: dict[str, Jaxkv | Baseline] = {**ways, **peers}
        for name, way in every.items():
            way.store()
            self.cache = _forget(self.cache, self.pages)  # so that a missing load is detected
            way.load()
            self.check(name)
            self.staging[name] = way.staging()
        found: dict[tuple[str, str], list[Sample]] = {}
        for direction in DIRECTIONS:
            runs: dict[str, Callable[[], Sample]] = {}
            for name, way in ways.items():
                runs[name] = getattr(way, direction)
                runs[f"{name}, no copy"] = functools.partial(way.no_copy, direction)
            for name, peer in peers.items():
                runs[name] = getattr(peer, direction)
                if direction == "store":
                    runs[name + REUSED] = functools.partial(peer.store, reuse=True)
            samples = timing.rounds(runs, WARMUP + self.size.rounds)
            found |= {(direction, name): taken[WARMUP:] for name, taken in samples.items()}
        for own in ways.values():
            own.pool.close()
        return found


class Jaxkv:
    """One copy of all pages by jaxkv."""

    def __init__(self, engine: Engine, as_ids: Callable[[np.ndarray], Any]):
        self.engine = engine
        self.ids = {"host_pages": as_ids(engine.host_pages), "device_pages": as_ids(engine.pages)}
        self.pool = jaxkv.HostPool.create(engine.size.spec, num_pages=engine.num_pages)

        def store(pool: Any, cache: Any, ids: Any) -> Any:
            return jaxkv.store_pages(pool, cache, **ids)

        def load(cache: Any, pool: Any, ids: Any) -> Any:
            return jaxkv.load_pages(pool, cache, **ids)

        def no_copy(state: Any, other: Any, ids: Any) -> Any:
            return stamp_first(state, 0)  # otherwise JAX would not run it at all

        self._store, self._load, self._empty = (
            jax.jit(f, donate_argnums=0, keep_unused=True) for f in (store, load, no_copy)
        )

    def store(self) -> Sample:
        cache = self.engine.cache
        self.pool, sample = timed(lambda: self._store(self.pool, cache, self.ids))
        jaxkv.check_errors()
        return sample

    def load(self) -> Sample:
        engine = self.engine
        engine.cache, sample = timed(lambda: self._load(engine.cache, self.pool, self.ids))
        jaxkv.check_errors()
        return sample

    def no_copy(self, direction: str) -> Sample:
        getattr(self, direction)()  # a host thread that has waited less is faster
        engine = self.engine
        if direction == "load":
            engine.cache, sample = timed(lambda: self._empty(engine.cache, self.pool, self.ids))
        else:
            self.pool, sample = timed(lambda: self._empty(self.pool, engine.cache, self.ids))
        return sample

    def staging(self) -> int:
        analyses = (
            self._store.lower(self.pool, self.engine.cache, self.ids).compile().memory_analysis(),
            self._load.lower(self.engine.cache, self.pool, self.ids).compile().memory_analysis(),
        )
        return max(analysis.temp_size_in_bytes if analysis else 0 for analysis in analyses)


class Baseline:
    """One copy of all pages by `device_put`."""

    def __init__(self, engine: Engine, name: str):
        self.engine, self.name, size = engine, name, engine.size
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

    def store(self, *, reuse: bool = False) -> Sample:
        self.stored = [] if reuse else self.stored
        self.stored, sample = timed(self._store)
        if not reuse:
            self.kept.append(self.stored)
        return sample

    def _store(self) -> list[list[jax.Array]]:
        gathered = (self._gather(self.engine.cache, ids) for ids in self.chunks)
        if self.name == SGLANG:  # the others copy the first chunk while the next is gathered
            gathered = iter(jax.block_until_ready([*gathered]))
        return [
            [jax.device_put(block, self.engine.on_host) for block in blocks] for blocks in gathered
        ]

    def load(self) -> Sample:
        self.engine.cache, sample = timed(self._load)
        return sample

    def _load(self) -> jaxkv.DeviceCache:
        engine = self.engine
        arrived = self._worker.submit(self._arrived).result() if self._worker else self._arrived()
        chunks = self.chunks
        if self.name == SGLANG:
            blocks = [block for of_chunk in arrived for block in of_chunk]
            starts = range(0, len(blocks), SGLANG_PAGES)
            arrived = [blocks[i : i + SGLANG_PAGES] for i in starts]
            chunks = self._chunks(SGLANG_PAGES)
        for blocks, ids in zip(arrived, chunks, strict=True):
            engine.cache = self._scatter(engine.cache, blocks, ids)
        # The baseline engines wait here, before the step; no later point shows when the host
        # can continue.
        return jax.block_until_ready(engine.cache)

    def _arrived(self) -> list[list[jax.Array]]:
        put = functools.partial(jax.device_put, device=self.engine.on_device)
        return jax.block_until_ready([[*map(put, blocks)] for blocks in self.stored])

    def staging(self) -> int:
        lowered = self._gather.lower(self.engine.cache, self.chunks[0])
        analysis = lowered.compile().memory_analysis()
        payload = self.engine.size.pages * self.engine.size.spec.page_bytes
        return payload + (analysis.temp_size_in_bytes if analysis else 0)


@functools.partial(jax.jit, donate_argnums=0)
def _forget(cache: jaxkv.DeviceCache, pages: np.ndarray) -> jaxkv.DeviceCache:
    return jax.tree.map(lambda leaf: leaf.at[pages].set(0), cache)


class Comparison:
    """Rows and targets of one direction and size."""

    def __init__(
        self, engine: Engine, direction: str, samples: dict[tuple[str, str], list[Sample]]
    ):
        self.engine, self.direction = engine, direction
        self.case = f"{direction}, {engine.size}"
        mine = {name: taken for (way, name), taken in samples.items() if way == direction}
        self.done = {name: [done for done, _ in taken] for name, taken in mine.items()}
        self.returned = {name: [host for _, host in taken] for name, taken in mine.items()}
        self.peers = [name for name in mine if name.startswith(BASELINES)]

    def blocked(self, name: str) -> Figure:
        """Seconds; of jaxkv those added by the copy."""
        taken = timing.median(self.returned[name])
        empty = f"{name}, no copy"
        return taken - timing.median(self.returned[empty]) if empty in self.returned else taken

    def record(self, results: Results) -> None:
        staging = self.engine.staging
        for name in JAXKV:
            label = f"{self.case}, {name}"
            for metric, unit, of in (
                (LATENCY, "ms", lambda name: timing.median(self.done[name]) * 1e3),
                (HOST_TIME, "ms", lambda name: self.blocked(name) * 1e3),
                ("staging memory (HBM)", "MiB", lambda name: Figure(staging[base(name)] / 2**20)),
            ):
                others = {peer: of(peer) for peer in self.peers}
                results.row(label, metric, unit, of(name), None, others)
                listed = ", ".join(f"{peer} {other:.2f}" for peer, other in others.items())
                print(f"{label}: {metric} {of(name):.3f} {unit}  [{listed}]", flush=True)
            self.targets(results, name)

    def targets(self, results: Results, name: str) -> None:
        """The bound is that of a copy at peak bandwidth."""
        size, label = self.engine.size, f"{self.case}, {name}"
        peak_bytes = PEAK_BYTES if jax.default_backend() == "gpu" else 1 << 20
        _, link = peak_bandwidth.contiguous_copy(self.direction, peak_bytes)
        at_peak = size.pages * size.spec.page_bytes / (link * 1e9)
        for memory in ("", REUSED) if self.direction == "store" else ("",):
            per_page = [TPU_INFERENCE + memory, SGLANG + memory]
            for what, wanted in WANTED[self.direction].items():
                peers = per_page if what == PER_PAGE else [ALL_PAGES + memory]
                peer = min(peers, key=lambda peer: timing.median(self.done[peer]))
                speedup = timing.ratio(self.done[peer], self.done[name])
                bound = timing.median(self.done[peer]) / at_peak
                results.target(
                    f"{label}: speedup over {what}{memory}", speedup, ">=", wanted, "x", bound
                )
        blocked = self.blocked(name) * 1e3
        results.target(f"{label}: host time (blocking)", blocked, "<=", MOST_BLOCKED_MS, "ms")
        staging = self.engine.staging[name] / 2**20
        results.check(f"{label}: staging memory (HBM)", staging, "<=", MOST_STAGING_MIB, "MiB")


def base(name: str) -> str:
    return name.removesuffix(REUSED)


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    results = Results("engines")
    for size in sizes(jax.default_backend(), flags.quick):
        engine = Engine(size)
        samples = engine.measure()
        for direction in DIRECTIONS:
            Comparison(engine, direction, samples).record(results)
    results.save(flags.out)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
