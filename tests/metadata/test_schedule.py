"""metadata.schedule against an explicit form of the rules, and upstream's cases."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import schedule
from tests.util.batches import every_batch

REQUESTS = st.lists(
    st.tuples(st.integers(1, 6), st.integers(0, 6), st.integers(1, 9)), max_size=40
)  # scheduled, computed, prompt


def columns(requests) -> tuple[list[int], list[int], list[int]]:
    scheduled, computed, prompt = ([row[i] for row in requests] for i in range(3))
    return scheduled, computed, prompt


def region_of(request: tuple[int, int, int], threshold: int) -> int:
    scheduled, computed, prompt = request
    if computed == 0:
        return 3
    if scheduled > threshold:
        return 2
    return 1 if computed < prompt else 0


def swapped_into_order(regions: list[int]) -> list[int]:
    """The rows after swaps along cycles, as a scheduler moves its state."""
    target = [region for kind in range(4) for region in regions if region == kind]
    places = [i for i, region in enumerate(regions) if region != target[i]]
    by_region = sorted(places, key=lambda i: regions[i])
    goes_to = dict(zip(by_region, places, strict=True))
    rows = list(range(len(regions)))
    for start in by_region:
        place = goes_to[start]
        while place != start:
            rows[start], rows[place] = rows[place], rows[start]
            goes_to[place], place = place, goes_to[place]
    return rows


@every_batch
@given(REQUESTS, st.integers(0, 4))
def test_reorder_batch(requests, threshold):
    order = schedule.reorder_batch(*columns(requests), threshold)
    regions = [region_of(request, threshold) for request in requests]
    assert order.tolist() == swapped_into_order(regions)
    assert sorted(order) == list(range(len(requests)))
    assert [regions[i] for i in order] == sorted(regions)
    # Rows in their place stay.
    stays = [i for i, region in enumerate(regions) if region == sorted(regions)[i]]
    assert [order[i] for i in stays] == stays
    again = schedule.reorder_batch(*columns([requests[i] for i in order]), threshold)
    assert again.tolist() == list(range(len(requests)))


@pytest.mark.parametrize(
    ("requests", "threshold", "order"),
    [
        ([(100, 100, 100), (1, 10, 10), (200, 200, 200), (1, 20, 20)], 1, [3, 1, 2, 0]),
        ([(1, 0, 1), (1, 5, 5)], 1, [1, 0]),  # one token, but nothing computed: a prefill
        ([(1, 5, 9), (1, 9, 9)], 1, [1, 0]),  # a short extend after a decode
        ([(4, 5, 9), (4, 9, 9), (2, 5, 9), (2, 9, 9), (4, 0, 9)], 2, [3, 2, 0, 1, 4]),
        ([(1, 5, 5), (1, 6, 6)], 1, [0, 1]),
        ([], 1, []),
    ],
)
def test_reorder_batch_examples(requests, threshold, order):
    assert schedule.reorder_batch(*columns(requests), threshold).tolist() == order


def test_reorder_batch_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="decode_threshold must be >= 0 tokens, got -1"):
        schedule.reorder_batch([1], [1], [1], -1)
    with pytest.raises(ValueError, match="got 2, 1 and 1 requests"):
        schedule.reorder_batch([1, 1], [1], [1], 1)
    with pytest.raises(ValueError, match="num_computed must be integers"):
        schedule.reorder_batch([1], np.array([0.5]), [1], 1)


@given(REQUESTS)
def test_seq_lens_upper_bound(requests):
    scheduled, computed, _ = columns(requests)
    got = schedule.seq_lens_upper_bound(scheduled, computed, max_num_reqs=40)
    assert got.dtype == np.int32
    want = [s + c for s, c in zip(scheduled, computed, strict=True)]
    assert got.tolist() == want + [0] * (40 - len(want))


def test_seq_lens_upper_bound_rejects_invalid_arguments():
    with pytest.raises(ValueError, match="num_scheduled must be integers in one dimension"):
        schedule.seq_lens_upper_bound(np.array([1.5]), [2], max_num_reqs=1)
    with pytest.raises(ValueError, match="max_num_reqs=1, got 2 and 2 requests"):
        schedule.seq_lens_upper_bound([1, 1], [2, 2], max_num_reqs=1)
    with pytest.raises(ValueError, match="2 and 1 requests"):
        schedule.seq_lens_upper_bound([1, 1], [2], max_num_reqs=4)
    message = "request 1: num_scheduled=5 and num_computed=2147483643 tokens"
    for dtype in (np.int32, np.int64):
        scheduled, computed = np.array([[5, 5], [2**31 - 6, 2**31 - 5]], dtype)
        with pytest.raises(ValueError, match=message):
            schedule.seq_lens_upper_bound(scheduled, computed, max_num_reqs=4)
        got = schedule.seq_lens_upper_bound(scheduled[:1], computed[:1], max_num_reqs=2)
        assert got.tolist() == [2**31 - 1, 0]


@every_batch
@given(st.lists(st.integers(0, 9), max_size=30), st.integers(9, 30), st.integers(0, 5))
def test_split_prefill_chunks(lens, workspace, offset):
    chunks = schedule.split_prefill_chunks(lens, workspace, offset)
    rows = [row for first, last in chunks for row in range(first, last)]
    assert rows == list(range(offset, offset + len(lens)))
    assert all(first < last for first, last in chunks)
    totals = [sum(lens[first - offset : last - offset]) for first, last in chunks]
    assert all(total <= workspace for total in totals)
    # Each is of maximum length: the next request would not have fitted.
    for total, (following, _) in itertools.zip_longest(totals[:-1], chunks[1:]):
        assert total + lens[following - offset] > workspace


@pytest.mark.parametrize(
    ("lens", "workspace", "offset", "chunks"),
    [
        ([2, 3, 4], 5, 0, [(0, 2), (2, 3)]),
        ([5, 5, 5], 5, 2, [(2, 3), (3, 4), (4, 5)]),
        ([0, 5, 0], 5, 0, [(0, 3)]),
        ([], 5, 3, []),
    ],
)
def test_split_prefill_chunks_examples(lens, workspace, offset, chunks):
    assert schedule.split_prefill_chunks(lens, workspace, offset) == chunks


def test_split_prefill_chunks_rejects_long_request():
    with pytest.raises(ValueError, match="request 1: 6 tokens exceed workspace=5 tokens"):
        schedule.split_prefill_chunks([1, 6], 5, 0)
