"""Rejected page copies: keywords of each error, and nothing written."""

import dataclasses
import pickle
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from tests.util.layout_reference import spec_of
from tests.util.transfer_cases import (
    DIRECTIONS,
    after,
    as_ids,
    assert_not_copied,
    assert_rejected,
    copy,
    donating,
    fails_at_once,
    make_case,
    mesh_of,
    runner,
)

# (host ids, device ids), the wrong side, its description in the message, the rejected entries.
WRONG_IDS = {
    "host id past the end": (([3, 12, 1], [2, 4, 5]), "host", ["12", "[0, 12)"], [1]),
    "host id far past the end": (([2**31 - 1], [2]), "host", ["2147483647", "[0, 12)"], [0]),
    "device id past the end": (([3, 2, 1], [2, 4, 9]), "device", ["9", "[0, 9)"], [2]),
}
EQUAL_DESTINATIONS = {
    "load": (([3, 2, 1, 0], [2, 4, 2, 5]), "device", ["2", "destination"], [0, 2]),
    "store": (([3, 2, 3, 0], [2, 4, 1, 5]), "host", ["3", "destination"], [0, 2]),
}
SOURCE = {"load": "host", "store": "device"}
every_wrong_id = pytest.mark.parametrize(
    "direction, ids, side, words, bad",
    [
        pytest.param(direction, *wrong, id=f"{direction}-{name}")
        for direction in DIRECTIONS
        for name, wrong in {**WRONG_IDS, "duplicate": EQUAL_DESTINATIONS[direction]}.items()
    ],
)


@pytest.mark.sanitizer
@every_wrong_id
def test_invalid_ids_outside_jit_are_rejected(direction, ids, side, words, bad, implementation):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    args = [as_ids(pages, implementation) for pages in ids]

    def call():
        return copy(direction, pool, cache, *args, implementation=implementation)

    if fails_at_once(implementation, inside_jit=False):
        assert_rejected(call, jaxkv.PageIndexError, f"{side}_pages", *words)
        jaxkv.check_errors()
    else:
        counted = implementation != "xla"
        assert_only_the_others_moved(case, direction, ids, bad, call(), pool, cache, counted)
    case.assert_holds(pool, cache)


@pytest.mark.sanitizer
@every_wrong_id
def test_invalid_ids_inside_jit_are_rejected(direction, ids, side, words, bad, implementation):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    args = [as_ids(pages, implementation) for pages in ids]
    step = donating(direction, implementation=implementation)

    def call():
        return jax.block_until_ready(step(pool, cache, *args))

    if fails_at_once(implementation, inside_jit=True):
        role = "source" if side == SOURCE[direction] else "destination"
        assert_rejected(call, jax.errors.JaxRuntimeError, "PageIndexError", role, *words)
        jaxkv.check_errors()
    else:
        counted = implementation != "xla"
        assert_only_the_others_moved(case, direction, ids, bad, call(), pool, cache, counted)


def assert_only_the_others_moved(case, direction, ids, bad, out, pool, cache, counted):
    """The bad entries were skipped, and counted once; the count is reset by reading it."""
    good = [[-1 if i in bad else page for i, page in enumerate(pages)] for pages in ids]
    jax.block_until_ready(out)
    if counted:
        assert_not_copied(len(bad))
    jaxkv.check_errors()
    case.assert_holds(*after(direction, out, pool, cache), **case.expected(direction, *good))


THREE = np.arange(3, dtype=np.int32)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "host_ids, device_ids, error, words",
    [
        (np.zeros(3, np.float32), THREE, TypeError, ["host_pages", "float32"]),
        (THREE, jnp.arange(3, dtype=jnp.int8), TypeError, ["device_pages", "int8"]),
        (jnp.arange(3, dtype=jnp.uint32), THREE, TypeError, ["host_pages", "uint32"]),
        (THREE[:, None], THREE, ValueError, ["host_pages", "(3, 1)"]),
        (THREE, np.int32(0), ValueError, ["device_pages", "()"]),
        (THREE, np.arange(4, dtype=np.int32), ValueError, ["host_pages", "3", "device_pages", "4"]),
    ],
    ids=["float", "int8", "uint32", "rank 2", "scalar", "unequal lengths"],
)
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
def test_malformed_ids_are_rejected(direction, host_ids, device_ids, error, words, inside_jit):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    run = runner(direction, inside_jit)
    assert_rejected(lambda: run(pool, cache, host_ids, device_ids), error, *words)
    case.assert_holds(pool, cache)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layers, word", [(3, "3"), (range(1, 4), "3"), (-1, "-1")])
def test_layers_out_of_range_are_rejected(direction, layers, word):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    ids = [np.zeros(1, np.int32)] * 2
    assert_rejected(
        lambda: copy(direction, pool, cache, *ids, layers=layers),
        ValueError,
        "layers",
        word,
        "num_layers",
    )
    case.assert_holds(pool, cache)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layers", [[0.5, 1.7], [True, False], True, 1.0, np.array([True, False])])
def test_non_integer_layers_are_rejected(direction, layers):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    assert_rejected(
        lambda: copy(direction, pool, cache, [0], [0], layers=layers),
        ValueError,
        "layers",
        "integers",
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "ids", [([99, 0], [1, 2]), ([1, 1], [3, 3])], ids=["out of range", "duplicate"]
)
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
def test_ids_without_layers_are_not_checked(direction, inside_jit, ids):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    arrays = [np.array(side, np.int32) for side in ids]
    out = runner(direction, inside_jit, layers=[])(pool, cache, *arrays)
    jaxkv.check_errors(out)
    case.assert_holds(*after(direction, out, pool, cache))


@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("operation", ["load_pages", "store_pages", "start_load", "start_store"])
@pytest.mark.parametrize("layers", [np.array([[0, 1]]), np.zeros((1, 0, 1), int)], ids=["2", "3"])
def test_layers_of_several_dimensions_are_rejected(layers, operation, inside_jit):
    case = make_case()
    call = partial(getattr(jaxkv, operation), layers=layers)
    call = partial(jax.jit(call) if inside_jit else call, case.pool(), case.cache())
    words = f"{operation}: layers", "one-dimensional", f"{layers.ndim} dimensions"
    assert_rejected(lambda: call(THREE, THREE), ValueError, *words)


@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda layers: (*layers, layers[0]), ["num_layers=3", "got 4"]),
        (lambda layers: layers[:-1], ["num_layers=3", "got 2"]),
        (lambda layers: (), ["num_layers=3", "got 0"]),
        (lambda layers: (*layers[:2], (*layers[2], layers[2][0])), ["layers[2]", "2", "got 3"]),
        (lambda layers: (layers[0], (), layers[2]), ["layers[1]", "2 arrays", "got 0"]),
    ],
    ids=["more layers", "fewer layers", "no layers", "more arrays", "no arrays"],
)
def test_cache_without_the_arrays_of_its_spec_is_rejected(change, words, direction, inside_jit):
    case = make_case()
    cache = case.cache()
    cache = dataclasses.replace(cache, layers=change(cache.layers))
    call = partial(runner(direction, inside_jit), case.pool(), cache, THREE, THREE)
    assert_rejected(call, ValueError, "cache.layers", *words)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("start", [False, True], ids=["copy", "start"])
def test_pool_of_a_numpy_array_is_rejected(direction, start):
    case = make_case()
    pool = jax.device_get(case.pool())
    assert isinstance(pool.data, np.ndarray)
    operation = getattr(jaxkv, f"start_{direction}" if start else f"{direction}_pages")
    call = partial(operation, pool, case.cache(), THREE, THREE)
    assert_rejected(call, ValueError, "pool.data", "pinned_host", "NumPy array")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "field, of_cache",
    [
        ("num_layers", 2),
        ("page_size", 8),
        ("num_kv_heads", 2),
        ("head_dim", 8),
        ("dtype", jnp.float16),
        ("kind", "mla"),
    ],
)
def test_pool_and_cache_of_different_specs_are_rejected(direction, field, of_cache):
    case = make_case(num_kv_heads=1)
    other = make_case("layer_first", **{"num_kv_heads": 1, field: of_cache})
    pool, cache = case.pool(), other.cache()
    ids = [np.zeros(1, np.int32)] * 2
    values = (np.dtype(of_cache).name if field == "dtype" else of_cache, getattr(case.spec, field))
    assert_rejected(lambda: copy(direction, pool, cache, *ids), ValueError, field, *values)
    case.assert_holds(pool, case.cache())
    other.assert_holds(other.pool(), cache)


ON_CPU = jax.default_backend() == "cpu"


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "name, error, words",
    [
        ("memcpy", ValueError, ["memcpy", "dma", "kernel", "host"]),
        ("dma", NotImplementedError, ["dma", "cpu" if ON_CPU else "HostIds"]),
        ("kernel" if ON_CPU else "host", NotImplementedError, ["cpu"]),
    ],
    ids=["unknown", "dma", "other platform"],
)
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
def test_unsupported_implementation_is_rejected(direction, name, error, words, inside_jit):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    ids = [jnp.zeros(1, jnp.int32)] * 2
    run = runner(direction, inside_jit, implementation=name)
    assert_rejected(lambda: run(pool, cache, *ids), error, *words)
    case.assert_holds(pool, cache)


@pytest.mark.multigpu
@pytest.mark.parametrize("direction, inside_jit", [*product(DIRECTIONS, (False, True))])
def test_sharded_pool_outside_shard_map_is_rejected(direction, inside_jit):
    """XLA would gather the pool for a call that it can't partition; visible with explicit axes."""
    case = make_case()
    mesh = jax.sharding.Mesh(
        mesh_of(2).devices, ("tp",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    pool, cache = (getattr(case, name)(mesh=mesh, head_axis="tp") for name in ("pool", "cache"))
    ids = [np.zeros(1, np.int32)] * 2
    run = runner(direction, inside_jit)
    assert_rejected(lambda: run(pool, cache, *ids), ValueError, "shard_map", "tp")


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_closed_pool_is_rejected(direction):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    pool.close()
    ids = [np.zeros(1, np.int32)] * 2
    assert_rejected(lambda: copy(direction, pool, cache, *ids), ValueError, "closed")


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"layout": "page_last"}, ["layout", "page_last", "page_first_direct", "page_unified"]),
        ({"layout": "page_first", "head_groups": 2}, ["head_groups", "2", "page_unified"]),
        ({"layout": "page_unified", "head_groups": 3}, ["head_groups", "3", "num_kv_heads", "2"]),
        ({"layout": "page_first", "num_pages": 0}, ["num_pages", "0"]),
    ],
)
def test_invalid_pool_is_rejected(arguments, words):
    arguments = {"num_pages": 4, **arguments}
    assert_rejected(lambda: jaxkv.HostPool.create(spec_of(), **arguments), ValueError, *words)


def test_errors_derive_from_builtins():
    assert issubclass(jaxkv.PageIndexError, IndexError)
    assert issubclass(jaxkv.HostMemoryError, MemoryError)


@pytest.mark.parametrize("dtype", ["int64", "float64"])
@pytest.mark.parametrize("ids", [[], [0]], ids=["no ids", "an id"])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_64_bit_numpy_arrays_are_rejected(side, ids, dtype):
    wide, array = np.zeros((2, 2), dtype), np.zeros((2, 2), np.int32)
    src, dst = (wide, array) if side == "src" else (array, wide)
    assert_rejected(
        lambda: jaxkv.swap_blocks(src, dst, ids, ids), ValueError, side, dtype, "64 bits", "32"
    )


def test_non_array_leaves_are_rejected():
    array = jnp.zeros((2, 2))
    assert_rejected(
        lambda: jaxkv.swap_blocks([[1.0]], [[array]], [0], [0]), TypeError, "src", "got float"
    )


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_closed_over_host_ids_are_rejected(direction):
    case = make_case()
    pool, cache = case.pool(), case.cache()
    ids = [jaxkv.HostIds([1, 2]), jaxkv.HostIds([0, 1])]
    call = jax.jit(lambda pool, cache: copy(direction, pool, cache, *ids), donate_argnums=(0, 1))
    assert_rejected(lambda: call(pool, cache), ValueError, "HostIds", "arguments of the jitted")
    case.assert_holds(pool, cache)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_pool_in_device_memory_is_rejected(direction):
    case = make_case()
    pool = pickle.loads(pickle.dumps(case.pool()))
    call = partial(copy, direction, pool, case.cache(), [1], [2])
    assert_rejected(call, ValueError, "pool.data", "pinned_host", "got device")


@pytest.mark.parametrize("layers", [np.int32(1), np.array(1), np.array([1])], ids=repr)
def test_layers_as_numpy_integers(layers):
    case = make_case()
    out = jaxkv.load_pages(case.pool(), case.cache(), [1], [2], layers=layers)
    case.assert_holds(case.pool(), out, **case.expected("load", [1], [2], 1))


@pytest.mark.parametrize("side, name", [("pool", "pool.data"), ("cache", "cache.layers[0]")])
def test_arrays_of_another_dtype_are_rejected(side, name):
    case = make_case(dtype="bfloat16")
    pool, cache = case.pool(), case.cache()
    if side == "pool":
        pool = jax.tree.map(lambda array: array.view(jnp.float16), pool)
    else:
        cache = jax.tree.map(lambda array: array.view(jnp.float16), cache)
    call = partial(jaxkv.load_pages, pool, cache, [1], [2])
    assert_rejected(call, ValueError, f"{name} must be bfloat16[", "got float16[")


@pytest.mark.parametrize(
    "operation, names",
    [
        ("load_pages", ("host_pages", "device_pages")),
        ("store_pages", ("device_pages", "host_pages")),
        ("start_load", ("host_pages", "device_pages")),
        ("start_store", ("device_pages", "host_pages")),
    ],
)
def test_rejected_id_is_reported_with_its_position(operation, names):
    case = make_case()
    call = partial(getattr(jaxkv, operation), case.pool(), case.cache())
    good, outside = [99, 1, 2, 3, 4], [-1, 0, 50, 60, 5]  # the first is padding
    for name, other in (names, names[::-1]):
        ids = {name: outside, other: good}
        side, limit = ("pool", 12) if name == "host_pages" else ("cache", 9)
        words = f"{operation}: {name}[2] = 50 is outside [0, {limit}), the pages of the {side}"
        remedy = f"use ids below {limit}, or below 0 for padding"
        counts = "2 of 5 ids", "nothing was copied"
        assert_rejected(partial(call, **ids), jaxkv.PageIndexError, words, *counts, remedy)
    duplicate = f"{names[1]} has duplicate destination 5, at positions 1 and 3: nothing was copied"
    ids = dict(zip(names, ([0, 1, 2, 3, -1], [4, 5, 6, 5, 5]), strict=True))
    with_duplicate = partial(call, **ids)
    assert_rejected(with_duplicate, jaxkv.PageIndexError, duplicate)


def test_rejected_block_id_names_its_array():
    call = partial(jaxkv.swap_blocks, jnp.zeros((3, 2)), jnp.zeros((4, 2)))
    words = "src_ids[0] = 7 is outside [0, 3), the blocks of src"
    assert_rejected(lambda: call([7], [0]), jaxkv.PageIndexError, words)
    words = "dst_ids[0] = 4 is outside [0, 4), the blocks of dst"
    assert_rejected(lambda: call([0], [4]), jaxkv.PageIndexError, words)


def test_explain_names_a_missing_argument():
    case = make_case()
    call = partial(jaxkv.explain, jaxkv.load_pages, case.pool(), case.cache())
    words = "explain: load_pages: missing a required argument: 'host_pages'", "pass the arguments"
    assert_rejected(call, TypeError, *words)


def test_list_of_tracers_is_rejected():
    array = jnp.arange(5)
    call = partial(jax.jit(jaxkv.swap_blocks), array, array, [1], [2])
    assert_rejected(call, TypeError, "src_ids", "list of tracers")
