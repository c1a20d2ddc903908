"""Latency of copies of a few blocks of 8 KiB: `python -m bench.transfer.small_batches`.

The latency depends on the place of the call, so each of these is compared with itself:

  - "in a step": the cost of one more copy in a jitted program, (17 copies - 1) / 16, each with its
    own ids and dependent on the previous one. jaxkv, and CUDA's copy engine by a batch call and by
    a loop of calls, through an FFI call like jaxkv's.
  - "one call": a call of a program with one copy, from before the call until the data is available.
    The same baselines. It includes JAX's overhead of calling any program: the row "no copy"
    measures that.
  - "outside JAX": a native call and a wait for its stream; for information only, not comparable
    with calls through JAX. The copy engine submitted from C++ with addresses prepared in advance,
    and a Triton kernel with vLLM's parameters launched from Python.

All times are by the host's clock, with an idle device before each call: the median of rounds in
which all methods run in random order. jaxkv's choice is compared with the best baseline, round by
round.
"""

import contextlib
import os
import random
import statistics
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax

from bench.harness import peers, timing
from bench.harness.records import Results, arguments
from bench.transfer.blocks import DIRECTIONS, IMPLEMENTATIONS, Blocks, Method, Program

BLOCK_BYTES = 8192
COUNTS = (1, 4, 16, 64)
IN_STEP, ONE_CALL, OUTSIDE = "in a step", "one call", "outside JAX"
RETURNS = "one call returns"
NOTHING = Method("nothing")
BASELINES = (peers.BATCH, peers.LOOP)


class Effort(NamedTuple):
    """Amount of work: copies of the longer program, rounds, and timed calls per round."""

    copies: int
    rounds: int
    calls: int


def inside_us(programs: dict[int, Program], effort: Effort) -> dict[str, float]:
    """Microseconds of one copy inside JAX, "in a step" and "one call", in one round."""
    one, many = (program.idle_calls(effort.calls) for program in programs.values())
    seconds = {
        IN_STEP: (many.done - one.done) / effort.copies,
        ONE_CALL: one.done,
        RETURNS: one.returns,
    }
    return {footing: taken * 1e6 for footing, taken in seconds.items()}


def rounds_of(
    made: Blocks, ways: Sequence[str], direction: str, count: int, effort: Effort
) -> dict[str, list[dict[str, float]]]:
    """Times of each method by round; interleaved, as the machine drifts."""
    programs = {}
    for name in ways:
        with contextlib.suppress(NotImplementedError):  # not every implementation supports the call
            programs[name] = {
                copies: made.program(Method(name), direction, count, copies, stamped=False)
                for copies in (1, 1 + effort.copies)
            }
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    rng = random.Random(0)
    for _ in range(effort.rounds):
        for name in rng.sample(list(programs), len(programs)):  # random order within a round
            taken[name].append(inside_us(programs[name], effort))
    return taken


def outside_us(made: Blocks, direction: str, count: int, calls: int) -> dict[str, float]:
    """Microseconds from a native call to the data, for each copy-engine baseline."""
    source, destination = (made.arrays[side] for side in made.sides(direction))
    _, ids = made.ids(Method(peers.BATCH), count, 0)
    return {
        peer: 1e6 * peers.run(peer, source, destination, ids, calls=1, repeats=calls).total
        for peer in BASELINES
    }


def measure(results: Results, platform: str, quick: bool) -> None:
    effort = Effort(4, 2, 3) if quick else Effort(16, 60, 6)
    calls = effort.rounds * effort.calls
    triton = None
    if platform == "gpu":
        triton = peers.triton([], 0, small_block=BLOCK_BYTES, small_counts=COUNTS)
    made = Blocks(BLOCK_BYTES, 1024)
    for direction in DIRECTIONS:
        for count in COUNTS[:2] if quick else COUNTS:
            case = f"{direction}, {count} x 8 KiB"
            _inside(results, made, direction, count, effort)
            outside = outside_us(made, direction, count, calls) if platform == "gpu" else {}
            if triton:
                outside[peers.TRITON] = 1e6 * triton.latency[direction, count]
            for name, value in outside.items():
                results.row(f"{case}, {name}", OUTSIDE, "us", value)
                print(_text(f"{case}, {name}", OUTSIDE, value, {}), flush=True)
        empty = made.program(NOTHING, direction, 1, 0).idle_calls(calls).done * 1e6
        results.row(f"{direction}, no copy", ONE_CALL, "us", empty)


def _inside(results: Results, made: Blocks, direction: str, count: int, effort: Effort) -> None:
    """Rows of one cell, and its targets if there are baselines."""
    platform = jax.default_backend()
    case = f"{direction}, {count} x 8 KiB"
    baselines = BASELINES if platform == "gpu" else ()
    taken = rounds_of(made, (*baselines, *IMPLEMENTATIONS[platform]), direction, count, effort)
    for footing in (IN_STEP, ONE_CALL, RETURNS):
        samples = {name: [figures[footing] for figures in all_] for name, all_ in taken.items()}
        middle = {name: statistics.median(values) for name, values in samples.items()}
        beside = {name: middle[name] for name in baselines}
        for name in (name for name in middle if name not in baselines):
            results.row(f"{case}, {name}", footing, "us", middle[name], None, beside)
            print(_text(f"{case}, {name}", footing, middle[name], beside), flush=True)
        if baselines and footing != RETURNS:
            chosen = made.chosen(direction, count)
            best = min(baselines, key=lambda name: middle[name])
            got, error = timing.ratio(samples[chosen], samples[best])
            name = f"{case}: {footing}"
            results.row(f"{name}: twice the standard error", "of a ratio", "x", 2 * error)
            what = f"{name}, {chosen}, to within the error"
            results.target(what, got, "<=", 1 + 2 * error, "times the best peer's")


def _text(case: str, footing: str, value: float, others: dict[str, float]) -> str:
    beside = ", ".join(f"{name} {other:.1f}" for name, other in others.items())
    return f"{case:40} {footing:16} {value:8.1f} us  [{beside}]"


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = Results("small_batches")
    measure(results, jax.default_backend(), flags.quick)
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
