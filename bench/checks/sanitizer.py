"""Runs a program, also under compute-sanitizer, and returns its output."""

import re
import subprocess
import threading
from collections.abc import Mapping, Sequence

from bench.harness.records import REPOSITORY

MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no")


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, limit_s: float = 3600
) -> tuple[str, int]:
    """Output and exit code of a program, which is killed after `limit_s`; prints the output."""
    lines = []
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    ) as process:  # fmt: skip
        timer = threading.Timer(limit_s, process.kill)
        timer.start()
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        timer.cancel()
    return "".join(lines), process.returncode


def memory_errors(output: str) -> int | None:
    """The number in the summaries of compute-sanitizer; None if the tool itself failed: no
    measurement, as opposed to no error."""
    errors = [int(count) for count in re.findall(r"ERROR SUMMARY: (\d+) error", output)]
    return sum(errors) if errors else None
