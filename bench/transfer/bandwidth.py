"""Bandwidth of scattered block copies, jaxkv and baselines: `python -m bench.transfer.bandwidth`.

1 to 100,000 blocks of 512 B to 1 MiB at random positions without repetition, in both directions,
with each implementation. GB/s is payload bytes (1e9) over the wall clock time of a chain of copies
(bench/transfer/blocks.py); the peak is one contiguous copy. Copies shorter than five milliseconds
are batched, 8 in a program; a row records it. "CPU time of the handlers" is the time of a copy
between two stamps (bench/harness/timestamps.py); "host time per call" is that of a call of the
program on an idle device.

Baselines, in the same run, between the same arrays and with the same ids
(bench/harness/copy_baselines.py): CUDA's copy engine by one batch call, by one per 1024 blocks, and
by a loop of calls, submitted from C++ in a chain outside JAX; the faster of the first two counts.
Below 10,000 blocks the call overhead dominates, not the link; there the batch call is also made
inside JAX, through an FFI call like jaxkv's ("in JAX"), and is the baseline. And a Triton kernel
with vLLM's parameters in its own process.
"""

import os
import sys
import time
from collections.abc import Sequence

import jax

from bench.harness import copy_baselines, peak_bandwidth
from bench.harness.records import Results, Row, arguments
from bench.harness.timestamps import Timed
from bench.harness.timing import chain_length
from bench.transfer.bandwidth_rows import (
    BATCH_IN_JAX,
    CHOSEN,
    CPU,
    FULL,
    KIB,
    QUICK_CPU,
    QUICK_GPU,
    Grid,
    Point,
    size_text,
)
from bench.transfer.bandwidth_targets import record_targets
from bench.transfer.blocks import DIRECTIONS, IMPLEMENTATIONS, SM_IMPLEMENTATIONS, Blocks, Method

LINK_FIVE_MILLISECONDS = 250_000_000  # bytes
COPIES_OF_SHORT = 8
MAX_LOOP_COUNT = 10_000
LIMIT_SECONDS = 360  # after that only the main comparison is measured


def copy_engine_baselines(count: int) -> list[str]:
    """Copy-engine baselines for `count` blocks; a long loop would take too much time."""
    loop = [copy_baselines.LOOP] if count <= MAX_LOOP_COUNT else []
    short = (
        [copy_baselines.SHORT_BATCH] if count > copy_baselines.SHORT_BATCH_SIZE else []
    )  # else equal to BATCH
    return [copy_baselines.BATCH, *loop, *short]


class Bench:
    """One run over a grid."""

    def __init__(self, results: Results, grid: Grid, triton: copy_baselines.TritonRates | None):
        self.results, self.grid, self.triton = results, grid, triton
        self.platform = jax.default_backend()
        self.failures = 0
        self.start = time.perf_counter()

    def run(self) -> None:
        for block_bytes in self.grid.blocks:
            counts = self.grid.counts_of(block_bytes)
            made = Blocks(block_bytes, max(counts))
            for direction in DIRECTIONS:
                for count in counts:
                    self.cell(made, direction, count)

    def cell(self, made: Blocks, direction: str, count: int) -> None:
        many = count == min(self.grid.many, self.grid.max_bytes // made.block_bytes)
        if not many and time.perf_counter() - self.start > LIMIT_SECONDS:
            self.log(f"{direction}, {count} x {made.block_bytes}: skipped: time limit")
            return
        copies = COPIES_OF_SHORT if count * made.block_bytes < LINK_FIVE_MILLISECONDS else 1
        rates, submits = self.baseline_rates(made, direction, count, copies)
        found: dict[tuple[str, int], float] = {}
        for method in self.methods(made.block_bytes, many):
            if (method.name, method.num_sms) in found:
                continue  # the default number of SMs
            program = self.timed(made, method, direction, count, copies)
            if program is None:
                continue
            timed, num_sms = program
            point = Point(direction, made.block_bytes, count, method.name, num_sms)
            rate = copies * count * made.block_bytes / timed.total / 1e9
            found[method.name, num_sms] = rate
            link = peak_bandwidth.contiguous_copy(direction, self.grid.peak_bytes)
            row = self.results.row(str(point), "bandwidth", "GB/s", rate, link, rates)
            cpu_us = timed.handlers / copies * 1e6
            self.results.row(str(point), "CPU time of the handlers", "us", cpu_us, None, submits)
            self.results.row(str(point), "host time per call", "us", timed.returns * 1e6)
            self.results.row(str(point), "copies per program", "copies", copies)
            self.log(text(row))
        self.record_choice(made, direction, count, found)

    def methods(self, block_bytes: int, many: bool) -> list[Method]:
        """All implementations with default settings; for many blocks also with the SM limits."""
        names = IMPLEMENTATIONS[self.platform]
        sm_counts: list[int] = []
        if many:
            sm_counts = [12] if block_bytes < 8 * KIB else [4, 2]
            if self.triton and ("load", block_bytes) in self.triton.bandwidth:
                sm_counts = list(dict.fromkeys([12, *sm_counts]))
        used = [name for name in names if name in SM_IMPLEMENTATIONS]
        variants = [Method(name, num_sms) for name in used for num_sms in sm_counts]
        return [*map(Method, names), *variants]

    def timed(
        self, made: Blocks, method: Method, direction: str, count: int, copies: int
    ) -> tuple[Timed, int] | None:
        """Times and SMs of a program; None and the reason if it is unsupported or incorrect."""
        try:
            program = made.program(method, direction, count, copies)
            return program.measure(), program.num_sms
        except NotImplementedError as error:
            self.log(f"{direction}, {count} x {made.block_bytes}: unsupported: {error}")
        except Exception as error:  # one failure must not lose the other figures
            self.failures += 1
            self.log(
                f"{direction}, {count} x {made.block_bytes}, {method}: FAILED: {error!r}"[:2000]
            )
            made.fill()
        return None

    def baseline_rates(
        self, made: Blocks, direction: str, count: int, copies: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """GB/s of the baselines, and microseconds of submission per copy."""
        nbytes = count * made.block_bytes
        rates: dict[str, float] = {}
        submits: dict[str, float] = {}
        if self.platform == "gpu":
            source, destination = (made.arrays[side] for side in made.sides(direction))
            _, ids = made.ids(Method(copy_baselines.BATCH), count, 0)
            for baseline in copy_engine_baselines(count):
                first = copy_baselines.run(baseline, source, destination, ids, calls=1, repeats=1)
                calls = chain_length(first.total)
                took = copy_baselines.run(
                    baseline, source, destination, ids, calls=calls, repeats=3
                )
                rates[baseline] = nbytes / took.total / 1e9
                submits[baseline] = took.submit * 1e6
            short = count < MAX_LOOP_COUNT
            method = Method(copy_baselines.BATCH)
            if short and (program := self.timed(made, method, direction, count, copies)):
                rates[BATCH_IN_JAX] = copies * nbytes / program[0].total / 1e9
                submits[BATCH_IN_JAX] = program[0].handlers / copies * 1e6
        key = (direction, made.block_bytes)
        if self.triton and count == self.grid.many and key in self.triton.bandwidth:
            rates[copy_baselines.TRITON] = self.triton.bandwidth[key]
        return rates, submits

    def record_choice(
        self, made: Blocks, direction: str, count: int, found: dict[tuple[str, int], float]
    ) -> None:
        """Rate of the implementation that jaxkv chooses, relative to the fastest."""
        chosen = made.chosen(direction, count)
        rates = [rate for (name, _), rate in found.items() if name == chosen]
        if rates:
            case = f"{direction}, {size_text(made.block_bytes)} x {count}"
            share = rates[0] / max(found.values())
            self.results.row(case, CHOSEN, "of the fastest", share)
            self.log(f"{case}: jaxkv chooses {chosen}, {share:.0%} of the fastest")

    def log(self, line: str) -> None:
        print(f"{time.perf_counter() - self.start:5.0f} s  {line}", flush=True)


def text(row: Row) -> str:
    assert row.peak
    others = ", ".join(f"{name} {value:.3g}" for name, value in row.baselines.items())
    share = row.value / row.peak["value"]
    return (
        f"{row.case:45} {row.value:6.2f} GB/s  {share:4.0%} of {row.peak['value']:.1f}  [{others}]"
    )


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    # The Triton kernel runs in a separate process, and needs GPU memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    triton = None
    if jax.default_backend() == "gpu":
        grid = QUICK_GPU if flags.quick else FULL
        sizes = [b for b in grid.blocks if b * grid.many <= grid.max_bytes]
        triton = copy_baselines.triton(sizes, grid.many, small_block=8 * KIB, small_counts=[])
    else:
        grid = QUICK_CPU if flags.quick else CPU
    results = Results("transfer")
    bench = Bench(results, grid, triton)
    bench.run()
    results.check("failed programs", bench.failures, "==", 0, "programs")
    if bench.platform == "gpu":
        record_targets(results, grid)
    results.save(flags.out)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
