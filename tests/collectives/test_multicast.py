"""Driver calls of `cuda/collectives/multicast.cu`: complete cleanup, whichever call fails.

With a driver that only logs its calls (`tests/native/multicast_calls.cc`).
"""

import re
import subprocess

import pytest

from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only

CALLS = {
    "create-multicast": "cuMulticastCreate",
    "add": "cuMulticastAddDevice",
    "create": "cuMemCreate",
    "bind": "cuMulticastBindMem",
    "reserve": "cuMemAddressReserve",
    "map": "cuMemMap",
    "access": "cuMemSetAccess",
}
TAKEN_BACK_BY = {
    "create-multicast": "release",
    "create": "release",
    "bind": "unbind",
    "reserve": "free",
    "map": "unmap",
}
MAPPED = ["reserve", "map", "access"]
BOUND = ["create", "bind", *MAPPED]
STEPS = ["create-multicast", "add", "add", *BOUND, *BOUND, *MAPPED, *MAPPED]
DEVICES = [3, 3, 2, *[3] * 5, *[2] * 5, *[3] * 3, *[2] * 3]  # of each step


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`program(failing)`: the printed lines, each split in two."""
    built = build("multicast_calls", tmp_path_factory.mktemp("multicast"))

    def run(failing: int = 0) -> list[list[str]]:
        ran = subprocess.run([built, str(failing)], check=True, capture_output=True, text=True)
        asked, *lines = (line.split(" ", 1) for line in ran.stdout.splitlines()[1:])
        assert asked[0] == "attribute"
        return lines

    return run


def taken_back(done: list[list[str]]) -> list[list[str]]:
    return [[TAKEN_BACK_BY[step], of] for step, of in reversed(done) if step in TAKEN_BACK_BY]


def test_close_releases_all_resources(program):
    lines = program()
    done, have, undone = lines[: len(STEPS)], lines[len(STEPS)], lines[len(STEPS) + 1 :]
    assert [step for step, _ in done] == STEPS
    addresses = [of for step, of in done if step == "map"]
    assert have == ["have", f"{addresses[1]} {addresses[3]}"]
    assert undone == taken_back(done)


@pytest.mark.parametrize("failing", range(1, len(STEPS) + 1))
def test_failed_driver_call_is_reported_and_undone(program, failing):
    *lines, error = program(failing)
    step, device = STEPS[failing - 1], DEVICES[failing - 1]
    assert re.fullmatch(
        rf"jaxkv: multicast memory of device {device}: {CALLS[step]}\(.*\) failed at "
        r"\S*cuda/collectives/multicast\.cu:\d+: CUDA_ERROR_NOT_PERMITTED",
        " ".join(error),
    )
    done = lines[:failing]
    assert [step for step, _ in done] == STEPS[:failing]
    assert lines[failing:] == taken_back(done[:-1])
