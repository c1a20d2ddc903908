"""Figures of a run of the serving benchmarks."""

from collections.abc import Iterable, Sequence

import jax
import numpy as np

from bench.harness import timing
from bench.harness.records import Results
from bench.serving.systems import Measured
from examples.serving.request import Request

RATE, TTFT, LATENCY = "requests/s", "TTFT", "inter-token latency"
HOST_TIME = "host time per step"
UNEQUAL = "unequal answers"
Figures = dict[tuple[str, str], float]  # by metric and unit


def intervals(requests: Iterable[Request]) -> np.ndarray:
    """Seconds between the tokens of each request."""
    gaps = [np.diff(request.token_times) for request in requests]
    return np.concatenate(gaps) if gaps else np.zeros(0)


def figures(engine: Measured, requests: Sequence[Request]) -> Figures:
    """Metrics of served requests: rates, latencies, hits by tier, bytes, host time."""
    start = min(request.submitted_at for request in requests)
    seconds = max(request.token_times[-1] for request in requests) - start
    first = [1e3 * (request.token_times[0] - request.submitted_at) for request in requests]
    between = 1e3 * intervals(requests)
    placements = [r.first_placement for r in requests if r.first_placement]
    prompt, size = sum(len(r.prompt) for r in requests), engine.limits.page_size
    loaded = sum(p.loaded for p in placements)
    moved = {"loaded": loaded, "stored": sum(r.stored for r in requests)}
    found: Figures = {
        (RATE, "1/s"): len(requests) / seconds,
        ("output throughput", "tokens/s"): sum(len(r.answer) for r in requests) / seconds,
        ("prompt tokens in HBM", "%"): 100
        * size * sum(p.found_in_hbm for p in placements) / prompt,
        ("prompt tokens on the host", "%"): 100 * size * loaded / prompt,
    }  # fmt: skip
    for name, values in ((TTFT, first), (LATENCY, between)):
        for percent in (50, 99):
            if len(values):
                found[f"{name} p{percent}", "ms"] = float(np.percentile(values, percent))
    for direction, pages in moved.items():
        gigabytes = pages * engine.spec.page_bytes / 1e9
        found[direction, "GB"] = gigabytes
        found[f"{direction} per second", "GB/s"] = gigabytes / seconds
    found[HOST_TIME, "ms"] = 1e3 * engine.seconds / max(1, engine.steps)
    found["steps dispatched to an idle device", "%"] = (
        100 * engine.idle_steps / max(1, engine.steps)
    )
    found["preemptions", "requests"] = sum(r.preemptions for r in requests)
    return found


def record(results: Results, workload: str, runs: dict[str, Figures]) -> None:
    """One row for each metric of each system, and a line of the main ones."""
    for system, found in runs.items():
        for (metric, unit), value in found.items():
            results.row(f"{workload}, {system}", metric, unit, value)


def show(workload: str, system: str, found: Figures) -> None:
    listed = ", ".join(f"{name} {value:.4g} {unit}" for (name, unit), value in found.items())
    print(f"{workload}, {system}: {listed}", flush=True)


def target(
    results: Results, name: str, samples: dict[str, list[float]], pair: tuple[str, str],
    op: str, want: float,
) -> None:  # fmt: skip
    """The ratio of paired samples of two systems, if both ran; a target on GPUs only."""
    a, b = (samples.get(system) for system in pair)
    if not (a and b):
        return
    ratio = timing.ratio(a, b)
    print(f"{name}: {ratio:.3f} x +- {2 * ratio.error:.3f}, target {op} {want}", flush=True)
    results.row(name, "ratio", "x", ratio)
    if jax.default_backend() == "gpu":
        results.target(name, ratio, op, want, "x")


def target_tokens(results: Results, case: str, answers: dict[str, list[list[int]]]) -> None:
    """Answers of all systems equal those of the first."""
    first, *others = answers
    for system in others:
        pairs = zip(answers[first], answers[system], strict=True)
        unequal = sum(a != b for a, b in pairs)
        results.check(f"{case}: tokens of {system} as {first}", unequal, "==", 0, UNEQUAL)
