"""How `cuda/overlap.cu` orders a copy between XLA's stream and its own, whichever call fails.

With a runtime that only writes down what it is asked to do (`tests/native/overlap_calls.cc`).
"""

import subprocess

import pytest
from native_program import build

pytestmark = pytest.mark.cpu_only

BEHIND, END = 1, 2  # events of a lane: where XLA's stream was, and the end of the first copy
START = [f"xla records {BEHIND}", f"lane waits for {BEHIND}", "lane copies from 1"]
ENDED, JOINED = f"lane records {END}", f"xla waits for {END}"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`program(failing, joined)`: the calls, the error, and how many copies were started."""
    folder = tmp_path_factory.mktemp("lanes")
    built = build("overlap_calls", folder, "cuda/overlap.cu")

    def run(failing: int, joined: bool) -> tuple[list[str], str, int]:
        command = [built, str(failing), str(int(joined))]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        *calls, error, started = ran.stdout.splitlines()
        return calls, error, int(started)

    return run


@pytest.mark.parametrize("joined", [False, True])
def test_a_copy_runs_behind_what_xla_enqueued(program, joined):
    assert program(0, joined) == ([*START, ENDED, *[JOINED] * joined], "", 1)


@pytest.mark.parametrize("joined", [False, True])
def test_after_a_copy_that_failed_halfway_xla_waits(program, joined):
    """It may have enqueued something, and XLA frees the arrays once the handler has failed."""
    calls, error, started = program(len(START), joined)
    assert calls == [*START, ENDED, JOINED]
    assert (error, started) == ("no copy", 1)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("failing", [1, 2])
def test_nothing_is_copied_if_the_streams_cannot_be_ordered(program, failing, joined):
    calls, error, started = program(failing, joined)
    assert calls == START[:failing]
    assert "an error of the runtime" in error and started == 0


def test_an_end_that_is_not_recorded_is_an_error(program):
    calls, error, started = program(len(START) + 1, False)
    assert calls == [*START, ENDED]
    assert "cudaEventRecord" in error and started == 0
