"""`jaxkv.all_reduce`, XLA's psum and PyTorch's all-reduces.

Usage: `python -m bench.collectives.all_reduce`.

bfloat16 messages of 1 KiB to 64 MiB per device, on 2, 4 and 8 devices where available, in one
process and with one process per device. jaxkv: the choice of the tuning table, and each algorithm
by name. The baselines are in bench/results/BASELINES.md; some run at MAIN_SIZES only. All results
are verified before they are timed. Each setting runs as a separate program; failures and timeouts
are recorded, and the others continue.

Three metrics, measured identically for all methods:

- "GPU time": kernel duration, from a profile of consecutive calls (with products between them for
  an algorithm by name). A duration starts when the rank enters the call and includes its wait for
  the last rank, so the shortest over the ranks counts for each call, that of the last rank; then
  the median over calls. Gaps between kernels are excluded.
- "time per call (chained)": wall clock time of consecutive calls, gaps included: for jaxkv and psum
  in one jitted chain of all-reduces only, for PyTorch in a replayed graph, timed by events. This
  can only favour PyTorch, whose time includes no dispatch.
- "time per pair (chained)": wall clock time of an all-reduce and a product in a jitted chain, as in
  a step.

A jitted chain is donated the output of the previous one: addresses stay the same, and XLA replays
its graphs without updating them, as PyTorch does.

A target covers a range of sizes; its figure is the maximum ratio. jaxkv times include the copy into
symmetric memory, those on symmetric memory do not.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from bench.collectives.all_reduce_rank import CHOSEN, PSUM
from bench.harness import processes, timing
from bench.harness.blocks import size_text
from bench.harness.main import Flags, benchmark_of_devices, on_gpu
from bench.harness.records import Results
from bench.harness.timing import Figure

Answer = dict[str, Any]  # a line of a program
RANK = "bench.collectives.all_reduce_rank"
KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB << i for i in (0, 2, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)]
MAIN_SIZES = (KIB, 32 * KIB, 256 * KIB, MIB, 4 * MIB, 64 * MIB)  # of psum with other kernels
GPU_TIME = "GPU time"
CHAINED_CALL, CHAINED_PAIR = "time per call (chained)", "time per pair (chained)"
ONE_PROCESS, PROCESS_PER_DEVICE, TORCH = "one process", "one process per device", "PyTorch"
COPIES = "copy to the next device"  # peak of the links, not a baseline
XLA_KERNELS_OFF, SYMMETRIC = "psum, XLA kernels disabled", "psum, NCCL symmetric buffers"
LINK = {"NVIDIA H200": ("NVLink4", 478e9)}  # bytes per second and direction
MAIN_TIMEOUT_S, BASELINE_TIMEOUT_S = 150.0, 75.0


class Band(NamedTuple):
    """Range of message sizes in bytes, and the target ratio to the best baseline."""

    min_bytes: int
    max_bytes: int
    wanted: float

    def __str__(self) -> str:
        return f"{size_text(self.min_bytes)} to {size_text(self.max_bytes)}"


BANDS = (
    Band(KIB, 32 * KIB, 0.55),
    Band(64 * KIB, 256 * KIB, 0.70),
    Band(512 * KIB, 4 * MIB, 0.85),
    Band(16 * MIB, 64 * MIB, 0.85),
)
PAIR_BAND = Band(KIB, 256 * KIB, 0.5)


class Run(NamedTuple):
    """A program that measures methods.

    Attributes:
      setting: one of ONE_PROCESS, PROCESS_PER_DEVICE and TORCH.
      module, request: the program and its argument.
      each_device: a process per device.
      environment: additional variables.
      psum: name of its psum.
    """

    setting: str
    module: str
    request: dict[str, Any]
    each_device: bool = False
    timeout_s: float = BASELINE_TIMEOUT_S
    environment: Mapping[str, str] = MappingProxyType({})
    psum: str = PSUM


class Key(NamedTuple):
    setting: str
    method: str
    num_bytes: int


class Bench:
    """All settings for one number of devices.

    Attributes:
      times: microseconds by metric.
      ran: the chosen algorithm, or the observed kernels.
    """

    def __init__(self, results: Results, platform: str, world: int, *, quick: bool):
        self.results, self.platform, self.world = results, platform, world
        self.sizes = [SIZES[0], SIZES[2]] if platform == "cpu" else SIZES[::3] if quick else SIZES
        self.times: dict[Key, dict[str, Figure]] = {}
        self.ran: dict[Key, str] = {}

    def measure(self) -> None:
        for run in self.runs():
            self.run(run)
        self.record()
        if self.platform == "gpu":
            self.record_targets()

    def runs(self) -> Iterator[Run]:
        request = {
            "platform": self.platform, "world": self.world, "sizes": self.sizes,
            "quick": self.platform == "cpu",
        }  # fmt: skip
        yield Run(ONE_PROCESS, RANK, {**request, "methods": None}, timeout_s=MAIN_TIMEOUT_S)
        yield Run(PROCESS_PER_DEVICE, RANK, {**request, "methods": [CHOSEN, PSUM]}, True)
        if self.platform != "gpu":
            return
        for backend in ("CUDA", "NCCL"):
            of_torch = {"sizes": self.sizes, "world": self.world, "backend": backend}
            yield Run(TORCH, "bench.collectives.torch_all_reduce", of_torch, True)
        sizes = [size for size in self.sizes if size in MAIN_SIZES]
        request = {**request, "methods": [PSUM], "sizes": sizes}
        for name, flags in xla_flags().items():
            variables = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
            yield Run(ONE_PROCESS, RANK, request, environment=variables, psum=name)

    def run(self, run: Run) -> None:
        requests = [run.request]
        if run.each_device:
            port = processes.free_port()
            requests = [{**run.request, "rank": rank, "port": port} for rank in range(self.world)]
        ended = processes.run(
            run.module, requests, timeout_s=run.timeout_s, environment=run.environment
        )
        renamed = {} if run.psum == PSUM else {PSUM: run.psum}
        what = ", ".join([f"{self.world} devices", run.setting, *renamed.values()])
        if ended.failure:
            self.results.not_measured(f"{what}: {ended.failure}")
        self.record_reasons(what, ended.answers, renamed)
        for method, num_bytes, answers in together(ended.answers):
            if times := over_ranks(answers):
                key = Key(run.setting, renamed.get(method, method), num_bytes)
                self.times[key] = times
                names = [answers[0].get("algorithm", method)]
                if method == PSUM and "names" in answers[0]:
                    names = [*map(short_name, answers[0]["names"])]
                self.ran[key] = " + ".join(names)

    def record_reasons(
        self, what: str, ranks: Sequence[Sequence[Answer]], renamed: dict[str, str]
    ) -> None:
        """Why methods were not measured; equal reasons of several ranks once.

        A size that a method does not support is only printed.
        """
        reasons: dict[str, bool] = {}
        for answer in (answer for answers in ranks for answer in answers):
            size = size_text(answer["bytes"]) if "bytes" in answer else "all sizes"
            for reason in {"unsupported", "failed", "unprofiled"} & {*answer}:
                name = renamed.get(answer["method"], answer["method"])
                text = f"{what}, {size}: {name}: {reason}: {answer[reason]}"
                reasons[text] = reason != "unsupported" or "bytes" not in answer
        for text, recorded in reasons.items():
            if recorded:
                self.results.not_measured(text)
            else:
                print(f"not measured: {text}", flush=True)

    def record(self) -> None:
        for key, times in self.times.items():
            size = size_text(key.num_bytes)
            case = f"{self.world} devices, {key.setting}, {size}: {key.method} ({self.ran[key]})"
            for metric, microseconds in times.items():
                reduces = metric in (GPU_TIME, CHAINED_CALL) and key.method != COPIES
                peak = self.link_time(key.num_bytes) if reduces else None
                others = {} if key.setting == TORCH else self.of_torch(metric, key.num_bytes)
                self.results.row(case, metric, "us", microseconds, peak, others)

    def link_time(self, num_bytes: int) -> tuple[str, float] | None:
        """Microseconds that the link needs for the data a device sends and receives."""
        if link := LINK.get(jax.local_devices()[0].device_kind):
            return link[0], self.share * num_bytes / link[1] * 1e6
        return None

    @property
    def share(self) -> float:
        """Part of the message that each device sends and receives."""
        return 2 * (self.world - 1) / self.world

    def time(self, setting: str, method: str, metric: str, num_bytes: int) -> Figure | None:
        return self.times.get(Key(setting, method, num_bytes), {}).get(metric)

    def of_torch(self, metric: str, num_bytes: int) -> dict[str, Figure]:
        return {
            key.method: times[metric]
            for key, times in self.times.items()
            if (key.setting, key.num_bytes) == (TORCH, num_bytes)
            and key.method != COPIES
            and metric in times
        }

    def best_peer(self, setting: str, metric: str, num_bytes: int) -> Figure | None:
        """The least time of PyTorch and psum where measured; for pairs of psum.

        For pairs psum must be measured in the same setting, too.
        """
        names = (PSUM, XLA_KERNELS_OFF, SYMMETRIC)
        found = [self.time(ONE_PROCESS, name, metric, num_bytes) for name in names]
        if metric == CHAINED_PAIR:
            needed = [self.time(setting, PSUM, metric, num_bytes)]
        else:
            needed = [*self.of_torch(metric, num_bytes).values()]
        return min(time for time in found + needed if time) if any(needed) else None

    def ratio(self, setting: str, metric: str, num_bytes: int) -> Figure | None:
        """Time of jaxkv relative to the best peer."""
        own = self.time(setting, CHOSEN, metric, num_bytes)
        peer = self.best_peer(setting, metric, num_bytes)
        return own / peer if own and peer else None

    def bound(self, setting: str, metric: str, num_bytes: int) -> Figure | None:
        """`ratio` if all links ran at the rate of copy engines."""
        copying = self.time(TORCH, COPIES, CHAINED_CALL, num_bytes)
        peer = self.best_peer(setting, metric, num_bytes)
        return self.share * copying / peer if copying and peer else None

    def highest(self, of: Callable[[int], Figure | None], band: Band) -> Figure | None:
        """The maximum of `of(bytes)` over a band, if all sizes are measured."""
        sizes = [size for size in self.sizes if band.min_bytes <= size <= band.max_bytes]
        known = [found for found in map(of, sizes) if found is not None]
        return max(known) if known and len(known) == len(sizes) else None

    def record_targets(self) -> None:
        bands = [(metric, band) for metric in (GPU_TIME, CHAINED_CALL) for band in BANDS]
        for setting in (ONE_PROCESS, PROCESS_PER_DEVICE):
            for metric, band in (*bands, (CHAINED_PAIR, PAIR_BAND)):
                pairs = metric == CHAINED_PAIR
                ratio = self.highest(partial(self.ratio, setting, metric), band)
                bound = None if pairs else self.highest(partial(self.bound, setting, metric), band)
                name = f"{self.world} devices, {setting}, {band}: {metric}"
                unit = "x best psum" if pairs else "x best peer"
                self.results.target(name, ratio, "<=", band.wanted, unit, bound)


def xla_flags() -> dict[str, str]:
    """XLA flags for compiling psum, by name; flags unknown to an XLA version abort the process."""
    off = "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"
    if jax.__version_info__ >= (0, 11):  # the other name is a legacy alias there
        off += " --xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE"
    return {
        XLA_KERNELS_OFF: off,
        SYMMETRIC: f"{off} --xla_gpu_experimental_enable_nccl_symmetric_buffers=true",
    }


def together(ranks: Sequence[Sequence[Answer]]) -> list[tuple[str, int, list[Answer]]]:
    """(method, bytes, answers of the ranks), where all ranks answered."""
    merged: dict[tuple[str, int], dict[int, Answer]] = {}
    for rank, answers in enumerate(ranks):
        for answer in answers:
            if "bytes" in answer:
                key = answer["method"], answer["bytes"]
                merged.setdefault(key, {}).setdefault(rank, {}).update(answer)
    return [
        (method, num_bytes, [by_rank[rank] for rank in sorted(by_rank)])
        for (method, num_bytes), by_rank in merged.items()
        if len(by_rank) == len(ranks)
    ]


def over_ranks(answers: Sequence[Answer]) -> dict[str, Figure]:
    """Microseconds by metric: wall clock of the slowest rank; kernels as in the docstring above."""
    found: dict[str, Figure] = {}
    if all(answer.get("kernels") for answer in answers):
        listed = [one for answer in answers for one in answer["kernels"]]
        found[GPU_TIME] = timing.median([min(call) for call in zip(*listed, strict=False)])
    for metric, key in ((CHAINED_CALL, "call"), (CHAINED_PAIR, "pair")):
        if all(key in answer for answer in answers):
            found[metric] = max(timing.median(answer[key]) for answer in answers)
    return {metric: seconds * 1e6 for metric, seconds in found.items()}


def short_name(kernel: str) -> str:
    """A kernel name without template arguments, namespaces and parameters."""
    bare = kernel.replace("(anonymous namespace)", "").partition("(")[0].partition("<")[0]
    return bare.split("::")[-1].removeprefix("void ").strip()


def measure(results: Results, world: int, flags: Flags) -> None:
    Bench(results, jax.default_backend(), world, quick=flags.quick).measure()


def device_count(flags: Flags) -> int:
    """On a CPU the processes have as many devices as they request."""
    return len(jax.devices()) if on_gpu() else 2 if flags.quick else 4


main = benchmark_of_devices("all_reduce", __doc__, measure, device_count)

if __name__ == "__main__":
    sys.exit(main())
