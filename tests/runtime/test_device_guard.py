"""`cuda/common/device.cu`: the context of the thread and the last error after each failing call.

With a runtime that only logs its calls (`tests/native/device_calls.cc`).
"""

import re
import subprocess

import pytest

from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only

# The program's stream and our own of device 2, in turn; none of the stream that was replaced, and
# none of device 3.
CALLS = [
    "device-2",
    *("create", "record-1-on-7", "wait-1", "destroy-1"),
    *("create", "record-2-on-9", "wait-2", "destroy-2"),
]
NAMES = {
    "device": "cudaSetDevice",
    "create": "cudaEventCreateWithFlags",
    "record": "cudaEventRecord",
    "wait": "cudaEventSynchronize",
}
NONE, ANOTHER = "0", "15"  # contexts of the thread


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`program(failing, context)`: the calls, the message, and `current context, last error`."""
    built = build("device_calls", tmp_path_factory.mktemp("device"))

    def run(failing: int, context: str) -> list[str]:
        command = [built, str(failing), context]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        return ran.stdout.splitlines()

    return run


@pytest.mark.parametrize("context", [NONE, ANOTHER])
def test_streams_are_synchronized_and_the_context_restored(program, context):
    """A thread without a context has none afterwards: cudaSetDevice(0) would create one."""
    calls, message, state = program(0, context)
    assert (calls.split(), message, state) == (CALLS, "", f"{context} 0")


@pytest.mark.parametrize("failing", range(1, len(CALLS) + 1))
def test_failed_call_is_reported_and_the_context_restored(program, failing):
    calls, message, state = program(failing, ANOTHER)
    name = CALLS[failing - 1].split("-")[0]
    assert state == f"{ANOTHER} 0"
    if name == "destroy":
        assert (calls.split(), message) == (CALLS, "")
        return
    destroyed = [f"destroy-{(failing + 2) // 4}"] * (name in ("record", "wait"))
    assert calls.split() == [*CALLS[:failing], *destroyed]
    assert re.fullmatch(
        rf"jaxkv: CUDA device 2: {NAMES[name]}\(.*\) failed at "
        r"\S*cuda/common/device\.cu:\d+: cudaErrorUnknown: unknown error",
        message,
    )
