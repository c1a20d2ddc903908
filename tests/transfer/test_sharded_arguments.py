"""Arguments that XLA would gather for a copy, and asynchronous copies that it cannot partition."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.transfer import dispatch
from tests.util.transfer_cases import assert_rejected, make_case, mesh_of

pytestmark = pytest.mark.multigpu
IDS = np.array([1, 2], np.int32)
OPERATIONS = ["load_pages", "store_pages", "start_load", "start_store"]
SYNCHRONOUS = {"start_load": "load_pages", "start_store": "store_pages"}


@pytest.fixture(params=[True, False], ids=["shardy", "gspmd"])
def partitioner(request):
    name = "jax_use_shardy_partitioner"
    if not hasattr(jax.config, name):
        if not request.param:
            pytest.skip("this JAX has Shardy only")
        yield
        return
    before = getattr(jax.config, name)
    jax.config.update(name, request.param)
    yield
    jax.config.update(name, before)


def state_on(mesh, pool_axis, cache_axis):
    case = make_case(num_kv_heads=4)
    return case.pool(mesh=mesh, head_axis=pool_axis), case.cache(mesh=mesh, head_axis=cache_axis)


def result_of(operation, *args, **options):
    result = getattr(jaxkv, operation)(*args, **options)
    return result.cache if operation == "start_load" else result


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "pool_axis, cache_axis",
    [("tp", "tp"), ("tp", None), (None, "tp")],
    ids=["both sharded", "pool sharded", "cache sharded"],
)
def test_sharded_argument_is_rejected(operation, pool_axis, cache_axis, partitioner):
    pool, cache = state_on(mesh_of(2), pool_axis, cache_axis)
    step = jax.jit(lambda pool, cache: result_of(operation, pool, cache, IDS, IDS))
    assert_rejected(lambda: step(pool, cache), ValueError, operation, "sharding", "jax.shard_map")


def test_sharded_blocks_are_rejected(partitioner):
    blocks = jax.device_put(jnp.zeros((4, 8)), NamedSharding(mesh_of(2), PartitionSpec(None, "tp")))
    swap = jax.jit(jaxkv.swap_blocks)
    words = ("swap_blocks", "tensor<4x8xf32>", "jax.shard_map")
    assert_rejected(lambda: swap(blocks, blocks, IDS, IDS), ValueError, *words)


def test_sharded_argument_of_a_loop_in_an_inner_jit_is_rejected(partitioner):
    pool, cache = state_on(mesh_of(2), None, "tp")

    @jax.jit
    def inner(pool, cache):
        def body(_, cache):
            return jaxkv.load_pages(pool, cache, IDS, IDS)

        return jax.lax.fori_loop(0, 2, body, cache)

    step = jax.jit(lambda pool, cache: inner(pool, cache))
    assert_rejected(lambda: step(pool, cache), ValueError, "load_pages", "jax.shard_map")


def test_arguments_replicated_or_on_an_axis_of_one_device_are_accepted(partitioner):
    mesh = jax.sharding.Mesh(mesh_of(2).devices.reshape(2, 1), ("dp", "tp"))
    pool, cache = state_on(mesh, "tp", "tp")
    other = jax.device_put(np.zeros(4, np.float32), NamedSharding(mesh, PartitionSpec("dp")))
    step = jax.jit(lambda pool, cache, x: (jaxkv.load_pages(pool, cache, IDS, IDS), x + 1))
    loaded, _ = step(pool, cache, other)
    case = make_case(num_kv_heads=4)
    case.assert_holds(pool, loaded, **case.expected("load", IDS, IDS))


def test_copy_in_shard_map_of_a_larger_program_is_accepted(partitioner):
    mesh = mesh_of(2)
    pool, cache = state_on(mesh, "tp", "tp")
    specs = pool.partition_spec, cache.partition_spec
    load = partial(jaxkv.load_pages, host_pages=IDS, device_pages=IDS)

    @jax.jit
    def step(pool, cache):
        flipped = jax.tree.map(lambda array: array[:, ::-1][:, ::-1], cache)
        return jax.shard_map(load, mesh=mesh, in_specs=specs, out_specs=specs[1])(pool, flipped)

    case = make_case(num_kv_heads=4)
    case.assert_holds(pool, step(pool, cache), **case.expected("load", IDS, IDS))


def mesh_of_two_axes(sizes):
    return jax.sharding.Mesh(mesh_of(int(np.prod(sizes))).devices.reshape(sizes), ("tp", "dp"))


def load_on_shards(pool, cache, **options):
    specs = pool.partition_spec, cache.partition_spec
    load = partial(result_of, "start_load", host_pages=IDS, device_pages=IDS)
    return jax.shard_map(load, in_specs=specs, out_specs=specs[1], **options)


@pytest.mark.parametrize("operation", SYNCHRONOUS)
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "no jit"])
def test_start_on_replicated_arrays_is_rejected(operation, jitted, partitioner):
    start = partial(getattr(jaxkv, operation), host_pages=IDS, device_pages=IDS)
    call: Any = jax.jit(start) if jitted else start
    words = operation, "2 devices", "jax.shard_map", "all mesh axes", SYNCHRONOUS[operation]
    assert_rejected(lambda: call(*state_on(mesh_of(2), None, None)), ValueError, *words)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "no jit"])
def test_wait_for_replicated_arrays_is_rejected(jitted, axis_type, partitioner):
    mesh = mesh_of(2, axis_type)
    pool, cache = state_on(mesh, None, None)
    start = partial(jaxkv.start_load, host_pages=IDS, device_pages=IDS)
    start = jax.shard_map(
        start,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    loading = jax.jit(start, donate_argnums=1)(pool, cache)

    def wait(loading):
        return loading.cache

    wait = jax.jit(wait) if jitted else wait
    assert_rejected(lambda: wait(loading), ValueError, "wait", "2 devices", "jax.shard_map")


def test_start_in_a_shard_map_over_some_axes_is_rejected(partitioner):
    mesh = mesh_of_two_axes((2, 2))
    step = load_on_shards(*state_on(mesh, "tp", "tp"), mesh=mesh, axis_names={"tp"})
    words = "start_load", "4 devices", "all mesh axes", "load_pages"
    assert_rejected(lambda: jax.jit(step)(*state_on(mesh, "tp", "tp")), ValueError, *words)


def check_load(step, pool, cache):
    loaded = jax.jit(step, donate_argnums=1)(pool, cache)
    case = make_case(num_kv_heads=4)
    case.assert_holds(pool, loaded, **case.expected("load", IDS, IDS))


def test_other_axes_may_have_one_device(partitioner):
    mesh = mesh_of_two_axes((2, 1))
    pool, cache = state_on(mesh, "tp", "tp")
    check_load(load_on_shards(pool, cache, mesh=mesh, axis_names={"tp"}), pool, cache)


def test_nested_shard_maps_over_all_axes(partitioner):
    mesh = mesh_of_two_axes((2, 2))
    pool, cache = state_on(mesh, "tp", "tp")
    inner = load_on_shards(pool, cache, axis_names={"tp"})
    outer = jax.shard_map(
        inner,
        mesh=mesh,
        axis_names={"dp"},
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    check_load(outer, pool, cache)


@pytest.mark.cpu_only
@pytest.mark.parametrize("operation", ["load_pages", "store_pages", "start_load"])
def test_the_copy_engine_for_arrays_on_cpus_is_rejected(operation, monkeypatch):
    """In a process with a GPU, whose CPU backend has no such handler."""
    monkeypatch.setattr(dispatch, "_machine", lambda: dispatch.Machine("gpu", "NVIDIA H200", True))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    case = make_case()
    args = case.pool(), case.cache(), jaxkv.HostIds(IDS), jaxkv.HostIds(IDS)
    step = jax.jit(partial(getattr(jaxkv, operation), implementation="dma"))
    words = operation, "CPUs", "implementation='kernel'", "HostIds"
    assert_rejected(lambda: step(*args), NotImplementedError, *words)
