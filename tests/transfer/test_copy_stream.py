"""Ordering of a copy between XLA's stream and its own, whichever call fails.

`cuda/transfer/copy_stream.cu` with a runtime that only logs its calls
(`tests/native/copy_stream_calls.cc`).
"""

import subprocess

import pytest

from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only

BEHIND, END = 1, 2  # events of a copy stream: XLA's position, and the end of the first copy
ORDERED = [f"xla records {BEHIND}", f"copy waits for {BEHIND}"]
COPIED, HANDED_OUT = "copy copies from 1", "xla gets the ticket"
ENDED, JOINED = f"copy records {END}", f"xla waits for {END}"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`program(failing, joined)`: the calls, the error, and the number of started copies."""
    folder = tmp_path_factory.mktemp("copy_streams")
    sources = [f"cuda/transfer/{name}.cu" for name in ("copy_stream", "ticket")]
    built = build("copy_stream_calls", folder, *sources)

    def run(failing: int, joined: bool) -> tuple[list[str], str, int]:
        command = [built, str(failing), str(int(joined))]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        *calls, error, started, left = ran.stdout.splitlines()
        assert left == "0 0", "an error is left for the next check"
        return calls, error, int(started)

    return run


@pytest.mark.parametrize("joined", [False, True])
def test_copy_is_ordered_after_the_xla_stream(program, joined):
    calls = [*ORDERED, COPIED, HANDED_OUT, ENDED, *[JOINED] * joined]
    assert program(0, joined) == (calls, "", 1)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("failing", [COPIED, HANDED_OUT])
def test_failed_start_counts_as_a_copy_in_flight(program, failing, joined):
    """A part of it may be enqueued."""
    steps = [*ORDERED, COPIED, HANDED_OUT]
    until = steps[: steps.index(failing) + 1]
    calls, error, started = program(len(until), joined)
    assert calls == [*until, ENDED, *[JOINED] * joined]
    assert error and started == 1


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("failing", [1, 2])
def test_failed_stream_ordering_prevents_the_copy(program, failing, joined):
    calls, error, started = program(failing, joined)
    assert calls == ORDERED[:failing]
    assert "an error of the runtime" in error and started == 0


@pytest.mark.parametrize(
    ("failing", "what", "started"), [(5, "cudaEventRecord", 0), (6, "cudaStreamWaitEvent", 1)]
)
def test_failed_completion_signal_raises(program, failing, what, started):
    calls, error, counted = program(failing, True)
    assert calls == [*ORDERED, COPIED, HANDED_OUT, ENDED, JOINED][:failing]
    assert what in error and counted == started
