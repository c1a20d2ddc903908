"""CUDA's last error is sticky: after any failed call it must have been cleared."""

import os
import subprocess

import pytest

from tests.util.native_program import build

OPERATIONS = {
    "communicator": 20,
    "communicator of two processes": 15,
    "pinned memory": 12,
    "device": 5,
}


@pytest.mark.cpu_only
def test_no_failed_call_leaves_an_error_or_another_device(tmp_path):
    built = build("failing_calls", tmp_path)
    # What cannot be freed, because the call that frees it fails, is not freed.
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run(
        [built], env=environment, check=False, capture_output=True, text=True, timeout=60
    )
    lines = ran.stdout.splitlines()
    summaries = [line for line in lines if line.endswith(" wrong")]
    assert [line for line in lines if line not in summaries] == [], ran.stderr
    assert ran.returncode == 0, ran.stderr
    # Each operation makes at least this number of calls, each of which has failed.
    for summary, (name, at_least) in zip(summaries, OPERATIONS.items(), strict=True):
        assert summary.startswith(f"{name}: ")
        assert int(summary.split()[-4]) >= at_least
