"""`pytest --sample=N` of conftest.py."""

import subprocess
import sys

import pytest

from bench.harness.records import REPOSITORY

pytestmark = pytest.mark.host_only
FILE = "tests/examples/test_serving_attention.py"  # some tests with many cases


def sample(number: int) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", f"--sample={number}", FILE]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_sample_has_the_first_case_of_each_test_and_a_share_of_the_others():
    everything, half, first = sample(1), sample(2), sample(10**9)
    first_cases: dict[str, str] = {}
    for case in everything:
        first_cases.setdefault(case.partition("[")[0], case)
    assert first == [*first_cases.values()]
    assert set(first) < set(half) < set(everything) and sample(2) == half
    assert 0.3 < len(half) / len(everything) < 0.8
