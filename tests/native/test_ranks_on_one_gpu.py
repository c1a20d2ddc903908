"""All-reduces of all ranks in one process, each value compared bit for bit: the CUDA kernels with
all ranks on one GPU, and the same checks with the CPU backend."""

import json
import subprocess

import jax
import pytest

from bench.checks import ranks_on_one_gpu
from bench.checks.ranks_on_one_gpu import RANKS, VARIANTS, lines_of, record
from bench.harness.records import Results
from tests.util.native_program import build_for_cpu

ALGORITHMS = {"low_latency", "one_shot", "two_shot", "two_shot in tiles"}


@pytest.mark.cpu_only
def test_checks_with_the_cpu_backend(tmp_path):
    sources = ["cuda/collectives/symmetric_memory.cc", "cuda/collectives/symmetric_memory_cpu.cc"]
    options = ["-Wall", "-Wextra", "-Werror"]
    built = build_for_cpu("all_reduce_exact", tmp_path, *sources, options=options)
    ran = subprocess.run([built], check=False, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = lines_of(ran.stdout)
    checks = {"thresholds", "random orders", "wraps", "rank absent", "rank stops"}
    for ranks in (2, 6):
        of_ranks = [line for line in lines if line["ranks"] == ranks]
        assert {line["check"] for line in of_ranks} == checks
        assert {line["algorithm"] for line in of_ranks} == {*ALGORITHMS, "multimem"}


@pytest.mark.cpu_only
def test_wrong_results_are_found(tmp_path):
    built = build_for_cpu("all_reduce_cases", tmp_path, options=["-Wall", "-Werror"])
    subprocess.run([built], check=True, timeout=60)


@pytest.mark.gpu
def test_checks_with_the_kernels():
    architecture = ranks_on_one_gpu.architecture_of(jax.local_devices()[0])
    try:
        built = ranks_on_one_gpu.build(VARIANTS[0], architecture)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    ran = subprocess.run(
        [built, "--brief"], check=False, capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    found = {(line["ranks"], line["algorithm"]) for line in lines_of(ran.stdout)}
    assert found == {(ranks, algorithm) for ranks in RANKS for algorithm in ALGORITHMS}


def output_of(wrong: int = 0, *, ranks=RANKS, check: str = "thresholds") -> str:
    lines = [
        {"check": name, "ranks": n, "algorithm": "one_shot", "calls": 5,
         "wrong": wrong if (n, name) == (ranks[-1], check) else 0}
        for n in ranks
        for name in ("thresholds", "rank absent")
    ]  # fmt: skip
    return "\n".join(["========= COMPUTE-SANITIZER", *map(json.dumps, lines)])


CLEAN = "\n========= ERROR SUMMARY: 0 errors"


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("outputs", "missed"),
    [
        ({}, None),
        ({"product": output_of(3)}, "wrong values, 8 ranks"),
        (
            {"product": output_of(1, check="rank absent")},
            "ranks that do not name the absent one, or return a sum, 8 ranks",
        ),
        ({"product": output_of(ranks=(2, 4, 6))}, "complete runs of three"),
        ({"memcheck": output_of()}, "memory errors"),
        ({"memcheck": output_of() + CLEAN.replace("0", "2")}, "memory errors"),
    ],
)
def test_record(outputs, missed):
    outputs = {variant.name: output_of() for variant in VARIANTS} | outputs
    if "memcheck" not in outputs or missed != "memory errors":
        outputs["memcheck"] += CLEAN
    results = Results("ranks_on_one_gpu")
    record(results, outputs)
    assert results.exit_code == (missed is not None)
    assert [check.name for check in results.checks if not check.met][:1] == [missed][
        : missed is not None
    ]
    assert len(results.checks) == 2 * len(RANKS) + 2
