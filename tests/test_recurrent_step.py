"""What is known on the host of recurrent states, and when; and the next step's batch."""

import itertools

import jax
import numpy as np
import pytest
import recurrent_reference as reference
from hypothesis import given
from hypothesis import strategies as st
from recurrent_cases import batch_of, random_accepted, random_rows

import jaxkv
from jaxkv.metadata import BatchMetadata, slot_mapping, token_positions


def can_skip(requests, block_size) -> bool:
    """Of (computed, scheduled, drafts) for each request."""
    computed, scheduled, drafts = np.array(requests, np.int64).reshape(-1, 3).T
    return jaxkv.can_skip_align_postprocess(computed, scheduled, drafts, block_size)


def test_can_skip_is_exact_for_one_request():
    """It says False just where some count that may come makes the reference change something."""
    for block_size, computed, scheduled in itertools.product(range(1, 7), range(14), range(9)):
        for drafts in range(min(scheduled, 5)):
            case = computed, scheduled, drafts
            due = any(
                reference.changes(*case, accepted, block_size) for accepted in range(1, drafts + 2)
            )
            skip = can_skip([case], block_size)
            assert skip is not due, (block_size, *case)


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 3)), st.integers(1, 20))
def test_can_skip_of_a_batch_is_that_of_all_its_requests(requests, block_size):
    requests = [(c, q, min(d, max(q - 1, 0))) for c, q, d in requests]
    alone = [can_skip([case], block_size) for case in requests]
    assert can_skip(requests, block_size) is all(alone)


def start_counts(step, ids, counts):
    """A jitted step that starts the copy and does nothing else."""

    @jax.jit
    def run(step, ids, counts):
        return jaxkv.DeferredCounts.start(counts, step=step, request_ids=ids)

    return run(np.int32(step), np.array(ids, np.int32), np.array(counts, np.int32))


def test_deferred_counts_arrive_in_pinned_memory():
    deferred = start_counts(7, [30, 10, 20, -1], [1, 4, 2, 1])
    assert deferred.packed.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(deferred.read(step=7, request_ids=[30, 10, 20, -1]), [1, 4, 2, 1])
    assert deferred.is_ready()
    np.testing.assert_array_equal(deferred.read(step=7, request_ids=[30, 10]), [1, 4])
    assert deferred.read(step=7, request_ids=[]).shape == (0,)


@pytest.mark.parametrize(
    "step, ids, message",
    [
        (8, [30, 10], "counts of step 8 were wanted, these are of step 7"),
        (6, [30, 10], "counts of step 6 were wanted, these are of step 7"),
        (7, [10, 30], "row 0 of step 7 is of request 30, not of 10"),
        (7, [30, 11], "row 1 of step 7 is of request 10, not of 11"),
        (7, [30, 10, 20], "3 rows were wanted, step 7 had 2"),
    ],
)
def test_stale_or_permuted_counts_are_an_error(step, ids, message):
    deferred = start_counts(7, [30, 10], [1, 4])
    with pytest.raises(jaxkv.StaleCountsError, match=message):
        deferred.read(step=step, request_ids=ids)


def test_deferred_counts_of_several_steps_in_flight():
    ids = np.arange(5)
    pending = [start_counts(step, ids, ids + step) for step in range(4)]
    for step, deferred in enumerate(pending):
        np.testing.assert_array_equal(deferred.read(step=step, request_ids=ids), ids + step)


# --------------------------------------------------------------------------------------------------
# The next step


@jax.jit
def next_step(batch, accepted, drafts, query_lens):
    batch = jaxkv.advance(batch, accepted, num_drafts=drafts, next_query_lens=query_lens)
    positions = token_positions(batch)
    return batch, positions, slot_mapping(batch, positions)


def next_call(rng, max_num_tokens=80):
    rows = random_rows(rng, 10, columns=14)
    batch = batch_of(rows)
    batch = BatchMetadata(**{**vars(batch), "max_num_tokens": max_num_tokens})
    return rows, batch, random_accepted(rng, rows), rng.integers(0, 7, 10).astype(np.int32)


@given(st.integers(0, 2**32 - 1))
def test_advance(seed):
    rng = np.random.default_rng(seed)
    rows, batch, accepted, query_lens = next_call(rng)
    got, positions, slots = next_step(batch, accepted, rows.drafts.astype(np.int32), query_lens)
    want_positions, want_slots, starts, ends = [], [], [0], []
    for row in range(10):
        valid = rows.end(row)
        if rows.scheduled[row]:
            valid += int(accepted[row]) - 1 - int(rows.drafts[row])
        new = int(query_lens[row]) if row < rows.num_reqs else 0
        for position in range(valid, valid + new):
            block = rows.table[row, position // rows.block_size]
            want_positions.append(position)
            want_slots.append(block * rows.block_size + position % rows.block_size)
        starts.append(starts[-1] + new)
        ends.append(valid + new if row < rows.num_reqs else 0)
    padding = 80 - len(want_positions)
    np.testing.assert_array_equal(got.query_start_loc, starts)
    np.testing.assert_array_equal(got.seq_lens, ends)
    assert got.num_tokens == starts[-1] and got.num_reqs == rows.num_reqs
    np.testing.assert_array_equal(positions, want_positions + [0] * padding)
    np.testing.assert_array_equal(slots, want_slots + [-1] * padding)


@pytest.mark.parametrize(
    "longer, message", [(False, "num_tokens = 30 exceeds"), (True, "seq_len = ")]
)
def test_advance_holds_its_bounds(longer, message):
    rows, batch, accepted, query_lens = next_call(np.random.default_rng(0), 100 if longer else 20)
    query_lens[:] = 3
    rows.num_reqs = 10
    batch = BatchMetadata(**{**vars(batch), "num_reqs": np.int32(10)})
    if longer:
        query_lens[2] = 70
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(next_step(batch, accepted, rows.drafts.astype(np.int32), query_lens))
        jaxkv.check_errors()
