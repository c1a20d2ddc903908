"""States at block boundaries against the row-by-row reference, in jit, and rejected arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.runtime import native as runtime_native
from jaxkv.recurrent import StateKind
from tests.util import recurrent_reference as reference
from tests.util.recurrent_cases import (
    DS,
    DTYPES,
    SD,
    TEMPORAL,
    batch_of,
    post,
    pre,
    random_accepted,
    random_rows,
    random_states,
    same_bits,
)
from tests.util.recurrent_reference import Rows


def assert_post(states, kinds, rows: Rows, accepted) -> None:
    """Runs the op and the reference, and compares all outputs."""
    accepted = np.asarray(accepted, np.int32)
    want = [state.copy() for state in states]
    want_counts = reference.postprocess(want, kinds, rows, accepted)
    got, counts = post(states, batch_of(rows), accepted, rows.drafts.astype(np.int32), kinds)
    np.testing.assert_array_equal(counts, want_counts)
    for got_state, want_state, kind in zip(got, want, kinds, strict=True):
        assert same_bits(got_state, want_state), kind


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
    """Different geometries, widths and dtypes; blocks of 16-byte words, and of odd sizes."""
    rng = np.random.default_rng(num_rows)
    kinds = (SD, TEMPORAL, DS, SD, TEMPORAL, TEMPORAL)
    shapes = [(6, 32), (8, 16), (12, 5), (3, 7), (8, 16), (13,)]
    dtypes = [
        DTYPES[name] for name in ("float16", "float32", "bfloat16", "int8", "float32", "int8")
    ]
    rows = random_rows(rng, num_rows)
    states = random_states(rng, kinds, shapes, dtypes, rows.table.size + 1)
    assert_post(states, kinds, rows, random_accepted(rng, rows))


@pytest.mark.parametrize("shape", [(2, 1), (5, 2), (33, 4), (340, 6), (641, 7), (66, 65), (4, 513)])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_contiguous_columns_of_any_length(shape, dtype):
    """Shorter and longer than one move of a warp; columns of full words, and with half a word."""
    rng = np.random.default_rng(shape[0])
    rows = random_rows(rng, 48)
    states = random_states(rng, [DS], [shape], [DTYPES[dtype]], rows.table.size + 1)
    assert_post(states, (DS,), rows, random_accepted(rng, rows))


@pytest.mark.parametrize("aliased", [False, True], ids=["same column", "same block"])
@pytest.mark.parametrize("bias", [1, 2, 3])
def test_convolution_window_shifts_within_block(bias, aliased):
    """Source and destination overlap, by column or only because two columns name the same block."""
    rng = np.random.default_rng(bias)
    kinds, shapes = (SD, DS, TEMPORAL), [(6, 160), (90, 6), (40,)]
    states = random_states(rng, kinds, shapes, [np.float16] * 3, 9)
    table = np.array([[3, 1, 7, 5, 8, 2]])
    # Ends on a boundary; or one token past it, so that the running state is one column further.
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


def test_read_only_blocks_may_be_shared():
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
def test_empty_batch_is_a_no_op(num_rows, num_reqs):
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
# In jit


def small_call(rng, *, dtype=np.float32):
    """States, rows and counts of a call that copies."""
    drafts = np.full(6, 2)
    table = 1 + np.arange(24).reshape(6, 4)
    rows = Rows(table, np.arange(1, 7), 1 + drafts, drafts, 6, block_size=4)
    states = random_states(rng, (SD, TEMPORAL), [(5, 8), (8,)], [dtype] * 2, 25)
    return states, rows, np.full(6, 3, np.int32)


def of_geometries(count: int) -> list[np.ndarray]:
    """States of two arrays of each geometry."""
    return [np.zeros((25, 1 + i % count), np.float32) for i in range(2 * count)]


def test_as_many_geometries_as_a_kernel_takes():
    _, rows, accepted = small_call(np.random.default_rng(0))
    states = [
        state + np.arange(25, dtype=np.float32)[:, None]
        for state in of_geometries(runtime_native.extension().MAX_STATE_GEOMETRIES)
    ]
    assert_post(states, (TEMPORAL,) * len(states), rows, accepted)


def test_donated_states_are_written_in_place():
    states, rows, accepted = small_call(np.random.default_rng(0))
    want = [state.copy() for state in states]
    reference.postprocess(want, (SD, TEMPORAL), rows, accepted)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states, batch, accepted, drafts):
        kinds = {"conv": SD, "temporal": TEMPORAL}  # a prefix of the states
        return jaxkv.recurrent.align_postprocess(
            states, batch, accepted, kinds=kinds, num_drafts=drafts
        )

    arrays = {"conv": [jnp.array(states[0])], "temporal": [jnp.array(states[1])]}
    addresses = jax.tree.map(lambda array: array.unsafe_buffer_pointer(), arrays)
    got, _ = step(arrays, batch_of(rows), accepted, rows.drafts.astype(np.int32))
    assert jax.tree.map(lambda array: array.unsafe_buffer_pointer(), got) == addresses
    assert same_bits(got["conv"][0], want[0]) and same_bits(got["temporal"][0], want[1])
    assert not same_bits(want[0], states[0])


def test_undonated_states_are_unchanged():
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


def test_sharded_states_in_shard_map():
    """Each device of a mesh has its heads of every block, and makes the same decisions."""
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
        return jaxkv.recurrent.align_postprocess(
            states, batch, accepted, kinds=kinds, num_drafts=drafts
        )

    got, counts = step(states, batch_of(rows), accepted, rows.drafts.astype(np.int32))
    assert all(map(same_bits, got, want))
    np.testing.assert_array_equal(counts, want_counts)


@pytest.mark.multigpu
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
@pytest.mark.parametrize("case", ["concrete", "Explicit", "Auto"])
def test_sharded_states_outside_shard_map_raise(case):
    axis = getattr(jax.sharding.AxisType, case, jax.sharding.AxisType.Auto)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis,), devices=jax.devices()[:2])
    states, rows, accepted = small_call(np.random.default_rng(0))
    specs = jax.P(None, None, "x"), jax.P(None, "x")
    split = [
        jax.device_put(state, jax.NamedSharding(mesh, spec))
        for state, spec in zip(states, specs, strict=True)
    ]
    call = functools.partial(
        jaxkv.recurrent.align_preprocess, kinds=[SD, TEMPORAL], state_idx=accepted
    )
    with pytest.raises(ValueError, match=r"inside jax\.shard_map"):
        (call if case == "concrete" else jax.jit(call))(split, batch_of(rows), accepted)


@pytest.mark.multigpu
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices")
def test_varying_counts_make_replicated_states_varying():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    states, rows, accepted = small_call(np.random.default_rng(0))

    def step(states, batch, accepted, drafts):
        kinds = [SD, TEMPORAL]
        return jaxkv.recurrent.align_postprocess(
            states, batch, accepted[0], kinds=kinds, num_drafts=drafts
        )

    specs = (jax.P(), jax.P(), jax.P("x"), jax.P())
    args = states, batch_of(rows), np.stack([accepted, accepted]), rows.drafts.astype(np.int32)
    for out_specs in ((jax.P(), jax.P("x")), jax.P()):
        with pytest.raises(ValueError, match="replicat"):
            jax.eval_shape(
                jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out_specs), *args
            )
    mapped = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=jax.P("x"))
    got, counts = jax.jit(mapped)(*args)
    want = [state.copy() for state in states]
    want_counts = reference.postprocess(want, (SD, TEMPORAL), rows, accepted)
    for array, state in zip(got, want, strict=True):
        assert same_bits(array, np.concatenate([state, state]))
    np.testing.assert_array_equal(counts, np.concatenate([want_counts, want_counts]))


# --------------------------------------------------------------------------------------------------
# Rejected arguments


@pytest.mark.sanitizer
@pytest.mark.parametrize(
    "column, block, message",
    [
        (1, 26, r"block_table\[5\] = 26 is outside \[0, 26\) blocks of the states"),
        (2, -1, r"block_table\[6\] = -1 is outside \[0, 26\) blocks of the states"),
        (0, 2**31 - 1, r"block_table\[4\] = 2147483647 is outside \[0, 26\) blocks of the states"),
    ],
)
def test_block_out_of_range_is_counted_and_row_unchanged(column, block, message):
    rng = np.random.default_rng(0)
    drafts = np.full(3, 2)
    table = 1 + np.arange(12).reshape(3, 4)
    table[1, column] = block
    rows = Rows(table, np.array([2, 2, 2]), 1 + drafts, drafts, 3, block_size=4)
    states = random_states(rng, (SD, TEMPORAL), [(5, 8), (8,)], [np.float32] * 2, 26)
    assert_post(states, (SD, TEMPORAL), rows, [2, 2, 2])
    message = f"1 entry was not copied: recurrent.align_postprocess: {message}"
    with pytest.raises(jaxkv.PageIndexError, match=message) as raised:
        jaxkv.check_errors()
    error = raised.value
    assert (error.operation, error.argument) == ("recurrent.align_postprocess", "block_table")
    jaxkv.check_errors()


def test_column_out_of_range_is_counted_and_row_unchanged():
    states, rows, accepted = small_call(np.random.default_rng(0))
    rows.computed[4] = 14
    assert_post(states, (SD, TEMPORAL), rows, accepted)
    message = "recurrent.align_postprocess: row 4 needs column 4 of a block table of 4"
    with pytest.raises(jaxkv.PageIndexError, match=message):
        jaxkv.check_errors()


def test_errors_of_preprocess_name_it():
    states, rows, accepted = small_call(np.random.default_rng(0))
    rows.table[3, 0] = 25
    got = pre(states, batch_of(rows), accepted, np.zeros(6, np.int32), (SD, TEMPORAL))
    message = r"recurrent.align_preprocess: block_table\[12\] = 25 is outside \[0, 25\)"
    with pytest.raises(jaxkv.PageIndexError, match=message):
        jaxkv.check_errors(got)


@pytest.mark.parametrize("name", ["vmap", "grad"])
def test_transformations_are_rejected(name):
    states, rows, accepted = small_call(np.random.default_rng(0))
    batch, known = batch_of(rows), rows.drafts.astype(np.int32)
    for operation, argument in (
        ("align_postprocess", "num_drafts"),
        ("align_preprocess", "state_idx"),
    ):
        call = functools.partial(
            getattr(jaxkv.recurrent, operation),
            batch=batch, num_accepted=accepted, kinds=TEMPORAL, **{argument: known},
        )  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"^recurrent.{operation}: jax.{name}"):
            getattr(jax, name)(lambda state, call=call: call(state)[0].sum())(states[1])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kinds": [SD]}, "kinds must have the structure of states, or a prefix of it: got "),
        ({"kinds": ["conv", TEMPORAL]}, "leaf 0 must be a StateKind, got 'conv'"),
        ({"states": [jnp.zeros(25), jnp.zeros((25, 8))]}, r"leaf 0 of kind CONV_SD .* \(25,\)"),
        (
            {"states": [jnp.zeros((25, 4, 8)), jnp.zeros((24, 8))]},
            "got 24 in leaf 1 and 25 in leaf 0",
        ),
        (
            {"states": [jnp.zeros((25, 4, 8), "int4"), jnp.zeros((25, 8))]},
            "dtype of leaf 0 must be byte-aligned, got int4 of 4 bits",
        ),
        (
            {"states": [np.zeros((25, 4, 8)), np.zeros((25, 8))]},
            "leaf 0 is float64 of 64 bits, the limit is 32 bits unless jax_enable_x64",
        ),
        (
            {"states": [jnp.zeros((25, 4, 8)), np.zeros((25, 8), np.int64)]},
            "leaf 1 is int64 of 64 bits",
        ),
        ({"states": [], "kinds": []}, "states must have 1 to 256 arrays, got 0"),
        (
            {"states": of_geometries(17), "kinds": TEMPORAL},
            r"states: 17 different geometries .* the limit of a call is 16: call it for some",
        ),
        (
            {"num_accepted": np.ones(5, np.int32)},
            r"num_accepted must be int32\[6\], got int32\[5\]",
        ),
        (
            {"num_accepted": np.full(6, 2**32 + 1)},
            r"num_accepted must fit int32, got 4294967297 \.\. 4294967297",
        ),
        ({"num_accepted": np.full(6, -1, np.int32)}, "num_accepted must be at least 0 .* got -1"),
        ({"num_drafts": np.full(6, -1, np.int32)}, "num_drafts must be at least 0 .* got -1"),
        ({"num_drafts": jnp.ones(6, jnp.int16)}, r"num_drafts must be int32\[6\], got int16\[6\]"),
    ],
)
def test_inconsistent_arguments_raise_while_tracing(change, message):
    states, rows, accepted = small_call(np.random.default_rng(0))
    call = {
        "states": states,
        "batch": batch_of(rows),
        "num_accepted": accepted,
        "kinds": [SD, TEMPORAL],
        "num_drafts": rows.drafts.astype(np.int32),
    }
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: jaxkv.recurrent.align_postprocess(**(call | change)))
