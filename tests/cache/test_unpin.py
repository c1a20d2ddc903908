"""`cuda/cache/pinned_memory.cu`: memory is unpinned after the work of all its devices.

With a runtime that only logs its calls (`tests/native/unpin_calls.cc`).
"""

import subprocess

import pytest

from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only

CALLS = ["synchronize-2", "synchronize-3", "unregister-2"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("unpin_calls", tmp_path_factory.mktemp("unpin"))


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_memory_is_unpinned_after_all_work_or_not_at_all(program, failing):
    """Memory that is still pinned is never unmapped: the device could write it."""
    ran = subprocess.run([program, str(failing)], check=True, capture_output=True, text=True)
    calls, message, state = ran.stdout.splitlines()
    assert calls.split() == (CALLS[:failing] if failing else CALLS)
    assert ("unknown error" in message) == bool(failing)
    assert state == "5 0"  # the device is restored, and no error is left
