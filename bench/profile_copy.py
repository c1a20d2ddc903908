"""Bottleneck of copies by SMs: `python -m bench.profile_copy`, with Nsight Compute.

Scattered blocks, copied by the CUDA kernel; one launch is profiled in a separate process. If warps
are mostly stalled on memory, hardly any issue slot is used and the link carries little more than
the payload, then the rate is that of the link for requests of SMs.
"""

import csv
import shutil
import subprocess
import sys
from typing import NamedTuple

from bench.harness import peak_bandwidth
from bench.harness.blocks import DEVICE_IDS, DIRECTIONS, KIB, Blocks, Method, size_text
from bench.harness.main import Flags, benchmark
from bench.harness.records import REPOSITORY, Results
from jaxkv._src.autotune.pools import Pools, pool_bytes

TOOL = "ncu"
COUNT = 10_000
PEAK_BYTES = 1 << 30
SIZES = ((KIB, 12), (2 * KIB, 12), (8 * KIB, 2))  # bytes of a block, SMs
TIME = "gpu__time_duration.sum"
# Nsight Compute's name of a metric, then the label, its unit, and the conversion factor.
METRICS = {
    TIME: ("kernel time", "us", 1e-3),
    "pcie__read_bytes.sum": ("bytes read (link)", "MiB", 2**-20),
    "pcie__write_bytes.sum": ("bytes written (link)", "MiB", 2**-20),
    "smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct": (
        "warps stalled on memory", "%", 1.0,
    ),
    "smsp__issue_active.avg.pct_of_peak_sustained_active": ("issue slot utilization", "%", 1.0),
}  # fmt: skip


class Case(NamedTuple):
    """One copy of COUNT blocks."""

    direction: str
    block_bytes: int
    num_sms: int

    def __str__(self) -> str:
        size = size_text(self.block_bytes)
        return f"{self.direction}, {size} x {COUNT}, kernel, {self.num_sms} SMs, profiled"


def copy_once(case: Case) -> None:
    """The profiled program."""
    method = Method("kernel", DEVICE_IDS, case.num_sms)
    made = Blocks(Pools(pool_bytes(1 << 28)), case.block_bytes)
    made.program(method, case.direction, COUNT, 1, stamped=False)


def parse(output: str) -> dict[str, float]:
    """The values of the metrics that Nsight Compute printed as CSV for one kernel.

    Raises:
      ValueError: one of METRICS is missing.
    """
    _, header, table = output.partition('"ID"')
    values = {}
    for row in csv.DictReader((header + table).splitlines()):
        if row["Metric Name"] in METRICS:
            values[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    if missing := METRICS.keys() - values.keys():
        raise ValueError(f"{TOOL} printed no {', '.join(sorted(missing))}:\n{output[-2000:]}")
    return values


def profile(case: Case) -> dict[str, float]:
    command = [TOOL, "--csv", "--print-units", "base", "--clock-control", "none"]
    command += ["--metrics", ",".join(METRICS), "-k", "regex:copy_blocks", "-c", "1"]
    program = f"from bench.profile_copy import Case, copy_once; copy_once({case!r})"
    command += [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return parse(run.stdout + run.stderr)


def record(results: Results, case: Case, values: dict[str, float]) -> None:
    name, link = peak_bandwidth.contiguous_copy(case.direction, PEAK_BYTES)
    rate = COUNT * case.block_bytes / values[TIME]  # bytes per nanosecond
    results.row(str(case), "kernel bandwidth", "GB/s", rate, (name, link))
    for metric, (label, unit, scale) in METRICS.items():
        results.row(str(case), label, unit, values[metric] * scale)


def measure(results: Results, flags: Flags) -> None:
    if not shutil.which(TOOL):
        sys.exit(f"{TOOL} is not on PATH; it is part of the CUDA toolkit")
    for direction in DIRECTIONS:
        for block_bytes, num_sms in SIZES[:1] if flags.quick else SIZES:
            case = Case(direction, block_bytes, num_sms)
            record(results, case, profile(case))


main = benchmark("profile", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
