"""Time to first token with a prefix in host memory: `python -m bench.serving.ttft`.

Parts (`--part`; systems: bench.serving.systems):

  ttft     one request at a time: `--cached` tokens of an earlier request, which other requests have
           evicted from HBM, and `--new` tokens; for all systems
  latency  inter-token latency of running requests, while requests with evicted prefixes are
           admitted beside them; each step loads a part of a prefix. All in HBM is the run
           without loads, with the same requests
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from bench.serving import runs, systems, workloads
from bench.serving.runs import LATENCY, TTFT, Case, Wanted
from bench.serving.systems import IN_HBM, JAXKV, RECOMPUTE, Memory
from examples.serving.engine import Limits
from examples.serving.presets import PRESETS

PARTS = ("ttft", "latency")
WANTED = {
    "ttft": (Wanted("ttft", TTFT, RECOMPUTE, "<=", 0.20), Wanted("ttft", TTFT, IN_HBM, "<=", 1.15)),
    "latency": (Wanted("latency", LATENCY, IN_HBM, "<=", 1.10),),
}
REPEATS = {"ttft": 3, "latency": 7}


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


FULL = Size("qwen3-8b", "bfloat16", 32, 8192, 1024, 8, 16, 1024, 256, 16, 32)
SMALL = Size("tiny", "float32", 8, 64, 16, 4, 2, 16, 24, 4, 4)


def cases(flags: argparse.Namespace) -> list[Case]:
    size = SMALL if flags.tiny else FULL
    given = {name: getattr(flags, name) for name in ("model", "cached", "new")}
    size = size._replace(**{name: value for name, value in given.items() if value})
    if flags.quick and not flags.tiny:
        size = size._replace(model=flags.model or "qwen3-0.6b", prefixes=4)
    short = flags.tiny and flags.quick
    parts = flags.part or (PARTS[:1] if short else PARTS)
    return [case(part, size, flags.system, short) for part in parts]


def case(part: str, size: Size, chosen: Sequence[str] | None, short: bool) -> Case:
    """HBM for one request with a prefix and a half, beside the running ones.

    Sizes are those of both parts, which share the programs without copies.
    """
    prefix_pages = -(-(size.cached + size.new + 2) // size.page_size)
    running_pages = -(-(size.prompt + size.answer) // size.page_size)
    everything = 2 * size.prefixes * prefix_pages + size.running * running_pages
    memory = Memory(everything, prefix_pages * 3 // 2 + size.running * running_pages, everything)
    # A prefix is loaded in one step, beside the computation of what follows it, unless others
    # would wait for that step.
    whole = -(-size.cached // size.page_size // 64) * 64
    limits = Limits(
        size.page_size,
        size.running + 2,
        size.new + size.running + 2,
        max(prefix_pages, running_pages),
        copy_pages=size.copy_pages if part == "latency" else whole,
        token_buckets=(size.running + 2 * size.page_size,),
    )
    label = f"{size.model}, {size.cached} tokens cached, {size.new} new"
    all_systems: Sequence[str] = (JAXKV,) if short else systems.NAMES
    if part == "latency":
        label = f"{size.model}, {size.running} requests beside loads of {size.cached} tokens"
        all_systems = (IN_HBM, JAXKV)
    make = partial(workload, part, size)
    repeats = {} if size.dtype == "float32" else REPEATS
    return Case(
        label, chosen or all_systems, limits, memory, {part: make}, repeats, WANTED[part],
        size.model, size.dtype,
    )  # fmt: skip


def workload(part: str, size: Size, repeat: int) -> workloads.Workload | workloads.BesideLoads:
    vocab = PRESETS[size.model].vocab_size
    if part == "ttft":
        return workloads.cached_prefixes(size.prefixes, size.cached, size.new, 2, vocab, repeat)
    rng = np.random.default_rng([4, repeat])
    prefixes = rng.integers(0, vocab, (size.prefixes, size.cached)).tolist()
    running = rng.integers(0, vocab, (size.running, size.prompt)).tolist()
    return workloads.BesideLoads(prefixes, running, size.answer, size.page_size, size.every)


def main(argv: Sequence[str] | None = None) -> int:
    parser = runs.parser(__doc__)
    add = parser.add_argument
    add("--part", choices=PARTS, nargs="+", help="default: both")
    add("--cached", type=int, help="tokens of a prefix")
    add("--new", type=int, help="tokens after it")
    return runs.main("serving_ttft", parser, argv, cases, "bench.serving.ttft")


if __name__ == "__main__":
    sys.exit(main())
