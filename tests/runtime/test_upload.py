"""`upload_replicated`: the array of `jax.device_put`, without its Python code."""

import contextlib
import unittest.mock
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, SingleDeviceSharding

import jaxkv
from jaxkv._src.runtime import upload
from jaxkv._src.runtime.upload import upload_replicated


def shardings() -> dict[str, jax.sharding.Sharding]:
    """Fully replicated shardings."""
    devices = jax.devices()
    meshes = {
        kind: jax.make_mesh((len(devices),), ("tp",), axis_types=(kind,))
        for kind in (AxisType.Auto, AxisType.Explicit)
    }
    return {
        "device": SingleDeviceSharding(devices[-1]),
        "pinned": SingleDeviceSharding(devices[0], memory_kind="pinned_host"),
        "auto": jax.NamedSharding(meshes[AxisType.Auto], jax.P()),
        "explicit": jax.NamedSharding(meshes[AxisType.Explicit], jax.P()),
        "pinned mesh": jax.NamedSharding(
            meshes[AxisType.Auto], jax.P(None), memory_kind="pinned_host"
        ),
    }


@pytest.fixture(autouse=True)
def _no_earlier_types():
    upload._type_of.cache_clear()


def assert_equal_arrays(array, want):
    assert jax.typeof(array) == jax.typeof(want)
    assert jax.typeof(array).memory_space == jax.typeof(want).memory_space
    assert (array.sharding, array.committed) == (want.sharding, want.committed)
    assert array.sharding.memory_kind == want.sharding.memory_kind
    shards, expected = array.addressable_shards, want.addressable_shards
    assert [shard.device for shard in shards] == [shard.device for shard in expected]
    for shard, other in zip(shards, expected, strict=True):
        np.testing.assert_array_equal(shard.data, other.data)


@pytest.mark.parametrize("in_mesh", [False, True], ids=["no mesh", "other mesh"])
@pytest.mark.parametrize("name", shardings())
def test_array_is_that_of_device_put(name, in_mesh):
    sharding = shardings()[name]
    other = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    for values in (np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32) + 7):
        # The first one is typed outside of the mesh, and the second one in it.
        scope = jax.set_mesh(other) if in_mesh and values[0] else contextlib.nullcontext()
        with scope:
            array, want = upload_replicated(values, sharding), jax.device_put(values, sharding)
        assert_equal_arrays(array, want)


@pytest.mark.parametrize("name", shardings())
def test_programs_compile_once(name):
    values, sharding = np.arange(3, dtype=np.int32), shardings()[name]
    double: Any = jax.jit(lambda x: 2 * jax.device_put(x, jax.memory.Space.Device))
    for array in (jax.device_put(values, sharding), upload_replicated(values, sharding)):
        np.testing.assert_array_equal(double(array), 2 * values)
    assert double._cache_size() == 1


def test_each_shape_and_dtype_has_its_type():
    sharding = shardings()["pinned"]
    for values in (np.zeros(3, np.int32), np.ones((3, 1), np.int32), np.ones(3, np.int8)):
        assert_equal_arrays(upload_replicated(values, sharding), jax.device_put(values, sharding))


def test_later_arrays_do_not_pass_through_device_put(monkeypatch):
    """Unless JAX lacks the function, which then is a matter of speed only."""
    values, sharding = np.arange(3, dtype=np.int32), shardings()["pinned"]
    first = upload_replicated(values, sharding)
    device_put = unittest.mock.Mock(wraps=jax.device_put)
    monkeypatch.setattr(jax, "device_put", device_put)
    assert_equal_arrays(upload_replicated(values, sharding), first)
    assert not device_put.called
    monkeypatch.setattr(upload, "batched_device_put", None)
    assert_equal_arrays(upload_replicated(values, sharding), first)
    assert device_put.call_count == 1


def test_upload_inside_jit_is_traced():
    values, sharding = np.arange(3, dtype=np.int32), shardings()["device"]
    upload_replicated(values, sharding)
    traced = []
    jax.jit(lambda: traced.append(upload_replicated(values, sharding)))()
    assert isinstance(traced[0], jax.core.Tracer)


def test_upload_is_an_explicit_transfer():
    values, sharding = np.arange(3, dtype=np.int32), shardings()["device"]
    upload_replicated(values, sharding)
    with jax.transfer_guard("disallow"):
        array = upload_replicated(values, sharding)
    np.testing.assert_array_equal(array, values)
    with jax.transfer_guard("disallow_explicit"), pytest.raises(Exception, match="isallowed"):
        upload_replicated(values, sharding)


def test_upload_is_no_host_sync():
    values, sharding = np.arange(3, dtype=np.int32), shardings()["pinned"]
    with jaxkv.forbid_host_sync() as report:
        for _ in range(2):
            upload_replicated(values, sharding)
    assert not report.count
