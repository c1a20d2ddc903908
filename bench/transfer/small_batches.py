"""Latency of copies of a few blocks of 8 KiB: `python -m bench.transfer.small_batches`.

The time depends on the caller, so only equal metrics are compared:

  - "time per copy (in a step)": cost of one more copy in a jitted program, (17 copies - 1) / 16,
    each with its own ids and dependent on the previous one. jaxkv, and CUDA's copy engine by a
    batch call and by a loop of calls, through an FFI call like jaxkv's.
  - "latency (one call)": a call of a program with one copy, from before the call until the data is
    available. The same baselines. It includes JAX's overhead of calling any program: the row "no
    copy" measures that.
  - "latency (outside JAX)": a native call and a wait for its stream; for information only, not
    comparable with calls through JAX. The copy engine submitted from C++ with addresses prepared in
    advance, and a Triton kernel with vLLM's parameters launched from Python.

All times are by the host's clock, with an idle device before each call: the median of rounds in
which all methods run in random order. jaxkv's choice is compared with the best baseline, round by
round.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from bench.harness import copy_baselines, timing
from bench.harness.records import Results, arguments
from bench.transfer.blocks import DIRECTIONS, IMPLEMENTATIONS, Blocks, Method, Program

BLOCK_BYTES = 8192
COUNTS = (1, 4, 16, 64)
IN_STEP, ONE_CALL = "time per copy (in a step)", "latency (one call)"
OUTSIDE = "latency (outside JAX)"
RETURNS = "host time per call"
NO_COPY = Method("no copy")
BASELINES = (copy_baselines.BATCH, copy_baselines.LOOP)


class Effort(NamedTuple):
    """Amount of work: copies of the longer program, rounds, and timed calls per round."""

    copies: int
    rounds: int
    calls: int


def inside_us(programs: dict[int, Program], effort: Effort) -> dict[str, float]:
    """Microseconds of one copy inside JAX, by metric, in one round."""
    one, many = (program.idle_calls(effort.calls) for program in programs.values())
    seconds = {
        IN_STEP: (many.done - one.done) / effort.copies,
        ONE_CALL: one.done,
        RETURNS: one.returns,
    }
    return {metric: taken * 1e6 for metric, taken in seconds.items()}


def rounds_of(
    made: Blocks, methods: Sequence[str], direction: str, count: int, effort: Effort
) -> dict[str, list[dict[str, float]]]:
    """Times of each method by round; interleaved, as the machine drifts."""
    programs = {}
    for name in methods:
        with contextlib.suppress(NotImplementedError):  # not every implementation supports the call
            programs[name] = {
                copies: made.program(Method(name), direction, count, copies, stamped=False)
                for copies in (1, 1 + effort.copies)
            }
    runs = {name: functools.partial(inside_us, programs[name], effort) for name in programs}
    return timing.rounds(runs, effort.rounds)


def outside_us(made: Blocks, direction: str, count: int, calls: int) -> dict[str, float]:
    """Microseconds from a native call to the data, for each copy-engine baseline."""
    source, destination = (made.arrays[side] for side in made.sides(direction))
    _, ids = made.ids(Method(copy_baselines.BATCH), count, 0)
    return {
        baseline: 1e6
        * copy_baselines.run(baseline, source, destination, ids, calls=1, repeats=calls).total
        for baseline in BASELINES
    }


def measure(results: Results, platform: str, quick: bool) -> None:
    effort = Effort(4, 2, 3) if quick else Effort(16, 60, 6)
    calls = effort.rounds * effort.calls
    triton = None
    if platform == "gpu":
        triton = copy_baselines.triton([], 0, small_block=BLOCK_BYTES, small_counts=COUNTS)
    made = Blocks(BLOCK_BYTES, 1024)
    for direction in DIRECTIONS:
        for count in COUNTS[:2] if quick else COUNTS:
            case = f"{direction}, {count} x 8 KiB"
            _inside(results, made, direction, count, effort)
            outside = outside_us(made, direction, count, calls) if platform == "gpu" else {}
            if triton:
                outside[copy_baselines.TRITON] = 1e6 * triton.latency[direction, count]
            for name, value in outside.items():
                results.row(f"{case}, {name}", OUTSIDE, "us", value)
                print(_text(f"{case}, {name}", OUTSIDE, value, {}), flush=True)
        empty = made.program(NO_COPY, direction, 1, 0).idle_calls(calls).done * 1e6
        results.row(f"{direction}, no copy", ONE_CALL, "us", empty)


def _inside(results: Results, made: Blocks, direction: str, count: int, effort: Effort) -> None:
    """Rows of one cell, and its targets if there are baselines."""
    platform = jax.default_backend()
    case = f"{direction}, {count} x 8 KiB"
    baselines = BASELINES if platform == "gpu" else ()
    taken = rounds_of(made, (*baselines, *IMPLEMENTATIONS[platform]), direction, count, effort)
    for metric in (IN_STEP, ONE_CALL, RETURNS):
        samples = {name: [times[metric] for times in rounds] for name, rounds in taken.items()}
        medians = {name: timing.median(values) for name, values in samples.items()}
        others = {name: medians[name] for name in baselines}
        for name in (name for name in medians if name not in baselines):
            results.row(f"{case}, {name}", metric, "us", medians[name], None, others)
            print(_text(f"{case}, {name}", metric, medians[name], others), flush=True)
        if baselines and metric != RETURNS:
            chosen = made.chosen(direction, count)
            best = min(baselines, key=lambda name: medians[name])
            got = timing.ratio(samples[chosen], samples[best])
            results.target(f"{case}: {metric}, {chosen}", got, "<=", 1, "x best baseline")


def _text(case: str, metric: str, value: float, others: Mapping[str, float]) -> str:
    listed = ", ".join(f"{name} {other:.1f}" for name, other in others.items())
    return f"{case:40} {metric:24} {value:8.1f} us  [{listed}]"


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = Results("small_batches")
    measure(results, jax.default_backend(), flags.quick)
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
