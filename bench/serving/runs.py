"""Runs of serving systems, and their figures.

All systems of a case are in one process and share the weights. A workload is repeated with other
prompts, each time by all systems. Their order is random in one repeat, and the reverse of that in
the next. Ratios are of the same repeat. The GPU idle share is of one more repeat, which is no
sample: `bench.serving.gpu_idle`.
"""

import argparse
import contextlib
import os
import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax
import numpy as np

from bench.harness import peak_bandwidth, timing
from bench.harness.records import Results
from bench.serving import gpu_idle, systems
from bench.serving.systems import IN_HBM, JAXKV, Measured, Memory
from bench.serving.workloads import BesideLoads, Served, Workload
from examples.serving.engine import Limits
from examples.serving.presets import PRESETS, init_params

RATE, THROUGHPUT = "requests/s", "output throughput"
LATENCY, MEAN_LATENCY = "inter-token latency p99", "inter-token latency, mean"
TTFT, TTFT_P99 = "TTFT p50", "TTFT p99"
RATE_AT_EQUAL_TTFT = "requests/s at equal p99 TTFT"
LOADED, STORED = "loaded per second", "stored per second"
GPU_IDLE = "GPU idle share"
PRECISION = "jax_default_matmul_precision"
PEAK_BYTES = 1 << 30  # of the contiguous copy
Figures = dict[str, tuple[str, float]]  # by metric: unit and value
Samples = dict[str, dict[str, list[Figures]]]  # by workload and system
Answers = dict[str, dict[str, list[list[int]]]]  # the same; tokens, in float32


class Wanted(NamedTuple):
    """Ratio of a metric, of `system` over `other`; a target if there is a limit."""

    workload: str
    metric: str
    other: str
    op: str = ""
    ratio: float | None = None
    system: str = JAXKV


class Case(NamedTuple):
    """Workloads served by one engine of each system.

    Attributes:
      label: of the rows of a workload, `{}` its name.
      workloads: by name; of a repeat, which may give several samples.
      repeats: of each workload; 1 if it is missing.
      only: systems that serve a workload; all if it is missing.
      profiled: as `workloads`, of those whose GPU idle share is measured.
      checks_only: record whether tokens are equal, and no figures.
    """

    label: str
    systems: Sequence[str]
    limits: Limits
    memory: Memory
    workloads: dict[str, Callable[[int], Workload | BesideLoads]]
    repeats: dict[str, int]
    wanted: Sequence[Wanted]
    model: str
    dtype: str
    only: Mapping[str, Sequence[str]] = MappingProxyType({})
    profiled: Mapping[str, Callable[[int], Workload | BesideLoads]] = MappingProxyType({})
    checks_only: bool = False


def main(
    name: str, description: str | None,
    cases: Callable[[argparse.Namespace], Sequence[Case]], parts: Sequence[str],
    argv: Sequence[str] | None = None, *,
    also: Callable[[Results, argparse.Namespace], None] = lambda results, flags: None,
) -> int:  # fmt: skip
    """`main` of a benchmark: `cases`, and then `also`, fill its record."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", metavar="DIR", help="also write the JSON file below DIR")
    add("--quick", action="store_true", help="a smaller model and smaller cases")
    add("--tiny", action="store_true", help="a tiny model in float32, for any device")
    add("--part", choices=parts, nargs="+", help="default: all")
    add("--system", choices=systems.NAMES, nargs="+", help="default: all")
    add("--repeats", type=int, help="of each workload; default: by workload")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # The weights and the pages of all systems may need more than the default, 0.75.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.9")
    flags = parser.parse_args(argv)
    on_cpu = jax.default_backend() == "cpu"
    results = Results(f"{name}_tiny" if flags.tiny and not on_cpu else name)
    flags.tiny |= on_cpu
    for case in cases(flags):
        with full_products(case.dtype):
            record(results, case, *serve(case, flags.repeats))
        results.save(flags.out)  # after each, as the next may not fit into the time
    also(results, flags)
    results.save(flags.out)
    return results.exit_code


def model_of(flags: argparse.Namespace) -> tuple[str, str]:
    """Preset of the random weights, and their dtype."""
    if flags.tiny:
        return "tiny", "float32"
    return "qwen3-0.6b" if flags.quick else "qwen3-8b", "bfloat16"


@contextlib.contextmanager
def full_products(dtype: str) -> Iterator[None]:
    """Float32 without TF32, whose rounding, which depends on the batch, could change tokens.

    In all threads, since several compile.
    """
    before = getattr(jax.config, PRECISION)
    jax.config.update(PRECISION, "highest" if dtype == "float32" else before)
    try:
        yield
    finally:
        jax.config.update(PRECISION, before)


def serve(case: Case, repeats: int | None = None) -> tuple[Samples, Answers]:
    """Samples and answers of all systems, in the order of the repeats."""
    config = PRESETS[case.model]
    params = init_params(config, 0, case.dtype)
    engines = {
        name: systems.create(name, config, params, case.limits, case.memory)
        for name in case.systems
    }
    taken, answers = Samples(), Answers()
    for workload, make in case.workloads.items():
        names = [name for name in engines if name in case.only.get(workload, engines)]
        found = {name: list[Figures]() for name in names}
        tokens = {name: list[list[int]]() for name in names}
        for repeat, name in orders(names, repeats or case.repeats.get(workload, 1)):
            windows = make(repeat).run(engines[name])
            found[name] += [figures(engines[name], served) for served in windows]
            if case.dtype == "float32":
                # Clients of the same order, whatever the order of their answers.
                tokens[name] += sorted(r.tokens for served in windows for r in served.all)
        if names:
            taken[workload], answers[workload] = found, tokens
    # After all samples, lest what a profile leaves behind slow them.
    profile(case, engines, taken, repeats)
    for engine in engines.values():
        engine.release()
    for leaf in jax.tree.leaves(params):
        leaf.delete()
    return taken, answers


def orders(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """Repeat and system, in random orders, each of which is followed by its reverse."""
    order: Sequence[str] = ()
    for repeat in range(repeats):
        order = order[::-1] if repeat % 2 else random.sample(names, len(names))
        yield from ((repeat, name) for name in order)


def profile(
    case: Case, engines: Mapping[str, Measured], taken: Samples, repeats: int | None = None
) -> None:
    """Adds the GPU idle share to the first sample of each workload and system, if on a GPU."""
    for workload, make in case.profiled.items() if jax.default_backend() == "gpu" else ():
        repeat = repeats or case.repeats.get(workload, 1)  # after those that were served
        for name, samples in taken.get(workload, {}).items():
            try:
                share = gpu_idle.measure(engines[name], make(repeat))
            except Exception:  # the samples are there, and need more time than a profile
                traceback.print_exc()
                return
            if share is not None:
                samples[0][GPU_IDLE] = "%", 100 * share


def figures(engine: Measured, served: Served) -> Figures:
    """Metrics of served requests: rates, latencies, hits by tier, bytes, host time."""
    requests = served.requests
    seconds = max(request.token_times[-1] for request in requests) - served.start
    first = [1e3 * (request.token_times[0] - request.submitted_at) for request in requests]
    times = {
        id(request): [taken for taken in request.token_times if taken >= served.since]
        for request in served.all
    }
    between = 1e3 * np.concatenate([np.diff(times[id(request)]) for request in served.running])
    placements = [r.first_placement for r in requests if r.first_placement]
    prompt, size = sum(len(r.prompt) for r in requests), engine.limits.page_size
    loaded = sum(p.loaded for p in placements)
    in_hbm = sum(p.found_in_hbm for p in placements)
    steps = max(1, served.steps.dispatched)
    found: Figures = {
        RATE: ("1/s", len(requests) / seconds),
        THROUGHPUT: ("tokens/s", sum(map(len, times.values())) / seconds),
        "prompt tokens in HBM": ("%", 100 * size * in_hbm / prompt),
        "prompt tokens on the host": ("%", 100 * size * loaded / prompt),
        "host time per step": ("ms", 1e3 * served.steps.seconds / steps),
        "steps dispatched to an idle device": ("%", 100 * served.steps.to_idle / steps),
        "preemptions": ("requests", sum(r.preemptions for r in requests)),
    }
    for name, values in (("TTFT", first), ("inter-token latency", between)):
        for percent in (50, 99):
            if len(values):
                found[f"{name} p{percent}"] = "ms", float(np.percentile(values, percent))
    if len(between):
        found[MEAN_LATENCY] = "ms", float(between.mean())
    if engine.pool:
        extents = max(1, served.steps.extents)
        found["consecutive pages"] = "pages", served.steps.copied_pages / extents
    stored = sum(r.stored for r in requests)
    for moved, rate, count in (("loaded", LOADED, loaded), ("stored", STORED, stored)):
        gigabytes = count * engine.spec.page_bytes / 1e9
        found[moved] = "GB", gigabytes
        found[rate] = "GB/s", gigabytes / seconds
    return found


def record(results: Results, case: Case, taken: Samples, answers: Answers) -> None:
    """Rows of medians, targets, and in float32 checks that all systems give the same tokens."""
    for workload, by_system in taken.items():
        label = case.label.format(workload)
        for system, samples in by_system.items() if not case.checks_only else ():
            for metric, (unit, _) in samples[0].items():
                values = [sample[metric][1] for sample in samples if metric in sample]
                value = timing.median(values)
                results.row(f"{label}, {system}", metric, unit, value, peak_of(metric))
            shown = {metric: f"{value:.4g} {unit}" for metric, (unit, value) in samples[0].items()}
            print(f"{label}, {system}: {shown}", flush=True)
        first, *others = answers[workload]
        for system in others if case.dtype == "float32" else ():
            pairs = zip(answers[workload][first], answers[workload][system], strict=True)
            unequal = sum(a != b for a, b in pairs)
            name = f"{label}: tokens of {system} as {first}"
            results.check(name, unequal, "==", 0, "unequal answers")
    for want in case.wanted:
        label = case.label.format(want.workload)
        by_system, bound = taken.get(want.workload, {}), None
        if want.metric == RATE_AT_EQUAL_TTFT:
            a, b = rates_at_equal_ttft(taken, want)
        else:
            a, b = (
                [sample[want.metric][1] for sample in by_system.get(system, ())]
                for system in (want.system, want.other)
            )
        if a and b and want.metric == RATE and (rate := highest_rate(by_system, want.system)):
            bound = rate / timing.median(b)
        if a and b:
            _target(results, label, want, timing.ratio(a, b), bound)


def rates_at_equal_ttft(taken: Samples, want: Wanted) -> tuple[list[float], list[float]]:
    """Requests/s of two systems by repeat, each the highest within one limit of the p99 of TTFT.

    The limit is the p99 of `want.system` with most requests in flight, or the lowest of the other
    one if that is higher. Rates between those of two numbers of requests in flight are
    interpolated. Empty if the workload ran with one number of requests in flight only.
    """
    found: tuple[list[float], list[float]] = [], []
    # The first is with most in flight.
    names = [name for name in taken if name.partition(",")[0] == want.workload]
    points = [
        list(zip(*(taken[name].get(system, ()) for name in names), strict=False))
        for system in (want.system, want.other)
    ]
    for levels in zip(*points, strict=False) if len(names) > 1 else ():
        own, others = ([(f[TTFT_P99][1], f[RATE][1]) for f in level] for level in levels)
        limit = max(own[0][0], min(others)[0])
        for rates, level in zip(found, (own, others), strict=True):
            rates.append(_highest_within(limit, level))
    return found


def _highest_within(limit: float, points: Sequence[tuple[float, float]]) -> float:
    """The highest rate of the line through points of p99 and rate, up to a p99 of `limit`."""
    p99, rates = map(np.array, zip(*sorted(points), strict=True))
    within = rates[p99 <= limit]
    return float(max(*within, np.interp(limit, p99, rates)))


def peak_of(metric: str) -> tuple[str, float] | None:
    """Peak bandwidth of the link, for the metrics of copies."""
    if metric not in (LOADED, STORED):
        return None
    return peak_bandwidth.contiguous_copy("load" if metric == LOADED else "store", PEAK_BYTES)


def highest_rate(by_system: dict[str, list[Figures]], system: str) -> timing.Figure | None:
    """Upper bound of a system's requests/s: all in HBM, and its loads at peak bandwidth."""
    rates = {
        name: [sample[RATE][1] for sample in by_system.get(name, ())] for name in (IN_HBM, system)
    }
    bounds = [timing.median(rates[IN_HBM])] if rates[IN_HBM] else []
    loaded = [sample[LOADED][1] for sample in by_system[system] if LOADED in sample]
    if any(loaded):
        _, peak = peak_bandwidth.contiguous_copy("load", PEAK_BYTES)
        bounds.append(timing.median(rates[system]) * (peak / timing.median(loaded)))
    return min(bounds, default=None)


def _target(
    results: Results, label: str, want: Wanted, ratio: timing.Figure, bound: timing.Figure | None
) -> None:
    """A row, and on GPUs a target if there is a limit."""
    name = f"{label}: {want.metric}, {want.system} / {want.other}"
    limit = "" if want.ratio is None else f", {want.op} {want.ratio}"
    print(f"{name}: {ratio:.3f} x +- {2 * ratio.error:.3f}{limit}", flush=True)
    results.row(name, "ratio", "x", ratio)
    if jax.default_backend() == "gpu" and want.ratio is not None:
        results.target(name, ratio, want.op, want.ratio, "x", bound)
