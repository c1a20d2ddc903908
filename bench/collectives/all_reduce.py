"""`jaxkv.all_reduce`, XLA's psum and PyTorch's all-reduces.

Usage: `python -m bench.collectives.all_reduce`.

bfloat16 messages of 1 KiB to 64 MiB per device, on 2, 4 and 8 devices where available, in one
process and with one process per device. jaxkv: the choice of the tuning table, and each algorithm
by name. `psum`: XLA's default (the kernel that ran is recorded), NCCL (XLA's kernels disabled), and
NCCL with symmetric buffers (both at some sizes). PyTorch: NCCL, also on its symmetric memory, and
the two all-reduces of symmetric memory, in CUDA graphs. All results are verified before they are
timed. Each setting runs as a separate program; failures and timeouts are recorded, and the others
continue.

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

A target covers a range of sizes; its figure is the maximum ratio. The jaxkv figure is that of the
tuning table's choice; the baseline is the best of PyTorch's methods and of psum's at each size,
where measured. jaxkv times include the copy into symmetric memory, those on symmetric memory do
not.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from bench.collectives.all_reduce_rank import CHOSEN, PSUM
from bench.harness import processes, timing
from bench.harness.blocks import size_text
from bench.harness.main import benchmark_of_devices, on_gpu
from bench.harness.records import Results

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


# Seconds by metric, by (setting, method) and bytes; and the names of the kernels.
Times = dict[tuple[str, str], dict[int, dict[str, float]]]
Names = dict[tuple[str, str, int], str]


class Bench:
    """All settings for one number of devices."""

    def __init__(self, results: Results, platform: str, world: int, *, quick: bool):
        self.results, self.platform, self.world = results, platform, world
        self.sizes = [SIZES[0], SIZES[2]] if platform == "cpu" else SIZES[::3] if quick else SIZES
        self.times: Times = {}
        self.names: Names = {}

    def measure(self) -> None:
        self._run(ONE_PROCESS, [self._request(None)], MAIN_TIMEOUT_S)
        self._run_each(
            PROCESS_PER_DEVICE, "bench.collectives.all_reduce_rank", self._request([CHOSEN, PSUM])
        )
        if self.platform == "gpu":
            self._measure_peers()
        self._record()
        if self.platform == "gpu":
            self._record_targets()

    def _measure_peers(self) -> None:
        """PyTorch, and psum with other kernels."""
        for backend in ("CUDA", "NCCL"):
            request = {"sizes": self.sizes, "world": self.world, "backend": backend}
            self._run_each(TORCH, "bench.collectives.torch_all_reduce", request)
        for name, flags in xla_flags().items():
            xla = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
            sizes = [size for size in self.sizes if size in MAIN_SIZES]
            request = {**self._request([PSUM]), "sizes": sizes}
            self._run(ONE_PROCESS, [request], BASELINE_TIMEOUT_S, xla, {PSUM: name})

    def _request(self, methods: list[str] | None) -> dict[str, Any]:
        return {
            "platform": self.platform, "world": self.world, "methods": methods, "sizes": self.sizes,
            "quick": self.platform == "cpu",
        }  # fmt: skip

    def _run_each(self, setting: str, module: str, request: dict[str, Any]) -> None:
        """One process per device."""
        port = processes.free_port()
        requests = [{**request, "rank": rank, "port": port} for rank in range(self.world)]
        self._run(setting, requests, BASELINE_TIMEOUT_S, module=module)

    def _run(
        self,
        setting: str,
        requests: list[dict[str, Any]],
        timeout_s: float,
        environment: dict[str, str] | None = None,
        renamed: dict[str, str] | None = None,
        module: str = "bench.collectives.all_reduce_rank",
    ) -> None:
        ran = processes.run(module, requests, timeout_s=timeout_s, environment=environment)
        what = ", ".join([f"{self.world} devices", setting, *(renamed or {}).values()])
        if ran.failure:
            self.results.not_measured(f"{what}: {ran.failure}")
        renamed = renamed or {}
        self._print_reasons(what, ran.answers, renamed)
        for method, num_bytes, answers in together(ran.answers):
            if times := over_ranks(answers):
                name, first = renamed.get(method, method), answers[0]
                self.times.setdefault((setting, name), {})[num_bytes] = times
                ran_here = [first.get("algorithm", method)]
                if method == PSUM and "names" in first:
                    ran_here = [*map(short_name, first["names"])]
                self.names[setting, name, num_bytes] = " + ".join(ran_here)

    def _print_reasons(
        self, what: str, ranks: Sequence[Sequence[dict[str, Any]]], renamed: dict[str, str]
    ) -> None:
        """Records why a method was not measured; equal reasons of several ranks once.

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

    def _record(self) -> None:
        for (setting, method), by_size in self.times.items():
            for num_bytes, times in by_size.items():
                kernel = self.names[setting, method, num_bytes]  # or the chosen algorithm
                size = size_text(num_bytes)
                case = f"{self.world} devices, {setting}, {size}: {method} ({kernel})"
                for metric, seconds in times.items():
                    reduces = metric in (GPU_TIME, CHAINED_CALL) and method != COPIES
                    peak = self._link_time(num_bytes) if reduces else None
                    baselines = {} if setting == TORCH else self._baselines(metric, num_bytes)
                    self.results.row(case, metric, "us", seconds * 1e6, peak, baselines)

    def _link_time(self, num_bytes: int) -> tuple[str, float] | None:
        """Microseconds that the link needs for the data a device sends and receives."""
        if link := LINK.get(jax.local_devices()[0].device_kind):
            share = 2 * (self.world - 1) / self.world
            return link[0], share * num_bytes / link[1] * 1e6
        return None

    def _baselines(self, metric: str, num_bytes: int) -> dict[str, float]:
        """PyTorch's times in microseconds."""
        return {
            method: by_size[num_bytes][metric] * 1e6
            for (setting, method), by_size in self.times.items()
            if setting == TORCH and method != COPIES and metric in by_size.get(num_bytes, {})
        }

    def _time(self, setting: str, method: str, metric: str, num_bytes: int) -> float | None:
        """Microseconds."""
        seconds = self.times.get((setting, method), {}).get(num_bytes, {}).get(metric)
        return None if seconds is None else seconds * 1e6

    def ratio(self, setting: str, metric: str, num_bytes: int) -> float | None:
        """jaxkv to the best peer: for pairs psum in the same setting."""
        time = self._time(setting, CHOSEN, metric, num_bytes)
        peers = self._peers(metric, num_bytes)
        if metric == CHAINED_PAIR:
            peers = [self._time(setting, PSUM, metric, num_bytes)]
        known = [peer for peer in peers if peer]
        return time / min(known) if time and known else None

    def _peers(self, metric: str, num_bytes: int) -> list[float | None]:
        """Microseconds of PyTorch's methods and, if these were measured, of psum's."""
        of_torch = [*self._baselines(metric, num_bytes).values()]
        names = (PSUM, XLA_KERNELS_OFF, SYMMETRIC)
        of_psum = [self._time(ONE_PROCESS, name, metric, num_bytes) for name in names]
        return [*of_torch, *of_psum] if of_torch else []

    def bound(self, metric: str, num_bytes: int) -> float | None:
        """`ratio` if all links ran at the rate of copy engines."""
        copying = self._time(TORCH, COPIES, CHAINED_CALL, num_bytes)
        known = [peer for peer in self._peers(metric, num_bytes) if peer]
        if not copying or not known:
            return None
        return 2 * (self.world - 1) / self.world * copying / min(known)

    def _max_ratio(self, ratio: Callable[[int], float | None], band: Band) -> float | None:
        sizes = [size for size in self.sizes if band.min_bytes <= size <= band.max_bytes]
        known = [found for found in map(ratio, sizes) if found is not None]
        return max(known) if sizes and len(known) == len(sizes) else None

    def _record_targets(self) -> None:
        for setting in (ONE_PROCESS, PROCESS_PER_DEVICE):
            where = f"{self.world} devices, {setting}"
            for metric in (GPU_TIME, CHAINED_CALL):
                for band in BANDS:
                    highest = self._max_ratio(partial(self.ratio, setting, metric), band)
                    bound = self._max_ratio(partial(self.bound, metric), band)
                    self.results.target(
                        f"{where}, {band}: {metric}", highest, "<=", band.wanted,
                        "x best peer", bound,
                    )  # fmt: skip
            highest = self._max_ratio(partial(self.ratio, setting, CHAINED_PAIR), PAIR_BAND)
            name = f"{where}, {PAIR_BAND}: {CHAINED_PAIR}"
            self.results.target(name, highest, "<=", PAIR_BAND.wanted, "x psum")


def xla_flags() -> dict[str, str]:
    """XLA flags for compiling psum, by name; flags unknown to an XLA version abort the process."""
    off = "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"
    if jax.__version_info__ >= (0, 11):  # the other name is a legacy alias there
        off += " --xla_gpu_experimental_use_collective_kernels=-ALL_REDUCE"
    return {
        XLA_KERNELS_OFF: off,
        SYMMETRIC: f"{off} --xla_gpu_experimental_enable_nccl_symmetric_buffers=true",
    }


def together(
    ranks: Sequence[Sequence[dict[str, Any]]],
) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """(method, bytes, answers of the ranks), where all ranks answered."""
    merged: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
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


def over_ranks(answers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds by metric: wall clock of the slowest rank; kernels as in the module docstring."""
    found: dict[str, float] = {}
    if all(answer.get("kernels") for answer in answers):
        listed = [one for answer in answers for one in answer["kernels"]]
        shortest = [min(call) for call in zip(*listed, strict=False)]
        found[GPU_TIME] = timing.median(shortest)
    for metric, key in ((CHAINED_CALL, "call"), (CHAINED_PAIR, "pair")):
        if all(key in answer for answer in answers):
            found[metric] = max(timing.median(answer[key]) for answer in answers)
    return found


def short_name(kernel: str) -> str:
    """A kernel name without template arguments, namespaces and parameters."""
    bare = kernel.replace("(anonymous namespace)", "").partition("(")[0].partition("<")[0]
    return bare.split("::")[-1].removeprefix("void ").strip()


def measure(results: Results, world: int, flags: argparse.Namespace) -> None:
    Bench(results, jax.default_backend(), world, quick=flags.quick).measure()


def device_count(flags: argparse.Namespace) -> int:
    """On a CPU the processes have as many devices as they request."""
    return len(jax.devices()) if on_gpu() else 2 if flags.quick else 4


main = benchmark_of_devices("all_reduce", __doc__, measure, device_count)

if __name__ == "__main__":
    sys.exit(main())
