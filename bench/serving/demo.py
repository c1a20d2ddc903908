"""Runs the serving example on this device and records its results.

Usage: `python -m bench.serving.demo`.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.harness.records import REPOSITORY, Results, arguments

RUN = "offload"  # the other runs are its baselines
LATER_TURNS = "later turns"
UNEQUAL = "unequal tokens"
# Column of the example's tables -> metric and unit.
COMPARED = {
    "TTFT ms": ("time to first token", "ms"),
    "tokens/s": ("output throughput", "tokens/s"),
    "recomputed": ("recomputed prompt tokens", "tokens"),
}
MOVED = {"stored MiB": "stored to host memory", "loaded MiB": "loaded from host memory"}


def serve(flags: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Runs the example from its command line.

    Returns:
      Its --json output, and its exit code.

    Raises:
      subprocess.CalledProcessError: it ended without output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "demo.json")
        command = [sys.executable, "-m", "examples.serving", "--json", str(path), *flags]
        code = subprocess.run(command, cwd=REPOSITORY, check=False).returncode
        if not path.exists():
            raise subprocess.CalledProcessError(code, command)
        return json.loads(path.read_text()), code


def record(results: Results, summary: dict[str, Any]) -> None:
    """Rows per round of turns; checks: equality of all tokens with and without offload.

    Raises:
      ValueError: the runs have different numbers of answers.
    """
    rounds = summary["rounds"]
    others = [name for name in rounds if name != RUN]
    cases = {
        f"turn {row['turn']}": {name: rounds[name][index] for name in rounds}
        for index, row in enumerate(rounds[RUN])
    }
    cases[LATER_TURNS] = {row["run"]: row for row in summary["compared"]}
    for case, rows in cases.items():
        for column, (metric, unit) in COMPARED.items():
            baselines = {name: rows[name][column] for name in others}
            results.row(case, metric, unit, rows[RUN][column], baselines=baselines)
        for column, metric in MOVED.items():
            results.row(case, metric, "MiB", rows[RUN][column])
    answers = {
        name: [turn["tokens"] for turn in summary["turns"] if turn["run"] == name]
        for name in rounds
    }
    for name in others:
        pairs = zip(answers[RUN], answers[name], strict=True)
        unequal = sum(_unequal_tokens(*pair) for pair in pairs)
        results.check(f"tokens equal to run '{name}'", unequal, "==", 0, UNEQUAL)
    # Equal tokens prove nothing unless pages were reloaded.
    loaded = sum(row["on host"] for row in rounds[RUN])
    results.check("prompt tokens loaded from host memory", loaded, ">=", 1, "tokens")


def _unequal_tokens(tokens: Sequence[int], others: Sequence[int]) -> int:
    differing = sum(a != b for a, b in zip(tokens, others, strict=False))
    return differing + abs(len(tokens) - len(others))


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    short = ["--max-new-tokens", "8"] if flags.quick else []
    summary, code = serve(["--dtype", "float32", *short])
    results = Results("demo")
    record(results, summary)
    results.save(flags.out)
    return code or results.exit_code


if __name__ == "__main__":
    sys.exit(main())
