"""`bench.checks.gpu_test`: selection of the tests, and their record."""

import importlib.util
import itertools
import json
import subprocess
import sys

import jax
import pytest

from bench.checks import gpu_test
from bench.harness import records
from bench.harness.records import Results

pytestmark = pytest.mark.host_only

MARKERS = ("gpu", "cpu_only", "multigpu", "host_only")


@pytest.mark.parametrize("xdist", [None, object()], ids=["without xdist", "with xdist"])
@pytest.mark.parametrize("marked", list(itertools.product([False, True], repeat=len(MARKERS))))
def test_runs_select_each_test_at_most_once(marked, xdist, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: xdist)
    markers = dict(zip(MARKERS, marked, strict=True))
    elsewhere = markers["cpu_only"] or (markers["host_only"] and not markers["gpu"])

    def times(multigpu: bool) -> int:
        runs = gpu_test.test_runs(multigpu)  # -m takes Python's boolean expressions
        return sum(eval(arguments[1], dict(markers)) for arguments in runs)

    assert times(multigpu=True) == markers["multigpu"]
    assert times(multigpu=False) == (not markers["multigpu"] and not elsewhere)


INNER_TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip("needs two moons")
@pytest.fixture
def broken(): raise RuntimeError
def test_cannot_start(broken): pass
@pytest.mark.skipif(True, reason="needs two moons")
def test_is_skipped_too(): pass
@pytest.mark.xfail(reason="known")
def test_known(): assert False
"""


RUN_INNER_TESTS = """
import json, sys
from bench.checks import gpu_test
from bench.harness.records import Results

outcomes, code = gpu_test.run(*json.loads(sys.argv[1]))
results = Results("inner")
outcomes.write_to(results, code)
rows = [[row.case, row.metric, row.value] for row in results.rows]
targets = [[target.name, target.got, target.met] for target in results.checks]
print()
print(json.dumps([code, rows, targets]))
"""


@pytest.mark.parametrize("processes", [[], ["-n", "2"]], ids=["one process", "two processes"])
def test_outcomes_of_several_runs_are_recorded(processes, tmp_path):
    if processes:
        pytest.importorskip("xdist")
    (tmp_path / "test_inner.py").write_text(INNER_TESTS)
    (tmp_path / "test_broken.py").write_text("import a_module_that_does_not_exist")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    flags = ["-p", "no:cacheprovider", "--continue-on-collection-errors", *processes]
    runs = [[*flags, str(tmp_path / name)] for name in ("test_inner.py", "test_broken.py")]
    command = [sys.executable, "-c", RUN_INNER_TESTS, json.dumps(runs)]
    run = subprocess.run(command, cwd=records.REPOSITORY, capture_output=True, text=True)
    code, rows, targets = json.loads(run.stdout.splitlines()[-1])
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "ModuleNotFoundError: No module named 'a_module_that_does_not_exist'" in run.stdout
    assert sorted(rows) == sorted(
        [
            ["test_inner.py", "passed", 1],
            ["test_inner.py", "failed", 2],
            ["test_inner.py", "skipped", 3],
            ["test_broken.py", "passed", 0],
            ["test_broken.py", "failed", 1],
            ["test_broken.py", "skipped", 0],
            ["test_inner.py: needs two moons", "skip reason", 2],
            ["test_inner.py: expected to fail: known", "skip reason", 1],
            ["test_broken.py", "failed", 1],
            ["test_inner.py::test_fails", "failed", 1],
            ["test_inner.py::test_cannot_start", "failed", 1],
        ]
    )
    assert targets == [
        ["failed tests", 3, False],
        ["passed tests", 1, True],
        ["exit code of pytest", 1, False],
    ]


@pytest.mark.parametrize("code", [0, 3])
def test_record_of_a_run_that_ended_with_an_error_fails(code):
    outcomes, results = gpu_test.Outcomes(), Results("gpu_test")
    outcomes.counts["test_a.py"]["passed"] = 1
    outcomes.write_to(results, code)  # an error outside of tests has no outcome
    assert results.exit_code == (code != 0)


def test_gpu_test_on_another_platform_records_nothing(monkeypatch, capsys):
    if jax.default_backend() == "gpu":
        pytest.skip("needs a machine on which JAX runs on no GPU")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # main sets it if it is unset
    monkeypatch.setattr(gpu_test, "run", lambda *runs: (gpu_test.Outcomes(), 0))
    assert gpu_test.main([]) == gpu_test.NOT_ON_A_GPU
    assert "nothing recorded" in capsys.readouterr().out
