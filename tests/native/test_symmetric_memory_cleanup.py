"""Memory is unmapped and freed on every device that can be used, whatever fails on the others."""

import os
import subprocess
from collections import Counter

import pytest

from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only
CLEANUP = Counter(synchronize=1, close=2, free=1, free_host=1)  # of a device


@pytest.fixture(scope="module")
def cleanup(tmp_path_factory):
    """`cleanup(failing, selectable)`: the calls, by device."""
    built = build("symmetric_memory_cleanup", tmp_path_factory.mktemp("cleanup"))
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}

    def run(failing: int, selectable: bool) -> dict[int, Counter[str]]:
        ran = subprocess.run(
            [built, str(failing), str(int(selectable))],
            env=environment, check=False, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        line, device = ran.stdout.splitlines()
        assert device == "5"
        calls = [call.split("-") for call in line.split()]
        names = [name for name, _ in calls]
        first_close = names.index("close") if "close" in names else len(names)
        assert "synchronize" not in names[first_close:]
        return {n: Counter(name for name, on in calls if on == str(n)) for n in (0, 1)}

    return run


@pytest.mark.parametrize("failing", [-1, 0, 1])
def test_failed_work_of_a_device(cleanup, failing):
    assert cleanup(failing, selectable=True) == {0: CLEANUP, 1: CLEANUP}


@pytest.mark.parametrize("failing", [0, 1])
def test_device_that_cannot_be_used(cleanup, failing):
    assert cleanup(failing, selectable=False) == {failing: Counter(), 1 - failing: CLEANUP}
