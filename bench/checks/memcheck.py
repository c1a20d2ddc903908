"""Runs the tests marked `sanitizer` under compute-sanitizer: `python -m bench.checks.memcheck`.

These tests run jaxkv's own CUDA handlers and Pallas kernels, not the implementation "xla".

Exits with 0 only if tests ran, all passed with exit code 0, and no memory error was found.
"""

import os
import re
import shutil
import sys

from bench.checks.sanitizer import MEMCHECK, memory_errors, run
from bench.harness.main import Flags, benchmark
from bench.harness.records import Results

# Without XLA's own copies: under the tool, those to pinned memory do not end (jax 0.11.2).
TESTS = "sanitizer and not xla"


def outcomes(output: str) -> dict[str, int]:
    """Tests that passed and failed, from pytest's summary: its last line between equals signs.

    A setup or teardown that failed, which pytest calls an error, is a failed test.
    """
    lines = re.findall(r"^=+ (.*) =+$", output, re.MULTILINE)
    counts = {"passed": 0, "failed": 0, "error": 0}
    for count, name in re.findall(r"(\d+) (passed|failed|error)", lines[-1] if lines else ""):
        counts[name] = int(count)
    return {"passed": counts["passed"], "failed": counts["failed"] + counts["error"]}


def record(results: Results, output: str, exit_code: int) -> None:
    """Rows and checks from a run of pytest under compute-sanitizer."""
    counts = outcomes(output)
    for outcome, count in counts.items():
        results.row("tests marked sanitizer", outcome, "tests", count)
    results.check("memory errors in the CUDA handlers", memory_errors(output), "==", 0, "errors")
    results.check("failed tests", counts["failed"], "==", 0, "tests")
    results.check("passed tests", counts["passed"], ">=", 1, "tests")
    results.check("exit code", exit_code, "==", 0, "code")


def measure(results: Results, flags: Flags) -> None:
    if not shutil.which(MEMCHECK[0]):
        sys.exit(f"{MEMCHECK[0]} is not on PATH; it is part of the CUDA toolkit")
    pytest = (sys.executable, "-u", "-m", "pytest", "-v", "--durations=10", "-m", TESTS)
    # One allocation per array: in XLA's pool a neighbouring array would hide an overflow.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    record(results, *run((*MEMCHECK, *pytest), environment))


main = benchmark("memcheck", __doc__, measure, quick=False)

if __name__ == "__main__":
    sys.exit(main())
