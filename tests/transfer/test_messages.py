"""Messages of rejected calls: each begins with the operation, names the argument and the remedy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from tests.util.transfer_cases import assert_rejected, make_case, mesh_of

IDS = np.array([1, 2], np.int32)
OPERATIONS = ["load_pages", "store_pages", "start_load", "start_store"]


def arrays(dtype=jnp.float32):
    return [jnp.zeros((4, 16, 8), dtype) for _ in range(2)]


def pool_of(cache, **options):
    return jaxkv.HostPool.create(jaxkv.ArrayCacheSpec.from_arrays(cache, **options), num_pages=4)


def assert_message(call, error, beginning, *words):
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    assert message.startswith(beginning)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"layers": 2}, ValueError, ["layers must be in", "got 2"]),
        ({"layers": [0, 0]}, ValueError, ["layers must not have duplicates"]),
        ({"tokens": 5}, TypeError, ["tokens must be a range", "range(0, 5)"]),
        ({"tokens": range(17)}, ValueError, ["tokens must be in [0, page_size=16)"]),
        ({"implementation": "cuda"}, ValueError, ["implementation must be", "got 'cuda'"]),
        ({"timeout_s": 0}, ValueError, ["timeout_s must be more than 0"]),
        ({"host_pages": jnp.ones(2)}, TypeError, ["host_pages must be int32", "astype(jnp.int32)"]),
        ({"device_pages": np.ones(2)}, TypeError, ["device_pages must", "array.astype(np.int32)"]),
        ({"cache": arrays(jnp.int8)}, ValueError, ["cache: array 0 of layer 0", "from_arrays(cac"]),
        ({"cache": tuple(arrays())}, ValueError, ["cache must", "PyTreeDef([", "PyTreeDef(("]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_message_begins_with_the_operation(operation, options, error, words):
    if "timeout_s" in options and not operation.startswith("start"):
        pytest.skip("not asynchronous")
    cache = arrays()
    given = {"cache": cache, "host_pages": IDS, "device_pages": IDS} | options
    call = partial(getattr(jaxkv, operation), pool_of(cache, page_size=16), **given)
    assert_message(call, error, f"{operation}: {words[0]}", *words)


@pytest.mark.parametrize("operation", ["swap_blocks", "start_swap"])
@pytest.mark.parametrize(
    "src, dst, words",
    [
        (jnp.float32(1), jnp.float32(1), "each array of src"),
        (jnp.ones((2, 4)), jnp.ones((2, 5)), "blocks of src and dst must"),
        ([jnp.ones((2, 4)), jnp.ones((3, 4))], [jnp.ones((2, 4))] * 2, "all arrays of src"),
    ],
)
def test_message_of_a_swap_begins_with_the_operation(operation, src, dst, words):
    call = partial(getattr(jaxkv, operation), src, dst, IDS, IDS)
    assert_message(call, ValueError, f"{operation}: {words}")


def test_layer_that_was_not_copied():
    cache = arrays()
    loading = jaxkv.start_load(pool_of(cache), cache, IDS, IDS, layers=[1])
    words = "[1], got 0", "argument layers"
    assert_message(lambda: loading.wait(0), ValueError, "wait: layer must be one", *words)


def test_traced_ids_for_a_dict_of_groups():
    cache = arrays()
    pools = {"a": pool_of(cache)}
    call = partial(jax.jit(jaxkv.load_pages), pools, {"a": cache}, IDS, {"a": IDS})
    assert_message(call, TypeError, "load_pages: host_pages must be a dict", "got an array")


def test_handle_without_donation_is_reported_once():
    cache = arrays()
    loading = jax.jit(jaxkv.start_load, donate_argnums=1)(pool_of(cache), cache, IDS, IDS)
    result = jax.jit(lambda loading: loading.cache)(loading)
    with pytest.raises(jaxkv.TransferError) as raised:
        jaxkv.check_errors(result)
    message = str(raised.value)
    assert raised.value.count == len(cache)
    assert message.count("donate the handle") == 1 and "segment" not in message


@pytest.mark.cpu_only
@pytest.mark.parametrize("argument", ["pool", "cache", "host_pages"])
def test_sharded_argument_is_named_with_explicit_axes(argument):
    mesh = jax.sharding.Mesh(mesh_of(2).devices, ("tp",), axis_types=(AxisType.Explicit,))
    case = make_case()
    axes = {name: "tp" if name == argument else None for name in ("pool", "cache")}
    ids = jax.device_put(IDS, NamedSharding(mesh, P("tp" if argument == "host_pages" else None)))
    pool = case.pool(mesh=mesh, head_axis=axes["pool"])
    cache = case.cache(mesh=mesh, head_axis=axes["cache"])
    call = partial(jax.jit(jaxkv.load_pages), pool, cache, ids, IDS)
    words = "sharded by P(", "{'tp': 2}", "manual over all these axes"
    assert_message(call, ValueError, f"load_pages: {argument} has an array", *words)


@pytest.mark.cpu_only
def test_shard_map_over_some_axes_of_the_pool():
    mesh = jax.make_mesh((2, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    spec = P("data", None, "tp")
    cache = [jax.device_put(np.zeros((4, 16, 8), np.float32), NamedSharding(mesh, spec))]
    pool = pool_of(cache)
    partly = jax.shard_map(
        jaxkv.load_pages, mesh=mesh, axis_names={"data"}, in_specs=P("data"), out_specs=P("data")
    )
    ids = jax.device_put(IDS, NamedSharding(mesh, P("data")))
    call = partial(jax.jit(partly), pool, cache, ids, ids)
    assert_message(call, ValueError, "load_pages: pool is sharded", "manual over all mesh axes")


def abstract(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def test_compilation_ahead_of_time():
    cache = arrays()
    pool = pool_of(cache)
    load = jax.jit(jaxkv.load_pages)
    compiled = load.lower(jax.tree.map(abstract, pool), cache, IDS, IDS).compile()
    jax.block_until_ready(compiled(pool, cache, IDS, IDS))
    untyped = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), pool)
    words = "load_pages: pool.data", "pinned_host, got device", "sharding=pool.data.sharding"
    assert_rejected(lambda: load.lower(untyped, cache, IDS, IDS), ValueError, *words)
