"""All-reduces of 2, 4, 6 and 8 ranks on one GPU: `python -m bench.checks.ranks_on_one_gpu`.

Each rank is a stream; the kernels are those of the product. `tests/native/all_reduce_checks.h`
has the checks: both sides of every threshold, random orders and delays, counters that wrap, replays
of CUDA graphs, and absent ranks. Every value is compared bit for bit. They run with the product's
kernels, with kernels that also delay threads within calls, and, fewer of them, under
compute-sanitizer. Exits with 0 only if everything ran and was right.

`--compile ARCHITECTURE` (90a for an H100 or H200) only compiles, for a machine without nvcc: copy
`build/ranks_on_one_gpu` there.
"""

import collections
import json
import shutil
import sys
from typing import Any, NamedTuple

import jax

from bench.checks.sanitizer import MEMCHECK, memory_errors, run
from bench.harness.main import Flags, benchmark
from bench.harness.records import Results
from tests.util.native_program import build_for_gpu

SOURCES = (
    "cuda/collectives/symmetric_memory.cc",
    "cuda/collectives/symmetric_memory.cu",
    "cuda/collectives/multicast.cu",
    "cuda/common/device.cu",
)
RANKS = (2, 4, 6, 8)
ABSENT = ("rank absent", "rank stops")  # checks without one of the ranks
LIMIT_S = 900  # of a run; the program itself ends after ten minutes
COMPILE = {"metavar": "ARCHITECTURE", "help": "only compile"}


class Variant(NamedTuple):
    """One run of the program."""

    name: str
    options: tuple[str, ...] = ()  # of nvcc
    before: tuple[str, ...] = ()  # in the command, before the program
    arguments: tuple[str, ...] = ()


VARIANTS = (
    Variant("product"),
    Variant("threads delayed", ("-DJAXKV_TEST_HOOKS",)),
    Variant("memcheck", (), MEMCHECK, ("--brief", "--timeout-s", "20")),
)


def architecture_of(device: jax.Device) -> str:
    """The architecture in nvcc's notation, with the features of Hopper: multicast needs them."""
    number = device.compute_capability.replace(".", "")
    return f"{number}a" if number == "90" else number


def build(variant: Variant, architecture: str) -> str:
    return build_for_gpu(
        "ranks_on_one_gpu", *SOURCES, architecture=architecture, options=variant.options
    )


def lines_of(output: str) -> list[dict[str, Any]]:
    """The program's lines of JSON, among those of compute-sanitizer."""
    return [json.loads(line) for line in output.splitlines() if line.startswith('{"check"')]


def record(results: Results, outputs: dict[str, str]) -> None:
    """Rows and checks from the output of each variant that ran."""
    wrong: collections.Counter[tuple[int, bool]] = collections.Counter()
    calls: collections.Counter[tuple[int, bool]] = collections.Counter()
    for name, output in outputs.items():
        for line in lines_of(output):
            case = f"{line['ranks']} ranks, {line['algorithm']}, {line['check']}, {name}"
            results.row(case, "calls", "calls", line["calls"])
            results.row(case, "wrong", "values or ranks", line["wrong"])
            key = line["ranks"], line["check"] in ABSENT
            calls[key] += line["calls"]
            wrong[key] += line["wrong"]
    for ranks in RANKS:
        for absent, what in (
            (False, "wrong values"),
            (True, "ranks that do not name the absent one, or return a sum"),
        ):
            got = wrong[ranks, absent] if calls[ranks, absent] else None
            results.check(f"{what}, {ranks} ranks", got, "==", 0, "count")
    complete = sum({line["ranks"] for line in lines_of(o)} == {*RANKS} for o in outputs.values())
    results.check("complete runs of three", complete, "==", len(VARIANTS), "runs")
    errors = memory_errors(outputs.get("memcheck", ""))
    results.check("memory errors", errors, "==", 0, "errors")


def measure(results: Results, flags: Flags) -> None:
    if flags.compile:
        for variant in VARIANTS:
            print(build(variant, flags.compile))
        sys.exit()
    device = jax.local_devices()[0]
    if device.platform != "gpu":
        sys.exit(f"needs a GPU, JAX runs on {device.platform}")
    outputs = {}
    for variant in VARIANTS:
        if variant.before and not shutil.which(variant.before[0]):
            print(f"{variant.before[0]} is not on PATH: {variant.name} is not run")
            continue
        print(f"== {variant.name}", flush=True)
        program = build(variant, architecture_of(device))
        command = (*variant.before, program, *variant.arguments)
        outputs[variant.name], _ = run(command, limit_s=LIMIT_S)
    record(results, outputs)


main = benchmark("ranks_on_one_gpu", __doc__, measure, options={"--compile": COMPILE}, quick=False)

if __name__ == "__main__":
    sys.exit(main())
