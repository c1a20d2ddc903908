"""Bandwidth of scattered block copies, jaxkv and baselines: `python -m bench.transfer`.

1 to 50,000 blocks of 512 B to 1 MiB at random places of arrays of 32 GiB (where memory allows), in
both directions, with each implementation and form of ids. GB/s is payload bytes (1e9) over the wall
clock time of a chain of copies (bench/harness/blocks.py); the peak is one contiguous copy. All
methods of a cell run in rounds. Copies shorter than five milliseconds are batched, 8 in a program.
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
"""

import functools
import gc
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

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
from bench.harness.records import Results, arguments
from bench.harness.timestamps import stamped
from jaxkv._src.autotune.pools import Pools, pool_bytes

LINK_FIVE_MILLISECONDS = 250_000_000  # bytes
COPIES_OF_SHORT = 8
MANY = 10_000  # blocks of the main comparison, if `max_bytes` allows
IN_JAX = " in JAX"
CHAIN_SECONDS, ROUNDS, IDLE_CALLS = 0.04, 5, 5
LIMIT_SECONDS = 300  # after that only the main comparison is measured
TRITON_SMS = 12
SPEEDUPS = {KIB: 20, 4 * KIB: 4, 8 * KIB: 2, 16 * KIB: 2}  # over batch calls, loads
OVER_TRITON = {KIB: 7.0, 4 * KIB: 2.0, 8 * KIB: 1.15}
AS_FAST = 0.97
CHOSEN = "of the fastest method"


class Grid(NamedTuple):
    """Measured sizes and counts.

    Attributes:
      blocks: bytes of a block, measured with `many` of them.
      many: blocks of the main comparison.
      counted: sizes that are also measured with `counts` blocks.
      max_bytes: limit of one copy; reduces `many` for large blocks.
      peak_bytes: size of the contiguous copy.
    """

    blocks: tuple[int, ...]
    many: int
    counted: tuple[int, ...]
    counts: tuple[int, ...]
    max_bytes: int
    peak_bytes: int

    def many_of(self, block_bytes: int) -> int:
        return min(self.many, self.max_bytes // block_bytes)

    def counts_of(self, block_bytes: int) -> list[int]:
        limit = self.max_bytes // block_bytes
        others = [n for n in self.counts if block_bytes in self.counted and n <= limit]
        return sorted({self.many_of(block_bytes), *others})


FULL = Grid(
    blocks=(512, *(KIB * k for k in (1, 2, 4, 8, 16, 24, 64, 256, 1024))),
    many=MANY,
    counted=tuple(KIB * k for k in (1, 8, 24, 64)),
    counts=(1, 64, 1024, 50_000),
    max_bytes=2 << 30,
    peak_bytes=1 << 30,
)
QUICK_GPU = Grid((KIB, 8 * KIB), 1000, (8 * KIB,), (1,), 1 << 30, 1 << 30)
CPU = Grid((KIB, 8 * KIB, 64 * KIB), 1000, (8 * KIB,), (1, 64), 1 << 24, 1 << 24)
QUICK_CPU = Grid((8 * KIB,), 64, (8 * KIB,), (1,), 1 << 20, 1 << 20)


def cell_text(direction: str, block_bytes: int, count: int) -> str:
    return f"{direction}, {size_text(block_bytes)} x {count}"


class Cell:
    """All methods of one direction, size and count, in the same rounds."""

    def __init__(self, made: Blocks, direction: str, count: int, *, compare_sms: bool):
        self.made, self.direction, self.count = made, direction, count
        self.nbytes = count * made.block_bytes
        self.copies = COPIES_OF_SHORT if self.nbytes < LINK_FIVE_MILLISECONDS else 1
        self.name = cell_text(direction, made.block_bytes, count)
        self.platform = jax.default_backend()
        self.failed: list[str] = []
        self.programs: dict[Method, Program] = {}
        same_sms = [Method("kernel", DEVICE_IDS, TRITON_SMS)] if compare_sms else []
        self.choices = [made.chosen(direction, count, ids) for ids in (DEVICE_IDS, HOST_IDS)]
        own = *methods(self.platform), *self.choices, *same_sms
        for method in dict.fromkeys((*own, *map(Method, self._batches_in_jax()))):
            self._add(method)
        self.outside = self._outside() if self.platform == "gpu" else {}
        self.samples: dict[Any, list[float]] = {}
        self.submits: dict[str, list[float]] = {name: [] for name in self.outside}

    def _batches(self) -> list[str]:
        """With up to 1024 blocks, both are equal."""
        return [BATCH, SHORT_BATCH] if self.count > SHORT_BATCH_SIZE else [BATCH]

    def _batches_in_jax(self) -> list[str]:
        return self._batches() if self.platform == "gpu" and self.count < MANY else []

    def _add(self, method: Method) -> None:
        try:
            program = self.made.program(method, self.direction, self.count, self.copies)
            program.warm_up(CHAIN_SECONDS)
            self.programs[method] = program
        except NotImplementedError as error:
            print(f"{self.name}, {method}: unsupported: {error}", flush=True)
        except Exception as error:  # one failure must not lose the other figures
            self.failed.append(f"{self.name}, {method}: {error!r}"[:2000])
            self.made.fill()

    def _outside(self) -> dict[str, tuple[copy_baselines.Outside, int]]:
        """Baselines outside JAX, and the length of a chain."""
        found = {}
        sides = self.made.sides(self.direction)
        _, ids = self.made.ids(Method(BATCH), self.count, 0)
        for name in (*self._batches(), *([LOOP] if self.count <= MANY else [])):
            run = copy_baselines.Outside(name, *sides, ids)
            run(1)
            calls = int(CHAIN_SECONDS / run(1)[0])
            found[name] = run, max(1, min(timing.MAX_CALLS, calls))
        return found

    def measure(self) -> None:
        """Fills `samples` with seconds of a copy, by method and round."""

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
        self.samples = timing.rounds(runs, ROUNDS)

    def baseline(self) -> Any:
        """The faster batch call: in JAX if measured there; None without one."""
        names: list[Any] = [m for m in self.samples if isinstance(m, Method) and m.is_baseline]
        names = names or [name for name in self._batches() if name in self.samples]
        return min(names, key=lambda name: timing.median(self.samples[name]), default=None)

    def chosen(self) -> list[Method]:
        """What jaxkv selects, for each form of ids; without those that failed."""
        return [method for method in self.choices if method in self.samples]

    def slower_choice(self) -> Method | None:
        return max(
            self.chosen(), key=lambda method: timing.median(self.samples[method]), default=None
        )

    def rate(self, key: Any) -> timing.Figure:
        return self.nbytes / timing.median(self.samples[key]) / 1e9

    def own(self) -> list[Method]:
        return [m for m in self.samples if isinstance(m, Method) and not m.is_baseline]

    def record(
        self, results: Results, peak: tuple[str, float], triton: Sequence[float] | None
    ) -> None:
        """Rows of jaxkv's methods, and of the choices relative to the fastest method."""
        others = {text(key): self.rate(key) for key in self.samples if key not in self.own()}
        submits = {name: timing.median(taken) * 1e6 for name, taken in self.submits.items()}
        if triton:
            others[TRITON] = self.nbytes / timing.median(triton) / 1e9
        fastest = min(self.own(), key=lambda m: timing.median(self.samples[m]), default=None)
        for method in self.own():
            program, handlers = self.programs[method], list[float]()
            idle = program.idle_calls(IDLE_CALLS, after=lambda: handlers.append(stamped()[0]))  # noqa: B023
            case = f"{self.name}, {method}, {program.num_sms} SMs"
            results.row(case, "bandwidth", "GB/s", self.rate(method), peak, others)
            cpu = timing.median(handlers) / self.copies * 1e6
            results.row(case, "CPU time of the handlers", "us", cpu, None, submits)
            results.row(case, "host time per call", "us", idle.returns * 1e6)
            listed = ", ".join(f"{name} {rate:.3g}" for name, rate in others.items())
            print(
                f"{case:45} {self.rate(method):6.2f} GB/s of {peak[1]:.1f}  [{listed}]", flush=True
            )
        for method in self.chosen():
            share = timing.ratio(self.samples[fastest], self.samples[method])
            results.row(f"{self.name}, {method.ids}: {method.name}", CHOSEN, "x", share)


def lowest_of(found: Sequence[timing.Figure]) -> timing.Figure | None:
    """The one that is the lowest if it is worse by two standard errors."""
    return min(found, key=lambda figure: float(figure) - 2 * figure.error, default=None)


def text(key: Any) -> str:
    return f"{key}{IN_JAX}" if isinstance(key, Method) else key


class Bench:
    """One run over a grid."""

    def __init__(self, results: Results, grid: Grid, triton: copy_baselines.TritonTimes | None):
        self.results, self.grid, self.triton = results, grid, triton
        self.failed: list[str] = []
        self.start = time.perf_counter()
        self.speedups: dict[str, list[timing.Figure]] = {direction: [] for direction in DIRECTIONS}
        self.over_triton: list[timing.Figure] = []

    def run(self, pools: Pools) -> None:
        for block_bytes in self.grid.blocks:
            made = Blocks(pools, block_bytes)
            for direction in DIRECTIONS:
                for count in self.grid.counts_of(block_bytes):
                    self.cell(made, direction, count)
            del made
            gc.collect()  # the next arrays need its memory
        for direction, found in self.speedups.items():
            name = f"{direction}: speedup over the faster batch call, minimum over sizes and counts"
            self.results.target(name, lowest_of(found), ">=", AS_FAST, "x")
        lowest = lowest_of(self.over_triton)
        self.results.target("speedup over Triton, minimum over sizes", lowest, ">=", 1, "x")
        print(*self.failed, sep="\n")
        self.results.check("failed programs", len(self.failed), "==", 0, "programs")

    def cell(self, made: Blocks, direction: str, count: int) -> None:
        name = cell_text(direction, made.block_bytes, count)
        many = count == self.grid.many_of(made.block_bytes)
        if not many and time.perf_counter() - self.start > LIMIT_SECONDS:
            print(f"{name}: skipped: time limit", flush=True)
            return
        times = self.triton.many if self.triton and many and count == self.grid.many else {}
        triton = times.get((direction, made.block_bytes))
        cell = Cell(made, direction, count, compare_sms=bool(triton))
        cell.measure()
        peak = peak_bandwidth.contiguous_copy(direction, self.grid.peak_bytes)
        cell.record(self.results, peak, triton)
        self.failed += cell.failed
        self.targets(cell, peak, many=many, triton=triton)

    def targets(
        self, cell: Cell, peak: tuple[str, float], *, many: bool, triton: Sequence[float] | None
    ) -> None:
        own, baseline, size = cell.slower_choice(), cell.baseline(), cell.made.block_bytes
        if own is None:
            return
        sms = cell.programs[own].num_sms
        if many and size >= KIB:
            want = 0.85 if sms <= 2 and own.name != "dma" and size >= 8 * KIB else 0.9
            name = f"{cell.name}: as chosen"
            self.results.target(name, cell.rate(own) / peak[1], ">=", want, "of peak")
        if baseline is not None:
            speedup = timing.ratio(cell.samples[baseline], cell.samples[own])
            self.speedups[cell.direction].append(speedup)
            if many and cell.direction == "load" and size in SPEEDUPS:
                name = f"{cell.name}: speedup over the faster batch call"
                bound = peak[1] / cell.rate(baseline)
                self.results.target(name, speedup, ">=", SPEEDUPS[size], "x", bound)
        same_sms = Method("kernel", DEVICE_IDS, TRITON_SMS)
        if triton and same_sms in cell.samples:
            seconds = timing.median(triton)
            speedup = seconds / timing.median(cell.samples[same_sms])
            self.over_triton.append(speedup)
            if cell.direction == "load" and size in OVER_TRITON:
                name = f"{cell.name}: speedup over Triton, {TRITON_SMS} SMs each"
                bound = peak[1] * seconds * 1e9 / cell.nbytes
                self.results.target(name, speedup, ">=", OVER_TRITON[size], "x", bound)


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    on_gpu, triton = jax.default_backend() == "gpu", None
    grid = (QUICK_GPU if flags.quick else FULL) if on_gpu else (QUICK_CPU if flags.quick else CPU)
    num_bytes = pool_bytes(2 * grid.max_bytes)
    if on_gpu:
        sizes = [b for b in grid.blocks if b * grid.many <= grid.max_bytes]
        triton = copy_baselines.triton(
            pool_bytes=num_bytes, blocks=sizes, count=grid.many, few_block=8 * KIB, few_counts=[]
        )
    results = Results("transfer")
    Bench(results, grid, triton).run(Pools(num_bytes))
    results.save(flags.out)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
