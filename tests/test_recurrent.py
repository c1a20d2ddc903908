"""States at block boundaries against the row-by-row reference, and histories whose every state is
known from its request and token."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import recurrent_reference as reference
from hypothesis import given
from hypothesis import strategies as st
from recurrent_reference import Rows

import jaxkv
from jaxkv import StateKind
from jaxkv.metadata import BatchMetadata, slot_mapping, token_positions

SD, DS, TEMPORAL = StateKind.CONV_SD, StateKind.CONV_DS, StateKind.TEMPORAL
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "int8": np.int8,
}


def random_states(rng, kinds, shapes, dtypes, num_blocks):
    """Random bits, NaNs among them."""
    arrays = []
    for _, shape, dtype in zip(kinds, shapes, dtypes, strict=True):
        itemsize = np.dtype(dtype).itemsize
        bits = rng.integers(0, 256, (num_blocks, int(np.prod(shape)) * itemsize), np.uint8)
        arrays.append(bits.view(dtype).reshape(num_blocks, *shape))
    return arrays


def batch_of(rows: Rows) -> BatchMetadata:
    starts = np.concatenate([[0], np.cumsum(rows.scheduled)]).astype(np.int32)
    return BatchMetadata(
        query_start_loc=starts,
        seq_lens=(rows.computed + rows.scheduled).astype(np.int32),
        block_table=rows.table.astype(np.int32),
        num_reqs=np.int32(rows.num_reqs),
        num_tokens=starts[-1],
        max_num_tokens=1 << 20,
        block_size=rows.block_size,
    )


@functools.partial(jax.jit, static_argnames="kinds")
def post(states, batch, accepted, drafts, kinds):
    return jaxkv.align_postprocess(states, batch, accepted, kinds=[*kinds], num_drafts=drafts)


@functools.partial(jax.jit, static_argnames="kinds")
def pre(states, batch, accepted, state_idx, kinds):
    return jaxkv.align_preprocess(states, batch, accepted, kinds=[*kinds], state_idx=state_idx)


def same_bits(got, want) -> bool:
    got, want = np.asarray(got), np.asarray(want)
    return got.shape == want.shape and got.tobytes() == want.tobytes()


def assert_post(states, kinds, rows: Rows, accepted) -> None:
    """Runs the op and the reference, and compares all of both."""
    accepted = np.asarray(accepted, np.int32)
    want = [state.copy() for state in states]
    want_counts = reference.postprocess(want, kinds, rows, accepted)
    got, counts = post(states, batch_of(rows), accepted, rows.drafts.astype(np.int32), kinds)
    np.testing.assert_array_equal(counts, want_counts)
    for got_state, want_state, kind in zip(got, want, kinds, strict=True):
        assert same_bits(got_state, want_state), kind


def random_rows(rng, num_rows, *, block_size=5, columns=9, max_drafts=3, nulls=0.1) -> Rows:
    """Rows at random places, near boundaries more often than not; blocks are of one row only."""
    drafts = rng.integers(0, max_drafts + 1, num_rows)
    scheduled = np.where(rng.random(num_rows) < 0.1, 0, 1 + drafts + rng.integers(0, 4, num_rows))
    last = (columns - max_drafts) * block_size
    computed = rng.integers(0, last - scheduled + 1)
    blocks = 1 + rng.permutation(num_rows * columns)
    table = np.where(rng.random(blocks.shape) < nulls, 0, blocks).reshape(num_rows, columns)
    num_reqs = int(rng.integers(num_rows // 2, num_rows + 1))
    return Rows(table, computed, scheduled, np.where(scheduled, drafts, 0), num_reqs, block_size)


def random_accepted(rng, rows: Rows):
    return rng.integers(1, rows.drafts + 2).astype(np.int32)


# --------------------------------------------------------------------------------------------------
# Against the reference

SHAPES = {SD: (6, 5, 2), DS: (7, 6), TEMPORAL: (3, 11)}


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", StateKind)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_and_dtype(kind, dtype):
    rng = np.random.default_rng(1)
    for _ in range(5):
        rows = random_rows(rng, 40)
        shapes, dtypes = [SHAPES[kind]], [DTYPES[dtype]]
        states = random_states(rng, [kind], shapes, dtypes, rows.table.size + 1)
        assert_post(states, (kind,), rows, random_accepted(rng, rows))


@pytest.mark.parametrize("num_rows", [1, 2, 33, 1024, 1025, 2500])
def test_all_kinds_in_one_call(num_rows):
    """Geometries, widths and dtypes side by side; blocks of 16-byte words, and of odd sizes."""
    rng = np.random.default_rng(num_rows)
    kinds = (SD, TEMPORAL, DS, SD, TEMPORAL, TEMPORAL)
    shapes = [(6, 32), (8, 16), (12, 5), (3, 7), (8, 16), (13,)]
    dtypes = [
        DTYPES[name] for name in ("float16", "float32", "bfloat16", "int8", "float32", "int8")
    ]
    rows = random_rows(rng, num_rows)
    states = random_states(rng, kinds, shapes, dtypes, rows.table.size + 1)
    assert_post(states, kinds, rows, random_accepted(rng, rows))


@pytest.mark.parametrize("aliased", [False, True], ids=["same column", "same block"])
@pytest.mark.parametrize("bias", [1, 2, 3])
def test_a_window_slides_within_its_block(bias, aliased):
    """Source and destination overlap, by column or only by the block that two columns name."""
    rng = np.random.default_rng(bias)
    kinds, shapes = (SD, DS, TEMPORAL), [(6, 160), (90, 6), (40,)]
    states = random_states(rng, kinds, shapes, [np.float16] * 3, 9)
    table = np.array([[3, 1, 7, 5, 8, 2]])
    # Ends on a boundary; or past it by a token, so that the running state is a column further.
    drafts = np.array([bias + aliased])
    if aliased:
        table[0, 1] = 3
    computed, scheduled = np.array([7 - bias]), 1 + drafts
    rows = Rows(table, computed, scheduled, drafts, 1, block_size=8)
    before = [state.copy() for state in states]
    assert_post(states, kinds, rows, [bias + 1])
    want = [state.copy() for state in states]
    counts = reference.postprocess(want, kinds, rows, np.array([bias + 1]))
    assert counts[0] == (bias + 1 if aliased else 1)
    assert same_bits(want[0][3, : 6 - bias], before[0][3, bias:])
    assert not same_bits(want[1][3], before[1][3])


def test_blocks_that_rows_only_read_may_be_shared():
    rng = np.random.default_rng(0)
    states = random_states(rng, (SD, TEMPORAL), [(5, 8), (8,)], [np.float32] * 2, 12)
    table = np.array([[1, 9, 10, 11], [2, 9, 10, 11], [3, 9, 10, 11]])
    drafts = np.array([2, 2, 2])
    rows = Rows(table, np.array([6, 6, 6]), 1 + drafts, drafts, 3, block_size=8)
    assert_post(states, (SD, TEMPORAL), rows, [2, 3, 1])


@given(data=st.data())
def test_preprocess(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rows = random_rows(rng, 16)
    kinds, shapes = (DS, SD, TEMPORAL), [(4, 6), (6, 4), (9,)]
    states = random_states(
        rng, kinds, shapes, [np.int8, np.float16, np.float32], rows.table.size + 1
    )
    accepted = rng.integers(1, 5, 16).astype(np.int32)
    state_idx = rng.integers(-1, 6, 16).astype(np.int32)
    want = [state.copy() for state in states]
    want_counts, want_idx = reference.preprocess(want, kinds, rows, accepted, state_idx)
    got, counts, idx = pre(states, batch_of(rows), accepted, state_idx, kinds)
    np.testing.assert_array_equal(counts, want_counts)
    np.testing.assert_array_equal(idx, want_idx)
    assert all(map(same_bits, got, want))


@pytest.mark.parametrize("num_rows, num_reqs", [(0, 0), (4, 0)])
def test_an_empty_batch_changes_nothing(num_rows, num_reqs):
    rng = np.random.default_rng(0)
    rows = random_rows(rng, num_rows)
    rows.num_reqs = num_reqs
    states = random_states(rng, (TEMPORAL,), [(4,)], [np.float32], 50)
    got, counts = post(
        states,
        batch_of(rows),
        np.full(num_rows, 3, np.int32),
        rows.drafts.astype(np.int32),
        (TEMPORAL,),
    )
    assert same_bits(got[0], states[0])
    np.testing.assert_array_equal(counts, np.full(num_rows, 3))


# --------------------------------------------------------------------------------------------------
# Histories


class Histories:
    """Requests that live through steps. The state after token t of a request is known: a temporal
    state holds `mark(request, t)`, a row of a window the mark of its token."""

    BLOCK, WINDOW, DRAFTS, TOKENS = 4, 3, 3, 24
    KINDS = (SD, DS, TEMPORAL, TEMPORAL)
    SHAPES = ((WINDOW + DRAFTS, 4), (2, WINDOW + DRAFTS), (3,), (16,))
    TYPES = (np.float16, np.int8, np.float32, ml_dtypes.bfloat16)

    def __init__(self, rng, num_rows: int):
        self.rng, self.num_rows = rng, num_rows
        self.columns = self.TOKENS // self.BLOCK + 1 + self.DRAFTS
        size = num_rows * self.columns
        self.table = 1 + rng.permutation(size).reshape(num_rows, self.columns)
        self.states = random_states(rng, self.KINDS, self.SHAPES, self.TYPES, size + 1)
        self.ids = rng.integers(0, 1 << 20, num_rows)
        self.prompt = rng.integers(1, self.TOKENS, num_rows)
        self.computed = np.zeros(num_rows, np.int64)
        self.accepted = np.ones(num_rows, np.int32)
        self.state_idx = np.full(num_rows, -1, np.int32)
        self.saved: list[set[int]] = [set() for _ in range(num_rows)]

    def mark(self, row, token):
        return (self.ids[row] * 13 + token * 7) % 120 - 60

    def disturb(self) -> None:
        """Preempts some requests; they resume from a boundary whose state was kept, or at 0."""
        for row in np.flatnonzero(self.rng.random(self.num_rows) < 0.12):
            self.computed[row] = self.rng.choice([0, *sorted(self.saved[row])])
            kept = self.computed[row] // self.BLOCK
            self.saved[row] = {t for t in self.saved[row] if t <= self.computed[row]}
            self.table[row, kept:] = self.rng.permutation(self.table[row, kept:])
            self.accepted[row], self.state_idx[row] = 1, -1

    def schedule(self) -> Rows:
        left = self.TOKENS - self.computed
        chunk = np.minimum(self.rng.integers(1, 2 * self.BLOCK + 1, self.num_rows), left)
        to_boundary = -(self.computed + chunk) % self.BLOCK
        chunk = np.where(self.rng.random(self.num_rows) < 0.5, chunk + to_boundary, chunk)
        prefill = self.computed < self.prompt
        drafts = np.where(prefill, 0, self.rng.integers(0, self.DRAFTS + 1, self.num_rows))
        scheduled = np.where(prefill, np.minimum(chunk, self.prompt - self.computed), 1 + drafts)
        rests = (self.rng.random(self.num_rows) < 0.1) | (scheduled > left)
        return Rows(
            self.table,
            self.computed,
            np.where(rests, 0, scheduled),
            np.where(rests, 0, drafts),
            self.num_rows,
            self.BLOCK,
        )

    def forward(self, rows: Rows) -> None:
        """Checks the state that every row starts from, and writes those after its last tokens."""
        sd, ds, *temporal = self.states
        for row in range(self.num_rows):
            if not rows.active(row):
                continue
            end, ahead = rows.end(row), self.accepted[row] - 1
            column = (end - 1) // self.BLOCK
            block = self.table[row, column]
            if start := self.computed[row]:
                window = self.mark(row, np.arange(start - self.WINDOW, start))
                seen = slice(ahead, ahead + self.WINDOW)
                assert (sd[block, seen] == window[:, None]).all()
                assert (ds[block, :, seen] == window).all()
                for state in temporal:
                    assert (state[self.table[row, column + ahead]] == self.mark(row, start)).all()
            certain = end - rows.drafts[row]
            tokens = self.mark(row, np.arange(certain - self.WINDOW, end))
            sd[block, : len(tokens)] = tokens[:, None]
            ds[block, :, : len(tokens)] = tokens
            for ahead, state in itertools.product(range(rows.drafts[row] + 1), temporal):
                state[self.table[row, column + ahead]] = self.mark(row, certain + ahead)

    def check_saved(self, rows: Rows, sampled) -> None:
        """Every boundary that was reached, now or before, has its state in its block."""
        for row in range(self.num_rows):
            if rows.active(row):
                certain = rows.end(row) - rows.drafts[row]
                boundary = (certain + sampled[row] - 1) // self.BLOCK * self.BLOCK
                if boundary >= certain:
                    self.saved[row].add(int(boundary))
            for boundary in self.saved[row]:
                block = self.table[row, boundary // self.BLOCK - 1]
                window = self.mark(row, np.arange(boundary - self.WINDOW, boundary))
                assert (self.states[0][block, : self.WINDOW] == window[:, None]).all()
                assert (self.states[2][block] == self.mark(row, boundary)).all()

    def step(self) -> int:
        """One step of all; returns how many rows copied a state."""
        self.disturb()
        rows = self.schedule()
        batch = batch_of(rows)
        got = pre(self.states, batch, self.accepted, self.state_idx, self.KINDS)
        want = reference.preprocess(self.states, self.KINDS, rows, self.accepted, self.state_idx)
        self.compare(got, want)
        self.accepted, self.state_idx = want
        self.forward(rows)
        sampled = np.where(rows.scheduled > 0, random_accepted(self.rng, rows), self.accepted)
        sampled = sampled.astype(np.int32)
        skipped = jaxkv.can_skip_align_postprocess(
            rows.computed, rows.scheduled, rows.drafts, self.BLOCK
        )
        before = [state.copy() for state in self.states]
        got = post(self.states, batch, sampled, rows.drafts.astype(np.int32), self.KINDS)
        want_counts = reference.postprocess(self.states, self.KINDS, rows, sampled)
        self.compare(got, (want_counts,))
        copied = not all(map(same_bits, before, self.states))
        assert not (skipped and (copied or (want_counts != sampled).any()))
        self.accepted = want_counts
        self.check_saved(rows, sampled)
        valid = rows.computed + rows.scheduled - rows.drafts + sampled - 1
        self.computed = np.where(rows.scheduled > 0, valid, self.computed)
        return copied

    def compare(self, got, want) -> None:
        states, *numbers = got
        assert all(map(same_bits, states, self.states))
        for ours, theirs in zip(numbers, want, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_histories():
    """5,120 of them, with prompts in chunks, drafts, preemption, resumption and rests."""
    copies = 0
    for seed in range(80):
        histories = Histories(np.random.default_rng(seed), 64)
        copies += sum(histories.step() for _ in range(12))
        assert any(histories.saved)
    assert copies > 80 * 6


# --------------------------------------------------------------------------------------------------
# In jit


def small_call(rng, *, dtype=np.float32):
    """States, rows and counts of a call that copies."""
    drafts = np.full(6, 2)
    table = 1 + np.arange(24).reshape(6, 4)
    rows = Rows(table, np.arange(1, 7), 1 + drafts, drafts, 6, block_size=4)
    states = random_states(rng, (SD, TEMPORAL), [(5, 8), (8,)], [dtype] * 2, 25)
    return states, rows, np.full(6, 3, np.int32)


def test_donated_states_are_written_in_place():
    states, rows, accepted = small_call(np.random.default_rng(0))
    want = [state.copy() for state in states]
    reference.postprocess(want, (SD, TEMPORAL), rows, accepted)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states, batch, accepted, drafts):
        kinds = {"conv": SD, "temporal": TEMPORAL}  # a prefix of the states
        return jaxkv.align_postprocess(states, batch, accepted, kinds=kinds, num_drafts=drafts)

    arrays = {"conv": [jnp.array(states[0])], "temporal": [jnp.array(states[1])]}
    addresses = jax.tree.map(lambda array: array.unsafe_buffer_pointer(), arrays)
    got, _ = step(arrays, batch_of(rows), accepted, rows.drafts.astype(np.int32))
    assert jax.tree.map(lambda array: array.unsafe_buffer_pointer(), got) == addresses
    assert same_bits(got["conv"][0], want[0]) and same_bits(got["temporal"][0], want[1])
    assert not same_bits(want[0], states[0])


def test_states_that_are_not_donated_stay():
    states, rows, accepted = small_call(np.random.default_rng(0))
    arrays = [jnp.array(state) for state in states]
    counts = jnp.array(accepted)
    got, new_counts = post(
        arrays, batch_of(rows), counts, rows.drafts.astype(np.int32), (SD, TEMPORAL)
    )
    assert all(map(same_bits, arrays, states))
    assert not same_bits(got[1], states[1])
    np.testing.assert_array_equal(counts, accepted)
    assert (np.asarray(new_counts) != accepted).any()


def test_shards_of_states():
    """Each device of a mesh has its heads of every block, and takes the same decisions."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    states, rows, accepted = small_call(np.random.default_rng(0), dtype=np.float16)
    want = [state.copy() for state in states]
    want_counts = reference.postprocess(want, (SD, TEMPORAL), rows, accepted)
    spec = [jax.P(None, None, "x"), jax.P(None, "x")]

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(spec, jax.P(), jax.P(), jax.P()),
        out_specs=(spec, jax.P()),
    )
    def step(states, batch, accepted, drafts):
        kinds = [SD, TEMPORAL]
        return jaxkv.align_postprocess(states, batch, accepted, kinds=kinds, num_drafts=drafts)

    got, counts = step(states, batch_of(rows), accepted, rows.drafts.astype(np.int32))
    assert all(map(same_bits, got, want))
    np.testing.assert_array_equal(counts, want_counts)


# --------------------------------------------------------------------------------------------------
# What is refused


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "column, block, message",
    [
        (1, 26, r"source id 26 at position 5 is outside \[0, 26\)"),
        (2, -1, r"source id -1 at position 6 is outside \[0, 26\)"),
        (0, 2**31 - 1, r"destination id 2147483647 at position 4 is outside \[0, 26\)"),
    ],
)
def test_a_block_out_of_range_is_counted_and_its_row_left(column, block, message):
    rng = np.random.default_rng(0)
    drafts = np.full(3, 2)
    table = 1 + np.arange(12).reshape(3, 4)
    table[1, column] = block
    rows = Rows(table, np.array([2, 2, 2]), 1 + drafts, drafts, 3, block_size=4)
    states = random_states(rng, (SD, TEMPORAL), [(5, 8), (8,)], [np.float32] * 2, 26)
    assert_post(states, (SD, TEMPORAL), rows, [2, 2, 2])
    with pytest.raises(jaxkv.PageIndexError, match=rf"1 entries were not copied: {message}"):
        jaxkv.check_errors()
    jaxkv.check_errors()


def test_a_column_past_the_table_is_counted_and_its_row_left():
    states, rows, accepted = small_call(np.random.default_rng(0))
    rows.computed[4] = 14
    assert_post(states, (SD, TEMPORAL), rows, accepted)
    with pytest.raises(jaxkv.PageIndexError, match="row 4 needs column 4 of a block table of 4"):
        jaxkv.check_errors()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kinds": [SD]}, "."),  # what jax.tree.broadcast says
        ({"kinds": ["conv", TEMPORAL]}, "leaf 0 is 'conv', not a StateKind"),
        ({"states": [jnp.zeros(25), jnp.zeros((25, 8))]}, r"leaf 0 has shape \(25,\), but CONV_SD"),
        (
            {"states": [jnp.zeros((25, 4, 8)), jnp.zeros((24, 8))]},
            "leaf 1 has 24 blocks, leaf 0 25",
        ),
        ({"states": [], "kinds": []}, "states has 0 arrays, must have 1 to 256"),
        (
            {"num_accepted": np.ones(5, np.int32)},
            r"num_accepted must be int32\[6\], got int32\[5\]",
        ),
        ({"num_drafts": np.ones(6, np.int16)}, r"num_drafts must be int32\[6\], got int16\[6\]"),
    ],
)
def test_what_does_not_go_together_is_refused_while_tracing(change, message):
    states, rows, accepted = small_call(np.random.default_rng(0))
    call = {
        "states": states,
        "batch": batch_of(rows),
        "num_accepted": accepted,
        "kinds": [SD, TEMPORAL],
        "num_drafts": rows.drafts.astype(np.int32),
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: jaxkv.align_postprocess(**(call | change)))


# --------------------------------------------------------------------------------------------------
# On the host


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
# Indices and the next step


@given(data=st.data())
def test_state_indices(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    blocks = data.draw(st.sampled_from([0, 1, 3, 7]))
    rows = random_rows(rng, 12, columns=10)
    got = jax.jit(jaxkv.state_indices, static_argnames="num_speculative_blocks")(
        batch_of(rows), num_speculative_blocks=blocks
    )
    for row in range(12):
        first = max((rows.end(row) - 1) // rows.block_size, 0)
        padded = [*rows.table[row], *[0] * blocks]
        np.testing.assert_array_equal(got[row], padded[first : first + 1 + blocks])


def test_state_indices_refuses_a_negative_number_of_blocks():
    with pytest.raises(ValueError, match="num_speculative_blocks=-1 blocks is below 0"):
        jaxkv.state_indices(
            batch_of(random_rows(np.random.default_rng(0), 2)), num_speculative_blocks=-1
        )


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
