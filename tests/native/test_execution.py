"""`cuda/execution.h`: XLA's stream is noted, and copies are joined if a call fails.

With a stub of XLA (`tests/native/execution_calls.cc`).
"""

import subprocess

import pytest

from tests.util.native_program import build_for_cpu

pytestmark = pytest.mark.cpu_only

NOTED, JOINED = "stream 7 of device 2", "stream 7 waits for device 2"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`program(wrapper, fails, execution)`: the calls, then the result."""
    folder = tmp_path_factory.mktemp("execution")
    options = ["-Wall", "-Werror", "-fsanitize=address,undefined"]
    built = build_for_cpu("execution_calls", folder, options=options)

    def run(wrapper: str, fails: bool, execution: str) -> list[str]:
        command = [built, wrapper, str(int(fails)), execution]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        return ran.stdout.splitlines()

    return run


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("wrapper", ["note", "join", "both"])
def test_calls_of_an_execution(program, wrapper, fails):
    noted = [NOTED] * (wrapper != "join")
    joined = [JOINED] * (wrapper != "note" and fails)
    assert program(wrapper, fails, "2") == [
        *noted, "handler", *joined, "error" if fails else "success",
    ]  # fmt: skip


@pytest.mark.parametrize("execution", ["outside", "-1", "64"])
@pytest.mark.parametrize("wrapper", ["note", "join", "both"])
def test_nothing_is_done_outside_of_an_execution_or_for_unknown_devices(
    program, wrapper, execution
):
    assert program(wrapper, True, execution) == ["handler", "error"]


@pytest.mark.parametrize(("wrapper", "before", "after"), [("note", 1, 0), ("join", 0, 1)])
def test_error_of_xla_is_dropped(program, wrapper, before, after):
    destroyed = ["destroy"]
    assert program(wrapper, True, "unknown") == [
        *before * destroyed, "handler", *after * destroyed, "error",
    ]  # fmt: skip
