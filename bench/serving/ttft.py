"""Time to first token with a prefix in host memory: `python -m bench.serving.ttft`.

Parts (`--part`), each for all systems (`--system`; bench.serving.systems):

  ttft     one request at a time: `--cached` tokens of an earlier request, which other requests have
           evicted from HBM, and `--new` tokens
  latency  inter-token latency of running requests, while requests with evicted prefixes are
           admitted beside them; each step loads a part of a prefix. All in HBM is the run
           without loads, with the same requests
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from bench.harness.records import Results
from bench.serving import metrics, systems
from bench.serving.metrics import Figures
from bench.serving.systems import IN_HBM, JAXKV, RECOMPUTE, Measured, Memory
from examples.serving.engine import Limits
from examples.serving.model import PRESETS, Config, Params, init_params
from examples.serving.request import Request

PARTS = ("ttft", "latency")
TTFT, LATENCY = ("TTFT p50", "ms"), ("p99 inter-token latency beside loads", "ms")
WANTED_RECOMPUTE, WANTED_IN_HBM, WANTED_LATENCY = 0.20, 1.15, 1.10


class Size(NamedTuple):
    model: str
    dtype: str
    page_size: int
    cached: int  # tokens
    new: int
    prefixes: int
    running: int  # requests beside the loads, of `prompt` and `answer` tokens
    prompt: int
    answer: int
    every: int  # steps between the admissions
    copy_pages: int  # in one step, beside running requests

    @property
    def prefix_pages(self) -> int:
        """Of a request with a prefix."""
        return -(-(self.cached + self.new + 2) // self.page_size)

    @property
    def running_pages(self) -> int:
        return -(-(self.prompt + self.answer) // self.page_size)


FULL = Size("qwen3-8b", "bfloat16", 32, 8192, 1024, 8, 16, 1024, 256, 16, 32)
SMALL = Size("tiny", "float32", 8, 64, 16, 4, 2, 16, 24, 4, 4)


class Measurement(NamedTuple):
    figures: Figures
    samples: list[float]  # of the target's metric
    answers: list[list[int]]


class Prompts:
    """Random prefixes and what follows them."""

    def __init__(self, size: Size, vocab: int):
        self.size, self.vocab = size, vocab
        self.rng = np.random.default_rng(0)
        self.prefixes = [self.tokens(size.cached) for _ in range(size.prefixes)]

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(0, self.vocab, count).tolist()


def drain(engine: Measured) -> None:
    while engine.busy:
        engine.step()


def populate(engine: Measured, prompts: Prompts) -> None:
    """Serves all prefixes, which evict each other."""
    for prefix in prompts.prefixes:
        # The page of the last token is published with the next ones.
        engine.submit(Request([*prefix, 0], 1))
        drain(engine)


def measure_ttft(engine: Measured, size: Size, vocab: int) -> Measurement:
    """Median TTFT of one request at a time, after one for each prefix as a warm-up."""
    prompts = Prompts(size, vocab)
    populate(engine, prompts)
    served = []
    for warm_up in (True, False):
        engine.reset()
        for prefix in prompts.prefixes:
            request = Request(prefix + prompts.tokens(size.new), 2)
            engine.submit(request)
            drain(engine)
            if not warm_up:
                served.append(request)
    seconds = [request.token_times[0] - request.submitted_at for request in served]
    found = {TTFT: 1e3 * statistics.median(seconds)}
    placements = [request.first_placement for request in served if request.first_placement]
    loaded = sum(placement.loaded for placement in placements) * size.page_size
    found["tokens loaded for each request", "tokens"] = loaded / len(served)
    found["host time per step", "ms"] = 1e3 * engine.seconds / engine.steps
    return Measurement(found, seconds, [request.answer for request in served])


def measure_latency(engine: Measured, size: Size, vocab: int) -> Measurement:
    """Inter-token latency of running requests, while others with prefixes are admitted."""
    prompts = Prompts(size, vocab)
    populate(engine, prompts)
    running = [Request(prompts.tokens(size.prompt), size.answer) for _ in range(size.running)]
    for request in running:
        engine.submit(request)
    while not all(request.answer for request in running):
        engine.step()
    engine.reset()
    others: list[Request] = []
    step = 0
    while not all(request.finished for request in running):
        if step % size.every == 0:
            prefix = prompts.prefixes[len(others) % size.prefixes]
            others.append(Request(prefix + prompts.tokens(size.page_size), 2))
            engine.submit(others[-1])
        engine.step()
        step += 1
    drain(engine)
    between = 1e3 * metrics.intervals(running)
    found = {
        LATENCY: float(np.percentile(between, 99)),
        ("p50 inter-token latency beside loads", "ms"): float(np.percentile(between, 50)),
        ("requests admitted beside them", "requests"): len(others),
    }
    placements = [request.first_placement for request in others if request.first_placement]
    loaded = sum(placement.loaded for placement in placements) * size.page_size
    found["tokens loaded beside them", "tokens"] = loaded / max(1, len(others))
    answers = [request.answer for request in running]
    return Measurement(found, [found[LATENCY]], answers)


def plan(part: str, size: Size) -> tuple[Limits, Memory]:
    """HBM for one request with a prefix and a half, beside the running ones.

    Sizes are those of both parts, which share the programs without copies.
    """
    running = size.running * size.running_pages
    everything = 2 * size.prefixes * size.prefix_pages + running
    few = size.prefix_pages * 3 // 2 + running
    limits = Limits(
        size.page_size,
        size.running + 2,
        size.new + size.running + 2,
        max(size.prefix_pages, size.running_pages),
        # A prefix is loaded in one step, beside the computation of what follows it, unless others
        # would wait for that step.
        copy_pages=size.copy_pages
        if part == "latency"
        else -(-size.cached // size.page_size // 64) * 64,
        token_buckets=(size.running + 2 * size.page_size,),
    )
    return limits, Memory(everything, few, everything)


def measure(
    results: Results, part: str, size: Size, names: Sequence[str], model: tuple[Config, Params]
) -> None:
    config, params = model
    limits, memory = plan(part, size)
    case = f"{size.model}, {size.cached} tokens cached, {size.new} new"
    if part == "latency":
        case = f"{size.model}, {size.running} requests beside loads of {size.cached} tokens"
    run = {"ttft": measure_ttft, "latency": measure_latency}[part]
    runs: dict[str, Figures] = {}
    samples: dict[str, list[float]] = {}
    answers: dict[str, list[list[int]]] = {}
    for name in names:
        engine = systems.create(name, config, params, limits, memory)
        runs[name], samples[name], answers[name] = run(engine, size, config.vocab_size)
        metrics.show(case, name, runs[name])
        systems.close(engine)
    metrics.record(results, case, runs)
    wanted = (
        ((RECOMPUTE, TTFT, WANTED_RECOMPUTE), (IN_HBM, TTFT, WANTED_IN_HBM))
        if part == "ttft"
        else ((IN_HBM, LATENCY, WANTED_LATENCY),)
    )
    for other, metric, want in wanted:
        name = f"{case}: {metric[0]}, jaxkv / {other}"
        metrics.target(results, name, samples, (JAXKV, other), "<=", want)
    if size.dtype == "float32":
        metrics.target_tokens(results, case, answers)


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", metavar="DIR", help="also write the JSON file below DIR")
    add("--quick", action="store_true", help="a smaller model")
    add("--tiny", action="store_true", help="a tiny model in float32, for any device")
    add("--part", choices=PARTS, nargs="+", help="default: both")
    add("--system", choices=systems.NAMES, nargs="+", help="default: all")
    add("--model", choices=[*PRESETS], help="shape of the random weights")
    add("--cached", type=int, help="tokens of a prefix")
    add("--new", type=int, help="tokens after it")
    flags = parser.parse_args(argv)
    on_cpu = jax.default_backend() == "cpu"
    tiny = flags.tiny or on_cpu
    size = SMALL if tiny else FULL
    given = {name: getattr(flags, name) for name in ("model", "cached", "new")}
    size = size._replace(**{name: value for name, value in given.items() if value})
    if flags.quick and not tiny:
        size = size._replace(model=flags.model or "qwen3-0.6b", prefixes=4)
    config = PRESETS[size.model]
    params = init_params(config, 0, size.dtype)
    results = Results("serving_ttft_tiny" if tiny and not on_cpu else "serving_ttft")
    short = on_cpu and flags.quick
    names = flags.system or ((IN_HBM, JAXKV) if short else systems.NAMES)
    for part in flags.part or (PARTS[:1] if short else PARTS):
        measure(results, part, size, names, (config, params))
        results.save(flags.out)  # after each, as the next may not fit into the time
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
