"""Host knowledge of recurrent states, and its timing; and the next step's batch."""

import functools
import itertools
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv.metadata import BatchMetadata, slot_mapping, token_positions
from tests.util import recurrent_reference as reference
from tests.util.recurrent_cases import batch_of, random_accepted, random_rows


def can_skip(requests, block_size) -> bool:
    """Takes (computed, scheduled, drafts) of each request."""
    computed, scheduled, drafts = np.array(requests, np.int64).reshape(-1, 3).T
    return jaxkv.recurrent.can_skip_align_postprocess(computed, scheduled, drafts, block_size)


def test_can_skip_is_exact_for_one_request():
    """False exactly if some possible count makes the reference change something."""
    for block_size, computed, scheduled in itertools.product(range(1, 7), range(14), range(9)):
        for drafts in range(min(scheduled, 5)):
            case = computed, scheduled, drafts
            due = any(
                reference.changes(*case, accepted, block_size) for accepted in range(1, drafts + 2)
            )
            skip = can_skip([case], block_size)
            assert skip is not due, (block_size, *case)


@given(st.lists(st.tuples(*[st.integers(0, 50)] * 3)), st.integers(1, 20))
def test_can_skip_batch_requires_all_requests(requests, block_size):
    requests = [(c, q, min(d, max(q - 1, 0))) for c, q, d in requests]
    alone = [can_skip([case], block_size) for case in requests]
    assert can_skip(requests, block_size) is all(alone)


@pytest.mark.parametrize(
    "computed, scheduled, drafts, block_size, message",
    [
        ([7], [3], [2], 0, "block_size must be >= 1, got 0"),
        ([7, 3], [3], [2], 4, "one entry for each request, got 2, 1 and 1"),
        ([7, 3], [3, 3], [2], 4, "one entry for each request, got 2, 2 and 1"),
        ([7.5], [3], [2], 4, "num_computed must be integers in one dimension, got float64"),
        ([7], 3, [2], 4, r"num_scheduled must be integers in one dimension, got int64\[\]"),
        ([7], [3], [True], 4, "num_drafts must be integers in one dimension, got bool"),
        ([2**64 - 1], [3], [2], 4, "num_computed must fit int64, got 18446744073709551615"),
        ([7], [3], [2], True, "block_size must be an integer, got bool"),
    ],
)
def test_can_skip_rejects(computed, scheduled, drafts, block_size, message):
    with pytest.raises(TypeError if block_size is True else ValueError, match=message):
        jaxkv.recurrent.can_skip_align_postprocess(computed, scheduled, drafts, block_size)


def start_counts(step, ids, counts):
    """A jitted step that only starts the copy."""

    @jax.jit
    def run(step, ids, counts):
        return jaxkv.recurrent.DeferredCounts.start(counts, step=step, request_ids=ids)

    return run(np.int32(step), np.array(ids, np.int32), np.array(counts, np.int32))


def test_deferred_counts_are_in_pinned_memory():
    deferred = start_counts(7, [30, 10, 20, -1], [1, 4, 2, 1])
    assert deferred.packed.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(deferred.read(step=7, request_ids=[30, 10, 20, -1]), [1, 4, 2, 1])
    assert deferred.is_ready()
    np.testing.assert_array_equal(deferred.read(step=7, request_ids=[30, 10]), [1, 4])
    assert deferred.read(step=7, request_ids=[]).shape == (0,)


@pytest.mark.parametrize(
    "step, ids, message",
    [
        (8, [30, 10], "expected counts of step 8, got step 7"),
        (6, [30, 10], "expected counts of step 6, got step 7"),
        (7, [10, 30], "expected request 10 in row 0 of step 7, got request 30"),
        (7, [30, 11], "expected request 11 in row 1 of step 7, got request 10"),
        (7, [30, 10, 20], "request_ids has 3 rows, but step 7 has 2"),
    ],
)
def test_stale_or_permuted_counts_raise(step, ids, message):
    deferred = start_counts(7, [30, 10], [1, 4])
    with pytest.raises(jaxkv.StaleCountsError, match=message):
        deferred.read(step=step, request_ids=ids)


@pytest.mark.parametrize(
    "step, ids, error, message",
    [
        (7, [[30, 30]], ValueError, r"request_ids must be integers in one dimension, got int64\[1"),
        (7, 30, ValueError, "request_ids must be integers in one dimension"),
        (7, [30.0, 10.0], ValueError, "request_ids must be integers .*, got float64"),
        ("7", [30, 10], TypeError, "DeferredCounts.read: step must be an integer, got '7'"),
        (np.array(7.0), [30, 10], TypeError, "step must be an integer, got array"),
    ],
)
def test_read_rejects(step, ids, error, message):
    deferred = start_counts(7, [30, 10], [1, 4])
    with pytest.raises(error, match=message):
        deferred.read(step=step, request_ids=ids)
    np.testing.assert_array_equal(deferred.read(step=np.int64(7), request_ids=[30, 10]), [1, 4])


def test_deferred_counts_of_several_steps_in_flight():
    ids = np.arange(5)
    pending = [start_counts(step, ids, ids + step) for step in range(4)]
    for step, deferred in enumerate(pending):
        np.testing.assert_array_equal(deferred.read(step=step, request_ids=ids), ids + step)


@pytest.mark.cpu_only
@pytest.mark.parametrize("later_steps", [0, 2])
def test_counts_of_a_failed_step_raise_its_error(later_steps):
    """Also long after it, when they are ready, and those of the steps that it made fail."""
    batch = BatchMetadata.from_host(
        [1], [1], [[1]], max_num_reqs=1, max_num_tokens=4, max_blocks=1, block_size=4
    )

    @jax.jit
    def step(batch, query_lens, number):
        one = query_lens // query_lens
        following = jaxkv.recurrent.advance(
            batch, one, num_drafts=0 * one, next_query_lens=query_lens
        )
        return following, jaxkv.recurrent.DeferredCounts.start(one, step=number, request_ids=one)

    @jax.jit
    def slow_four():  # without it, the step might fail while it is dispatched
        x = jax.lax.fori_loop(0, 20, lambda _, x: x @ x * 0.001, jnp.ones((500, 500)))
        return (x[0, :1] * 0).astype(jnp.int32) + 4

    jax.block_until_ready(step(batch, slow_four() // 4, np.int32(0)))  # compiles
    query_lens = slow_four()
    for number in range(1 + later_steps):
        batch, deferred = step(batch, query_lens, np.int32(number))
    while not deferred.is_ready():
        time.sleep(0.01)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"BoundError: recurrent.advance: .* 5,"):
        deferred.read(step=later_steps, request_ids=[1])


def test_read_is_a_host_sync_even_of_ready_counts():
    deferred = start_counts(7, [30], [4])
    deferred.read(step=7, request_ids=[30])
    assert deferred.is_ready()
    with jaxkv.forbid_host_sync(mode="count") as report:
        deferred.read(step=7, request_ids=[30])
    assert report.count == 1


OPERANDS = {"num_accepted": np.ones(2), "step": np.array(7), "request_ids": np.array([30, 10])}


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("value", [2**32 + 5, -(2**31) - 1])
def test_start_rejects_values_outside_int32(name, value):
    given = {key: operand.astype(np.int64) for key, operand in OPERANDS.items()}
    jaxkv.recurrent.DeferredCounts.start(**given)
    given[name][...] = value
    with pytest.raises(ValueError, match=rf"{name} must fit int32, got {value} \.\. {value}"):
        jaxkv.recurrent.DeferredCounts.start(**given)


@pytest.mark.parametrize("shape", [(), (2, 1)])
def test_start_rejects_counts_of_other_shapes(shape):
    counts = np.ones(shape, np.int32)
    with pytest.raises(
        ValueError, match=rf"num_accepted must be int32\[B\], got {len(shape)} axes"
    ):
        jaxkv.recurrent.DeferredCounts.start(counts, step=7, request_ids=np.array([3, 1], np.int32))


@pytest.mark.parametrize("name", ["num_accepted", "num_drafts", "next_query_lens"])
def test_advance_rejects_values_outside_int32(name):
    _, batch, accepted, query_lens = next_call(np.random.default_rng(0))
    counts = {"num_drafts": accepted, "next_query_lens": query_lens, "num_accepted": accepted}
    with pytest.raises(ValueError, match=f"{name} must fit int32, got 4294967297"):
        jaxkv.recurrent.advance(batch, **counts | {name: np.full(10, 2**32 + 1)})


@pytest.mark.parametrize("name", ["num_accepted", "num_drafts", "next_query_lens"])
def test_advance_rejects_negative_counts(name):
    _, batch, accepted, query_lens = next_call(np.random.default_rng(0))
    counts = {"num_drafts": accepted, "next_query_lens": query_lens, "num_accepted": accepted}
    with pytest.raises(ValueError, match=f"{name} must be at least 0 in each row, got -1"):
        jaxkv.recurrent.advance(batch, **counts | {name: np.full(10, -1, np.int32)})


@pytest.mark.parametrize(
    "accepted, drafts, message",
    [
        (0, 1, r"the accepted tokens of row 0 must be in \[1, 2\], .* got 0"),
        (3, 1, r"the accepted tokens of row 0 must be in \[1, 2\], .* got 3"),
        (1, 5, "row 0 must have fewer drafts than its 2 query tokens, got num_drafts 5"),
    ],
)
def test_counts_that_contradict_the_batch_raise(accepted, drafts, message):
    """Of a row with tokens; any other row has no counts."""
    batch = BatchMetadata.from_host(
        [2, 0], [2, 4], [[1], [2]], max_num_reqs=3, max_num_tokens=4, max_blocks=1, block_size=4
    )
    counts = np.array([accepted, 0, 9], np.int32)
    drafts = np.array([drafts, 0, 0], np.int32)
    with pytest.raises(ValueError, match=f"recurrent.advance: {message}"):
        jaxkv.recurrent.advance(batch, counts, num_drafts=drafts, next_query_lens=0 * drafts)
    states, kinds = jnp.zeros((3, 4)), jaxkv.recurrent.StateKind.TEMPORAL
    with pytest.raises(ValueError, match=f"recurrent.align_postprocess: {message}"):
        jaxkv.recurrent.align_postprocess(states, batch, counts, kinds=kinds, num_drafts=drafts)
    counts[0], drafts[0] = 2, 1
    jaxkv.recurrent.align_postprocess(states, batch, counts, kinds=kinds, num_drafts=drafts)


@pytest.mark.parametrize("donated", [False, True])
def test_deleted_counts_raise(donated):
    deferred = start_counts(7, [30], [1])
    if donated:
        jax.jit(lambda words: words + 1, donate_argnums=0)(deferred.packed)
    else:
        deferred.packed.delete()
    assert deferred.packed.is_deleted()
    for ask in (deferred.is_ready, lambda: deferred.read(step=7, request_ids=[30])):
        with pytest.raises(RuntimeError, match="the counts were donated or deleted"):
            ask()


class OfAGpu:
    """An array with a GPU's attributes: the pointer must not be dereferenced."""

    ndim, size, dtype = 1, 3, np.int32

    def __init__(self, memory_kind):
        self.sharding = types.SimpleNamespace(memory_kind=memory_kind)

    def addressable_data(self, _):
        return self

    def devices(self):
        return [types.SimpleNamespace(platform="gpu")]

    def is_deleted(self):
        return False

    def block_until_ready(self):
        return self


def test_counts_in_device_memory_raise():
    array: Any = OfAGpu("device")
    with pytest.raises(ValueError, match="the host cannot read counts in memory of kind 'device'"):
        jaxkv.recurrent.DeferredCounts(array).read(step=7, request_ids=[30])
    moved = jaxkv.recurrent.DeferredCounts(
        jax.device_put(np.array([7, 30, 4], np.int32), jax.devices()[0])
    )
    if jax.default_backend() == "cpu":
        assert moved.read(step=7, request_ids=[30]).tolist() == [4]
    else:
        with pytest.raises(ValueError, match="memory of kind 'device'"):
            moved.read(step=7, request_ids=[30])


# --------------------------------------------------------------------------------------------------
# The next step


@jax.jit
def next_step(batch, accepted, drafts, query_lens):
    batch = jaxkv.recurrent.advance(batch, accepted, num_drafts=drafts, next_query_lens=query_lens)
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
    "longer, message",
    [
        (False, "recurrent.advance: .* needs 30, more than the bound max_num_tokens = 20"),
        (
            True,
            r"recurrent.advance: .* than the bound max_blocks \* block_size \* cp_world_size = ",
        ),
    ],
)
def test_advance_beyond_bounds_raises(longer, message):
    rows, batch, accepted, query_lens = next_call(np.random.default_rng(0), 100 if longer else 20)
    query_lens[:] = 3
    rows.num_reqs = 10
    batch = BatchMetadata(**{**vars(batch), "num_reqs": np.int32(10)})
    if longer:
        query_lens[2] = 70
    with pytest.raises(Exception, match=message):
        jax.block_until_ready(next_step(batch, accepted, rows.drafts.astype(np.int32), query_lens))
        jaxkv.check_errors()


@pytest.mark.parametrize(
    "query_lens, accepted, message",
    [
        ([2**30, 2**30, 0, 0], 1, "needs 2147483647, more than the bound max_num_tokens = 4"),
        ([2**31 - 1, 1, 1, 1], 1, "more than the bound max_num_tokens = 4"),
        ([2**30] * 4, 1, "more than the bound max_num_tokens = 4"),
        ([-1, 2, -1, 1], 1, "needs 2, more than the bound rows of negative length = 0"),
        ([1] * 4, -7, "needs 4, more than the bound rows of negative length = 0"),
        ([1] * 4, 2**31 - 1, "needs 4, more than the bound rows of negative length = 0"),
    ],
)
def test_advance_counts_lengths_that_overflow(query_lens, accepted, message):
    """On the device, where their sum may be a valid number."""
    batch = BatchMetadata.from_host(
        [1] * 4, [5] * 4, [[1, 2]] * 4, max_num_reqs=4, max_num_tokens=4, max_blocks=2, block_size=4
    )
    step = jax.jit(functools.partial(jaxkv.recurrent.advance, num_drafts=np.zeros(4, np.int32)))
    with pytest.raises(Exception, match=message):
        after = step(batch, np.full(4, accepted, np.int32), next_query_lens=np.int32(query_lens))
        jaxkv.check_errors(jax.block_until_ready(after))


@pytest.mark.parametrize("used", ["query_start_loc", "seq_lens", "num_tokens"])
@pytest.mark.parametrize("rows", [1, 2])
def test_advance_to_the_last_token_of_the_bound(rows, used):
    """And no more, with any subset of the next batch in use."""
    batch = BatchMetadata.from_host(
        [1] * rows, [7] * rows, [[1, 2]] * rows,
        max_num_reqs=rows, max_num_tokens=rows, max_blocks=2, block_size=4,
    )  # fmt: skip
    ones = np.ones(rows, np.int32)

    @jax.jit
    def step(query_lens):
        after = jaxkv.recurrent.advance(
            batch, ones, num_drafts=0 * ones, next_query_lens=query_lens
        )
        return getattr(after, used)

    jaxkv.check_errors(step(ones))
    with pytest.raises(Exception, match=f"needs {2 * rows}, more than .* max_num_tokens"):
        jaxkv.check_errors(jax.block_until_ready(step(ones + 1)))


@pytest.mark.parametrize("ranks", [np.int64(4), 4])
def test_advance_under_context_parallelism(ranks):
    """A context has a block table of blocks on each rank."""
    batch = BatchMetadata.from_host(
        [1], [30], [[1, 2]],
        max_num_reqs=1, max_num_tokens=4, max_blocks=2, block_size=4, cp_world_size=4,
    )  # fmt: skip
    one = np.ones(1, np.int32)
    following = functools.partial(jaxkv.recurrent.advance, num_drafts=0 * one, cp_world_size=ranks)
    after = following(batch, one, next_query_lens=2 * one)
    assert after.seq_lens.tolist() == [32]
    jaxkv.check_errors(after)
    with pytest.raises(Exception, match=r"needs 33, more than .* cp_world_size = 32"):
        jaxkv.check_errors(jax.block_until_ready(following(batch, one, next_query_lens=3 * one)))
    with pytest.raises(ValueError, match="cp_world_size must be >= 1, got 0"):
        following(batch, one, next_query_lens=one, cp_world_size=0)
