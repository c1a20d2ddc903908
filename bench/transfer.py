"""Copies of scattered blocks, jaxkv and baselines: `python -m bench.transfer`.

Two records: `transfer`, their bandwidth, and `small_batches`, the latency of a few.

Bandwidth: 1 to 50,000 blocks of 512 B to 1 MiB at random places of arrays of 32 GiB (where memory
allows), in both directions, with each implementation and form of ids. GB/s is payload bytes (1e9)
over the wall clock time of a chain of copies (bench/harness/blocks.py); the peak is one contiguous
copy. All methods of a cell run in rounds. Up to 8 copies are one program, if five milliseconds have
room for them, each of other blocks; consecutive copies of a baseline cycle through as many sets.
"CPU time of the handlers" is the time of a copy between two stamps (bench/harness/timestamps.py);
"host time per call" is that of a call of the program, from Python, on an idle device.

Baselines, in the same rounds, between the same arrays and with the same ids
(bench/harness/copy_baselines.py): CUDA's copy engine by one batch call and by one per 1024 blocks,
of which the faster counts, and by a loop of calls, submitted from C++ in a chain outside JAX. Below
10,000 blocks the call overhead dominates, not the link; there the batch calls are also made inside
JAX, through an FFI call like jaxkv's ("in JAX"), and are the baseline. And a Triton kernel with
vLLM's parameters in its own process.

Targets are of jaxkv "as chosen": by the implementation and SMs that it selects, and with the slower
form of ids, device ids or HostIds.

Latency of 1 to 64 blocks of 8 KiB: it depends on the caller, so only equal metrics are compared, of
jaxkv and of CUDA's copy engine by a batch call and by a loop of calls, through an FFI call like
jaxkv's. By the host's clock, with an idle device before each call, in rounds; jaxkv as chosen, with
either form of ids, is compared with the better baseline.

  - "time per copy (in a step)": cost of one more copy in a jitted program, (17 copies - 1) / 16,
    each with its own ids and dependent on the previous one;
  - "latency (one call)": a call of a program with one copy, from before the call until the data is
    available. It includes JAX's overhead of calling any program.
"""

import contextlib
import functools
import gc
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.harness import copy_baselines, peak_bandwidth, timing
from bench.harness.blocks import (
    DEVICE_IDS,
    DIRECTIONS,
    HOST_IDS,
    KIB,
    Blocks,
    Method,
    Program,
    methods,
    size_text,
)
from bench.harness.copy_baselines import BATCH, LOOP, SHORT_BATCH, SHORT_BATCH_SIZE, TRITON
from bench.harness.main import Flags, benchmark, on_gpu
from bench.harness.records import Results
from bench.harness.timing import Figure, Samples
from jaxkv._src.autotune.pools import Pools, pool_bytes

LINK_FIVE_MILLISECONDS = 250_000_000  # bytes
MAX_COPIES = 8  # of a program
MANY = 10_000  # blocks of the main comparison, if `max_bytes` allows
COUNTS = (1, 64, 1024, 50_000)  # of some sizes
CHAIN_SECONDS, ROUNDS, IDLE_CALLS = 0.04, 9, 5
LIMIT_SECONDS = 400  # after that only the main comparison is measured
SAME_SMS = Method("kernel", DEVICE_IDS, 12)  # as many as Triton has
SPEEDUPS = {KIB: 20, 4 * KIB: 4, 8 * KIB: 2, 16 * KIB: 2}  # over batch calls, loads
OVER_TRITON = {KIB: 7.0, 4 * KIB: 2.0, 8 * KIB: 1.15}
OVER, WANTED_SHARE = "speedup over the faster batch call", 0.9
OVER_BATCH = {way: f"{way}: {OVER}, minimum over sizes and counts" for way in DIRECTIONS}
LOWEST_TRITON = "speedup over Triton, minimum over sizes"
LOWEST = {**dict.fromkeys(OVER_BATCH.values(), 0.97), LOWEST_TRITON: 1.0}
FEW, FEW_BYTES, MOST_RATIO = (1, 4, 16, 64), 8192, 1.05  # blocks, their size, and the target
FEW_BASELINES = (Method(BATCH), Method(LOOP))
IN_STEP, ONE_CALL = "time per copy (in a step)", "latency (one call)"
HOST_TIME = "host time per call"


class Grid(NamedTuple):
    """Measured sizes and counts.

    Attributes:
      blocks: bytes of a block, measured with `many` of them.
      many: blocks of the main comparison.
      counts: other numbers of blocks, by size.
      max_bytes: limit of one copy; reduces `many` for large blocks.
      peak_bytes: size of the contiguous copy.
    """

    blocks: tuple[int, ...]
    many: int
    counts: Mapping[int, Sequence[int]]
    max_bytes: int
    peak_bytes: int

    def many_of(self, block_bytes: int) -> int:
        return min(self.many, self.max_bytes // block_bytes)

    def counts_of(self, block_bytes: int) -> list[int]:
        limit = self.max_bytes // block_bytes
        others = [n for n in self.counts.get(block_bytes, ()) if n <= limit]
        return sorted({self.many_of(block_bytes), *others})


FULL = Grid(
    blocks=(512, *(KIB * k for k in (1, 2, 4, 8, 16, 24, 64, 256, 1024))),
    many=MANY,
    # 4,096 HostIds: the most that every thread block reads from host memory.
    counts={KIB: (*COUNTS, 4096), **dict.fromkeys((8 * KIB, 24 * KIB, 64 * KIB), COUNTS)},
    max_bytes=2 << 30,
    peak_bytes=1 << 30,
)
QUICK = Grid((8 * KIB,), 64, {8 * KIB: (1,)}, 1 << 20, 1 << 20)


def copies_of(nbytes: int) -> int:
    """Copies in a program, each of other blocks, and sets of blocks of a baseline."""
    return max(1, min(MAX_COPIES, LINK_FIVE_MILLISECONDS // nbytes))


class Cell:
    """All methods of one direction, size and count, in the same rounds.

    Attributes:
      programs: of jaxkv's methods, and of the batch calls inside JAX.
      outside: baselines outside JAX, and the length of a chain.
      samples: seconds of a copy; keys are those of `programs` and `outside`.
    """

    def __init__(self, made: Blocks, direction: str, count: int):
        self.made, self.direction, self.count = made, direction, count
        self.nbytes = count * made.block_bytes
        self.copies = copies_of(self.nbytes)
        self.name = f"{direction}, {size_text(made.block_bytes)} x {count}"
        self.failed: list[str] = []
        self.programs: dict[Method, Program] = {}
        self.choices = [made.chosen(direction, count, ids) for ids in (DEVICE_IDS, HOST_IDS)]
        self.batches: list[str] = []
        self.outside: dict[str, tuple[copy_baselines.Outside, int]] = {}
        self.submits: dict[str, list[float]] = {}

    def prepare(self, *, compare_sms: bool) -> None:
        """Compiles and verifies all methods."""
        if on_gpu():  # with up to 1024 blocks, both are equal
            self.batches = [BATCH, SHORT_BATCH] if self.count > SHORT_BATCH_SIZE else [BATCH]
        in_jax = map(Method, self.batches) if self.count <= SHORT_BATCH_SIZE else ()
        same_sms = [SAME_SMS] if compare_sms else []
        for method in dict.fromkeys((*methods(), *self.choices, *same_sms, *in_jax)):
            try:
                program = self.made.program(method, self.direction, self.count, self.copies)
                program.warm_up(CHAIN_SECONDS)
                self.programs[method] = program
            except NotImplementedError as error:
                print(f"{self.name}, {method}: unsupported: {error}", flush=True)
            except Exception as error:  # one failure must not lose the other figures
                self.failed.append(f"{self.name}, {method}: {error!r}"[:2000])
                self.made.fill()
        id_sets = [self.made.ids(Method(BATCH), self.count, seed)[1] for seed in range(self.copies)]
        for name in (*self.batches, *([LOOP] if self.batches and self.count <= MANY else [])):
            run = copy_baselines.Outside(name, *self.made.sides(self.direction), id_sets)
            run(1)
            calls = max(1, min(timing.MAX_CALLS, int(CHAIN_SECONDS / run(1)[0])))
            self.outside[name], self.submits[name] = (run, calls), []

    def measure(self) -> None:
        def inside(program: Program) -> float:
            return program.chain() / self.copies

        def outside(name: str) -> float:
            # Addresses are those of the arrays: all programs write in place.
            run, calls = self.outside[name]
            total, submit = run(calls)
            self.submits[name].append(submit)
            return total

        runs: dict[Any, Any] = {
            method: functools.partial(inside, program) for method, program in self.programs.items()
        }
        runs |= {name: functools.partial(outside, name) for name in self.outside}
        self.samples: Samples[Any] = timing.compare(runs, ROUNDS)

    def baseline(self) -> Any:
        """The faster batch call: in JAX if measured there; None without one."""
        in_jax = [key for key in self.samples if isinstance(key, Method) and key.is_baseline]
        return self.samples.fastest(in_jax or [b for b in self.batches if b in self.samples])

    def chosen(self) -> list[Method]:
        """What jaxkv selects, for each form of ids; without those that failed."""
        return [method for method in self.choices if method in self.samples]

    def slower_choice(self) -> Method | None:
        return max(self.chosen(), key=self.samples.median, default=None)

    def rate(self, key: Any) -> Figure:
        return self.nbytes / self.samples.median(key) / 1e9

    def record(
        self, results: Results, peak: tuple[str, float], triton: Sequence[float] | None
    ) -> None:
        """Rows of jaxkv's methods, and of the choices relative to the fastest method."""
        own = [key for key in self.samples if isinstance(key, Method) and not key.is_baseline]
        others = {
            f"{key} in JAX" if isinstance(key, Method) else key: self.rate(key)
            for key in self.samples
            if key not in own
        }
        if triton:
            others[TRITON] = self.nbytes / timing.median(triton) / 1e9
        submits = {name: timing.median(taken) * 1e6 for name, taken in self.submits.items()}
        for method in own:
            program = self.programs[method]
            idle, handlers = program.stamped_calls(IDLE_CALLS)
            case = f"{self.name}, {method}, {program.num_sms} SMs"
            results.row(case, "bandwidth", "GB/s", self.rate(method), peak, others)
            cpu = handlers / self.copies * 1e6
            results.row(case, "CPU time of the handlers", "us", cpu, None, submits)
            results.row(case, HOST_TIME, "us", idle.returns * 1e6)
        fastest = self.samples.fastest(own)
        for method in self.chosen():
            share = self.samples.ratio(fastest, method)
            case = f"{self.name}, {method.ids}: {method.name}"
            results.row(case, "of the fastest method", "x", share)


def at_least(ratios: Sequence[float]) -> Figure:
    """The median; two errors reach to the lower end of its interval, the upper one is ignored."""
    middle = statistics.median(ratios)
    return timing.median([min(one, middle) for one in ratios])


def lowest_of(found: Mapping[str, Figure]) -> tuple[str, Figure]:
    """The cell whose interval has the lowest end, at least 0, and the lowest with that end."""
    ends = {cell: max(0.0, ratio - 2 * ratio.error) for cell, ratio in found.items()}
    cell, lowest = min(ends, key=ends.__getitem__), min(found.values())
    return cell, Figure(lowest, (lowest - ends[cell]) / 2)


class Bench:
    """One run over a grid."""

    def __init__(self, results: Results, grid: Grid, triton: dict[tuple[str, int], list[float]]):
        self.results, self.grid, self.triton = results, grid, triton
        self.failed: list[str] = []
        self.start = time.perf_counter()
        self.ratios: dict[str, dict[str, Figure]] = {name: {} for name in LOWEST}  # by cell
        # Targets relative to the peak, which is known at the end: name, figure, limit, and the
        # GB/s of the baseline if the figure is a speedup.
        self.of_peak: list[tuple[str, str, Figure, float, float | None]] = []

    def run(self, pools: Pools) -> None:
        for block_bytes in self.grid.blocks:
            made = Blocks(pools, block_bytes)
            for direction in DIRECTIONS:
                for count in self.grid.counts_of(block_bytes):
                    self.cell(Cell(made, direction, count))
            del made
            gc.collect()  # the next arrays need its memory
        peak_bytes = self.grid.peak_bytes
        self.judge({d: peak_bandwidth.contiguous_copy(d, peak_bytes)[1] for d in DIRECTIONS})
        print(*self.failed, sep="\n")
        self.results.check("failed programs", len(self.failed), "==", 0, "programs")

    def cell(self, cell: Cell) -> None:
        many = cell.count == self.grid.many_of(cell.made.block_bytes)
        if not many and time.perf_counter() - self.start > LIMIT_SECONDS:
            print(f"{cell.name}: skipped: time limit", flush=True)
            return
        equal_counts = many and cell.count == self.grid.many
        key = cell.direction, cell.made.block_bytes
        triton = self.triton.get(key) if equal_counts else None
        cell.prepare(compare_sms=bool(triton))
        cell.measure()
        peak = peak_bandwidth.contiguous_copy(cell.direction, self.grid.peak_bytes, again=True)
        cell.record(self.results, peak, triton)
        self.failed += cell.failed
        print(f"{cell.name}: after {time.perf_counter() - self.start:.0f} s", flush=True)
        self.targets(cell, many=many, triton=triton)

    def targets(self, cell: Cell, *, many: bool, triton: Sequence[float] | None) -> None:
        own, baseline, size = cell.slower_choice(), cell.baseline(), cell.made.block_bytes
        if own is None:
            return
        add = self.of_peak.append
        if many and size >= KIB:
            add((cell.direction, f"{cell.name}: as chosen", cell.rate(own), WANTED_SHARE, None))
        loads = many and cell.direction == "load"
        if baseline is not None:
            pairs = zip(cell.samples[baseline], cell.samples[own], strict=True)
            self.ratios[OVER_BATCH[cell.direction]][cell.name] = at_least([a / b for a, b in pairs])
            if loads and size in SPEEDUPS:
                name, speedup = f"{cell.name}: {OVER}", cell.samples.ratio(baseline, own)
                add(("load", name, speedup, SPEEDUPS[size], cell.rate(baseline)))
        if triton and SAME_SMS in cell.samples:
            seconds = timing.median(triton)
            speedup = seconds / cell.samples.median(SAME_SMS)
            self.ratios[LOWEST_TRITON][cell.name] = speedup
            if loads and size in OVER_TRITON:
                name = f"{cell.name}: speedup over Triton, {SAME_SMS.num_sms} SMs each"
                add(("load", name, speedup, OVER_TRITON[size], cell.nbytes / seconds / 1e9))

    def judge(self, peaks: Mapping[str, float]) -> None:
        """Targets that depend on the peaks by direction, or on all cells."""
        for direction, name, figure, want, baseline in self.of_peak:
            if baseline is None:
                self.results.target(name, figure / peaks[direction], ">=", want, "of peak")
            else:
                self.results.target(name, figure, ">=", want, "x", peaks[direction] / baseline)
        for name, found in self.ratios.items():
            cell, lowest = lowest_of(found) if found else (None, None)
            self.results.target(name, lowest, ">=", LOWEST[name], "x")
            if cell is not None:
                self.results.row(f"{name}: lowest end in {cell}", "speedup", "x", found[cell])


def measure_bandwidth(results: Results, flags: Flags) -> None:
    grid = QUICK if flags.quick else FULL
    num_bytes, triton = pool_bytes(2 * grid.max_bytes), {}
    if on_gpu():
        sizes = [b for b in grid.blocks if b * grid.many <= grid.max_bytes]
        blocks = [(b, copies_of(b * grid.many)) for b in sizes]
        triton = copy_baselines.triton(pool_bytes=num_bytes, blocks=blocks, count=grid.many)
    Bench(results, grid, triton).run(Pools(num_bytes))


# Latency of a few blocks


class Effort(NamedTuple):
    """Amount of work: copies of the longer program, rounds, and timed calls per round."""

    copies: int
    rounds: int
    calls: int


def microseconds(programs: Sequence[Program], effort: Effort) -> dict[str, float]:
    """Microseconds of one copy, by metric, in one round."""
    one, many = (program.idle_calls(effort.calls) for program in programs)
    seconds = {
        IN_STEP: (many.done - one.done) / effort.copies,
        ONE_CALL: one.done,
        HOST_TIME: one.returns,
    }
    return {metric: float(taken) * 1e6 for metric, taken in seconds.items()}


def samples_of(
    made: Blocks, direction: str, count: int, choices: Sequence[Method], effort: Effort
) -> dict[Method, list[dict[str, float]]]:
    """Times of each method by round."""
    runs = {}
    for method in dict.fromkeys((*(FEW_BASELINES if on_gpu() else ()), *methods(), *choices)):
        with contextlib.suppress(NotImplementedError):  # not every implementation supports the call
            programs = [
                made.program(method, direction, count, copies, stamped=False)
                for copies in (1, 1 + effort.copies)
            ]
            runs[method] = functools.partial(microseconds, programs, effort)
    return timing.rounds(runs, effort.rounds)


def record_few(results: Results, made: Blocks, direction: str, count: int, effort: Effort) -> None:
    """Rows of one cell, and its targets if there are baselines."""
    case = f"{direction}, {count} x 8 KiB"
    choices = {ids: made.chosen(direction, count, ids) for ids in (DEVICE_IDS, HOST_IDS)}
    rounds = samples_of(made, direction, count, [*choices.values()], effort)
    for metric in (IN_STEP, ONE_CALL, HOST_TIME):
        samples = timing.Samples({m: [us[metric] for us in taken] for m, taken in rounds.items()})
        medians = samples.medians()
        others = {str(method): us for method, us in medians.items() if method.is_baseline}
        for method in (method for method in medians if not method.is_baseline):
            results.row(f"{case}, {method}", metric, "us", medians[method], None, others)
        best = samples.fastest(method for method in samples if method.is_baseline)
        if best is None or metric == HOST_TIME:
            continue
        for ids, chosen in choices.items():
            got = samples.ratio(chosen, best) if chosen in samples else None
            name = f"{case}: {metric}, as chosen with {ids}"
            results.target(name, got, "<=", MOST_RATIO, "x best baseline")


def measure_latency(results: Results, flags: Flags) -> None:
    effort = Effort(2, 2, 3) if flags.quick else Effort(16, 240, 6)
    made = Blocks(Pools(pool_bytes(1 << 24)), FEW_BYTES)
    for direction in DIRECTIONS:
        for count in FEW[:1] if flags.quick else FEW:
            record_few(results, made, direction, count, effort)


bandwidth = benchmark("transfer", __doc__, measure_bandwidth)
latency = benchmark("small_batches", __doc__, measure_latency)


def main(argv: Sequence[str] | None = None) -> int:
    return max(bandwidth(argv), latency(argv))


if __name__ == "__main__":
    sys.exit(main())
