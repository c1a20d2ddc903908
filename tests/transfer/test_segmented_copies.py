"""Copies by the copy engine whose start enqueues the first segments, and whose waits the others.

`cuda/transfer/async_copy.cu`, `copy_stream.cu`, `copy_engine.cu` and `wait_copy.cu` with a runtime
that logs its calls and copies on the host (`tests/native/segmented_copy_calls.cc`). Which programs
have such copies: test_deferred_copies.py.
"""

import dataclasses
import re
import subprocess
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only

SEGMENTS = 6
IN_A_KERNEL = "xla waits in a kernel"
STREAMS = ("kernel load", "load", "kernel store", "store")
JOINED = [call for name in STREAMS for call in (f"{name} records start", "xla waits for start")]
MOST_INCOMPLETE = 64  # copies of executions that did not end


@dataclasses.dataclass
class Done:
    """Effects of the steps.

    Attributes:
      steps: name of each step, and its calls of the runtime.
      errors: of the steps.
      copied: segments of each copy that have arrived.
      started: number of loads and stores that were enqueued entirely.
      last_error: the runtime's last error, 0 if it was cleared.
    """

    steps: list[tuple[str, list[str]]]
    errors: list[str]
    copied: list[list[int]]
    started: tuple[int, int]
    last_error: int

    def calls(self) -> list[str]:
        return [call for _, calls in self.steps for call in calls]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """`program(*steps, failing=0)`; a step is as in "start 1 2", see the source."""
    names = ("async_copy", "copy_stream", "ticket", "wait_copy")
    sources = [f"cuda/transfer/{name}.cu" for name in names]
    built = build("segmented_copy_calls", tmp_path_factory.mktemp("segments"), *sources)

    def run(*steps: str, failing: int = 0) -> Done:
        words = [word for step in steps for word in step.split()]
        command = [built, str(failing), *words]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        done = Done([], [], [], (0, 0), -1)
        for line in ran.stdout.splitlines():
            if line.startswith("  error "):
                done.errors.append(line.removeprefix("  error "))
            elif line.startswith("  "):
                done.steps[-1][1].append(line.strip())
            elif line.startswith("copied"):
                flags = line.removeprefix("copied").strip()
                done.copied.append([s for s, flag in enumerate(flags) if flag == "1"])
            elif found := re.fullmatch(r"started (\d+) (\d+), error (\d+)", line):
                loads, stores, done.last_error = map(int, found.groups())
                done.started = loads, stores
            else:
                done.steps.append((line, []))
        return done

    return run


def enqueued(copy: int, segments: range, *, first: int = 1, stream: str = "load") -> list[str]:
    """The calls that enqueue segments of a copy, the first of which has the number `first`."""
    calls: list[str] = []
    for segment in segments:
        calls += [f"{stream} copies {copy}.{segment}", f"{stream} signals {first + segment}"]
    return calls


ORDERED = ["xla records start", "load waits for start"]
ENDED = ["load records end"]


def test_start_enqueues_the_first_segments_and_each_wait_those_ahead(program):
    done = program("start 1 2", *(f"wait 1 {segment}" for segment in range(SEGMENTS)))
    start, *waits = [calls for _, calls in done.steps]
    assert start == [*ORDERED, *enqueued(0, range(2)), "xla gets the ticket"]
    assert waits == [
        [*enqueued(0, range(2, 3)), IN_A_KERNEL],
        [*enqueued(0, range(3, 4)), IN_A_KERNEL],
        [*enqueued(0, range(4, 5)), IN_A_KERNEL],
        [*enqueued(0, range(5, 6)), *ENDED, IN_A_KERNEL],
        [IN_A_KERNEL],
        [IN_A_KERNEL],
    ]
    assert done.copied == [[*range(SEGMENTS)]] and done.started == (1, 0)


@pytest.mark.parametrize("segment", [SEGMENTS - 1, -1], ids=["last", "known on the device"])
def test_wait_that_may_need_the_last_segment_enqueues_all(program, segment):
    done = program("start 1 1", f"wait 1 {segment}", "wait 1 0")
    assert done.steps[1][1] == [*enqueued(0, range(1, SEGMENTS)), *ENDED, IN_A_KERNEL]
    assert done.steps[2][1] == [IN_A_KERNEL]


@pytest.mark.parametrize("start", ["joined 1 1", "whole 1"])
def test_joined_and_whole_copies_are_enqueued_at_their_start(program, start):
    done = program(start, "wait 1 0")
    joined = ["xla waits for end"] * start.startswith("joined")
    start_calls = [*ORDERED, *enqueued(0, range(SEGMENTS)), "xla gets the ticket", *ENDED, *joined]
    assert [calls for _, calls in done.steps] == [start_calls, [IN_A_KERNEL]]


def test_second_copy_of_an_execution_follows_the_first(program):
    done = program("start 1 1", "start 1 2", "wait 1 0", "wait 1 5")
    assert done.steps[1][1] == [
        *enqueued(0, range(1, SEGMENTS)),
        *ENDED,
        *ORDERED,
        *enqueued(1, range(2), first=1 + SEGMENTS),
        "xla gets the ticket",
    ]
    assert done.copied == [[*range(SEGMENTS)]] * 2 and done.started == (2, 0)


def test_load_and_store_of_an_execution_proceed_together(program):
    done = program("start 1 1", "store 1 2", "wait 1 1", "wait 1 5")
    assert done.steps[2][1] == [
        *enqueued(0, range(1, 3)),
        *enqueued(1, range(2, 4), stream="store"),
        IN_A_KERNEL,
    ]
    assert done.copied == [[*range(SEGMENTS)]] * 2 and done.started == (1, 1)


def test_copy_of_an_execution_that_failed_is_never_continued(program):
    """Its arrays are freed: a later access would be reported by AddressSanitizer, too."""
    done = program("start 1 2", "free", "start 2 1", "wait 2 0", "wait 2 5", "start 3 1")
    assert [call for call in done.calls() if re.search(r"copies (0|unknown)", call)] == [
        "load copies 0.0",
        "load copies 0.1",
    ]
    assert done.copied == [[], [*range(SEGMENTS)], [0]] and done.started == (1, 0)


def test_copy_of_a_failed_execution_with_the_same_run_id_is_forgotten(program):
    done = program("start 1 2", "store 1 2", "free", "begin 1", "start 1 1", "wait 1 0", "wait 1 5")
    assert [call for call in done.calls() if re.search(r"copies (0|1|unknown)", call)] == [
        "load copies 0.0",
        "load copies 0.1",
        "store copies 1.0",
        "store copies 1.1",
    ]
    assert done.copied[-1] == [*range(SEGMENTS)] and done.started == (1, 0)


def test_executions_with_the_same_run_id_on_two_threads(program):
    """Of two programs: each copy is continued by the waits of its own execution."""
    other = ["aside begin 1", "aside start 1 1", "aside wait 1 0"]
    done = program("start 1 2", *other, "wait 1 1", "wait 1 5")
    assert done.copied == [[*range(SEGMENTS)], [0, 1]] and done.started == (1, 0)


def test_overtaken_copy_is_continued_by_its_own_waits(program):
    """The counter is ahead already, so that XLA's stream waits for the end of the copy."""
    done = program("start 1 2", "start 2 1", "wait 1 0", "wait 2 5", "wait 1 5")
    rest = [f"load copies 0.{segment}" for segment in range(2, SEGMENTS)]
    assert done.steps[2][1] == [*rest, *ENDED, "xla waits for end", IN_A_KERNEL]
    assert done.steps[4][1] == [IN_A_KERNEL]
    assert done.copied == [[*range(SEGMENTS)]] * 2 and done.started == (2, 0)


def test_start_that_fails_at_its_first_segment_overtakes_nothing(program):
    """No signal of a later copy will come, so that the first one still needs its own."""
    first_copy_of_the_second = 7 + len(ORDERED) + 1
    done = program("start 1 2", "start 2 1", "wait 1 5", failing=first_copy_of_the_second)
    assert len(done.errors) == 1 and done.steps[1][1][-len(JOINED) :] == JOINED
    assert done.steps[2][1] == [*enqueued(0, range(2, SEGMENTS)), *ENDED, IN_A_KERNEL]


def test_beyond_a_number_of_failed_executions_all_is_enqueued_at_the_start(program):
    starts = [f"start {run} 1" for run in range(1, MOST_INCOMPLETE + 2)]
    done = program(*starts, "wait 1 0")
    assert done.copied[-2:] == [[0], [*range(SEGMENTS)]]
    assert done.copied[0] == [*range(SEGMENTS)]  # its wait still finds it


SCENARIO = ["start 1 2", "wait 1 0", "wait 1 1", "wait 1 5"]
NUM_CALLS = 4 + 2 * SEGMENTS + 3  # of these steps, without an error


def test_each_failing_call_ends_the_copy(program):
    """The error is that of its step. XLA's stream waits for what was enqueued; no rest is left."""
    assert len(program(*SCENARIO).calls()) == NUM_CALLS
    for failing in range(1, NUM_CALLS + 1):
        done = program(*SCENARIO, failing=failing)
        calls = done.calls()
        failed = calls[failing - 1]
        assert len(done.errors) == 1 and done.last_error == 0, failed
        in_flight = any(word in failed for word in ("copies", "signals", "ticket"))
        joined = [*(ENDED if in_flight else []), *JOINED]
        assert calls[failing : failing + len(joined)] == joined, failed
        if failed != IN_A_KERNEL:  # XLA calls no other wait
            assert not [call for call in calls[failing:] if "copies" in call or "signals" in call]


@st.composite
def scenarios(draw) -> list[str]:
    """Starts and waits of three executions whose programs are launched at the same time."""
    of_runs: list[list[str]] = []
    for run in range(1, 4):
        steps: list[str] = []
        for _ in range(draw(st.integers(0, 2))):
            name = draw(st.sampled_from(["start", "start", "store", "joined"]))
            steps.append(f"{name} {run} {draw(st.integers(1, SEGMENTS))}")
            for segment in draw(st.lists(st.integers(-1, SEGMENTS - 1), max_size=4)):
                steps.append(f"wait {run} {segment}")
        of_runs.append([*steps, f"wait {run} {SEGMENTS - 1}"])
    merged: list[str] = []
    while any(of_runs):
        merged.append(draw(st.sampled_from([steps for steps in of_runs if steps])).pop(0))
    return merged


def copies_at(steps: list[str]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Each wait's position, and the (copy, segment) that must be enqueued before its kernel."""
    of_run: dict[str, list[int]] = {}
    number = 0
    for position, step in enumerate(steps):
        name, run, last = step.split()
        if name != "wait":
            of_run.setdefault(run, []).append(number)
            number += 1
            continue
        through = SEGMENTS - 1 if int(last) < 0 else int(last)
        needed = [(copy, s) for copy in of_run.get(run, []) for s in range(through + 1)]
        yield position, needed


@settings(max_examples=60, deadline=None)
@given(scenarios())
def test_each_wait_is_behind_its_segments(program, steps):
    done = program(*steps)
    assert not done.errors
    assert all(segments == [*range(SEGMENTS)] for segments in done.copied)
    of_steps = [calls for _, calls in done.steps]
    for position, needed in copies_at(steps):
        assert of_steps[position][-1] == IN_A_KERNEL
        before = [call for calls in of_steps[: position + 1] for call in calls]
        copied = {call.split()[-1] for call in before if " copies " in call}
        assert copied >= {f"{copy}.{segment}" for copy, segment in needed}
    for stream in ("load", "store"):
        own = [call for call in done.calls() if call.startswith(f"{stream} ")]
        values = [int(call.split()[-1]) for call in own if "signals" in call]
        assert values == sorted(set(values))  # the counter never decreases
    # Without a signal of its own, XLA's stream waits for the end of the copy.
    unsignalled = len(done.copied) * SEGMENTS - sum("signals" in call for call in done.calls())
    joined = sum(step.startswith("joined") for step in steps)
    assert (unsignalled > 0) == (done.calls().count("xla waits for end") > joined)
