"""Counts, steps and request ids: any integers on the host that fit int32, int32 on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import BatchMetadata
from jaxkv.recurrent import DeferredCounts, StateKind, advance, align_postprocess, align_preprocess

INT32 = st.integers(-(2**31), 2**31 - 1)
both_modes = pytest.mark.parametrize("x64", [False, True])


def batch_of(*query_lens: int) -> BatchMetadata:
    """Rows whose contexts end in the second of three blocks of 4 tokens."""
    rows = len(query_lens)
    table = np.arange(1, 1 + 3 * rows).reshape(rows, 3)
    return BatchMetadata.from_host(
        query_lens, [6] * rows, table,
        max_num_reqs=rows, max_num_tokens=16, max_blocks=3, block_size=4,
    )  # fmt: skip


@both_modes
@given(
    INT32,
    st.sampled_from(
        [int, np.int64, np.array, lambda step: [step], lambda step: np.array([[step]])]
    ),
    st.lists(st.tuples(INT32, st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from([np.int32, np.int64]),
)
def test_start_of_integers_on_the_host(x64, step, kind, rows, dtype):
    ids, counts = np.array(rows, dtype).T
    with jax.enable_x64(x64):
        started = DeferredCounts.start(counts, step=kind(step), request_ids=ids)
    assert started.packed.dtype == jnp.int32
    assert started.read(step=step, request_ids=ids).tolist() == counts.tolist()


@both_modes
@pytest.mark.parametrize("jitted", [False, True], ids=["no jit", "jit"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_start_of_a_step_of_one_element_on_the_device(x64, jitted, shape):
    ones = np.ones(2, np.int32)

    def start(step):
        return DeferredCounts.start(ones, step=step, request_ids=ones)

    with jax.enable_x64(x64):
        started = (jax.jit(start) if jitted else start)(jnp.full(shape, 7, jnp.int32))
    assert started.read(step=7, request_ids=[1, 1]).tolist() == [1, 1]


@both_modes
def test_python_integers_as_arguments_of_jit(x64):
    """With x64 they are int64, of a weak type."""
    start = jax.jit(
        lambda step, one: DeferredCounts.start(
            jnp.full(2, one), step=step, request_ids=jnp.full(2, 3 * one)
        )
    )
    with jax.enable_x64(x64):
        started = start(7, 1)
    assert started.packed.dtype == jnp.int32
    assert started.read(step=7, request_ids=[3, 3]).tolist() == [1, 1]


@both_modes
@pytest.mark.parametrize("empty", [[], np.zeros(0), np.zeros(0, int)], ids=repr)
def test_start_without_rows(x64, empty):
    with jax.enable_x64(x64):
        started = DeferredCounts.start(empty, step=7, request_ids=empty)
    assert started.packed.dtype == jnp.int32
    assert started.read(step=7, request_ids=empty).shape == (0,)


@both_modes
@pytest.mark.parametrize("step", [2**31, np.int64(-(2**31) - 1), np.array(2**32 + 3)])
def test_start_of_a_step_outside_int32_raises(x64, step):
    ones = np.ones(2, np.int32)
    message = f"DeferredCounts.start: step must fit int32, got {int(step)} "
    with jax.enable_x64(x64), pytest.raises(ValueError, match=message):
        DeferredCounts.start(ones, step=step, request_ids=ones)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"step": lambda: jnp.int64(3)}, r"step must be int32\[\], got int64\[\]"),
        ({"step": lambda: np.ones(2, int)}, r"step must be int32\[\], got int32\[2\]"),
        ({"step": lambda: 3.0}, r"step must be int32\[\], got float64\[\]"),
        ({"request_ids": lambda: jnp.arange(2)}, r"request_ids must be int32\[2\], got int64\[2\]"),
        ({"request_ids": lambda: np.ones(2)}, r"request_ids must be int32\[2\], got float64\[2\]"),
        (
            {"num_accepted": lambda: jnp.arange(2)},
            r"num_accepted must be int32\[2\], got int64\[2\]",
        ),
    ],
)
def test_start_of_other_dtypes_raises(change, message):
    valid = {"num_accepted": np.ones(2, int), "step": 3, "request_ids": np.ones(2, int)}
    with jax.enable_x64(True):
        arguments = valid | {name: value() for name, value in change.items()}
        with pytest.raises(ValueError, match=f"DeferredCounts.start: {message}"):
            DeferredCounts.start(**arguments)


@both_modes
def test_int64_counts_on_the_host_do_not_spread_to_results(x64):
    batch, ones = batch_of(1, 1), np.ones(2, np.int64)
    with jax.enable_x64(x64):
        states = jnp.zeros((7, 4), jnp.float32)
        following = advance(batch, ones, num_drafts=0 * ones, next_query_lens=ones)
        _, *before = align_preprocess(
            states, batch, ones, kinds=StateKind.TEMPORAL, state_idx=0 * ones
        )
        _, *after = align_postprocess(
            states, batch, ones, kinds=StateKind.TEMPORAL, num_drafts=0 * ones
        )
    leaves = jax.tree.leaves((following, before, after))
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.int32)}


on_the_host = pytest.mark.parametrize("kind", [np.array, list], ids=["array", "list"])


@on_the_host
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=4))
def test_preprocess_rejects_counts_below_1_of_rows_with_tokens(kind, rows):
    query_lens, accepted = np.array(rows).T
    batch, states = batch_of(*query_lens.tolist()), jnp.zeros((13, 4))
    columns = np.zeros(len(rows), np.int32)

    def run():
        return align_preprocess(
            states, batch, kind(accepted), kinds=StateKind.TEMPORAL, state_idx=columns
        )

    wrong = np.flatnonzero((query_lens > 0) & (accepted < 1))
    if not wrong.size:
        run()
        return
    message = (
        f"recurrent.align_preprocess: the accepted tokens of row {wrong[0]} must be at least 1, "
        "got 0: pass 1 for a new request"
    )
    with pytest.raises(ValueError, match=message):
        run()


@on_the_host
@pytest.mark.parametrize(
    "accepted, drafts, message",
    [
        ([1, 3], [0, 1], r"the accepted tokens of row 1 must be in \[1, 2\]"),
        ([1, 1], [1, 1], "row 0 must have fewer drafts than its 1 query tokens, got num_drafts 1"),
        ([1, 1], [-1, 1], "num_drafts must be at least 0 in each row, got -1"),
        ([1, -1], [0, 1], "num_accepted must be at least 0 in each row, got -1"),
    ],
)
def test_counts_that_contradict_the_batch_are_rejected(kind, accepted, drafts, message):
    batch, states = batch_of(1, 2), jnp.zeros((13, 4))
    accepted, drafts = kind(accepted), kind(drafts)
    with pytest.raises(ValueError, match=f"recurrent.advance: {message}"):
        advance(batch, accepted, num_drafts=drafts, next_query_lens=np.ones(2, int))
    with pytest.raises(ValueError, match=f"recurrent.align_postprocess: {message}"):
        align_postprocess(states, batch, accepted, kinds=StateKind.TEMPORAL, num_drafts=drafts)
