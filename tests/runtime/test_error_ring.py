"""`cuda/common/error_ring.cc`: `check_errors` on a ring with concurrent device writes.

With a program that simulates the device (`tests/native/error_ring_calls.cc`).
"""

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.util.native_program import build

pytestmark = pytest.mark.cpu_only

RING = 64  # entries
DEVICE = 3  # owner of the rings
PAGE_INDEX, TRANSFER, BOUND = range(3)  # kinds


@pytest.fixture(scope="module")
def take(take_kinds):
    """`take(*steps)`: for each "take" among the steps, (entries taken, the known ids)."""

    def run(*steps: str | int) -> list[tuple[int, list[int]]]:
        return [taken.get(PAGE_INDEX, (0, [])) for taken in take_kinds(*steps)]

    return run


@pytest.fixture(scope="module")
def take_kinds(tmp_path_factory):
    """As `take`, for each kind with errors."""
    built = build("error_ring_calls", tmp_path_factory.mktemp("device_errors"))

    def run(*steps: str | int) -> list[dict[int, tuple[int, list[int]]]]:
        command = [built, *map(str, steps)]
        ran = subprocess.run(command, check=True, capture_output=True, text=True)
        return [dict(map(taken_of_kind, line.split(";")[:-1])) for line in ran.stdout.splitlines()]

    return run


def taken_of_kind(text: str) -> tuple[int, tuple[int, list[int]]]:
    kind, device, count, *ids = map(int, text.split())
    assert device == DEVICE
    return kind, (count, ids)


def written(first: int, last: int) -> list[str | int]:
    return [step for slot in range(first, last) for step in ("claim", slot)]


def test_entry_is_read_once(take):
    assert take("take", *written(0, 3), "take", "take") == [(0, []), (3, [0, 1, 2]), (0, [])]


def test_counted_but_unwritten_entry_is_deferred(take):
    steps = "claim", "claim", 1, "take", 0, "take"
    assert take(*steps) == [(0, []), (2, [0, 1])]


@pytest.mark.parametrize("more", [0, 1, RING, 10 * RING + 5])
def test_overflowing_ring_keeps_the_last_entries(take, more):
    taken = take(*written(0, RING + more), "take")
    assert taken == [(RING + more, list(range(more, RING + more)))]


def test_late_write_of_an_older_entry_loses_no_count(take):
    """Threads of one kernel that are a ring apart write the same entry, in any order."""
    steps = ["claim"] * (RING + 1) + [*range(1, RING + 1), 0]
    assert take(*steps, "take", "take") == [(RING + 1, list(range(1, RING))), (0, [])]


def test_kinds_are_counted_separately(take_kinds):
    """Independent of the number of errors of another kind, even while one is not written yet."""
    many = written(0, 3 * RING)
    steps = [*written(0, 2), "bound", *many, "transfer", "claim", "take", 0, "take"]
    pages, bounds = (2, [0, 1]), (3 * RING, list(range(2 * RING, 3 * RING)))
    assert take_kinds(*steps) == [{PAGE_INDEX: pages, BOUND: bounds}, {TRANSFER: (1, [0])}]


def test_scopes_are_counted_separately(take):
    steps = [*written(0, 2), "other", "take", *written(0, 5), "default", "take", "other", "take"]
    assert take(*steps) == [(0, []), (2, [0, 1]), (5, list(range(5)))]


@settings(max_examples=100)
@given(data=st.data())
def test_entries_are_neither_lost_nor_read_twice(take, data):
    """Few enough that none is overwritten: each is taken once and in order."""
    total = data.draw(st.integers(0, RING))
    claimed = 0
    to_write: list[int] = []
    steps: list[str | int] = []
    while claimed < total or to_write:
        kind = data.draw(st.sampled_from(["claim", "write", "take"]))
        if kind == "claim" and claimed < total:
            to_write.append(claimed)
            claimed += 1
            steps.append("claim")
        elif kind == "write" and to_write:
            steps.append(to_write.pop(data.draw(st.integers(0, len(to_write) - 1))))
        elif kind == "take":
            steps.append("take")
    taken = take(*steps, "take")
    assert sum(count for count, _ in taken) == total
    assert [slot for _, ids in taken for slot in ids] == list(range(total))
