"""Runs the tests on this machine's GPU and records what passed: `python -m bench.gpu_test`.

Ordinary tests run too, since most of them serve every platform, with fewer random cases than on a
CPU. `--multigpu` runs the tests that need several GPUs instead. Exits with pytest's code.
"""

import argparse
import collections
import os
import sys
from collections.abc import Sequence

import pytest

from bench.results import REPOSITORY, Results
from jaxkv import env

NOT_ON_A_GPU = 2  # exit code; pytest's own for "interrupted", never for "passed"


class Outcomes:
    """A pytest plugin that counts outcomes per file."""

    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.skips: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Set-up and tear-down count only when they decide the outcome.
        if report.when == "call" or not report.passed:
            self._count(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._count(report)

    def _count(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        file = report.nodeid.partition("::")[0]
        self.counts[file][report.outcome] += 1
        if report.skipped:
            self.skips[file, _reason(report)] += 1
        if report.failed:
            self.failures.append(report.nodeid)

    def total(self, outcome: str) -> int:
        return sum(count[outcome] for count in self.counts.values())

    def write_to(self, results: Results) -> None:
        for file, count in sorted(self.counts.items()):
            for outcome in ("passed", "failed", "skipped"):
                results.row(file, outcome, "tests", count[outcome])
        for (file, reason), number in sorted(self.skips.items()):
            results.row(f"{file}: {reason}", "skipped because", "tests", number)
        for nodeid in self.failures:
            results.row(nodeid, "failed", "tests", 1)
        results.target("no test fails", self.total("failed"), "==", 0, "failed tests")
        results.target("tests ran", self.total("passed"), ">=", 1, "passed tests")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}".removesuffix(": ")
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return env.without_directories(text.removeprefix("Skipped: "))


def run(pytest_arguments: Sequence[str]) -> tuple[Outcomes, int]:
    outcomes = Outcomes()
    code = pytest.main([*pytest_arguments], plugins=[outcomes])
    return outcomes, int(code)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--multigpu", action="store_true", help="only tests that need several GPUs")
    parser.add_argument("--out", metavar="DIR", help="also write the JSON file below DIR")
    arguments = parser.parse_args(argv)

    # Tests that start processes of their own need GPU memory too.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    markers = "multigpu" if arguments.multigpu else "not cpu_only and not multigpu"
    outcomes, code = run([str(REPOSITORY / "tests"), "-m", markers, "--hypothesis-profile=brief"])

    import jax  # not earlier: conftest.py configures JAX before its backend starts

    if jax.default_backend() != "gpu":
        print(f"nothing recorded: JAX ran on {jax.default_backend()}, not on a GPU")
        return code or NOT_ON_A_GPU
    name = f"multigpu_test_{jax.device_count()}" if arguments.multigpu else "gpu_test"
    results = Results(name)
    outcomes.write_to(results)
    for (file, reason), number in sorted(outcomes.skips.items()):
        print(f"skipped {number} of {file}: {reason}")
    results.save(arguments.out)
    return code


if __name__ == "__main__":
    sys.exit(main())
