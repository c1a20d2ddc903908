"""Cases of the serving benchmarks: workloads, the memory of the systems, and targets.

`compare`:

  multi_turn  questions about long prompts, with the parameters of SGLang's HiCache benchmark and
              one token of answer, as on a prefill instance of disaggregated serving; HBM holds a
              quarter of the pages. The first round, in which nothing is cached, is not measured;
              each three of the nine others are a sample. Also in small pages by the copy engine
              and by jaxkv
  trace       whole sessions of Mooncake's conversation trace, lengths divided by a factor; served
              only twice, as it has no target, so that the errors of its rows are large
  random      prompts without reuse
  float32     all of these in a small form, with a tiny model: checks that all systems give the same
              tokens, and no figures

Equal tokens are claimed in float32 only. Requests are in other batches in each system, and rounding
depends on the batch: in bfloat16 it is of the order of the margin between the two best tokens.

Requests are served at saturation: "requests/s" is the highest rate for the number of requests in
flight, which is the same for all systems. Its upper bound is the rate with all pages in HBM, or
with loads at peak bandwidth. `multi_turn` is also served with fewer requests in flight, by jaxkv
and by device_put, to compare the rates at equal p99 of the time to first token. A step loads or
stores pages of at most COPY_TOKENS tokens, the prefix of one request; device_put twice as many.

`ttft`:

  ttft        one request at a time: 8,192 tokens of an earlier request, which other requests have
              evicted from HBM, and 1,024 tokens
  latency     inter-token latency of running requests, while requests with evicted prefixes are
              admitted; each step loads a part of a prefix. All in HBM is the run
              without loads, with the same requests
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bench.harness.records import REPOSITORY
from bench.serving import systems, workloads
from bench.serving.runs import (
    LATENCY,
    MEAN_LATENCY,
    RATE,
    RATE_AT_EQUAL_TTFT,
    TTFT,
    Case,
    Wanted,
    model_of,
)
from bench.serving.systems import COPY_ENGINE, DEVICE_PUT, IN_HBM, JAXKV, RECOMPUTE, Memory
from examples.serving.engine import Limits
from examples.serving.presets import PRESETS

TRACE = REPOSITORY / "bench" / "data" / "mooncake_conversation_sample.jsonl"
PARALLEL = 4  # requests in flight
HBM_SHARE = 4
COPY_TOKENS = 8192
IN_FLIGHT = {f"multi_turn, {level} in flight": level for level in (1, 2)}
# Even numbers, so that each order of the systems has its reverse.
# Conversations first compute 16 prompts of 6,144 tokens, and then give three samples each.
REPEATS = {
    "multi_turn": 6, "trace": 2, "random": 32, "ttft": 10, "latency": 20,
} | dict.fromkeys(IN_FLIGHT, 6)  # fmt: skip
FLOAT32 = "float32"  # a part
COMPARED = (
    Wanted("multi_turn", RATE, DEVICE_PUT),
    Wanted("multi_turn", RATE_AT_EQUAL_TTFT, DEVICE_PUT, ">=", 2.5),
    Wanted("multi_turn", RATE, COPY_ENGINE, ">=", 1.3),
    Wanted("multi_turn", RATE, RECOMPUTE, ">=", 2),
    Wanted("random", RATE, RECOMPUTE, ">=", 0.99),
)
SMALL_PAGES = (Wanted("multi_turn", RATE, COPY_ENGINE, ">=", 2),)  # of 8 KiB in each block
FIRST_TOKEN: Sequence[Wanted] = (
    Wanted("ttft", TTFT, RECOMPUTE, "<=", 0.20),
    Wanted("ttft", TTFT, IN_HBM, "<=", 1.15),
)
FIRST_TOKEN_SYSTEMS = (IN_HBM, RECOMPUTE, JAXKV)  # the others in `compare`
BESIDE_LOADS = tuple(
    Wanted("latency", metric, IN_HBM, "<=", 1.10) for metric in (LATENCY, MEAN_LATENCY)
)


def pages(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def compare(flags: argparse.Namespace) -> list[Case]:
    everything = _compared(flags)
    parts = flags.part or (*everything, FLOAT32)
    makers = {name: make for name, make in everything.items() if name.partition(",")[0] in parts}
    if flags.tiny and FLOAT32 in parts:
        makers = everything
    if flags.tiny and flags.quick:
        first = next(iter(makers))
        return [_compare(flags, 8, {first: makers[first]}, (IN_HBM, JAXKV), ())]
    if flags.tiny:
        return [_compare(flags, 8, makers, systems.NAMES, ())]
    found = []
    if makers:
        found.append(_compare(flags, 32, makers, systems.NAMES, COMPARED))
    if "multi_turn" in makers:
        few = {"multi_turn": makers["multi_turn"]}
        found.append(_compare(flags, 4, few, (COPY_ENGINE, JAXKV), SMALL_PAGES))
    if FLOAT32 in parts:
        tiny = argparse.Namespace(**vars(flags) | {"tiny": True})
        case = _compare(tiny, 8, _compared(tiny), systems.NAMES, ())
        label = f"{FLOAT32}, {case.label}"
        found.append(case._replace(label=label, checks_only=True, profiled={}))
    return found


def _compared(flags: argparse.Namespace) -> dict[str, Callable[[int], workloads.Workload]]:
    vocab = PRESETS[model_of(flags)[0]].vocab_size
    clients, question = 16, 128
    rounds, window, request = (3, 1, 2048) if flags.quick else (10, 3, 6144)
    sessions, scale = 24, 4
    prompts, length, new = 16, 1024, 32
    if flags.tiny:
        clients, question = 6, 20
        rounds, window, request = 3, 1, 60
        sessions, scale = 4, 64
        prompts, length, new = 4, 40, 4

    def conversations(parallel: int, repeat: int) -> workloads.Workload:
        seed = 100 * parallel + repeat  # no prompt was served before
        return workloads.multi_turn(
            clients, rounds, request, question, 1, parallel, vocab, seed,
            first=1, rounds_of_window=window,
        )  # fmt: skip

    levels = {"multi_turn": PARALLEL, **IN_FLIGHT}
    return {
        **{name: partial(conversations, level) for name, level in levels.items()},
        "trace": partial(workloads.trace, TRACE, sessions, 40, scale, PARALLEL, vocab),
        "random": partial(workloads.random_prompts, prompts, length, new, PARALLEL, vocab),
    }


def _compare(
    flags: argparse.Namespace, page_size: int, makers: dict[str, Any], chosen: Sequence[str],
    wanted: Sequence[Wanted],
) -> Case:  # fmt: skip
    """Limits and memory for all workloads; HBM by the first, the conversations if these run."""
    works = [make(0) for make in makers.values()]
    longest = max(pages(work.longest, page_size) for work in works)
    # Steps with one chunk of a prompt, or with the questions of 1, 2, or all requests in flight.
    budget, chunk, *questions = (64, 48, 32) if flags.tiny else (2176, 1088, 160, 320, 640)
    limits = Limits(
        page_size, PARALLEL, budget + PARALLEL, longest,
        copy_pages=8 if flags.tiny else COPY_TOKENS // page_size,
        token_buckets=(*questions, chunk + PARALLEL),
    )  # fmt: skip
    everything = [
        sum(pages(tokens, page_size) + 1 for tokens in work.sequences) + PARALLEL for work in works
    ]
    few = max(everything[0] // HBM_SHARE, longest)
    memory = Memory(max(everything), few, max(everything))
    repeats = {} if flags.tiny else REPEATS
    profiled = {name: make for name, make in makers.items() if name not in IN_FLIGHT}
    if "trace" in makers:  # but not the first requests of all sessions, of which nothing is cached
        profiled["trace"] = partial(makers["trace"], first=1)
    return Case(
        f"{{}}, pages of {page_size}", flags.system or chosen, limits, memory, makers, repeats,
        wanted, *model_of(flags), only=dict.fromkeys(IN_FLIGHT, (DEVICE_PUT, JAXKV)),
        profiled=profiled,
    )  # fmt: skip


class Size(NamedTuple):
    page_size: int
    cached: int  # tokens
    new: int
    prefixes: int
    running: int  # requests during the loads, of `prompt` and `answer` tokens
    prompt: int
    answer: int
    every: int  # steps between the admissions
    copy_pages: int  # in one step, with running requests


FULL = Size(32, 8192, 1024, 8, 16, 1024, 512, 16, 32)
TINY = Size(8, 64, 16, 4, 2, 16, 24, 4, 4)


def ttft(flags: argparse.Namespace) -> list[Case]:
    size = TINY if flags.tiny else FULL
    short = flags.tiny and flags.quick
    parts = flags.part or (("ttft",) if short else ("ttft", "latency"))
    return [_ttft(flags, part, size) for part in parts]


def _ttft(flags: argparse.Namespace, part: str, size: Size) -> Case:
    """HBM for one request with a prefix and a half, in addition to the running ones.

    Sizes are those of both parts, which share the programs without copies.
    """
    model, dtype = model_of(flags)
    prefix = pages(size.cached + size.new + 2, size.page_size)
    running = pages(size.prompt + size.answer, size.page_size)
    everything = (
        size.prefixes * (prefix + pages(size.new, size.page_size) + 1) + size.running * running
    )
    memory = Memory(everything, prefix * 3 // 2 + size.running * running, everything)
    label = f"{model}, {size.cached} tokens cached, {size.new} new"
    # A prefix is loaded in one step, during the computation of what follows it, unless others
    # would wait for that step.
    copy_pages, wanted = -(-size.cached // size.page_size // 64) * 64, FIRST_TOKEN
    chosen: Sequence[str] = (JAXKV,) if flags.tiny and flags.quick else FIRST_TOKEN_SYSTEMS
    if part == "latency":
        label = f"{model}, {size.running} requests beside loads of {size.cached} tokens"
        copy_pages, wanted, chosen = size.copy_pages, BESIDE_LOADS, (IN_HBM, JAXKV)
    # Chunks of twice the new tokens, for the recomputation of prefixes.
    most = size.running + 2
    limits = Limits(
        size.page_size, most, 2 * size.new + most, max(prefix, running), copy_pages=copy_pages,
        token_buckets=(size.running + 2 * size.page_size, size.new + most),
    )  # fmt: skip
    makers: dict[str, Any] = {part: partial(_ttft_workload, part, size, PRESETS[model].vocab_size)}
    repeats = {} if flags.tiny else REPEATS
    return Case(
        label, flags.system or chosen, limits, memory, makers, repeats, wanted, model, dtype
    )


def _ttft_workload(part: str, size: Size, vocab: int, repeat: int) -> Any:
    if part == "ttft":
        return workloads.cached_prefixes(size.prefixes, size.cached, size.new, vocab, repeat)
    # The prefixes of the first repeat: computed once.
    prefixes = np.random.default_rng(4).integers(0, vocab, (size.prefixes, size.cached)).tolist()
    running = (
        np.random.default_rng([4, repeat]).integers(0, vocab, (size.running, size.prompt)).tolist()
    )
    return workloads.BesideLoads(prefixes, running, size.answer, size.page_size, size.every)
