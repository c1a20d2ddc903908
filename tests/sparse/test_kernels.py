"""The CUDA kernels of sparse rows, on the host: threads of a block are coroutines.

Not a substitute for a GPU (threads do not run at the same time), but every line of the kernels runs
against the reference, in two opposite orders of the threads.
"""

import ctypes

import numpy as np
import pytest

from tests.util.native_program import load_kernels
from tests.util.sparse_reference import Reference

PAGE_SIZE, WIDTH = 4, 48
pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    loaded = load_kernels("sparse_rows_on_host", tmp_path_factory.mktemp("kernels"))
    loaded.run.restype = ctypes.c_int64
    return loaded


class Kernels:
    """The state of one layer, and a reference."""

    def __init__(self, library, rng, *, batch, slots, max_length, threads, descending):
        self.library, self.rng = library, rng
        self.batch, self.slots, self.max_length = batch, slots, max_length
        self.threads, self.descending = threads, descending
        columns = -(-max_length // PAGE_SIZE)
        self.num_pages = batch * columns
        self.table = rng.permutation(self.num_pages).astype(np.int32).reshape(batch, columns)
        self.pool = rng.integers(0, 256, (self.num_pages, PAGE_SIZE, WIDTH), np.uint8)
        self.hot = np.zeros((batch, slots, WIDTH), np.uint8)
        self.positions = np.full((batch, slots), -1, np.int32)
        self.used = np.zeros((batch, slots), np.int32)
        self.slot_of = rng.integers(-5, 2 * slots, (batch, max_length)).astype(np.int16)
        self.clock = rng.integers(-3, 3, batch).astype(np.int32)
        self.reference = Reference(batch, slots, max_length, PAGE_SIZE, self.pool.copy())

    def call(self, ids, lengths, added) -> np.ndarray:
        """Runs both kernels; returns the rows. `lengths` are those of a fetch, else None."""
        append = lengths is None
        num_ids = ids.shape[1]
        rows = np.full(ids.shape, -9, np.int32)
        moves = np.full((*ids.shape, 2), -9, np.int32)
        counts = np.full(self.batch, -9, np.int32)
        numbers = np.array(
            [append, self.threads, self.descending, 3, self.batch, num_ids, self.slots,
             self.max_length, self.table.shape[1], self.num_pages, PAGE_SIZE, 0, WIDTH,
             PAGE_SIZE * WIDTH, WIDTH], np.int64,
        )  # fmt: skip
        fetched = (lengths, rows, counts) if not append else (None, None, None)
        arrays = [
            ids, fetched[0], self.table, fetched[1], moves, fetched[2], self.positions, self.used,
            self.slot_of, self.clock, self.pool, self.hot, added,
        ]  # fmt: skip
        pointers = (ctypes.c_void_p * len(arrays))(
            *(None if array is None else array.ctypes.data for array in arrays)
        )
        faults = self.library.run(numbers.ctypes.data_as(ctypes.c_void_p), pointers)
        assert faults == self.reference.errors
        self.reference.errors = 0
        return rows

    def fetch(self, ids, lengths) -> None:
        want = self.reference.fetch(ids, lengths, self.table)
        rows = self.call(ids, lengths, None)
        first = np.arange(self.batch)[:, None] * self.slots
        np.testing.assert_array_equal(rows, np.where(want < 0, -1, first + want))
        self.check()

    def append(self, ids) -> None:
        added = self.rng.integers(0, 256, (*ids.shape, WIDTH), np.uint8)
        self.reference.append(added, ids, self.table)
        self.call(ids, None, added)
        self.check()

    def check(self) -> None:
        np.testing.assert_array_equal(self.pool, self.reference.pool)
        for request, held in enumerate(self.reference.slots):
            for slot, entry in enumerate(held):
                assert self.positions[request, slot] == (entry[0] if entry else -1)
                if entry:
                    np.testing.assert_array_equal(self.hot[request, slot], entry[2])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "threads, k, slots, spread", [(64, 40, 64, 90), (64, 200, 201, 300), (1024, 1500, 2000, 2500)]
)
def test_streams(library, threads, k, slots, spread, descending):
    rng = np.random.default_rng(k)
    kernels = Kernels(
        library, rng, batch=3, slots=slots, max_length=spread + 50, threads=threads,
        descending=descending,
    )  # fmt: skip
    for number in range(10 if threads == 64 else 4):
        start = rng.integers(0, 50, (3, 1))
        ids = (start + rng.integers(0, spread, (3, k))).astype(np.int32)
        ids[rng.random(ids.shape) < 0.1] = -1
        wrong = rng.random(ids.shape) < 0.01
        ids[wrong] = rng.choice([-2, spread + 50, 2**31 - 1, -(2**31)], wrong.sum())
        if number % 4 == 3:
            kernels.append(np.ascontiguousarray(ids[:, : k // 8]))
            kernels.table[0, 1] = kernels.num_pages
        lengths = np.full(3, spread + 50, np.int32)
        lengths[number % 3] -= rng.integers(0, 40)
        kernels.fetch(ids, lengths)


@pytest.mark.parametrize("descending", [False, True])
def test_all_misses_then_all_hits(library, descending):
    rng = np.random.default_rng(0)
    kernels = Kernels(
        library, rng, batch=2, slots=96, max_length=600, threads=64, descending=descending
    )
    lengths = np.full(2, 600, np.int32)
    for first in (0, 96, 192, 192, 0):
        ids = first + np.stack([rng.permutation(96) for _ in range(2)]).astype(np.int32)
        kernels.fetch(ids, lengths)
        kernels.fetch(np.full((2, 7), first + 3, np.int32), lengths)


@pytest.mark.parametrize("descending", [False, True])
def test_ages_that_share_a_bucket(library, descending):
    """Victims among rows that were last used hundreds of calls ago, at different times."""
    rng = np.random.default_rng(0)
    kernels = Kernels(
        library, rng, batch=1, slots=40, max_length=200, threads=64, descending=descending
    )
    lengths = np.full(1, 200, np.int32)
    for position in rng.permutation(39):
        kernels.fetch(np.array([[position]], np.int32), lengths)
    for _ in range(300):
        kernels.fetch(np.array([[39]], np.int32), lengths)
    for first in (100, 103, 106, 120):
        kernels.fetch(first + np.arange(first // 20, dtype=np.int32)[None], lengths)
        kernels.append(np.array([[39, first + 30, 7]], np.int32))
