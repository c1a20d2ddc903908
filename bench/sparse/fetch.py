"""Fetches of top-k rows from host memory: `python -m bench.sparse.fetch`.

32 requests of 32,768 tokens, by the reuse of ids between steps, with rows of 656 bytes (fp8
payload, scales and RoPE of DeepSeek V3.2) and 1,152 bytes (bf16 MLA). The pool has 32 GiB, as a
user's with many layers: the pages of the requests, of one layer, are at random over all of it.
Fetches are chained within one program, so the time is GPU time without dispatch. The rates are
payload of missing rows.

Baselines in the same run:
  - a kernel after the published design of SGLang's (bench/sparse/published.cu), which has one
    thread block, and so at most one SM, for each request; in the same rounds;
  - cudaMemcpyBatchAsync of the missing rows, after the ids were read back;
  - XLA's gather, of all rows.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import copy_baselines, peak_bandwidth, timestamps, timing
from bench.harness.main import Flags, benchmark, on_gpu
from bench.harness.records import Results
from bench.harness.timing import Figure, Samples
from bench.sparse import xla_gather
from bench.sparse.inputs import GIB_OPTION, PAGE_SIZE, Cache, Trace
from jaxkv import sparse

WARMUP = 5
PRODUCTS = 8  # about 1.5 ms on a data-centre GPU
SOURCE = copy_baselines.REPOSITORY / "bench" / "sparse" / "published.cu"
ROWS = (656, 1152)
REUSE = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
TIME, RATE, JAXKV = "time per call", "missing rows", "jaxkv"
PUBLISHED, BATCH = "published design", "cudaMemcpyBatchAsync"
RATES_WANTED = {656: 40.0, 1152: 44.0}  # GB/s, of all misses at 16 SMs
HIT_US, PARTLY, NEAR = 10.0, 0.95, 1.15
OVER_XLA, OVER_PUBLISHED = 5.0, {0.0: 1.3, 1.0: 1.5}


class Size(NamedTuple):
    """Sizes of the main case."""

    batch: int
    context: int
    k: int
    slots: int
    pool_bytes: int


FULL = Size(32, 32768, 2048, 4096, 32 << 30)
SMALL = Size(2, 512, 32, 64, 1 << 22)  # of the CPU backend


class Case:
    """Fetches of top-k ids of each of `batch` requests of `context` tokens."""

    def __init__(self, cache: Cache, size: Size, reuse: float, *, batch: int, context: int):
        self.cache, self.batch, self.context, self.k = cache, batch, context, size.k
        self.missing = batch * round(size.k * (1 - reuse))  # rows of a call
        self.missing_bytes = self.missing * cache.row_bytes
        self.slots = size.slots
        self.calls = int(
            min(24, max(2, 2e9 // max(self.missing_bytes, 1)))
        )  # at most 40 ms of the link
        self.name = f"{cache.row_bytes} B rows, batch {batch}, context {context}, reuse {reuse:.0%}"
        self.trace = functools.partial(
            Trace, batch=batch, context=context, k=size.k, reuse=reuse, calls=self.calls
        )
        self.table = cache.table(batch, context)

    def _chain(self, fetch: Any, *arguments: Any) -> Any:
        """`(state, rows) = program(state, ids)` of a `rows, state = fetch(state, ids, *arguments)`.

        Products of matrices come first, so that the host is ahead of the GPU.
        """

        @functools.partial(jax.jit, donate_argnums=0)
        def chain(state: Any, ids: list[jax.Array], x: jax.Array, *arrays: Any) -> Any:
            for _ in range(PRODUCTS):
                x = x @ x
            first = timestamps.stamp(ids[0] + jnp.where(x[0, 0] > 1, 1, 0), 0)
            for call in (first, *ids[1:]):
                rows, state = fetch(state, call, *arrays)
            return state, timestamps.stamp(rows, 1)

        size = 4096 if on_gpu() else 8
        x = jnp.full((size, size), 1 / size, jnp.bfloat16)
        return lambda state, ids: chain(state, ids, x, *arguments)

    def jaxkv(self) -> tuple[Any, Any]:
        state = sparse.SparseState.create(
            self.cache.spec, batch=self.batch, slots=self.slots, max_length=self.context
        )
        arrays = [jnp.asarray(self.table), jnp.full(self.batch, self.context, jnp.int32)]

        def fetch(state: Any, ids: jax.Array, pool: Any, table: Any, lengths: Any) -> Any:
            rows, new = sparse.fetch(
                sparse.SparseState(*state), pool, ids, layer=0, lengths=lengths,
                block_table=table,
            )  # fmt: skip
            return rows, (new.hot, new.positions, new.used, new.slot_of, new.clock)

        leaves = (state.hot, state.positions, state.used, state.slot_of, state.clock)
        return self._chain(fetch, self.cache.pool, *arrays), leaves

    def published(self) -> tuple[Any, Any]:
        library()
        tokens = np.arange(self.context)
        host_rows = jnp.asarray(
            self.table[:, tokens // PAGE_SIZE] * PAGE_SIZE + (tokens % PAGE_SIZE).astype(np.int32)
        )
        state = (
            jnp.zeros((self.batch, self.slots, self.cache.row_bytes), jnp.uint8),
            jnp.full((self.batch, self.slots), -1, jnp.int32),
            jnp.tile(jnp.arange(self.slots, dtype=jnp.int16), (self.batch, 1)),
        )

        def fetch(state: Any, ids: jax.Array, pool: Any, host_rows: Any) -> Any:
            call = jax.ffi.ffi_call(
                "bench_PublishedFetch",
                [jax.typeof(ids), *map(jax.typeof, state)],
                input_output_aliases={3: 1, 4: 2, 5: 3},
            )
            rows, *state = call(
                ids, host_rows, pool, *state,
                max_length=np.int64(self.context), row_bytes=np.int64(self.cache.row_bytes),
            )  # fmt: skip
            return rows, tuple(state)

        return self._chain(fetch, self.cache.pool.data, host_rows), state


class Fetches:
    """A method's program with a trace of its own: each must see every step of it."""

    def __init__(self, case: Case, program: Any, state: Any):
        self.case, self.program, self.trace = case, program, case.trace()
        self.state: Any = state, None
        for _ in range(WARMUP):  # until no slot is free
            self.state = self.step(self.state)
        self.calls, self.state = timestamps.warmed_up(self.step, self.state)
        self.check()

    def step(self, state: Any) -> Any:
        self.ids = self.trace.next()
        return self.program(state[0], self.ids)

    def sample(self) -> float:
        """Seconds per call: of the GPU, or of the host without one."""
        taken, self.state = timestamps.sample(self.step, self.state, calls=self.calls)
        return float(timestamps.timed([taken]).device) / self.case.calls

    def check(self) -> None:
        """Raises an AssertionError unless the last rows are those of the last ids."""
        case, (state, rows) = self.case, self.state
        jaxkv.check_errors(rows)
        found = np.asarray(state[0].reshape(-1, case.cache.row_bytes)[rows.reshape(-1)])
        number = np.ascontiguousarray(found[:, :4]).view(np.int32).reshape(case.batch, case.k)
        ids = np.asarray(self.ids[-1])
        pages = case.table[np.arange(case.batch)[:, None], ids // PAGE_SIZE]
        if not np.array_equal(number, pages * PAGE_SIZE + ids % PAGE_SIZE):
            raise AssertionError("fetched rows are wrong")


@functools.cache
def library() -> None:
    """Registers the kernel after the published design."""
    loaded = ctypes.CDLL(str(copy_baselines.compiled(SOURCE, cuda=True)))
    target = jax.ffi.pycapsule(loaded.PublishedFetch)
    jax.ffi.register_ffi_target("bench_PublishedFetch", target, platform="CUDA")


def read_back_seconds(case: Case) -> Figure:
    """Seconds of a fetch by cudaMemcpyBatchAsync: the ids are read back, misses are descriptors.

    Without the time of a lookup on the host, which would be added.
    """
    rows = case.cache.rows
    hot = jnp.zeros((case.batch * case.slots, case.cache.row_bytes), jnp.uint8)
    ids = case.trace().next()[0]

    def read() -> float:
        fresh = jax.block_until_ready(ids + 0)
        start = time.perf_counter()
        np.asarray(fresh)
        return time.perf_counter() - start

    reading = timing.median([read() for _ in range(9)])
    rng = np.random.default_rng(2)
    pairs = (
        rng.integers(0, rows.shape[0], case.missing),
        rng.permutation(hot.shape[0])[: case.missing],
    )
    if not case.missing:
        return reading
    copies = []
    for name in (copy_baselines.BATCH, copy_baselines.SHORT_BATCH):
        copy = copy_baselines.Outside(name, rows, hot, [pairs])
        copy(1)
        copies.append(timing.median([copy(1)[0] for _ in range(9)]))
    return reading + min(copies)


def record(results: Results, case: Case, peers: Sequence[str]) -> Samples[str]:
    """Measures a case and its baselines; returns seconds of those that ran in rounds."""
    runs: dict[str, Fetches] = {JAXKV: Fetches(case, *case.jaxkv())}
    alone: dict[str, Figure] = {}
    for peer in peers if on_gpu() else ():
        try:
            if peer == PUBLISHED:
                runs[peer] = Fetches(case, *case.published())
            else:
                alone[peer] = read_back_seconds(case)
        except (RuntimeError, ValueError, AssertionError) as error:
            print(f"{peer}: not measured: {str(error).splitlines()[0]}", flush=True)
    methods = {method: fetches.sample for method, fetches in runs.items()}
    samples = timing.compare(methods, timestamps.REPEATS)
    for fetches in runs.values():
        fetches.check()
    seconds = samples.medians() | alone
    times = {method: taken * 1e6 for method, taken in seconds.items()}
    results.row(case.name, TIME, "us", times.pop(JAXKV), None, times)
    if case.missing_bytes:
        rates = {m: case.missing_bytes / taken / 1e9 for m, taken in seconds.items()}
        peak = peak_bandwidth.contiguous_copy("load", 1 << (28 if on_gpu() else 20))
        results.row(case.name, RATE, "GB/s", rates.pop(JAXKV), peak, rates)
    return samples


def sweep_reuse(
    results: Results, cache: Cache, size: Size, reuses: Sequence[float]
) -> dict[float, Figure]:
    """The main case; microseconds of jaxkv by reuse."""
    times = {}
    for reuse in reuses:
        case = Case(cache, size, reuse, batch=size.batch, context=size.context)
        times[reuse] = record(results, case, (PUBLISHED, BATCH)).median(JAXKV) * 1e6
    return times


def compare_equal_sms(results: Results, cache: Cache, size: Size) -> None:
    """Both designs on 16 SMs: 16 requests, for which the published one has 16 thread blocks."""
    for reuse, want in OVER_PUBLISHED.items():
        case = Case(cache, size, reuse, batch=16, context=size.context)
        samples, link = record(results, case, (PUBLISHED,)), link_us(case.missing_bytes)
        gain = bound = None
        if PUBLISHED in samples:
            gain = samples.ratio(PUBLISHED, JAXKV)
            bound = samples.median(PUBLISHED) * 1e6 / link if link else None
        results.target(f"{case.name}: speedup over the {PUBLISHED}", gain, ">=", want, "x", bound)


def link_us(nbytes: int) -> float:
    """Microseconds of `nbytes` at the link's peak."""
    return nbytes / peak_bandwidth.contiguous_copy("load", 1 << 28)[1] / 1e3


def record_targets(
    results: Results, row_bytes: int, size: Size, times: dict[float, Figure]
) -> None:
    """Targets of the main case; `times` is the result of `sweep_reuse`."""
    main = f"{row_bytes} B rows, batch {size.batch} x {size.k} ids, 16 SMs"
    total = size.batch * size.k * row_bytes
    peak = peak_bandwidth.contiguous_copy("load", 1 << 28)[1]
    rate = total / times[0.0] / 1e3
    results.target(f"{main}: all miss", rate, ">=", RATES_WANTED[row_bytes], "GB/s", peak)
    hit = times[1.0]
    results.target(f"{main}: all hit", hit, "<=", HIT_US, "us")

    def missing_us(reuse: float) -> float:
        return link_us(round((1 - reuse) * size.k) * size.batch * row_bytes)

    near = times[PARTLY] / (missing_us(PARTLY) + hit)
    name = f"{main}: {PARTLY:.0%} hits, time over misses at link speed + all-hit time"
    results.target(name, near, "<=", NEAR, "x")
    gathers = xla_gather.measure(row_bytes, size.pool_bytes, size.batch * size.k)
    for name, seconds in gathers.items():
        results.row(f"{main}, {name}", TIME, "us", seconds * 1e6)
    xla = min(gathers.values(), default=None)  # of all rows, whatever the reuse
    for reuse, taken in times.items():
        gain = xla * 1e6 / taken if xla else None
        link = missing_us(reuse)
        bound = xla * 1e6 / link if xla and link else None
        name = f"{main}: speedup over XLA's gather, reuse {reuse:.0%}"
        results.target(name, gain, ">=", OVER_XLA, "x", bound)


def measure(results: Results, flags: Flags) -> None:
    size = FULL._replace(pool_bytes=flags.gib << 30) if on_gpu() else SMALL
    results.row("host pool", "size", "GiB", Figure(size.pool_bytes / 2**30))
    for row_bytes in ROWS[:1] if flags.quick else ROWS:
        cache = Cache(row_bytes, size.pool_bytes)
        main_rows = not flags.quick and row_bytes == ROWS[0]
        times = sweep_reuse(results, cache, size, REUSE if main_rows else (0.0, PARTLY, 1.0))
        if on_gpu():
            record_targets(results, row_bytes, size, times)
            compare_equal_sms(results, cache, size)
        del cache  # the next one needs its memory


main = benchmark("sparse", __doc__, measure, options=GIB_OPTION)

if __name__ == "__main__":
    sys.exit(main())
