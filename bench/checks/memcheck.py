"""Runs the tests marked `sanitizer` under compute-sanitizer: `python -m bench.checks.memcheck`.

These tests run jaxkv's own CUDA handlers and Pallas kernels, not the implementation "xla".

Exits with 0 only if tests ran, all passed with exit code 0, and no memory error was found.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from bench.harness.records import REPOSITORY, Results, arguments

TOOL = "compute-sanitizer"
# Without XLA's own copies: under the tool, those to pinned memory do not end (jax 0.11.2).
TESTS = "sanitizer and not xla"


def memory_errors(output: str) -> int | None:
    """The number in the summaries of compute-sanitizer; None if the tool itself failed: no
    measurement, as opposed to no error."""
    errors = [int(count) for count in re.findall(r"ERROR SUMMARY: (\d+) error", output)]
    return sum(errors) if errors else None


def outcomes(output: str) -> dict[str, int]:
    """Tests that passed and failed, from pytest's summary: its last line between equals signs.

    A setup or teardown that failed, which pytest calls an error, is a failed test.
    """
    lines = re.findall(r"^=+ (.*) =+$", output, re.MULTILINE)
    counts = {"passed": 0, "failed": 0, "error": 0}
    for count, name in re.findall(r"(\d+) (passed|failed|error)", lines[-1] if lines else ""):
        counts[name] = int(count)
    return {"passed": counts["passed"], "failed": counts["failed"] + counts["error"]}


def record(results: Results, output: str, exit_code: int) -> bool:
    """Rows and checks from a run of pytest under compute-sanitizer; whether all are met."""
    counts = outcomes(output)
    for outcome, count in counts.items():
        results.row("tests marked sanitizer", outcome, "tests", count)
    checks = [
        results.check(
            "memory errors in the CUDA handlers", memory_errors(output), "==", 0, "errors"
        ),
        results.check("failed tests", counts["failed"], "==", 0, "tests"),
        results.check("passed tests", counts["passed"], ">=", 1, "tests"),
        results.check("exit code", exit_code, "==", 0, "code"),
    ]
    return all(check.met for check in checks)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(__doc__, argv)
    if not shutil.which(TOOL):
        print(f"{TOOL} is not on PATH; it is part of the CUDA toolkit", file=sys.stderr)
        return 2
    command = [TOOL, "--tool", "memcheck", "--report-api-errors", "no"]
    command += [sys.executable, "-u", "-m", "pytest", "-v", "--durations=10", "-m", TESTS]
    # One allocation per array: in XLA's pool a neighbouring array would hide an overflow.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    output = ""
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as run:  # fmt: skip
        assert run.stdout
        for line in run.stdout:
            print(line, end="", flush=True)
            output += line
    results = Results("memcheck")
    met = record(results, output, run.returncode)
    results.save(options.out)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
