"""`cuda/common/device.cu`: the current device and the last error after a failed call.

With a runtime that only logs its calls (`tests/native/device_calls.cc`).
"""

import re
import subprocess

import pytest

from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only

CALLS = ["get", "set", "synchronize", "set"]
NAMES = ["cudaGetDevice", "cudaSetDevice", "cudaDeviceSynchronize"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`program(failing)`: the calls, the message, and `current device, last error`."""
    built = build("device_calls", tmp_path_factory.mktemp("device"))

    def run(failing: int) -> list[str]:
        ran = subprocess.run([built, str(failing)], check=True, capture_output=True, text=True)
        return ran.stdout.splitlines()

    return run


def test_device_is_restored(program):
    calls, message, state = program(0)
    assert (calls.split(), message, state) == (CALLS, "", "5 0")


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_failed_call_is_reported_and_the_device_restored(program, failing):
    calls, message, state = program(failing)
    assert calls.split() == (CALLS if failing == 3 else CALLS[:failing])
    assert state == "5 0"
    assert re.fullmatch(
        rf"jaxkv: (CUDA device 2: )?{NAMES[failing - 1]}\(.*\) failed at "
        r"\S*cuda/common/device\.cu:\d+: cudaErrorUnknown: unknown error",
        message,
    )


def test_failed_restoration_leaves_no_error_behind(program):
    _, message, state = program(4)
    assert (message, state) == ("", "2 0")
