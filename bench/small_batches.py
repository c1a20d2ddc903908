"""Latency of copies of a few blocks of 8 KiB: `python -m bench.small_batches`.

The time depends on the caller, so only equal metrics are compared:

  - "time per copy (in a step)": cost of one more copy in a jitted program, (17 copies - 1) / 16,
    each with its own ids and dependent on the previous one. jaxkv, and CUDA's copy engine by a
    batch call and by a loop of calls, through an FFI call like jaxkv's.
  - "latency (one call)": a call of a program with one copy, from before the call until the data is
    available. The same baselines. It includes JAX's overhead of calling any program.

All times are by the host's clock, with an idle device before each call, in rounds. jaxkv as chosen,
with either form of ids, is compared with the better baseline.
"""

import argparse
import contextlib
import functools
import sys
from collections.abc import Sequence
from typing import NamedTuple

from bench.harness import copy_baselines, timing
from bench.harness.blocks import (
    DEVICE_IDS,
    DIRECTIONS,
    HOST_IDS,
    Blocks,
    Method,
    Program,
    methods,
)
from bench.harness.main import benchmark, on_gpu
from bench.harness.records import Results
from jaxkv._src.autotune.pools import Pools, pool_bytes

BLOCK_BYTES = 8192
COUNTS = (1, 4, 16, 64)
IN_STEP, ONE_CALL = "time per copy (in a step)", "latency (one call)"
RETURNS = "host time per call"
BASELINES = (Method(copy_baselines.BATCH), Method(copy_baselines.LOOP))
MOST_RATIO = 1.0


class Effort(NamedTuple):
    """Amount of work: copies of the longer program, rounds, and timed calls per round."""

    copies: int
    rounds: int
    calls: int


def microseconds(programs: Sequence[Program], effort: Effort) -> dict[str, float]:
    """Of one copy, by metric, in one round."""
    one, many = (program.idle_calls(effort.calls) for program in programs)
    seconds = {
        IN_STEP: (many.done - one.done) / effort.copies,
        ONE_CALL: one.done,
        RETURNS: one.returns,
    }
    return {metric: float(taken) * 1e6 for metric, taken in seconds.items()}


def samples_of(
    made: Blocks, direction: str, count: int, choices: Sequence[Method], effort: Effort
) -> dict[Method, list[dict[str, float]]]:
    """Times of each method by round."""
    runs = {}
    for method in dict.fromkeys((*(BASELINES if on_gpu() else ()), *methods(), *choices)):
        with contextlib.suppress(NotImplementedError):  # not every implementation supports the call
            programs = [
                made.program(method, direction, count, copies, stamped=False)
                for copies in (1, 1 + effort.copies)
            ]
            runs[method] = functools.partial(microseconds, programs, effort)
    return timing.rounds(runs, effort.rounds)


def record(results: Results, made: Blocks, direction: str, count: int, effort: Effort) -> None:
    """Rows of one cell, and its targets if there are baselines."""
    case = f"{direction}, {count} x 8 KiB"
    choices = {ids: made.chosen(direction, count, ids) for ids in (DEVICE_IDS, HOST_IDS)}
    rounds = samples_of(made, direction, count, [*choices.values()], effort)
    for metric in (IN_STEP, ONE_CALL, RETURNS):
        samples = timing.Samples({m: [us[metric] for us in taken] for m, taken in rounds.items()})
        medians = samples.medians()
        others = {str(method): us for method, us in medians.items() if method.is_baseline}
        for method in (method for method in medians if not method.is_baseline):
            results.row(f"{case}, {method}", metric, "us", medians[method], None, others)
        best = samples.fastest(method for method in samples if method.is_baseline)
        if best is None or metric == RETURNS:
            continue
        for ids, chosen in choices.items():
            got = samples.ratio(chosen, best) if chosen in samples else None
            name = f"{case}: {metric}, as chosen with {ids}"
            results.target(name, got, "<=", MOST_RATIO, "x best baseline")


def measure(results: Results, flags: argparse.Namespace) -> None:
    effort = Effort(2, 2, 3) if flags.quick else Effort(16, 60, 6)
    made = Blocks(Pools(pool_bytes(1 << 24)), BLOCK_BYTES)
    for direction in DIRECTIONS:
        for count in COUNTS[:1] if flags.quick else COUNTS:
            record(results, made, direction, count, effort)


main = benchmark("small_batches", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
