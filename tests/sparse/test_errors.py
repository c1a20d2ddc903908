"""Ids, pages and arguments that are rejected."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv import sparse
from jaxkv._src.runtime import native
from tests.util.sparse_cases import Pair


@pytest.mark.sanitizer
@pytest.mark.parametrize("position", [24, 25, -2, 2**31 - 1, -(2**31)])
def test_ids_out_of_range_are_counted(position):
    pair = Pair()
    pair.fetch([[1, position, 2], [position, 1, 3], [-1, 4, position]])
    message = rf"3 entries were not copied: .*sparse.fetch: topk_ids\[1\] = {position} is outside"
    with pytest.raises(jaxkv.PageIndexError, match=message) as raised:
        jaxkv.check_errors(pair.state)
    assert (raised.value.operation, raised.value.argument) == ("sparse.fetch", "topk_ids")
    jaxkv.check_errors()


def test_ids_beyond_the_length_are_counted():
    pair = Pair()
    pair.fetch([[1, 4], [4, 3], [0, -1]], lengths=[4, 5, 0])
    with pytest.raises(
        jaxkv.PageIndexError, match=r"topk_ids\[1\] = 4 is outside \[0, 4\) tokens of the request"
    ):
        jaxkv.check_errors(pair.state)


def test_resident_rows_beyond_the_length_are_not_found():
    """A request is shorter than before, without a release: its old tokens are errors."""
    pair = Pair()
    pair.fetch([[10, 11]] * 3)
    pair.fetch([[10, 3]] * 3, lengths=[10, 4, 11])
    assert pair.check_errors() == 2


def test_missing_pages_are_counted():
    pair = Pair()
    pair.table[1, 2] = len(pair.contents[0])
    pair.table[2, 2] = -1
    pair.fetch([[8, 9, 8]] * 3)
    with pytest.raises(
        jaxkv.PageIndexError,
        match=r"4 entries .* block_table\[8\] = 20 is outside \[0, 20\) pages of this device",
    ):
        jaxkv.check_errors(pair.state)
    assert pair.reference.errors == 4
    pair.append([[8], [9], [10]])
    with pytest.raises(jaxkv.PageIndexError, match=r"sparse\.append"):
        jaxkv.check_errors(pair.state)


def test_columns_beyond_the_block_table_are_counted():
    pair = Pair()
    pair.table = pair.table[:, :2]
    pair.fetch([[7, 8]] * 3)
    with pytest.raises(
        jaxkv.PageIndexError, match=r"sparse.fetch: row [012] needs column 2 of a block table of 2"
    ):
        jaxkv.check_errors(pair.state)
    pair.append([[8], [1], [1]])
    with pytest.raises(jaxkv.PageIndexError, match=r"sparse.append: row 0 needs column 2"):
        jaxkv.check_errors(pair.state)


def test_equal_positions_of_an_append_are_counted():
    pair = Pair()
    pair.append([[1, 1, 2], [3, 4, 3], [-1, -1, 5]])
    with pytest.raises(
        jaxkv.PageIndexError, match=r"2 entries .* sparse.append: positions\[1\] = 1 is a duplicate"
    ) as raised:
        jaxkv.check_errors(pair.state)
    assert raised.value.argument == "positions"


def test_errors_belong_to_a_scope():
    pair, scope = Pair(), jaxkv.ErrorScope("sparse test")
    with scope:
        pair.fetch([[24], [1], [2]])
    jaxkv.check_errors(pair.state)
    with pytest.raises(jaxkv.PageIndexError, match="scope sparse test"):
        scope.check_errors(pair.state)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"topk_ids": jnp.zeros((3, 9), "int32")}, ValueError, "9 ids .* more than slots=8"),
        (
            {"topk_ids": jnp.zeros((2, 2), "int32")},
            ValueError,
            r"int32\[3, ...\], got \[2, 2\]",
        ),
        ({"topk_ids": jnp.zeros((3, 2))}, ValueError, "topk_ids must be int32, got float32"),
        ({"topk_ids": [[0.9, 1.9]] * 3}, ValueError, "topk_ids must be int32, got float64"),
        ({"topk_ids": [[True, False]] * 3}, ValueError, "topk_ids must be int32, got bool"),
        ({"topk_ids": [[2**32 + 1]] * 3}, ValueError, "topk_ids must fit int32, got 4294967297"),
        ({"topk_ids": [np.array([2**32 + 1])] * 3}, ValueError, "topk_ids must fit int32"),
        ({"topk_ids": [[jnp.int32(1)]] * 2 + [[-(2**31) - 1]]}, ValueError, "got -2147483649"),
        ({"lengths": [np.uint32(2**31)] * 3}, ValueError, "lengths must fit int32"),
        ({"block_table": [[2**31]] * 3}, ValueError, "block_table must fit int32"),
        ({"topk_ids": [[jnp.float32(1)]] * 3}, ValueError, "topk_ids must be int32, got float32"),
        ({"lengths": [15.9] * 3}, ValueError, "lengths must be int32, got float64"),
        ({"block_table": [[0.0]] * 3}, ValueError, "block_table must be int32, got float64"),
        ({"lengths": jnp.zeros(2, "int32")}, ValueError, r"lengths must be int32\[3\]"),
        ({"block_table": jnp.zeros((3, 0), "int32")}, ValueError, "n from 1 to"),
        ({"layer": 2}, ValueError, r"layer must be a static integer in \[0, 2\), got 2"),
        ({"layer": True}, ValueError, r"layer must be a static integer in \[0, 2\), got True"),
        ({"num_sms": 0}, ValueError, "num_sms must be an integer of at least 1"),
        ({"num_sms": True}, ValueError, "num_sms must be an integer of at least 1, got True"),
        ({"state": None}, TypeError, "state must be a SparseState, got NoneType"),
        ({"pool": None}, TypeError, "pool must be a jaxkv.HostPool, got NoneType"),
    ],
)
def test_inconsistent_arguments_raise_while_tracing(change, error, message):
    pair = Pair()
    call = {
        "state": pair.state,
        "pool": pair.pool,
        "topk_ids": jnp.zeros((3, 2), jnp.int32),
        "lengths": jnp.zeros(3, jnp.int32),
        "block_table": pair.table,
        "layer": 1,
    } | change
    state, pool = call.pop("state"), call.pop("pool")
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda state, pool: sparse.fetch(state, pool, **call), state, pool)


@pytest.mark.parametrize("name", ["state", "pool"])
@pytest.mark.parametrize("operation", ["fetch", "append"])
def test_closed_over_states_and_pools_raise(operation, name):
    """A program with a copy of them would not see a later update."""
    pair = Pair()
    values = {"state": pair.state, "pool": pair.pool}
    passed = {other: value for other, value in values.items() if other != name}
    ids, table = np.zeros((3, 1), np.int32), pair.table
    rest: dict[str, Any] = {"topk_ids": ids, "lengths": np.full(3, 24, np.int32)}
    if operation == "append":
        rest = {"rows": np.zeros((3, 1, 32), np.uint8), "positions": ids}
    rest |= {"layer": 0, "block_table": table}
    call = getattr(sparse, operation)
    message = rf"sparse.{operation}: {name} is closed over by a traced function, .*: pass {name} as"
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda passed, rest: call(**(values | passed), **rest | {"layer": 0}))(passed, rest)
    jax.jit(lambda values, rest: call(**values, **rest | {"layer": 0}))(values, rest)


def test_release_of_a_closed_over_state_raises():
    pair = Pair()
    with pytest.raises(ValueError, match=r"sparse.release: state is closed over"):
        jax.jit(lambda ended: sparse.release(pair.state, ended))(np.ones(3, bool))


def test_release_of_a_pool_raises():
    pool: Any = Pair().pool
    message = r"sparse.release: state must be a SparseState, got HostPool"
    with pytest.raises(TypeError, match=message):
        sparse.release(pool, np.ones(3, bool))


@pytest.mark.parametrize("gone", ["state", "pool", "closed pool", "positions"])
def test_deleted_arguments_raise(gone):
    pair = Pair()
    ids, lengths = jnp.zeros((3, 1), jnp.int32), np.full(3, 24, np.int32)
    rows = np.zeros((3, 1, 32), np.uint8)
    if gone == "closed pool":
        pair.pool.close()
    else:
        argument = {"state": pair.state, "pool": pair.pool, "positions": ids}[gone]
        jax.tree.map(lambda array: array.delete(), argument)
    call: dict[str, Any] = {"layer": 0, "block_table": pair.table}
    names = {"state": "state.hot", "closed pool": "pool.data", "pool": "pool.data"}
    message = "was closed, deleted or donated"
    with pytest.raises(
        ValueError, match=f"fetch: the array {names.get(gone, 'topk_ids')} {message}"
    ):
        sparse.fetch(pair.state, pair.pool, ids, lengths=lengths, **call)
    with pytest.raises(ValueError, match=f"append: the array {names.get(gone, gone)} {message}"):
        sparse.append(pair.state, pair.pool, rows, ids, **call)
    if gone == "state":
        with pytest.raises(ValueError, match=f"release: the array {names[gone]} {message}"):
            sparse.release(pair.state, np.ones(3, bool))


@pytest.mark.parametrize("dtype, value", [("int64", 2**33 + 1), ("float64", 1e300)])
@pytest.mark.parametrize("of_arrays", [False, True])
def test_rows_of_64_bits_raise(dtype, value, of_arrays):
    """JAX would truncate them to the dtype of the cache."""
    spec = jaxkv.KVCacheSpec(1, 4, 1, 4, dtype.replace("64", "32"), kind="mla")
    state = sparse.SparseState.create(spec, batch=2, slots=4, max_length=16)
    pool = jaxkv.HostPool.create(spec, num_pages=8)
    array = np.full((2, 1, 4), value, dtype)
    rows: Any = [*array] if of_arrays else array
    table = np.zeros((2, 1), np.int32)
    with pytest.raises(ValueError, match=f"sparse.append: rows is {dtype} of 64 bits"):
        sparse.append(state, pool, rows, table, layer=0, block_table=table)


def test_lists_of_integers_are_ids():
    pair = Pair()
    call: dict[str, Any] = {"layer": 1, "block_table": pair.table}
    ids: Any = [[3, -1], [jnp.int32(1), 0], [2, 2]]
    lengths: Any = [4, 4, np.int64(4)]
    none: Any = [[], [], []]
    got, _ = sparse.fetch(pair.state, pair.pool, ids, lengths=lengths, **call)
    want, _ = sparse.fetch(
        pair.state, pair.pool, jnp.array(ids), lengths=jnp.full(3, 4, jnp.int32), **call
    )
    np.testing.assert_array_equal(got, want)
    empty, _ = sparse.fetch(pair.state, pair.pool, none, lengths=lengths, **call)
    assert (empty.shape, empty.dtype) == ((3, 0), np.int32)
    jaxkv.check_errors()


def test_states_of_another_cache_raise():
    pair = Pair()
    other = Pair(layers=1, layer=0)
    call: dict[str, Any] = {"lengths": np.zeros(3, np.int32), "block_table": pair.table, "layer": 0}
    ids = np.zeros((3, 2), np.int32)
    with pytest.raises(ValueError, match="state has 1 layers, the pool has 2"):
        sparse.fetch(other.state, pair.pool, ids, **call)
    narrow = dataclasses.replace(pair.state, used=pair.state.used[:, :, :4])
    with pytest.raises(ValueError, match=r"state.used must be int32\[2, 3, 8\]"):
        sparse.fetch(narrow, pair.pool, ids, **call)
    rows = np.zeros((3, 2, 31), np.uint8)
    with pytest.raises(ValueError, match=r"rows must be uint8\[3, 2, 32\], got uint8\[3, 2, 31\]"):
        sparse.append(pair.state, pair.pool, rows, ids, layer=0, block_table=pair.table)
    with pytest.raises(ValueError, match=r"ended must be bool\[3\], got int32\[3\]"):
        sparse.release(pair.state, np.zeros(3, np.int32))
    on_device = dataclasses.replace(pair.pool, data=jnp.zeros(pair.pool.data.shape, np.uint8))
    with pytest.raises(ValueError, match="memory kind pinned_host"):
        sparse.fetch(pair.state, on_device, ids, **call)


@pytest.mark.parametrize(
    "spec, sizes, message",
    [
        ({"kind": "mha"}, {}, "require kind='mla'"),
        ({"head_dim": 24}, {}, "multiple of 16 bytes, got 24: 24 elements of uint8"),
        ({}, {"slots": 12289}, "slots must be at most 12288, got 12289"),
        ({}, {"batch": 4097}, "batch must be at most 4096, got 4097"),
        ({}, {"max_length": 0}, "max_length must be an integer"),
        ({"num_layers": 64}, {"batch": 4096, "slots": 12288}, "must be below 2"),
    ],
)
def test_buffers_that_are_not_supported(spec, sizes, message):
    given = {"num_layers": 1, "page_size": 4, "num_kv_heads": 1, "head_dim": 16, "kind": "mla"}
    cache = jaxkv.KVCacheSpec(**given | {"dtype": np.uint8} | spec)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda: sparse.SparseState.create(
                cache, **{"batch": 1, "slots": 8, "max_length": 9} | sizes
            )
        )


@pytest.mark.parametrize(
    "arrays, page_size, message",
    [
        ([{"k": (9, 4, 16), "v": (9, 4, 16)}], 4, "one array per layer, got 2"),
        ([{"k": (9, 4, 16)}], None, "got page_size=None"),
        ([{"k": (9, 16, 4)}], 4, r"first dimension of a page, got .*16, 4\]"),
        ([{"k": (9, 4, 6)}], 4, "multiple of 16 bytes, got 24: 6 elements of float32"),
    ],
)
def test_arrays_that_are_not_supported(arrays, page_size, message):
    layers = [
        {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in layer.items()}
        for layer in arrays
    ]
    with pytest.raises(ValueError, match=message):
        spec = jaxkv.ArrayCacheSpec.from_arrays(layers, page_size=page_size)
        sparse.SparseState.create(spec, batch=1, slots=8, max_length=9)


def test_limits_of_the_extension():
    assert np.iinfo(np.int16).max >= native.extension().MAX_SPARSE_SLOTS
    assert native.extension().MAX_SPARSE_IDS >= 2048


def test_vmap_is_rejected():
    pair = Pair()
    ids = jnp.zeros((2, 3, 1), jnp.int32)
    lengths = jnp.full(3, 24, jnp.int32)
    call: dict[str, Any] = {"lengths": lengths, "block_table": pair.table, "layer": 0}
    with pytest.raises(NotImplementedError, match=r"sparse.fetch: jax.vmap"):
        jax.vmap(lambda i: sparse.fetch(pair.state, pair.pool, i, **call)[0])(ids)


def test_sizes_of_numpy_do_not_overflow():
    """61 * 4096 * 12288 is above 2^31, and another number in int32."""
    spec = jaxkv.KVCacheSpec(61, 4, 1, 16, "uint8", kind="mla")
    sizes: dict[str, Any] = {"batch": np.int32(4096), "slots": np.int32(12288)}
    with pytest.raises(ValueError, match=r"num_layers \* batch \* slots must be below 2\^31"):
        jax.eval_shape(lambda: sparse.SparseState.create(spec, max_length=8, **sizes))
