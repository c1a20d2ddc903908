"""Driver calls of `cuda/transfer/copy_engine.cu`, and the bytes written, without a GPU.

With a driver that copies on the host (`tests/native/copy_engine_calls.cc`). Tests with the real one
are in test_transfer_gpu.py.
"""

import dataclasses
import re
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.cache.host_layout import PageGeometry
from jaxkv._src.transfer.block_copy import BlockCopy, _copy_attribute
from tests.util.native_program import build
from tests.util.strategies import page_ids

pytestmark = pytest.mark.cpu_only

BATCH = 1024  # descriptors
MIN_ROWS = 64
ASCENDING = [*range(MIN_ROWS)]
DESCENDING = ASCENDING[::-1]
NOT_SUPPORTED, INVALID = 801, 1  # statuses of cudaMemcpyBatchAsync
TWO_OPERANDS, ONE_OPERAND, OVERWRITTEN_DESTINATIONS = range(3)  # forms of the ids


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return build("copy_engine_calls", tmp_path_factory.mktemp("copy_engine"))


@dataclasses.dataclass
class Done:
    """Effects of a call.

    Attributes:
      calls: descriptors of each driver call, 0 for one that is no batch; "rows-n" for a copy of n
        rows; "segment-n" where segment n has been enqueued.
      rejected: number of rejected entries.
      last_error: the CUDA runtime's last error, 0 if it was cleared.
      error: the handler's error, "" for none.
      arrays: bytes of each array afterwards, the strided ones first.
    """

    calls: list[int | str]
    rejected: int
    last_error: int
    error: str
    arrays: list[np.ndarray]


def _call(token: str) -> int | str:
    return token if token.startswith(("rows", "segment")) else int(token.partition("-")[2] or 0)


@dataclasses.dataclass
class Copy:
    """A copy of bytes; the strided side is one array for all buffers, or one for each."""

    geometry: PageGeometry
    num_dense: int
    num_strided: int
    num_buffers: int = 1
    joint: bool = False
    to_dense: bool = True

    @property
    def offsets(self) -> list[int]:
        room = self.num_strided * self.geometry.page_stride_bytes
        return [b * room * self.joint for b in range(self.num_buffers)]

    def arrays(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """(strided, dense) arrays in the program's form."""
        buffers = self.num_buffers
        room = self.num_strided * self.geometry.page_stride_bytes
        strided = [room * buffers] if self.joint else [room] * buffers
        lengths = [*strided, *[self.num_dense * self.geometry.block_bytes] * buffers]
        made = [
            (101 * np.arange(length) + 59 * a).astype(np.uint8) for a, length in enumerate(lengths)
        ]
        return made[: len(strided)], made[len(strided) :]

    def expected(self, sources, destinations) -> list[np.ndarray]:
        strided, dense = self.arrays()
        g = self.geometry
        runs = [
            i0 * g.strides_bytes[0] + i1 * g.strides_bytes[1] for i0, i1 in np.ndindex(g.counts)
        ]
        block = np.add.outer(runs, np.arange(g.run_bytes)).ravel()
        for b, offset in enumerate(self.offsets):
            side = strided[0 if self.joint else b]
            rows = dense[b].reshape(self.num_dense, g.block_bytes)
            for s, d in zip(sources, destinations, strict=True):
                if min(s, d) < 0:
                    continue
                on_strided, on_dense = (s, d) if self.to_dense else (d, s)
                at = offset + on_strided * g.page_stride_bytes + block
                if self.to_dense:
                    rows[on_dense] = side[at]
                else:
                    side[at] = rows[on_dense]
        return [*strided, *dense]

    def run(
        self,
        program,
        sources,
        destinations,
        *,
        capturing: int = 0,
        batch_status: int = 0,
        segment_buffers: int = 0,
        form: int = TWO_OPERANDS,
        replaced: dict[int, int] | None = None,
    ) -> Done:
        """`replaced`: numbers of the attribute, by position."""
        strided, dense = self.arrays()
        copy = BlockCopy(
            "swap_blocks",
            self.to_dense,
            [jnp.empty(0)] * len(dense),  # counted, not read
            [],
            self.geometry,
            [0] * len(dense),
            self.offsets,
            self.num_dense,
            self.num_strided,
        )
        pair = jaxkv.HostIdPair(sources, destinations)
        two = jaxkv.HostIds(sources), jaxkv.HostIds(destinations)
        attribute = _copy_attribute(copy, (*pair,) if form == ONE_OPERAND else two)  # type: ignore[arg-type]
        for position, number in (replaced or {}).items():
            attribute[position] = number
        numbers = [capturing, batch_status, len(strided[0]), len(dense[0]), len(strided)]
        numbers += [len(dense), segment_buffers, form, len(attribute), len(sources)]
        given = " ".join(str(int(n)) for n in (*numbers, *attribute, *sources, *destinations))
        ran = subprocess.run([program], input=given.encode(), check=True, capture_output=True)
        calls, rejected, last_error, error, written = ran.stdout.split(b"\n", 4)
        ends = np.cumsum([len(array) for array in (*strided, *dense)])
        return Done(
            [_call(token) for token in calls.decode().split()],
            int(rejected),
            int(last_error),
            error.decode(),
            np.split(np.frombuffer(written, np.uint8), ends[:-1]),
        )

    def check(self, program, sources, destinations, **options) -> list[int | str]:
        """Runs it and checks the bytes; returns the calls."""
        done = self.run(program, sources, destinations, **options)
        assert (done.rejected, done.last_error, done.error) == (0, 0, "")
        for got, want in zip(done.arrays, self.expected(sources, destinations), strict=True):
            np.testing.assert_array_equal(got, want)
        return done.calls


def single_run(block_bytes: int = 8) -> PageGeometry:
    return PageGeometry.contiguous(block_bytes, block_bytes)


@st.composite
def geometries(draw) -> PageGeometry:
    """Runs that may be adjacent and never overlap."""
    run_bytes, gap = draw(st.integers(1, 5)), st.integers(0, 2)
    counts = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    inner = run_bytes + draw(gap)
    outer = counts[1] * inner + draw(gap)
    page = counts[0] * outer + draw(gap)
    block_bytes = run_bytes * counts[0] * counts[1]
    return PageGeometry(block_bytes, block_bytes, run_bytes, counts, (outer, inner), page)


@st.composite
def copies(draw) -> Copy:
    side, flag = st.integers(1, 6), st.booleans()
    buffers = draw(st.integers(1, 3))
    return Copy(draw(geometries()), draw(side), draw(side), buffers, draw(flag), draw(flag))


@settings(max_examples=60)
@given(data=st.data(), copy=copies(), form=st.sampled_from([TWO_OPERANDS, ONE_OPERAND]))
def test_only_the_requested_bytes_are_written(program, data, copy, form):
    sides = (copy.num_strided, copy.num_dense)
    ids = data.draw(page_ids(*(sides if copy.to_dense else sides[::-1])))
    copy.check(program, *ids, form=form)


@st.composite
def chunks(draw) -> tuple[list[int], list[int]]:
    """Source and destination pages, many of which follow each other on both sides."""
    lengths = draw(st.lists(st.integers(1, 2 * MIN_ROWS), min_size=1, max_size=3))
    sides = []
    for _ in range(2):
        starts, page = {}, 0
        for chunk in draw(st.permutations(range(len(lengths)))):
            starts[chunk], page = page, page + lengths[chunk]
        sides.append([starts[c] + i for c, length in enumerate(lengths) for i in range(length)])
    return sides[0], sides[1]


@settings(max_examples=60)
@given(ids=chunks(), to_dense=st.booleans(), gap=st.integers(0, 3), buffers=st.integers(1, 3))
def test_only_the_requested_bytes_of_consecutive_blocks_are_written(
    program, ids, to_dense, gap, buffers
):
    copy = Copy(pages(5, 5 + gap), 6 * MIN_ROWS, 6 * MIN_ROWS, buffers, to_dense=to_dense)
    calls = copy.check(program, *ids)
    if gap == 0:
        assert not [call for call in calls if isinstance(call, str)]


def test_overwritten_destinations_are_rejected(program):
    done = Copy(single_run(), 9, 9).run(program, [0, 2], [1, 3], form=OVERWRITTEN_DESTINATIONS)
    assert done.calls == [] and "HostIds of the destination" in done.error


def test_single_descriptor_is_not_batched(program):
    assert Copy(single_run(), 9, 9).check(program, [4], [2]) == [0]
    assert Copy(single_run(), 9, 9).check(program, [4, 5, 6], [2, 3, 4]) == [0]  # adjacent
    assert Copy(single_run(), 9, 9).check(program, [4, 5, 6], [2, 3, 5]) == [2]
    assert Copy(single_run(), 9, 9).check(program, [], []) == []


def pages(block_bytes: int = 8, page_bytes: int = 24) -> PageGeometry:
    """Blocks of one run, at a distance on the strided side."""
    return PageGeometry.contiguous(block_bytes, page_bytes)


@pytest.mark.parametrize("to_dense", [True, False], ids=["load", "store"])
def test_consecutive_blocks_are_rows_of_one_copy(program, to_dense):
    copy = Copy(pages(), 20 + MIN_ROWS, 20 + MIN_ROWS, num_buffers=2, to_dense=to_dense)
    ids = [3 + i for i in ASCENDING], [9 + i for i in ASCENDING]
    assert copy.check(program, *(side[1:] for side in ids)) == [2 * (MIN_ROWS - 1)]
    assert copy.check(program, *ids) == [f"rows-{MIN_ROWS}"] * 2
    ids = [1, *ids[0], MIN_ROWS + 9], [0, *ids[1], 2]
    assert copy.check(program, *ids) == [*[f"rows-{MIN_ROWS}"] * 2, 4]
    assert copy.check(program, *ids, segment_buffers=1) == [
        *[f"rows-{MIN_ROWS}", 2, "segment-0"],
        *[f"rows-{MIN_ROWS}", 2, "segment-1"],
    ]


@pytest.mark.parametrize(
    "ids",
    [
        (ASCENDING, DESCENDING),
        (DESCENDING, DESCENDING),
        (ASCENDING, [2 * page for page in ASCENDING]),
        ([*ASCENDING[:-1], MIN_ROWS], ASCENDING),
    ],
    ids=["descending on one side", "descending", "at a distance", "one too few"],
)
def test_other_blocks_are_no_rows(program, ids):
    assert Copy(pages(), 2 * MIN_ROWS, 2 * MIN_ROWS).check(program, *ids) == [MIN_ROWS]


def test_blocks_of_several_runs_are_no_rows(program):
    split = PageGeometry(8, 8, 4, (1, 2), (16, 8), 24)
    assert Copy(split, MIN_ROWS, MIN_ROWS).check(program, ASCENDING, ASCENDING) == [2 * MIN_ROWS]


def test_failed_copy_of_rows_is_reported_and_its_error_cleared(program):
    copy = Copy(pages(), MIN_ROWS, MIN_ROWS)
    done = copy.run(program, ASCENDING, ASCENDING, batch_status=INVALID)
    assert "cudaMemcpy2DAsync" in done.error and done.last_error == 0


def test_adjacent_runs_of_two_buffers_are_not_merged(program):
    """Two buffers in one array: the first's last block is adjacent to the second's first."""
    copy = Copy(single_run(), 2, 2, num_buffers=2, joint=True)
    assert copy.check(program, [0, 1], [0, 1]) == [2]


@pytest.mark.parametrize("to_dense", [True, False], ids=["load", "store"])
@pytest.mark.parametrize("count", [BATCH - 1, BATCH, BATCH + 1, 2 * BATCH + 452])
def test_batch_size_is_bounded(program, count, to_dense):
    copy = Copy(single_run(3), 2 * count, count, to_dense=to_dense)
    strided, adjacent = range(0, 2 * count, 2), range(count)
    ids = (adjacent, strided) if to_dense else (strided, adjacent)
    full, rest = divmod(count, BATCH)
    want = [BATCH] * full + [rest if rest > 1 else 0] * (rest > 0)
    assert copy.check(program, *ids) == want


@pytest.mark.parametrize("to_dense", [True, False], ids=["load", "store"])
def test_asynchronous_copy_enqueues_each_segment(program, to_dense):
    """A segment's buffers share a batch."""
    copy = Copy(single_run(), 9, 9, num_buffers=4, to_dense=to_dense)
    calls = copy.check(program, [4, 6], [2, 5], segment_buffers=2)
    assert calls == [4, "segment-0", 4, "segment-1"]
    calls = copy.check(program, [4, -1], [2, 5], segment_buffers=4)
    assert calls == [4, "segment-0"]
    calls = copy.check(program, [], [], segment_buffers=1)
    assert calls == [f"segment-{number}" for number in range(4)]


def test_descriptors_are_copied_singly_without_batches(program):
    calls = Copy(single_run(), 9, 9).check(
        program, [0, 2, 4], [1, 3, 5], batch_status=NOT_SUPPORTED
    )
    assert calls == [3, 0, 0, 0]


def test_failed_batch_is_reported_and_its_error_cleared(program):
    copy = Copy(single_run(), 9, 9)
    done = copy.run(program, [0, 2], [1, 3], batch_status=INVALID)
    assert re.fullmatch(
        r"jaxkv: 2 descriptors: cudaMemcpyBatchAsync failed at "
        r"\S*cuda/transfer/copy_engine\.cu:\d+: cudaErrorOfTheDriver: an error of the driver",
        done.error,
    )
    assert done.last_error == 0
    for got, before in zip(done.arrays, copy.expected([], []), strict=True):
        np.testing.assert_array_equal(got, before)


@pytest.mark.parametrize(
    ("position", "number"),
    [(3, -1), (3, 9), (3, 12), (4, 9), (4, 2**40), (5, 4), (5, -1), (5, 2**31)],
)
def test_ids_past_the_end_of_their_operand_are_rejected(program, position, number):
    """Of 3 ids after a header of 8 words. The attribute has the position and number of the ids."""
    done = Copy(single_run(), 9, 9).run(program, [0, 2, 4], [1, 3, 5], replaced={position: number})
    assert done.calls == [] and "of an operand of 11 words" in done.error


def test_capture_is_rejected(program):
    done = Copy(single_run(), 9, 9).run(program, [0, 2], [1, 3], capturing=True)
    assert done.calls == [] and "captured" in done.error and "kernel" in done.error


def test_failed_capture_query_is_reported_and_its_error_cleared(program):
    done = Copy(single_run(), 9, 9).run(program, [0, 2], [1, 3], capturing=2)
    assert done.calls == [] and "cudaStreamIsCapturing" in done.error
    assert done.last_error == 0


@pytest.mark.parametrize(
    ("sources", "destinations", "good"),
    [
        ([9, 1], [0, 1], [1]),
        ([0, 1], [2, 9], [0]),
        ([3, 4, 5], [7, 7, 6], [2]),
        ([9] * 100 + [2], [3] * 101, [100]),
    ],
    ids=["source", "destination", "duplicates", "more than a ring keeps"],
)
def test_rejected_ids_are_counted_and_others_copied(program, sources, destinations, good):
    copy = Copy(single_run(), 9, 9)
    done = copy.run(program, sources, destinations)
    assert (done.rejected, done.error) == (len(sources) - len(good), "")
    want = copy.expected([sources[i] for i in good], [destinations[i] for i in good])
    for got, wanted in zip(done.arrays, want, strict=True):
        np.testing.assert_array_equal(got, wanted)
