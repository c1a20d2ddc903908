"""The id check of the copy kernel on the host: threads of a block are coroutines.

Not a substitute for a GPU (threads do not run at the same time), but every line of
`cuda/transfer/id_check.cuh` runs, in two opposite orders of the threads, and asynchronous copies
arrive only when a thread waits for them. Tests on a GPU are in test_transfer_ids.py.
"""

import ctypes
import subprocess

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.util.native_program import build_for_cpu, load_kernels

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    loaded = load_kernels("id_check_on_host", tmp_path_factory.mktemp("kernels"))
    loaded.run.restype = loaded.run_few.restype = ctypes.c_int64
    return loaded


def pairs_of(entries: np.ndarray) -> list[tuple[int, int]]:
    """The pairs to copy, sorted."""
    return sorted((int(s), int(d)) for s, d in entries if d >= 0)


def reference(sources, destinations, limits):
    """The valid pairs, sorted, and the number of invalid entries that are not padding."""
    used = (sources >= 0) & (destinations >= 0)
    in_range = used & (sources < limits[0]) & (destinations < limits[1])
    repeated = np.array([(destinations[in_range] == d).sum() > 1 for d in destinations], bool)
    valid = in_range & ~repeated
    pairs = np.stack([sources[valid], destinations[valid]], axis=1)
    return pairs_of(pairs), int((used & ~valid).sum())


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 300),
    blocks=st.integers(1, 5),
    copied=st.booleans(),
    descending=st.booleans(),
    offset=st.integers(0, 3),
    wrong=st.sampled_from([0, 1, 2, 50]),
    only_duplicates=st.booleans(),
    padding=st.sampled_from([0, 0, 0.02, 0.7]),
)
@example(0, 64, 3, True, False, 0, 0, False, 0)  # shares that begin within a vector of ids
@example(0, 200, 2, True, False, 0, 1, True, 0)
@example(0, 200, 2, False, True, 1, 1, True, 0)
def test_verdict(
    library, seed, n, blocks, copied, descending, offset, wrong, only_duplicates, padding
):
    rng = np.random.default_rng(seed)
    num_sources, num_destinations = n + 3, n + 5
    # The address of the ids relative to 16 bytes, which are copied at once.
    room = [np.zeros(n + 8, np.int32) for _ in range(2)]
    skipped = [-(words.ctypes.data // 4) % 4 + offset for words in room]
    ids = [words[skip : skip + n] for words, skip in zip(room, skipped, strict=True)]
    ids[0][:], ids[1][:] = rng.permutation(num_sources)[:n], rng.permutation(num_destinations)[:n]
    for i in rng.integers(0, max(n, 1), min(wrong, n)):
        bad = 3 if only_duplicates else rng.integers(4)
        ids[bad % 2][i] = [num_sources, num_destinations, -5, ids[1][rng.integers(n)]][bad]
    ids[int(rng.integers(2))][rng.random(n) < padding] = -1

    numbers = np.array([64, descending, blocks, copied, n, num_sources, num_destinations], np.int64)
    opened, pairs = np.full((2, blocks, max(n, 1), 2), -9, np.int32)
    counts = np.zeros((blocks, 2), np.int32)
    arrays = [numbers, *ids, opened, pairs, counts]
    faults = library.run(*(ctypes.c_void_p(array.ctypes.data) for array in arrays))

    opened, pairs = (
        np.concatenate([each[block, : counts[block, kind]] for block in range(blocks)])
        for kind, each in enumerate((opened, pairs))
    )
    in_range = (ids[0] >= 0) & (ids[0] < num_sources) & (ids[1] >= 0) & (ids[1] < num_destinations)
    want = np.where(in_range[:, None], np.stack(ids, axis=1), [0, -1])
    np.testing.assert_array_equal(opened, want)
    assert (pairs_of(pairs), faults) == reference(ids[0], ids[1], (num_sources, num_destinations))


@pytest.mark.host_only
def test_memory_of_the_check_on_the_host(tmp_path):
    """Of the CPU backend and the copy engine: bounded for each thread, which XLA never ends."""
    sources = ["cuda/transfer/block_copy.cc", "cuda/common/error_ring.cc"]
    sources.append("cuda/transfer/host_ids.cc")
    built = build_for_cpu("id_memory", tmp_path, *sources, options=["-O0"])
    ran = subprocess.run([built], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout


@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(0, 32),
    descending=st.booleans(),
    record=st.booleans(),
    wrong=st.sampled_from([0, 1, 2, 10]),
    padding=st.sampled_from([0, 0, 0.1, 0.7]),
)
@example(0, 32, False, True, 0, 0)
@example(0, 32, True, True, 10, 0.1)
def test_verdict_of_few_ids(library, seed, n, descending, record, wrong, padding):
    """All pairs in order, and each invalid entry recorded once, by one thread block of several."""
    rng = np.random.default_rng(seed)
    limits = num_sources, num_destinations = n + 3, n + 5
    sources, destinations = (rng.permutation(limit)[:n].astype(np.int32) for limit in limits)
    ids = sources, destinations
    for i in rng.integers(0, max(n, 1), min(wrong, n)):
        bad = rng.integers(4)
        ids[bad % 2][i] = [num_sources, num_destinations, -5, ids[1][rng.integers(n)]][bad]
    ids[int(rng.integers(2))][rng.random(n) < padding] = -1

    numbers = np.array([64, descending, 1, 0, n, *limits], np.int64)
    pairs, count = np.full((32, 2), -9, np.int32), np.zeros(1, np.int32)
    arrays: list[np.ndarray] = [numbers, sources, destinations, pairs, count]
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in arrays]
    faults = library.run_few(*addresses[:3], ctypes.c_int32(record), *addresses[3:])

    valid = (ids[0] >= 0) & (ids[0] < num_sources) & (ids[1] >= 0) & (ids[1] < num_destinations)
    entries = np.stack(ids, axis=1)[valid]
    repeated = np.array([(entries[:, 1] == d).sum() > 1 for d in entries[:, 1]], bool)
    entries[repeated] = [0, -1]
    np.testing.assert_array_equal(pairs[: count[0]], entries)
    assert count[0] == len(entries) and (pairs[count[0] :] == -9).all()
    assert faults == (reference(sources, destinations, limits)[1] if record else 0)


@given(
    pairs=st.lists(st.tuples(st.integers(-2, 9), st.integers(-2, 9)), max_size=150),
    first=st.integers(0, 150),
    descending=st.booleans(),
)
@example([(2**31 - 1, 0), (-(2**31), 0), (0, 2**31 - 1), (0, -(2**31))], 0, False)
def test_staged_pairs_are_in_range(library, pairs, first, descending):
    """A checked list whose memory XLA may have reused."""
    numbers = np.array([64, descending, 1, 0, 0, 8, 5], np.int64)
    listed = np.array(pairs, np.int32).reshape(-1, 2)
    first = min(first, len(pairs))
    staged = np.full((len(pairs) + 1, 2), -9, np.int32)
    addresses = [ctypes.c_void_p(array.ctypes.data) for array in (numbers, listed, staged)]
    library.run_stage(*addresses[:2], first, len(pairs), addresses[2])
    valid = ((listed >= 0) & (listed < (8, 5))).all(axis=1, keepdims=True)
    want = np.where(valid, listed, (0, -1))[first:]
    np.testing.assert_array_equal(staged[: len(want)], want)
    assert (staged[len(want) :] == -9).all()
