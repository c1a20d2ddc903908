"""What `cuda/multicast.cu` asks of the driver: all of it is taken back, whichever call fails.

With a driver that only writes down what it is asked to do (`tests/native/multicast_calls.cc`).
"""

import pathlib
import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cpu_only

ROOT = pathlib.Path(__file__).parent.parent
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
    """`program(failing)`: the lines that it prints, each split in two."""
    if not (ROOT / "cuda").exists():
        pytest.skip("needs a checkout")
    locate = [sys.executable, str(ROOT / "tools/locate.py"), "nvcc"]
    nvcc = subprocess.run(locate, check=True, capture_output=True, text=True).stdout.strip()
    if not nvcc or not shutil.which("g++"):
        pytest.skip("needs nvcc, for its headers, and g++")
    built = str(tmp_path_factory.mktemp("multicast") / "multicast_calls")
    source = str(ROOT / "tests/native/multicast_calls.cc")
    options = ["-std=c++20", "-Xcompiler=-fsanitize=address", "--cudart=none"]
    subprocess.run([nvcc, *options, "-x", "c++", source, "-o", built], check=True)

    def run(failing: int = 0) -> list[list[str]]:
        ran = subprocess.run([built, str(failing)], check=True, capture_output=True, text=True)
        asked, *lines = (line.split(" ", 1) for line in ran.stdout.splitlines()[1:])
        assert asked[0] == "attribute"
        return lines

    return run


def taken_back(done: list[list[str]]) -> list[list[str]]:
    return [[TAKEN_BACK_BY[step], of] for step, of in reversed(done) if step in TAKEN_BACK_BY]


def test_all_is_taken_back_in_the_end(program):
    lines = program()
    done, have, undone = lines[: len(STEPS)], lines[len(STEPS)], lines[len(STEPS) + 1 :]
    assert [step for step, _ in done] == STEPS
    addresses = [of for step, of in done if step == "map"]
    assert have == ["have", f"{addresses[1]} {addresses[3]}"]
    assert undone == taken_back(done)


@pytest.mark.parametrize("failing", range(1, len(STEPS) + 1))
def test_a_call_that_fails_is_named_and_the_others_are_taken_back(program, failing):
    *lines, error = program(failing)
    step, device = STEPS[failing - 1], DEVICES[failing - 1]
    assert " ".join(error) == (
        f"jaxkv: multicast: {CALLS[step]} for device {device}: not permitted"
    )
    done = lines[:failing]
    assert [step for step, _ in done] == STEPS[:failing]
    assert lines[failing:] == taken_back(done[:-1])
