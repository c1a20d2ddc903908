"""Comparison with `device_put`, the copy method of JAX engines: `python -m bench.transfer.engines`.

32 layers with one array each, 256 pages of 64 KiB or 4096 of 8 KiB per layer, at random positions.

Baselines, as in tpu-inference and sglang-jax, in plain JAX:
  - store: a jitted gather over all layers for 64 pages at a time, stacked so that a page of all
    layers is one array, then a `device_put` to pinned memory for each page. sglang-jax waits once
    for all gathers before its first `device_put`;
  - load: a `device_put` for each page, one wait for all, then a jitted scatter into the donated
    arrays. The two engines differ in the thread that copies, not in the calls: sglang-jax can copy
    on a worker thread, here the caller's thread copies;
  - "one device_put of all pages": the same with one array, and one `device_put`, for all pages.
Stores go to new host memory, as in an engine whose host tier is filling up, or to that of
previously dropped pages ("host memory reused"), as in one whose tier is full.

Both methods need HBM for a second copy of the pages; bytes are from XLA's memory analysis of its
programs.

"Latency" is the time until the data is available, "host time" the time until the host can continue,
both on an idle device; host time of jaxkv is reduced by the time of the same call without the
copy, after a wait of the same length.
"""

import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import peak_bandwidth, timing
from bench.harness.records import Results, arguments
from bench.transfer.blocks import DIRECTIONS, IMPLEMENTATIONS, equal
from bench.transfer.pages import stamp_first

PAGES_AT_A_TIME = 64
PEAK_BYTES = 1 << 30
TPU_INFERENCE, SGLANG = "tpu-inference", "sglang-jax"
ALL_PAGES = "one device_put of all pages"
LATENCY = "latency (data available)"
PER_PAGE = "one device_put per page"
REUSED = ", host memory reused"
WANTED = {"store": {PER_PAGE: 12, ALL_PAGES: 1.2}, "load": {PER_PAGE: 1.6, ALL_PAGES: 1.2}}
WARMUP = 2  # calls: the first compiles, the second may capture a graph
WANTED_STAGING_MIB, WANTED_BLOCKED_MS = 0.1, 0.05


class Size(NamedTuple):
    num_layers: int
    pages: int
    block_bytes: int
    repeats: int  # of the baselines, which take up to a second
    jaxkv_repeats: int  # more, as host time varies more than latency

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
        return [Size(2, 8, 8 << 10, 3, 3)]
    if quick:
        return [Size(4, 128, 64 << 10, 3, 15)]
    return [Size(32, 256, 64 << 10, 5, 15), Size(32, 4096, 8 << 10, 3, 15)]


class Timing(NamedTuple):
    """Figures of one copy of all pages.

    Attributes:
      done: seconds until the data is available.
      blocked: seconds until the host can continue.
      staging: bytes of HBM in addition to the cache.
    """

    done: float
    blocked: float
    staging: int


class Engine:
    """A cache of random pages, and the state of each copy method."""

    def __init__(self, size: Size):
        self.size = size
        self.num_pages = size.pages + size.pages // 8
        self.cache = jaxkv.DeviceCache.create(size.spec, num_pages=self.num_pages)
        self.cache = jax.block_until_ready(_randomize(self.cache))
        rng = np.random.default_rng(0)
        self.pages = rng.permutation(self.num_pages)[: size.pages].astype(np.int32)
        self.host_pages = rng.permutation(self.num_pages)[: size.pages].astype(np.int32)
        self.device = jax.local_devices()[0]
        self.on_host = jax.sharding.SingleDeviceSharding(self.device, memory_kind="pinned_host")
        self.on_device = jax.sharding.SingleDeviceSharding(self.device)
        self.kept: list[Any] = []  # forces XLA to allocate new memory

    # jaxkv.

    def time_jaxkv(self, implementation: Any) -> dict[str, Timing]:
        """Raises NotImplementedError if the implementation does not support the call."""
        as_ids = jaxkv.HostIds if implementation == "dma" else jnp.asarray
        ids = {"host_pages": as_ids(self.host_pages), "device_pages": as_ids(self.pages)}
        pool = jaxkv.HostPool.create(self.size.spec, num_pages=self.num_pages)

        def store(pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, ids: Any) -> jaxkv.HostPool:
            return jaxkv.store_pages(pool, cache, **ids, implementation=implementation)

        def load(cache: jaxkv.DeviceCache, pool: jaxkv.HostPool, ids: Any) -> jaxkv.DeviceCache:
            return jaxkv.load_pages(pool, cache, **ids, implementation=implementation)

        def no_copy(state: Any, other: Any, ids: Any) -> Any:
            return stamp_first(state, 0)  # otherwise JAX would not run it at all

        took = {}
        before = jax.tree.map(jnp.copy, self.cache)
        stored, took["store"] = self._time_jitted(store, no_copy, pool, self.cache, ids)
        self.cache = _forget(self.cache, self.pages)  # so that a missing load is detected
        self.cache, took["load"] = self._time_jitted(load, no_copy, self.cache, stored, ids)
        self._check(before, implementation)
        stored.close()
        return took

    def _time_jitted(
        self, operation: Callable, no_copy: Callable, state: Any, other: Any, ids: Any
    ) -> tuple[Any, Timing]:
        jitted = [jax.jit(f, donate_argnums=0, keep_unused=True) for f in (operation, no_copy)]
        analysis = jitted[0].lower(state, other, ids).compile().memory_analysis()
        copy, empty = (functools.partial(_swapped, program, other, ids) for program in jitted)
        calls: dict[Any, list[timing.Call]] = {copy: [], empty: []}
        for _ in range(WARMUP + self.size.jaxkv_repeats):
            for step, timed in calls.items():
                # Equal waits before both: a host thread that has slept is slower.
                state = jax.block_until_ready(copy(state))
                call, state = timing.single_call(step, state, repeats=1)
                timed.append(call)
        jaxkv.check_errors()
        done, blocked, idle = (
            timing.median([getattr(call, what) for call in calls[step][WARMUP:]])
            for step, what in ((copy, "done"), (copy, "returns"), (empty, "returns"))
        )
        staging = analysis.temp_size_in_bytes if analysis else 0
        return state, Timing(done, blocked - idle, staging)

    # Baselines.

    def time_baseline(self, method: str) -> dict[str, Timing]:
        chunk = self.size.pages if method == ALL_PAGES else min(PAGES_AT_A_TIME, self.size.pages)
        chunks = [
            jax.device_put(self.pages[i : i + chunk], self.on_device)
            for i in range(0, self.size.pages, chunk)
        ]
        # 64 arrays of one page each, or one of all pages.
        split = (lambda pages: [pages]) if method == ALL_PAGES else list

        @jax.jit
        def gather(cache: jaxkv.DeviceCache, ids: jax.Array) -> list[jax.Array]:
            return split(jnp.stack([leaf[ids] for leaf in jax.tree.leaves(cache)], axis=1))

        @functools.partial(jax.jit, donate_argnums=0)
        def scatter(
            cache: jaxkv.DeviceCache, staged: list[jax.Array], ids: jax.Array
        ) -> jaxkv.DeviceCache:
            pages = staged[0] if method == ALL_PAGES else jnp.stack(staged)
            leaves, tree = jax.tree.flatten(cache)
            written = [leaf.at[ids].set(pages[:, layer]) for layer, leaf in enumerate(leaves)]
            return jax.tree.unflatten(tree, written)

        def store() -> list[list[jax.Array]]:
            gathered = (gather(self.cache, ids) for ids in chunks)
            if method == SGLANG:  # the others copy the first chunk while the next is gathered
                gathered = iter(jax.block_until_ready([*gathered]))
            return [
                [jax.device_put(block, self.on_host) for block in blocks] for blocks in gathered
            ]

        def load() -> jaxkv.DeviceCache:
            arrived = [
                [jax.device_put(block, self.on_device) for block in blocks] for blocks in stored
            ]
            jax.block_until_ready(arrived)
            for blocks, ids in zip(arrived, chunks, strict=True):
                self.cache = scatter(self.cache, blocks, ids)
            # The baseline engines wait here, before the step; no later point shows when the host
            # can continue.
            return jax.block_until_ready(self.cache)

        before = jax.tree.map(jnp.copy, self.cache)
        stored = jax.block_until_ready(store())
        analysis = gather.lower(self.cache, chunks[0]).compile().memory_analysis()
        payload = self.size.pages * self.size.spec.page_bytes
        staging = payload + (analysis.temp_size_in_bytes if analysis else 0)
        took = {"store": self._time_copies(store, staging, keep=True)}
        took["store" + REUSED] = self._time_copies(store, staging)
        self.cache = _forget(self.cache, self.pages)
        took["load"] = self._time_copies(load, staging)
        self._check(before, method)
        return took

    def _time_copies(self, move: Callable[[], Any], staging: int, keep: bool = False) -> Timing:
        samples = []
        for _ in range(self.size.repeats + 1):
            start = time.perf_counter()
            result = move()
            returned = time.perf_counter()
            jax.block_until_ready(result)
            samples.append((time.perf_counter() - start, returned - start))
            if keep:
                self.kept.append(result)
            del result
        done, blocked = zip(*samples[1:], strict=True)  # the first is a warm-up
        return Timing(timing.median(done), timing.median(blocked), staging)

    def _check(self, before: jaxkv.DeviceCache, method: str) -> None:
        if not equal(self.cache, before):
            raise AssertionError(f"{method}: pages differ after a store and a load")


def _swapped(jitted: Callable, other: Any, ids: Any, state: Any) -> Any:
    return jitted(state, other, ids)


@functools.partial(jax.jit, donate_argnums=0)
def _randomize(cache: jaxkv.DeviceCache) -> jaxkv.DeviceCache:
    leaves, tree = jax.tree.flatten(cache)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    fresh = [
        leaf + jax.random.normal(key, leaf.shape, leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, fresh)


@functools.partial(jax.jit, donate_argnums=0)
def _forget(cache: jaxkv.DeviceCache, pages: np.ndarray) -> jaxkv.DeviceCache:
    return jax.tree.map(lambda leaf: leaf.at[pages].set(0), cache)


def measure(results: Results, platform: str, quick: bool) -> None:
    for size in sizes(platform, quick):
        engine = Engine(size)
        baseline_times = {
            method: engine.time_baseline(method) for method in (TPU_INFERENCE, SGLANG, ALL_PAGES)
        }
        jaxkv_times = {}
        for name in IMPLEMENTATIONS[platform]:
            try:
                jaxkv_times[name] = engine.time_jaxkv(name)
            except NotImplementedError as error:
                print(f"{size}, {name}: unsupported: {error}", flush=True)
        for direction in DIRECTIONS:
            baselines = {method: took[direction] for method, took in baseline_times.items()}
            for method, took in baseline_times.items():
                if direction + REUSED in took:
                    baselines[method + REUSED] = took[direction + REUSED]
            times = {name: took[direction] for name, took in jaxkv_times.items()}
            record(results, f"{direction}, {size}", times, baselines)
            if platform == "gpu" and times:
                record_targets(results, direction, size, times, baselines)


def record(
    results: Results, case: str, jaxkv_times: dict[str, Timing], baseline_times: dict[str, Timing]
) -> None:
    metrics = ((LATENCY, "ms", "done", 1e3), ("host time (blocking)", "ms", "blocked", 1e3),
               ("staging memory (HBM)", "MiB", "staging", 2**-20))  # fmt: skip
    for name, took in jaxkv_times.items():
        for metric, unit, field, scale in metrics:
            baselines = {
                method: getattr(other, field) * scale for method, other in baseline_times.items()
            }
            value = getattr(took, field) * scale
            results.row(f"{case}, {name}", metric, unit, value, None, baselines)
            listed = ", ".join(f"{method} {other:.2f}" for method, other in baselines.items())
            print(f"{case}, {name}: {metric} {value:.3f} {unit}  [{listed}]", flush=True)


def record_targets(
    results: Results,
    direction: str,
    size: Size,
    jaxkv_times: dict[str, Timing],
    baseline_times: dict[str, Timing],
) -> None:
    """The fastest jaxkv implementation with device ids, as in the baselines, over the baselines.

    Each ratio is recorded with its bound, that of a copy at peak bandwidth.
    """
    on_device = [took for name, took in jaxkv_times.items() if name != "dma"]
    if not on_device:
        return
    best = min(on_device, key=lambda took: took.done)
    _, link = peak_bandwidth.contiguous_copy(direction, PEAK_BYTES)
    seconds_at_peak = size.pages * size.spec.page_bytes / (link * 1e9)
    wanted = WANTED[direction]
    for memory in ("", REUSED):
        if ALL_PAGES + memory not in baseline_times:
            continue
        case = f"{direction}, {size}"
        per_page = min(baseline_times[method + memory].done for method in (TPU_INFERENCE, SGLANG))
        for what, seconds, want in (
            (PER_PAGE, per_page, wanted[PER_PAGE]),
            (ALL_PAGES, baseline_times[ALL_PAGES + memory].done, wanted[ALL_PAGES]),
        ):
            name = f"{case}: speedup over {what}{memory}"
            bound = seconds / seconds_at_peak
            results.target(name, seconds / best.done, ">=", want, "x", bound)
    staging = best.staging / 2**20
    results.check(f"{case}: staging memory (HBM)", staging, "<=", WANTED_STAGING_MIB, "MiB")
    results.target(
        f"{case}: host time (blocking)", best.blocked * 1e3, "<=", WANTED_BLOCKED_MS, "ms"
    )


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = Results("engines")
    measure(results, jax.default_backend(), flags.quick)
    results.save(flags.out)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
