"""Specs of engines' own arrays."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_spec_has_pages_and_blocks():
    layers = [{"k": array(5, 16, 8), "s": array(5, 3, dtype=jnp.int8)} for _ in range(4)]
    spec = jaxkv.ArrayCacheSpec.from_arrays(layers)
    assert (spec.num_layers, spec.stacked, spec.mesh) == (4, False, None)
    assert [page.shape for page in spec.arrays] == [(16, 8), (3,)]
    # A block of 3 bytes is padded to 16.
    assert spec.page_bytes == 4 * (16 * 8 * 4 + 16)
    stacked = jax.tree.map(
        lambda *leaves: array(4, *leaves[0].shape, dtype=leaves[0].dtype), *layers
    )
    assert jaxkv.ArrayCacheSpec.from_arrays(stacked, stacked=True).arrays == spec.arrays


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_layout_has_the_bytes_of_the_pages(layout):
    spec = jaxkv.ArrayCacheSpec.from_arrays([array(5, 16, 8), array(5, 16, 8)])
    pool = jaxkv.HostPool.create(spec, num_pages=6, layout=layout)
    assert pool.host_layout.shape == pool.data.shape
    assert pool.host_layout.nbytes == 6 * spec.page_bytes == pool.data.nbytes
    assert pool.num_pages == 6


def test_spec_is_static():
    spec = jaxkv.ArrayCacheSpec.from_arrays([array(5, 16, 8)])
    assert hash(spec) == hash(jaxkv.ArrayCacheSpec.from_arrays([array(9, 16, 8)]))


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ([], {}, TypeError, "at least one layer"),
        ([3], {}, TypeError, "pytree of arrays, got int"),
        ({"k": [array(5, 2)]}, {}, TypeError, "list or tuple of layers, got dict"),
        ([array(5)], {}, ValueError, r"at least 2 dimensions, \[num_pages, ...\], .* shape \(5,\)"),
        ([(array(5, 2), array())], {}, ValueError, r"arrays\[0\]\[1\] must have .* got shape \(\)"),
        ([array(5, 0)], {}, ValueError, "none of them empty"),
        (array(3, 5), {"stacked": True}, ValueError, r"3 dimensions, \[num_layers, num_pages"),
        ([array(5, 2), array(6, 2)], {}, ValueError, "same number of pages, got 5 and 6"),
        ([array(5, 2), array(5, 3)], {}, ValueError, r"float32\[num_pages, 2\] and float32"),
        (
            [array(5, 2), (array(5, 2),)],
            {},
            ValueError,
            r"got PyTreeDef\(\*\) and PyTreeDef\(\(\*,\)\);",
        ),
        (
            [(array(5, 2),), [array(5, 2)]],
            {},
            ValueError,
            r"PyTreeDef\(\(\*,\)\) and .*\(\[\*\]\);",
        ),
        ([array(5, 16, 2)], {"page_size": 32}, ValueError, r"page_size=32 .*\[num_pages, 16, 2\]"),
        ([array(3, 5, 2)], {"stacked": True}, TypeError, "got a list, which is a list of layers"),
        ([array(5, 2, dtype=jnp.int4)], {}, ValueError, "int4"),
        ([array(5, 2, dtype=np.dtype(">f4"))], {}, ValueError, "dtype of an array must be a num"),
        ([array(5, 2, dtype=np.float64)], {}, ValueError, "dtype of an array is float64 of 64"),
    ],
)
def test_invalid_arrays_raise(arrays, options, error, message):
    with pytest.raises(error, match=message):
        jaxkv.ArrayCacheSpec.from_arrays(arrays, **options)


@pytest.mark.cpu_only
def test_shardings_follow_the_arrays():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tp"))
    zeros = np.zeros((8, 16, 4, 32), np.float32)
    arrays = [jax.device_put(zeros, NamedSharding(mesh, P("data", None, "tp")))]
    spec = jaxkv.ArrayCacheSpec.from_arrays(arrays)
    assert (spec.page_axes, spec.block_axes) == (("data",), ("tp",))
    pool = jaxkv.HostPool.create(spec, num_pages=6)
    assert pool.partition_spec == P("data", None, "tp")
    assert pool.data.nbytes == 6 * spec.page_bytes == 6 * zeros[0].nbytes
    with pytest.raises(ValueError, match="has the shardings of its arrays"):
        jaxkv.HostPool.create(spec, num_pages=6, mesh=mesh)


@pytest.mark.cpu_only
@pytest.mark.parametrize("form", ["arrays", "types"])
def test_the_device_follows_committed_arrays(form):
    device = jax.devices()[1]
    caches = [jnp.zeros((5, 4, 3)), jax.device_put(jnp.ones((5, 4, 3)), device)]
    arrays = caches
    if form == "types":
        placed = caches[1].sharding
        arrays = [jax.ShapeDtypeStruct(c.shape, c.dtype, sharding=placed) for c in caches]
    spec = jaxkv.ArrayCacheSpec.from_arrays(arrays)
    assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == spec
    with jax.default_device(jax.devices()[2]):
        pool = jaxkv.HostPool.create(spec, num_pages=4)
    pool = jaxkv.store_pages(pool, caches, [0], [1])
    assert pool.data.devices() == {device}
    on_default = jaxkv.ArrayCacheSpec.from_arrays(caches[:1] * 2)
    assert jaxkv.HostPool.create(on_default, num_pages=4).data.devices() == {jax.devices()[0]}


@pytest.mark.cpu_only
def test_arrays_on_several_devices_raise():
    arrays = [jax.device_put(jnp.zeros((5, 4)), device) for device in jax.devices()[:2]]
    with pytest.raises(ValueError, match=r"one device, .* got .*0, .*1; make a cache of"):
        jaxkv.ArrayCacheSpec.from_arrays(arrays)


def test_traced_arrays_raise():
    with pytest.raises(TypeError, match="must be called outside jit"):
        jax.jit(jaxkv.ArrayCacheSpec.from_arrays)([jax.numpy.zeros((8, 16))])


@pytest.mark.cpu_only
def test_sharded_layers_of_stacked_arrays_raise():
    mesh = Mesh(np.array(jax.devices()[:2]), ("pp",))
    arrays = jax.device_put(np.zeros((2, 8, 16), np.float32), NamedSharding(mesh, P("pp")))
    with pytest.raises(ValueError, match="layer axis"):
        jaxkv.ArrayCacheSpec.from_arrays(arrays, stacked=True)


def test_unknown_layout_raises():
    spec = jaxkv.ArrayCacheSpec.from_arrays([array(5, 16, 8)])
    with pytest.raises(ValueError, match="page_first_direct, layer_first, got 'page_head'"):
        jaxkv.HostPool.create(spec, num_pages=4, layout="page_head")
    with pytest.raises(ValueError, match="num_pages"):
        jaxkv.HostPool.create(spec, num_pages=0)
