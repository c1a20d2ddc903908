"""Fetches of top-k rows from host memory: `python -m bench.sparse.fetch`.

Sweeps of the reuse of ids between steps, the batch and the context, with rows of 656 bytes (fp8
payload, scales and RoPE of DeepSeek V3.2) and 1,152 bytes (bf16 MLA). Fetches are chained within
one program, so the time is GPU time without dispatch. The rates are payload of missing rows.

Baselines in the same run:
  - a kernel after the published design of SGLang's (bench/sparse/published.cu), which has one
    thread block, and so at most one SM, for each request;
  - cudaMemcpyBatchAsync of the missing rows, after the ids were read back;
  - XLA's gather, of all rows.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from bench.harness import peak_bandwidth
from bench.harness.records import Results, arguments
from bench.sparse import cases, xla_gather
from examples.sparse import engine, model

ROWS = (656, 1152)
REUSE = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99, 1.0)
TIME, RATE = "time per call", "missing rows"
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


FULL = Size(32, 32768, 2048, 4096, 1 << 30)
SMALL = Size(2, 512, 32, 64, 1 << 22)  # of the CPU backend


def case_of(
    cache: cases.Cache, size: Size, reuse: float, *, batch: int, context: int
) -> cases.Case:
    missing = batch * size.k * (1 - reuse) * cache.row_bytes
    calls = int(min(24, max(2, 2e9 // max(missing, 1))))  # at most 40 ms of the link
    return cases.Case(
        cache, batch=batch, context=context, reuse=reuse, k=size.k, slots=size.slots, calls=calls,
    )  # fmt: skip


def record(results: Results, case: cases.Case, name: str, peers: Sequence[str]) -> dict[str, float]:
    """Measures a case and its baselines; returns their microseconds."""
    on_gpu = jax.default_backend() == "gpu"
    seconds = {"jaxkv": case.seconds("jaxkv")}
    measures = {
        PUBLISHED: lambda: case.seconds("published"),
        BATCH: lambda: cases.read_back_seconds(case),
    }
    for peer in peers if on_gpu else ():
        try:
            seconds[peer] = measures[peer]()
        except (RuntimeError, ValueError, AssertionError) as error:
            print(f"{peer}: not measured: {str(error).splitlines()[0]}", flush=True)
    times = {method: taken * 1e6 for method, taken in seconds.items()}
    others = {method: taken for method, taken in times.items() if method != "jaxkv"}
    results.row(name, TIME, "us", times["jaxkv"], None, others)
    text = f"{name}: {times['jaxkv']:.1f} us"
    if case.missing_bytes:
        rates = {m: case.missing_bytes / taken / 1e9 for m, taken in seconds.items()}
        peak = peak_bandwidth.contiguous_copy("load", 1 << 28 if on_gpu else 1 << 20)
        own = rates.pop("jaxkv")
        results.row(name, RATE, "GB/s", own, peak, rates)
        text += f", {own:.1f} GB/s ({own / peak[1]:.0%} of peak)"
    print(text, "".join(f", {m} {taken:.1f} us" for m, taken in others.items()), flush=True)
    return times


def name_of(row_bytes: int, batch: int, context: int, reuse: float) -> str:
    return f"{row_bytes} B rows, batch {batch}, context {context}, reuse {reuse:.0%}"


def sweep_reuse(
    results: Results, cache: cases.Cache, size: Size, reuses: Sequence[float]
) -> dict[float, dict[str, float]]:
    """The main case; microseconds of each method by reuse."""
    times = {}
    for reuse in reuses:
        case = case_of(cache, size, reuse, batch=size.batch, context=size.context)
        name = name_of(cache.row_bytes, size.batch, size.context, reuse)
        times[reuse] = record(results, case, name, (PUBLISHED, BATCH))
    return times


def sweep_shapes(results: Results, cache: cases.Cache, size: Size) -> None:
    """Other batches and contexts, of all misses and of few."""
    shapes = [(batch, size.context) for batch in (1, 8, 64, 256)]
    for batch, context in [*shapes, (size.batch, 8192), (size.batch, 131072)]:
        for reuse in (0.0, PARTLY):
            case = case_of(cache, size, reuse, batch=batch, context=context)
            name = name_of(cache.row_bytes, batch, context, reuse)
            record(results, case, name, (PUBLISHED,))


def compare_equal_sms(results: Results, cache: cases.Cache, size: Size) -> None:
    """Both designs on 16 SMs: 16 requests, for which the published one has 16 thread blocks."""
    for reuse, want in OVER_PUBLISHED.items():
        case = case_of(cache, size, reuse, batch=16, context=size.context)
        name = name_of(cache.row_bytes, 16, size.context, reuse)
        times = record(results, case, name, (PUBLISHED,))
        published = times.get(PUBLISHED)
        gain = published / times["jaxkv"] if published else None
        link = link_us(case.missing_bytes)
        bound = published / link if published and link else None
        results.target(f"{name}: speedup over the {PUBLISHED}", gain, ">=", want, "x", bound)


def link_us(nbytes: int) -> float:
    """Microseconds of `nbytes` at the link's peak."""
    return nbytes / peak_bandwidth.contiguous_copy("load", 1 << 28)[1] / 1e3


def record_targets(
    results: Results, row_bytes: int, size: Size, times: dict[float, dict[str, float]]
) -> None:
    """Targets of the main case; `times` is the result of `sweep_reuse`."""
    main = f"{row_bytes} B rows, batch {size.batch} x {size.k} ids, 16 SMs"
    total = size.batch * size.k * row_bytes
    peak = peak_bandwidth.contiguous_copy("load", 1 << 28)[1]
    rate = total / times[0.0]["jaxkv"] / 1e3
    results.target(f"{main}: all miss", rate, ">=", RATES_WANTED[row_bytes], "GB/s", peak)
    hit = times[1.0]["jaxkv"]
    results.target(f"{main}: all hit", hit, "<=", HIT_US, "us")

    def missing_us(reuse: float) -> float:
        return link_us(round((1 - reuse) * size.k) * size.batch * row_bytes)

    near = times[PARTLY]["jaxkv"] / (missing_us(PARTLY) + hit)
    name = f"{main}: {PARTLY:.0%} hits, time over misses at link speed + all-hit time"
    results.target(name, near, "<=", NEAR, "x")
    gathers = xla_gather.measure(row_bytes, size.pool_bytes, size.batch * size.k)
    for name, seconds in gathers.items():
        results.row(f"{main}, {name}", TIME, "us", seconds * 1e6)
        print(f"{main}, {name}: {seconds * 1e6:.1f} us", flush=True)
    xla = min(gathers.values(), default=None)  # of all rows, whatever the reuse
    for reuse, taken in times.items():
        gain = xla * 1e6 / taken["jaxkv"] if xla else None
        link = missing_us(reuse)
        bound = xla * 1e6 / link if xla and link else None
        name = f"{main}: speedup over XLA's gather, reuse {reuse:.0%}"
        results.target(name, gain, ">=", OVER_XLA, "x", bound)


def example_reuse(results: Results) -> None:
    """Share of the chosen rows that are in the hot buffer of examples/sparse, random weights."""
    config, sizes, rng = model.Config(), engine.Sizes(), np.random.default_rng(0)
    prompts = [rng.integers(0, config.vocab, length).tolist() for length in (128, 64, 100, 17)]
    params = model.init_params(config, 0)
    ran = engine.Engine(config, sizes, params, engine.InHostMemory(config, sizes))
    ran.generate(prompts, 16)
    share = 1 - ran.missing / ran.chosen
    results.row(f"examples/sparse, {sizes.slots} slots, top {config.top_k}", "reuse", "", share)
    print(f"examples/sparse: reuse {share:.0%}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    results = Results("sparse")
    on_gpu = jax.default_backend() == "gpu"
    size = FULL if on_gpu else SMALL
    example_reuse(results)
    for row_bytes in ROWS[:1] if flags.quick else ROWS:
        cache = cases.Cache(row_bytes, size.pool_bytes)
        quick = flags.quick or not on_gpu
        reuses = (0.0, PARTLY, 1.0) if quick or row_bytes != ROWS[0] else REUSE
        times = sweep_reuse(results, cache, size, reuses)
        if on_gpu:
            record_targets(results, row_bytes, size, times)
            compare_equal_sms(results, cache, size)
        if not quick and row_bytes == ROWS[0]:
            sweep_shapes(results, cache, size)
        cache.pool.close()
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
