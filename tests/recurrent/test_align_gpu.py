"""GPU-only behaviour of recurrent states: replays, slow producers, many arrays, large offsets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util import recurrent_reference as reference
from tests.util.recurrent_cases import (
    DS,
    SD,
    TEMPORAL,
    batch_of,
    random_accepted,
    random_rows,
    random_states,
    same_bits,
)
from tests.util.recurrent_reference import Rows
from tests.util.slow_streams import slow_input, slow_zero

pytestmark = pytest.mark.gpu

KINDS = (SD, DS, TEMPORAL)
SHAPES = ((6, 64), (40, 6), (512,))


@functools.partial(jax.jit, donate_argnums=0, static_argnames="kinds")
def step(states, batch, accepted, drafts, kinds):
    return jaxkv.recurrent.align_postprocess(
        states, batch, accepted, kinds=[*kinds], num_drafts=drafts
    )


def test_graph_replay_reads_new_counts():
    """Equal arrays, so the same command buffer, with different rows each time."""
    rng = np.random.default_rng(0)
    rows = random_rows(rng, 200)
    want = random_states(rng, KINDS, SHAPES, [np.float16] * 3, rows.table.size + 1)
    states = [jnp.array(state) for state in want]
    for _ in range(12):
        rows = random_rows(rng, 200)
        accepted = random_accepted(rng, rows)
        states, counts = step(states, batch_of(rows), accepted, rows.drafts.astype(np.int32), KINDS)
        want_counts = reference.postprocess(want, KINDS, rows, accepted)
        np.testing.assert_array_equal(counts, want_counts)
        assert all(map(same_bits, states, want))


def test_many_calls_of_one_program():
    """Chained calls in one command buffer; each decides by the counts of the previous one."""
    rng = np.random.default_rng(1)
    rows = random_rows(rng, 64)
    want = random_states(rng, KINDS, SHAPES, [np.float16] * 3, rows.table.size + 1)
    accepted = random_accepted(rng, rows)

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(states, batch, accepted, drafts):
        for _ in range(8):
            states, accepted = jaxkv.recurrent.align_postprocess(
                states, batch, accepted, kinds=[*KINDS], num_drafts=drafts
            )
        return states, accepted

    states = [jnp.array(state) for state in want]
    for _ in range(4):
        states, counts = chain(states, batch_of(rows), accepted, rows.drafts.astype(np.int32))
        want_counts = accepted
        for _ in range(8):
            want_counts = reference.postprocess(want, KINDS, rows, want_counts)
        np.testing.assert_array_equal(counts, want_counts)
        assert all(map(same_bits, states, want))


def test_counts_are_read_when_ready():
    """Accepted counts that are available only after a long chain of products."""
    rng = np.random.default_rng(2)
    rows = random_rows(rng, 64)
    want = random_states(rng, KINDS, SHAPES, [np.float16] * 3, rows.table.size + 1)
    late_step = jax.jit(
        lambda states, batch, accepted, drafts, x: step(
            states, batch, accepted + slow_zero(x), drafts, KINDS
        ),
        donate_argnums=0,
    )
    states, x = [jnp.array(state) for state in want], slow_input()
    for _ in range(6):
        accepted = random_accepted(rng, rows)
        states, _ = late_step(states, batch_of(rows), accepted, rows.drafts.astype(np.int32), x)
        reference.postprocess(want, KINDS, rows, accepted)
        assert all(map(same_bits, states, want))


def test_maximum_number_of_arrays():
    rng = np.random.default_rng(3)
    rows = random_rows(rng, 16)
    kinds = tuple(KINDS[i % 3] for i in range(256))
    shapes = [SHAPES[i % 3] for i in range(256)]
    want = random_states(rng, kinds, shapes, [np.float16] * 256, rows.table.size + 1)
    accepted = random_accepted(rng, rows)
    states, _ = step(
        [jnp.array(s) for s in want], batch_of(rows), accepted, rows.drafts.astype(np.int32), kinds
    )
    reference.postprocess(want, kinds, rows, accepted)
    assert all(map(same_bits, states, want))


def test_offsets_beyond_32_bits():
    """Blocks at an offset of 5 GiB in an array."""
    block, num_blocks = 1 << 20, 5200
    drafts = np.array([2])
    table = np.array([[num_blocks - 1, 7, num_blocks - 2, 9]])
    rows = Rows(table, np.array([6]), 1 + drafts, drafts, 1, block_size=8)
    state = jnp.broadcast_to(
        (jnp.arange(num_blocks) % 120).astype(jnp.int8)[:, None], (num_blocks, block)
    ).copy()
    (state,), _ = step(
        [state], batch_of(rows), np.array([2], np.int32), np.array([2], np.int32), (TEMPORAL,)
    )
    want = np.arange(num_blocks) % 120
    want[num_blocks - 1] = want[num_blocks - 2]
    assert (np.asarray(state.min(axis=1)) == want).all()
    assert (np.asarray(state.max(axis=1)) == want).all()


def test_deferred_counts_do_not_block_the_host():
    """The step is dispatched, and its counts are not available yet."""

    @jax.jit
    def slow_step(counts, step, ids, x):
        return jaxkv.recurrent.DeferredCounts.start(
            counts + slow_zero(x), step=step, request_ids=ids
        )

    x, ids = slow_input(), np.arange(8, dtype=np.int32)
    for number in range(4):
        deferred = slow_step(ids + number, np.int32(number), ids, x)
        if number:  # the first compiles
            assert not deferred.is_ready()
        assert deferred.packed.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(deferred.read(step=number, request_ids=ids), ids + number)
