"""Pools, caches, ids and pinned arrays under `jax.set_mesh`, without a mesh of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import jaxkv
from tests.util.transfer_cases import make_case

pytestmark = pytest.mark.cpu_only
IDS = [1, 2], [3, 4]
every_axis_type = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])


def load(pool, cache, ids):
    return jaxkv.load_pages(pool, cache, *ids)


def mesh_of(axis_type):
    return jax.make_mesh((2,), ("tp",), axis_types=(axis_type,))


@every_axis_type
def test_new_arrays_are_replicated_over_the_mesh(axis_type):
    case = make_case()
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        pool, cache, ids = case.pool(), case.cache(), jaxkv.HostIdPair(*IDS)
        pinned = jaxkv.pinned_zeros((4, 8), np.float32)
        array_spec = jaxkv.ArrayCacheSpec.from_arrays([np.zeros((4, 8), np.float32)])
        of_arrays = jaxkv.HostPool.create(array_spec, num_pages=4)
        loaded = jax.jit(load)(pool, cache, ids)
        plain = jnp.zeros(3)
    case.assert_holds(pool, loaded, **case.expected("load", *map(np.array, IDS)))
    for array in (pool.data, cache.layers[0][0], ids.data, pinned, of_arrays.data):
        assert array.sharding.is_fully_replicated
        assert array.devices() == plain.devices() == set(mesh.devices.flat)


@every_axis_type
def test_heads_are_sharded_over_the_mesh(axis_type):
    case = make_case(num_kv_heads=4)
    with jax.set_mesh(mesh_of(axis_type)):
        pool, cache = case.pool(head_axis="tp"), case.cache(head_axis="tp")
        specs = pool.partition_spec, cache.partition_spec
        sharded = jax.jit(jax.shard_map(load, in_specs=(*specs, jax.P()), out_specs=specs[1]))
        loaded = sharded(pool, cache, jaxkv.HostIdPair(*IDS))
    case.assert_holds(pool, loaded, **case.expected("load", *map(np.array, IDS)))


def test_creation_inside_jit_is_rejected():
    with jax.set_mesh(mesh_of(AxisType.Auto)), pytest.raises(RuntimeError, match="outside of jit"):
        jax.jit(lambda: jaxkv.HostIds([1]).data)()
