"""Bandwidth of scattered block copies, jaxkv and baselines: `python -m bench.transfer.bandwidth`.

1 to 100,000 blocks of 512 B to 1 MiB at random positions without repetition, in both directions,
with each implementation. GB/s is payload bytes (1e9) over the wall clock time of a chain of copies
(bench/transfer/blocks.py); the peak is one contiguous copy. Copies shorter than five milliseconds
are batched, 8 in a program; a row records it. "CPU time of the handlers" is the time of a copy
between two stamps (bench/harness/timestamps.py); "call returns after" is the host time of a call of
the program on an idle device.

Baselines, in the same run, between the same arrays and with the same ids (bench/harness/peers.py):
CUDA's copy engine by one batch call, by one per 1024 blocks, and by a loop of calls, submitted from
C++ in a chain outside JAX; the faster of the first two counts. Below 10,000 blocks the call
overhead dominates, not the link; there the batch call is also made inside JAX, through an FFI call
like jaxkv's ("in JAX"), and is the baseline. And a Triton kernel with vLLM's parameters in its own
process.

A target takes the fastest jaxkv implementation unless it says "as chosen".
"""

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import jax

from bench.harness import peak_bandwidth, peers
from bench.harness.records import Results, Row, arguments
from bench.harness.timestamps import Timed
from bench.harness.timing import chain_length
from bench.transfer.blocks import DIRECTIONS, IMPLEMENTATIONS, SM_IMPLEMENTATIONS, Blocks, Method

KIB = 1024
LINK_FIVE_MILLISECONDS = 250_000_000  # bytes
COPIES_OF_SHORT = 8
BATCH_IN_JAX = f"{peers.BATCH} in JAX"
# Baselines: the fastest of the first of these groups that was measured.
BATCHES = ((peers.BATCH, peers.SHORT_BATCH),)
BATCHES_AS_CALLED = ((BATCH_IN_JAX,), *BATCHES)
ONLY_TRITON = ((peers.TRITON,),)
CHOSEN = "chosen implementation"
MAX_LOOP_COUNT = 10_000
LIMIT_SECONDS = 360  # after that only the main comparison is measured
NAMES = tuple(name for names in IMPLEMENTATIONS.values() for name in names)


class Grid(NamedTuple):
    """Measured sizes and counts.

    Attributes:
      blocks: bytes of a block, measured with `many` of them.
      many: blocks of the main comparison.
      counted: sizes that are also measured with `counts` blocks.
      max_bytes: limit of one copy; reduces `many` for large blocks.
      roof_bytes: size of the contiguous copy.
    """

    blocks: tuple[int, ...]
    many: int
    counted: tuple[int, ...]
    counts: tuple[int, ...]
    max_bytes: int
    roof_bytes: int

    def counts_of(self, block_bytes: int) -> list[int]:
        most = self.max_bytes // block_bytes
        others = [n for n in self.counts if block_bytes in self.counted and n <= most]
        return sorted({min(self.many, most), *others})


FULL = Grid(
    blocks=(512, *(KIB * k for k in (1, 2, 4, 8, 16, 28, 64, 256, 1024))),
    many=10_000,
    counted=tuple(KIB * k for k in (1, 4, 8, 16, 64, 1024)),
    counts=(1, 64, 1024, 100_000),
    max_bytes=2 << 30,
    roof_bytes=1 << 30,
)
QUICK_GPU = Grid((KIB, 8 * KIB), 1000, (8 * KIB,), (1,), 1 << 30, 1 << 30)
CPU = Grid((KIB, 8 * KIB, 64 * KIB), 1000, (8 * KIB,), (1, 64), 1 << 24, 1 << 24)
QUICK_CPU = Grid((KIB, 8 * KIB), 64, (8 * KIB,), (1,), 1 << 20, 1 << 20)


class Point(NamedTuple):
    """A measured bandwidth, and its text in a result file."""

    direction: str
    block_bytes: int
    num_blocks: int
    name: str
    num_sms: int

    @property
    def cell(self) -> str:
        return f"{self.direction}, {size_text(self.block_bytes)} x {self.num_blocks}"

    def __str__(self) -> str:
        return f"{self.cell}, {self.name}, {self.num_sms} SMs"

    @classmethod
    def parse(cls, text: str) -> "Point | None":
        """None for a case outside the grid."""
        match = re.fullmatch(r"(\w+), (\d+ \w+) x (\d+), (\w+), (\d+) SMs", text)
        if not match:
            return None
        direction, size, count, name, num_sms = match.groups()
        return cls(direction, size_bytes(size), int(count), name, int(num_sms))


UNITS = {"MiB": 1 << 20, "KiB": 1 << 10, "B": 1}


def size_text(nbytes: int) -> str:
    unit = next(unit for unit, size in UNITS.items() if nbytes % size == 0)
    return f"{nbytes // UNITS[unit]} {unit}"


def size_bytes(text: str) -> int:
    number, unit = text.split()
    return int(number) * UNITS[unit]


def points(rows: Sequence[Row]) -> dict[Point, Row]:
    """The bandwidths in the rows of a result file."""
    parsed = {Point.parse(row.case): row for row in rows if row.metric == "bandwidth"}
    return {point: row for point, row in parsed.items() if point}


def main_points(rows: Sequence[Row]) -> dict[Point, Row]:
    """Of each direction and size the bandwidths with about the same number of blocks."""
    found = points(rows)
    counts: dict[tuple[str, int], int] = {}
    for point in found:
        key = point[:2]
        counts[key] = min(counts.get(key, point.num_blocks), point.num_blocks, key=_far_from_many)
    return {point: row for point, row in found.items() if point.num_blocks == counts[point[:2]]}


def other_points(rows: Sequence[Row]) -> dict[Point, Row]:
    """Bandwidths with other numbers of blocks."""
    main = main_points(rows)
    return {point: row for point, row in points(rows).items() if point not in main}


def _far_from_many(num_blocks: int) -> float:
    return abs(math.log(num_blocks / FULL.many))


def engine_peers(count: int) -> list[str]:
    """Copy-engine baselines for `count` blocks; a long loop would take too much time."""
    loop = [peers.LOOP] if count <= MAX_LOOP_COUNT else []
    short = [peers.SHORT_BATCH] if count > peers.SHORT_BATCH_SIZE else []  # else equal to BATCH
    return [peers.BATCH, *loop, *short]


class Bench:
    """One run over a grid."""

    def __init__(self, results: Results, grid: Grid, triton: peers.TritonRates | None):
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
            self.say(f"{direction}, {count} x {made.block_bytes}: left out, it is late")
            return
        copies = COPIES_OF_SHORT if count * made.block_bytes < LINK_FIVE_MILLISECONDS else 1
        rates, submits = self.peer_rates(made, direction, count, copies)
        found: dict[tuple[str, int], float] = {}
        for way in self.ways(made.block_bytes, many):
            if (way.name, way.num_sms) in found:
                continue  # its default number of SMs
            program = self.timed(made, way, direction, count, copies)
            if program is None:
                continue
            timed, num_sms = program
            point = Point(direction, made.block_bytes, count, way.name, num_sms)
            rate = copies * count * made.block_bytes / timed.total / 1e9
            found[way.name, num_sms] = rate
            link = peak_bandwidth.contiguous_copy(direction, self.grid.roof_bytes)
            row = self.results.row(str(point), "bandwidth", "GB/s", rate, link, rates)
            cpu_us = timed.handlers / copies * 1e6
            self.results.row(str(point), "CPU time of the handlers", "us", cpu_us, None, submits)
            self.results.row(str(point), "call returns after", "us", timed.returns * 1e6)
            self.results.row(str(point), "copies in a program", "copies", copies)
            self.say(text(row))
        self.record_choice(made, direction, count, found)

    def ways(self, block_bytes: int, many: bool) -> list[Method]:
        """Every implementation by default and, for many blocks, with the targets' numbers of
        SMs."""
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
        self, made: Blocks, way: Method, direction: str, count: int, copies: int
    ) -> tuple[Timed, int] | None:
        """Times and SMs of a program; None and the reason if it is unsupported or incorrect."""
        try:
            program = made.program(way, direction, count, copies)
            return program.measure(), program.num_sms
        except NotImplementedError as error:
            self.say(f"{direction}, {count} x {made.block_bytes}: not served: {error}")
        except Exception as error:  # one failure must not lose the other figures
            self.failures += 1
            self.say(f"{direction}, {count} x {made.block_bytes}, {way}: FAILED: {error!r}"[:2000])
            made.fill()
        return None

    def peer_rates(
        self, made: Blocks, direction: str, count: int, copies: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """GB/s of the baselines, and microseconds of submission per copy."""
        nbytes = count * made.block_bytes
        rates: dict[str, float] = {}
        submits: dict[str, float] = {}
        if self.platform == "gpu":
            source, destination = (made.arrays[side] for side in made.sides(direction))
            _, ids = made.ids(Method(peers.BATCH), count, 0)
            for peer in engine_peers(count):
                first = peers.run(peer, source, destination, ids, calls=1, repeats=1)
                calls = chain_length(first.total)
                took = peers.run(peer, source, destination, ids, calls=calls, repeats=3)
                rates[peer] = nbytes / took.total / 1e9
                submits[peer] = took.submit * 1e6
            short = count < MAX_LOOP_COUNT
            way = Method(peers.BATCH)
            if short and (program := self.timed(made, way, direction, count, copies)):
                rates[BATCH_IN_JAX] = copies * nbytes / program[0].total / 1e9
                submits[BATCH_IN_JAX] = program[0].handlers / copies * 1e6
        key = (direction, made.block_bytes)
        if self.triton and count == self.grid.many and key in self.triton.bandwidth:
            rates[peers.TRITON] = self.triton.bandwidth[key]
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
            self.say(f"{case}: jaxkv chooses {chosen}, {share:.0%} of the fastest")

    def say(self, line: str) -> None:
        print(f"{time.perf_counter() - self.start:5.0f} s  {line}", flush=True)


def text(row: Row) -> str:
    assert row.peak
    others = ", ".join(f"{name} {value:.3g}" for name, value in row.peers.items())
    share = row.value / row.peak["value"]
    return (
        f"{row.case:45} {row.value:6.2f} GB/s  {share:4.0%} of {row.peak['value']:.1f}  [{others}]"
    )


def record_targets(results: Results, grid: Grid) -> None:
    """The targets of the grid; with several cells the worst counts."""
    found = points(results.rows)
    for direction in DIRECTIONS:
        for block_bytes in grid.blocks:
            if block_bytes >= KIB:
                _peak_targets(results, grid, found, direction, block_bytes)
    for block_bytes, times in ((KIB, 20), (4 * KIB, 4), (8 * KIB, 2), (16 * KIB, 2)):
        cell = _many(grid, "load", block_bytes)
        ratio, bound = _ratio(found, cell, BATCHES), _bound(found, cell, BATCHES)
        results.target(f"{cell.cell}: against {peers.BATCH}", ratio, ">=", times, "times", bound)
    shares = {row.case: row.value for row in results.rows if row.metric == CHOSEN}
    for direction in DIRECTIONS:
        cells = {point._replace(name="", num_sms=0) for point in found}
        ratios = {
            cell.cell: ratio
            for cell in cells
            if cell.direction == direction and (ratio := _ratio(found, cell, BATCHES_AS_CALLED))
        }
        chosen = [ratio * shares[cell] for cell, ratio in ratios.items() if cell in shares]
        for how, found_here in (("", ratios.values()), (", as chosen", chosen)):
            results.target(
                f"{direction}: against {peers.BATCH}, the worst of all sizes and counts{how}",
                min(found_here, default=None), ">=", 0.97, "times",
            )  # fmt: skip
    for block_bytes, more in ((KIB, 7.0), (4 * KIB, 2.0), (8 * KIB, 1.15)):
        cell = _many(grid, "load", block_bytes)
        ratio = _ratio(found, cell, ONLY_TRITON, num_sms=12)
        name = f"{cell.cell}: against Triton, both with 12 SMs"
        results.target(name, ratio, ">=", more, "times", _bound(found, cell, ONLY_TRITON))
    sizes = [
        _ratio(found, _many(grid, direction, block_bytes), ONLY_TRITON, num_sms=12)
        for direction in DIRECTIONS
        for block_bytes in grid.blocks
    ]
    slowest = min((ratio for ratio in sizes if ratio), default=None)
    name = "against Triton, the worst of the sizes that it ran"
    results.target(name, slowest, ">=", 1, "times")


def _many(grid: Grid, direction: str, block_bytes: int) -> Point:
    return Point(direction, block_bytes, min(grid.many, grid.max_bytes // block_bytes), "", 0)


def _peak_targets(
    results: Results, grid: Grid, found: dict[Point, Row], direction: str, block_bytes: int
) -> None:
    """Shares of peak bandwidth of copies by SMs; not of the copy engine, which uses none."""
    cell = _many(grid, direction, block_bytes)
    for most, want in ((12, 0.9),) if block_bytes < 8 * KIB else ((4, 0.9), (2, 0.85)):
        shares = [
            row.value / row.peak["value"]
            for point, row in _in_cell(found, cell).items()
            if row.peak and 0 < point.num_sms <= most
        ]
        best = max(shares, default=None)
        results.target(f"{cell.cell}: at most {most} SMs", best, ">=", want, "of peak")


def _in_cell(found: dict[Point, Row], cell: Point) -> dict[Point, Row]:
    return {point: row for point, row in found.items() if point[:3] == cell[:3]}


def _ratio(
    found: dict[Point, Row],
    cell: Point,
    groups: Sequence[Sequence[str]],
    num_sms: int | None = None,
) -> float | None:
    """Best jaxkv rate over the baselines' rate; None if either was not measured."""
    rates = [
        row.value
        for point, row in _in_cell(found, cell).items()
        if num_sms is None or point.num_sms == num_sms
    ]
    peer = _peer_rate(found, cell, groups)
    return max(rates) / peer if rates and peer else None


def _bound(found: dict[Point, Row], cell: Point, groups: Sequence[Sequence[str]]) -> float | None:
    """Ratio to the baselines of a copy at peak bandwidth."""
    row = next(iter(_in_cell(found, cell).values()), None)
    peer = _peer_rate(found, cell, groups)
    return row.peak["value"] / peer if row and row.peak and peer else None


def _peer_rate(
    found: dict[Point, Row], cell: Point, groups: Sequence[Sequence[str]]
) -> float | None:
    """The fastest of the first group of baselines with a measurement in the cell."""
    row = next(iter(_in_cell(found, cell).values()), None)
    rates = row.peers if row else {}
    measured = ([rates[name] for name in names if name in rates] for names in groups)
    return max(next(filter(None, measured), []), default=None)


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    # The Triton kernel runs in a separate process, and needs GPU memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    triton = None
    if jax.default_backend() == "gpu":
        grid = QUICK_GPU if flags.quick else FULL
        sizes = [b for b in grid.blocks if b * grid.many <= grid.max_bytes]
        triton = peers.triton(sizes, grid.many, small_block=8 * KIB, small_counts=[])
    else:
        grid = QUICK_CPU if flags.quick else CPU
    results = Results("transfer")
    bench = Bench(results, grid, triton)
    bench.run()
    results.target("programs that failed", bench.failures, "==", 0, "programs")
    if bench.platform == "gpu":
        record_targets(results, grid)
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
