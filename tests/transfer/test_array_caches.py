"""Page copies of engines' own arrays, compared with NumPy."""

from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from tests.util.array_cases import (
    HOST_PAGES,
    LAYER_ARRAYS,
    LAYERS,
    PAGES,
    assert_pages,
    by_page,
    random_arrays,
    stored_pool,
)
from tests.util.async_cases import OVERLAPPED
from tests.util.transfer_cases import as_ids

LAYOUTS = ("page_first_direct", "layer_first")
FORMS = tuple(LAYER_ARRAYS)


def page_ids(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    sides = (HOST_PAGES, PAGES)
    host, device = (rng.permutation(pages)[:count].astype(np.int32) for pages in sides)
    return host, device


def same_structure(tree, other) -> bool:
    return bool(jax.tree.structure(tree) == jax.tree.structure(other))  # type: ignore[operator]


def layer_of(tree, layer: int, stacked: bool):
    return jax.tree.map(lambda array: array[layer], tree) if stacked else tree[layer]


def loaded(host, device):
    def want(cache: np.ndarray, pool: np.ndarray) -> np.ndarray:
        cache = cache.copy()
        cache[device] = pool[host]
        return cache

    return want


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", FORMS)
def test_pages_survive_store_and_load(form, layout, stacked, implementation):
    pool, stored = stored_pool(form, layout, stacked)
    cache = random_arrays(form, stacked=stacked)
    host, device = page_ids(5)
    ids = [as_ids(entry, implementation) for entry in (host, device)]
    got = jaxkv.load_pages(pool, jax.device_put(cache), *ids, implementation=implementation)
    jaxkv.check_errors(got)
    assert same_structure(got, cache)
    assert_pages(got, loaded(host, device), cache, stored, stacked=stacked)
    # Store other pages, read them back, and check that all others are as before.
    back = jaxkv.store_pages(pool, jax.device_put(cache), *ids, implementation=implementation)
    every = np.arange(HOST_PAGES, dtype=np.int32)
    read = jaxkv.load_pages(back, jax.device_put(stored), every, every)
    assert_pages(read, loaded(device, host), stored, cache, stacked=stacked)


@settings(max_examples=20)
@given(
    st.sampled_from(FORMS),
    st.booleans(),
    st.lists(st.integers(-2, PAGES - 1), max_size=8),
    st.lists(st.integers(0, LAYERS - 1), unique=True),
)
def test_padding_and_layers_match_reference(form, stacked, device, layers):
    device = list(dict.fromkeys(device))  # destinations are unique
    host = list(range(len(device)))
    pool, stored = stored_pool(form, "page_first_direct", stacked)
    cache = random_arrays(form, stacked=stacked)
    got = jaxkv.load_pages(pool, jax.device_put(cache), host, device, layers=tuple(layers))
    used = [i for i, page in enumerate(device) if page >= 0]
    for layer in range(LAYERS):
        source = [host[i] for i in used] if layer in layers else []
        target = [device[i] for i in used] if layer in layers else []
        of_layer = [layer_of(tree, layer, stacked) for tree in (got, cache, stored)]
        assert_pages(of_layer[0], loaded(source, target), *of_layer[1:], stacked=False)


@pytest.mark.parametrize("named", OVERLAPPED)
@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
@pytest.mark.parametrize("form", FORMS)
def test_started_copies_match_reference(form, stacked, named):
    pool, stored = stored_pool(form, "page_first_direct", stacked)
    cache = random_arrays(form, stacked=stacked)
    host, device = page_ids(4)
    ids = [as_ids(entry, named) for entry in (host, device)]

    @jax.jit
    def step(pool, cache, ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)
        waited = [loading.wait(layer) for layer in range(LAYERS)]
        # Stacked arrays are one buffer: returning more than the last of them would copy it.
        layers = waited[-1:] if stacked else waited
        cache = loading.cache
        storing = jaxkv.start_store(pool, cache, *ids, implementation=named)
        storing.wait(1)
        return layers, cache, storing.pool

    lowered = step.lower(pool, jax.device_put(cache), ids).as_text()
    assert lowered.count("joined = false") == 2
    layers, got, new_pool = step(pool, jax.device_put(cache), ids)
    jaxkv.check_errors(got)
    assert_pages(got, loaded(host, device), cache, stored, stacked=stacked)
    np.testing.assert_array_equal(np.asarray(new_pool.data), np.asarray(pool.data))
    assert same_structure(layers[0], cache if stacked else cache[0])


@pytest.mark.parametrize("named", OVERLAPPED)
def test_scan_waits_for_traced_layer(named):
    pool, stored = stored_pool("fused", "page_first_direct", True)
    cache = random_arrays("fused", stacked=True)
    host, device = page_ids(4)
    ids = [as_ids(entry, named) for entry in (host, device)]

    def step(pool, cache, ids):
        loading = jaxkv.start_load(pool, cache, *ids, implementation=named)

        def layer_step(carry, layer):
            loading, checksum = carry
            kv = loading.wait(layer, after=checksum)
            bits = jax.lax.bitcast_convert_type(kv[layer][device], jnp.uint16)
            return (loading, checksum + bits.astype(jnp.uint32).sum()), None

        carry = loading, jnp.uint32(0)
        (loading, checksum), _ = jax.lax.scan(layer_step, carry, jnp.arange(LAYERS))
        return checksum, loading.cache

    step = jax.jit(step, donate_argnames="cache")
    assert "joined = false" in step.lower(pool, jax.device_put(cache), ids).as_text()
    checksum, got = step(pool, jax.device_put(cache), ids)
    jaxkv.check_errors(got)
    assert_pages(got, loaded(host, device), cache, stored, stacked=True)
    pages = by_page(stored, True)[host].view(np.uint16).astype(np.uint32)
    assert int(checksum) == int(pages.sum(dtype=np.uint64)) % 2**32


@pytest.mark.parametrize("named", OVERLAPPED)
@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
@pytest.mark.parametrize("form", ["latent", "quantized"])
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_handles_of_several_block_sizes_cross_programs(form, stacked, named):
    pool, stored = stored_pool(form, "page_first_direct", stacked)
    cache = random_arrays(form, stacked=stacked)
    host, device = page_ids(4)
    ids = [as_ids(entry, named) for entry in (host, device)]
    start = partial(jaxkv.start_load, implementation=named)
    loading = jax.jit(start, donate_argnames="cache")(pool, jax.device_put(cache), *ids)
    loading.wait(1)
    got = jax.jit(lambda loading: loading.cache, donate_argnums=0)(loading)
    jaxkv.check_errors(got)
    assert_pages(got, loaded(host, device), cache, stored, stacked=stacked)

    start = partial(jaxkv.start_store, implementation=named)
    begin = jax.jit(start, donate_argnames=("pool", "cache"))
    storing = begin(pool, jax.device_put(cache), *ids)
    finish = jax.jit(lambda storing: (storing.pool, storing.cache), donate_argnums=0)
    pool, same = finish(storing)
    assert_pages(same, loaded([], []), cache, cache, stacked=stacked)
    every = np.arange(HOST_PAGES, dtype=np.int32)
    read = jaxkv.load_pages(pool, jax.device_put(stored), every, every)
    assert_pages(read, loaded(device, host), stored, cache, stacked=stacked)


def test_largest_block_size_is_in_flight():
    """K of 2,048 bytes in flight, V of 256 bytes complete at the start."""
    pool, _ = stored_pool("latent", "page_first_direct", False)
    cache = jax.device_put(random_arrays("latent", stacked=False))
    step = jax.jit(lambda pool, cache, ids: jaxkv.start_load(pool, cache, ids, ids).cache)
    lowered = step.lower(pool, cache, jnp.arange(3)).as_text()
    assert lowered.count("@jaxkv_start_copy") == lowered.count("@jaxkv_copy_blocks") == 1
    text = jaxkv.explain(jaxkv.start_load, pool, cache, jnp.arange(3), jnp.arange(3))
    assert len([line for line in text.splitlines() if line.startswith("start_load: ")]) == 2


def test_wrong_id_of_a_start_with_several_block_sizes(named_implementation):
    if named_implementation not in OVERLAPPED:
        pytest.skip("not asynchronous")
    pool, _ = stored_pool("latent", "page_first_direct", False)
    cache = jax.device_put(random_arrays("latent", stacked=False))
    ids = [as_ids(entry, named_implementation) for entry in ([0, HOST_PAGES], [1, 2])]
    start = partial(jaxkv.start_load, implementation=named_implementation)
    step = jax.jit(lambda pool, cache, ids: start(pool, cache, *ids).cache)
    if jax.default_backend() == "cpu":
        with pytest.raises(jax.errors.JaxRuntimeError, match="PageIndexError"):
            jax.block_until_ready(step(pool, cache, ids))
    else:
        got = step(pool, cache, ids)
        with pytest.raises(jaxkv.PageIndexError, match=str(HOST_PAGES)):
            jaxkv.check_errors(got)


def test_groups_have_their_own_ids():
    forms = {"full": "fused", "window": "separate", "state": "recurrent"}
    pools, stored = {}, {}
    for name, form in forms.items():
        pools[name], stored[name] = stored_pool(form, "page_first_direct", False)
    caches = {name: random_arrays(form, stacked=False) for name, form in forms.items()}
    ids = {name: page_ids(count + 1, count) for count, name in enumerate(forms)}
    host = {name: pair[0] for name, pair in ids.items()}
    device = {name: pair[1] for name, pair in ids.items()}
    got = jaxkv.load_pages(pools, jax.device_put(caches), host, device)
    for name in forms:
        want = loaded(host[name], device[name])
        assert_pages(got[name], want, caches[name], stored[name], stacked=False)
    text = jaxkv.explain(jaxkv.load_pages, pools, jax.device_put(caches), host, device)
    assert all(f"{name}: load_pages: " in text for name in forms)


def test_groups_may_be_any_mapping():
    pool, stored = stored_pool("fused", "page_first_direct", False)
    cache = random_arrays("fused", stacked=False)
    host, device = page_ids(3)
    groups: Any = [
        MappingProxyType({"a": value}) for value in (pool, jax.device_put(cache), host, device)
    ]
    layers, tokens = MappingProxyType({"a": range(LAYERS)}), MappingProxyType({"a": None})
    got = jaxkv.load_pages(*groups, layers=layers, tokens=tokens)
    assert type(got) is dict
    assert_pages(got["a"], loaded(host, device), cache, stored, stacked=False)
    assert type(jaxkv.start_load(*groups)) is dict


def test_started_groups_have_a_handle_each():
    pools, caches, want = {}, {}, {}
    for name, form in {"full": "fused", "window": "separate"}.items():
        pools[name], stored = stored_pool(form, "page_first_direct", False)
        caches[name] = random_arrays(form, stacked=False)
        want[name] = stored
    host, device = ({name: page_ids(3)[side] for name in pools} for side in (0, 1))

    @jax.jit
    def step(pools, caches):
        loading = jaxkv.start_load(pools, caches, host, device)
        first = loading["window"].wait(0)
        return first, {name: handle.cache for name, handle in loading.items()}

    _, got = step(pools, jax.device_put(caches))
    for name in pools:
        assert_pages(
            got[name], loaded(host[name], device[name]), caches[name], want[name], stacked=False
        )


@pytest.mark.cpu_only
@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
@pytest.mark.parametrize("heads", [P("tp"), P(("ep", "tp")), P()], ids=str)
def test_shards_are_copied_inside_shard_map(heads, stacked):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("data", "ep", "tp"))
    head_axes = heads[0] if heads else None
    spec_of_array = P("data", None, head_axes)
    if stacked:
        spec_of_array = P(None, *spec_of_array)
    pages, host_pages = 8, 12  # of both data shards
    rng = np.random.default_rng(0)
    shape = (pages, 16, 4, 32)
    layers = [rng.random(shape, np.float32) for _ in range(LAYERS)]
    cache: Any = np.stack(layers) if stacked else layers
    sharding = NamedSharding(mesh, spec_of_array)
    arrays = jax.device_put(cache, sharding)
    spec = jaxkv.ArrayCacheSpec.from_arrays(arrays, stacked=stacked)
    pool = jaxkv.HostPool.create(spec, num_pages=host_pages)
    assert pool.num_pages == host_pages
    assert pool.partition_spec[0] == "data"
    # Of each data shard: its page 3 is stored as page 5, and loaded into page 1.
    ids = [jnp.array([page, page], jnp.int32) for page in (5, 3, 1)]

    @jax.jit
    @jax.shard_map(
        mesh=mesh,
        in_specs=(pool.partition_spec, spec_of_array, P("data")),
        out_specs=(pool.partition_spec, spec_of_array),
    )
    def step(pool, arrays, ids):
        host, stored, target = ids
        pool = jaxkv.store_pages(pool, arrays, host, stored)
        return pool, jaxkv.load_pages(pool, arrays, host, target)

    _, got = step(pool, arrays, ids)
    for layer in range(LAYERS):
        before, after = np.array(cache[layer]), np.asarray(got[layer])
        before[[1, 4 + 1]] = before[[3, 4 + 3]]
        np.testing.assert_array_equal(after, before)


@pytest.mark.cpu_only
def test_sharded_pool_outside_shard_map_raises():
    mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
    sharding = NamedSharding(mesh, P(None, None, "tp"))
    arrays = [jax.device_put(np.zeros((4, 16, 4, 32), np.float32), sharding)]
    pool = jaxkv.HostPool.create(jaxkv.ArrayCacheSpec.from_arrays(arrays), num_pages=4)
    for load in (jaxkv.load_pages, jax.jit(jaxkv.load_pages)):
        with pytest.raises(ValueError, match=r"over mesh axes tp: .* manual over all mesh axes"):
            load(pool, arrays, jnp.array([0]), jnp.array([1]))


@pytest.mark.cpu_only
@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
def test_bytes_of_a_shard_of_a_page(layout):
    """Outside shard_map the layout has the pages of all page shards, and these bytes."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tp"))
    sharding = NamedSharding(mesh, P("data", None, "tp"))
    arrays = [jax.device_put(np.zeros((8, 4, 2, 16), np.float32), sharding)] * 2
    pool = jaxkv.HostPool.create(
        jaxkv.ArrayCacheSpec.from_arrays(arrays), num_pages=16, layout=layout
    )
    assert pool.host_layout.num_pages == 16
    assert pool.host_layout.shape[-1] == pool.view(jax.devices()[0]).shape[-1] == 256
    message = r"partition_spec in its in_specs, where pool.data is uint8\[..., 256\], got uint8\["
    with pytest.raises(ValueError, match=message):
        jaxkv.load_pages(pool, arrays, [0], [0])


class TestErrors:
    @pytest.fixture
    def case(self):
        pool, _ = stored_pool("fused", "page_first_direct", False)
        return pool, jax.device_put(random_arrays("fused", stacked=False))

    def test_other_structure(self, case):
        pool, cache = case
        with pytest.raises(ValueError, match=r"expected 3 arrays, got 2: \[2\] is missing"):
            jaxkv.load_pages(pool, cache[:-1], [0], [1])

    @pytest.mark.parametrize("operation", [jaxkv.load_pages, jaxkv.start_load])
    def test_cache_of_the_other_kind(self, case, operation):
        pool, cache = case
        spec = jaxkv.KVCacheSpec(2, 4, 2, 8, np.float32)
        device_cache = jaxkv.DeviceCache.create(spec, num_pages=2)
        name = operation.__name__
        with pytest.raises(TypeError, match=rf"{name}: pool was .* the pool with cache\.spec"):
            operation(pool, device_cache, [0], [1])
        pool = jaxkv.HostPool.create(spec, num_pages=2)
        with pytest.raises(TypeError, match=rf"{name}: .* got list; .*\.from_arrays\(cache\)"):
            operation(pool, cache, [0], [1])

    def test_error_has_the_name_of_its_group(self, case):
        pool, cache = case
        pools, caches = {"full": pool, "window": pool}, {"full": cache, "window": cache}
        host, device = {"full": [0], "window": [999]}, {"full": [0], "window": [0]}
        last = {"full": [], "window": [0]}
        unsupported: Any = "host" if jax.default_backend() == "gpu" else "dma"
        for operation in (jaxkv.load_pages, jaxkv.start_load):
            name = operation.__name__
            with pytest.raises(jaxkv.PageIndexError) as raised:
                operation(pools, caches, host, device)
            assert raised.value.__notes__ == [f"{name}: in group 'window'"]
            assert (raised.value.operation, raised.value.argument) == (name, "host_pages")
            with pytest.raises(NotImplementedError) as rejected:
                operation(pools, caches, last, last, implementation=unsupported)
            assert raised.value.__notes__[0] in rejected.value.__notes__  # JAX may add one

    def test_other_shape_names_the_array(self, case):
        pool, cache = case
        cache[2] = cache[2][..., :16]
        with pytest.raises(ValueError, match="array 0 of layer 2 must be bfloat16"):
            jaxkv.load_pages(pool, cache, [0], [1])

    def test_traced_layer_requires_stacked_arrays(self, case):
        pool, cache = case

        @jax.jit
        def step(pool, cache, layer):
            return jaxkv.start_load(pool, cache, [0], [1]).wait(layer)

        with pytest.raises(TypeError, match="static integer"):
            step(pool, cache, 1)

    def test_groups_must_have_equal_keys(self, case):
        pool, cache = case
        with pytest.raises(ValueError, match=r"pool must have the groups of host_pages, \['a'\]"):
            jaxkv.load_pages({"b": pool}, {"a": cache}, {"a": [0]}, {"a": [1]})
        with pytest.raises(TypeError, match=r"device_pages must be a dict of groups .* got list$"):
            jaxkv.load_pages({"a": pool}, {"a": cache}, {"a": [0]}, [1])
        with pytest.raises(TypeError, match="host_pages must be a dict of groups like pool"):
            jaxkv.load_pages({"a": pool}, {"a": cache}, [0], [1])
        with pytest.raises(ValueError, match="layers must be a dict of some of the groups"):
            jaxkv.load_pages({"a": pool}, {"a": cache}, {"a": [0]}, {"a": [1]}, layers=[0])
