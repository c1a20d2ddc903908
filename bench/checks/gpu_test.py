"""Runs and records the tests on this machine's GPU: `python -m bench.checks.gpu_test`.

Includes the platform-independent tests, with fewer random cases than on a CPU. With pytest-xdist,
several processes share the GPU. `--multigpu` runs the multi-GPU tests instead. Exits with pytest's
code.
"""

import collections
import importlib.util
import sys
from collections.abc import Sequence

import pytest

from bench.harness.records import REPOSITORY, Results, arguments
from jaxkv._src.environment import report as environment_report

NOT_ON_A_GPU = 2  # exit code; pytest's own for "interrupted", never for "passed"
ANYWHERE = "not gpu and not cpu_only and not multigpu and not host_only"
GPU_ONLY = "gpu and not cpu_only and not multigpu"
MAX_PROCESSES = 32  # per GPU: each takes about 1 GiB of it, and a core or two to compile


class Outcomes:
    """A pytest plugin that counts outcomes by file."""

    def __init__(self) -> None:
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.skips: collections.Counter[tuple[str, str]] = collections.Counter()
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Setup and teardown count only when they decide the outcome.
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

    def write_to(self, results: Results, exit_code: int) -> None:
        for file, count in sorted(self.counts.items()):
            for outcome in ("passed", "failed", "skipped"):
                results.row(file, outcome, "tests", count[outcome])
        for (file, reason), number in sorted(self.skips.items()):
            results.row(f"{file}: {reason}", "skip reason", "tests", number)
        for nodeid in self.failures:
            results.row(nodeid, "failed", "tests", 1)
        results.check("failed tests", self.total("failed"), "==", 0, "tests")
        results.check("passed tests", self.total("passed"), ">=", 1, "tests")
        results.check("exit code of pytest", exit_code, "==", 0, "code")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}".removesuffix(": ")
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return environment_report.without_directories(text.removeprefix("Skipped: "))


def test_runs(multigpu: bool) -> list[list[str]]:
    """pytest arguments of each run."""
    if multigpu:
        return [["-m", "multigpu"]]
    if importlib.util.find_spec("xdist") is None:
        return [["-m", f"({ANYWHERE}) or ({GPU_ONLY})"]]
    parallel = ["-n", "auto", f"--maxprocesses={MAX_PROCESSES}", "--dist=worksteal"]
    parallel += ["-p", "no:benchmark"]  # if installed it warns, which is an error here
    # Ordering tests rely on slow work and need the GPU to themselves.
    return [["-m", ANYWHERE, *parallel], ["-m", GPU_ONLY]]


def run(*runs: Sequence[str]) -> tuple[Outcomes, int]:
    """Runs pytest once per argument list and returns the highest exit code."""
    outcomes = Outcomes()
    codes = [pytest.main([*arguments], plugins=[outcomes]) for arguments in runs]
    return outcomes, int(max(codes))


def main(argv: Sequence[str] | None = None) -> int:
    several = {"action": "store_true", "help": "only tests that need several GPUs"}
    flags = arguments(__doc__, argv, {"--multigpu": several}, quick=False)
    common = [str(REPOSITORY / "tests"), "--hypothesis-profile=brief"]
    outcomes, code = run(*([*common, *only] for only in test_runs(flags.multigpu)))

    import jax  # not earlier: conftest.py configures JAX before its backend starts

    if jax.default_backend() != "gpu":
        print(f"nothing recorded: JAX ran on {jax.default_backend()}, not on a GPU")
        return code or NOT_ON_A_GPU
    results = Results(f"multigpu_test_{jax.device_count()}" if flags.multigpu else "gpu_test")
    outcomes.write_to(results, code)
    for (file, reason), number in sorted(outcomes.skips.items()):
        print(f"skipped {number} of {file}: {reason}")
    results.save(flags.out)
    return code


if __name__ == "__main__":
    sys.exit(main())
