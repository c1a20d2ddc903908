"""Copies in plain JAX: platforms without handlers, invalid ids, and no copy of entire arrays."""

from collections.abc import Generator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.cache import host_pool, pinned_memory
from jaxkv._src.runtime import devices
from jaxkv._src.transfer import dispatch, ids
from jaxkv._src.transfer.dispatch import Machine
from tests.util.array_cases import LAYERS, assert_pages, random_arrays, stored_pool
from tests.util.async_cases import check, finish, ids_of, start
from tests.util.layout_reference import KIND_LAYOUTS, LAYOUTS
from tests.util.transfer_cases import (
    DIRECTIONS,
    after,
    assert_rejected,
    copied_shapes,
    copy,
    distinct_ids,
    donating,
    make_case,
    runner,
)

SKIPPED = {
    "past the end": (([3, 12, 1, 2**31 - 1], [2, 4, 9, 5]), [0]),
    "padding": (([3, -1, 1], [2, 4, -7]), [0]),
    "all": (([-1, 12], [2, 3]), []),
}


@pytest.fixture(params=["tpu", "rocm"])
def platform(request, monkeypatch) -> Generator[str]:
    """This machine as another platform, without native handlers and memory."""
    name = request.param
    monkeypatch.setattr(devices, "platform_of", lambda device: name)
    monkeypatch.setattr(dispatch, "_machine", lambda: Machine(name, "Some device", False))
    for module in (host_pool, pinned_memory, ids):
        for function in ("platform_of", "has_native_memory"):
            if hasattr(module, function):
                value = name if function == "platform_of" else False
                monkeypatch.setattr(module, function, lambda device, value=value: value)
    monkeypatch.setattr(jax.ffi, "ffi_call", None)
    monkeypatch.setattr(pinned_memory, "_shards", None)
    jax.clear_caches()  # of programs outside jit, traced for this platform
    yield name
    jax.clear_caches()


@pytest.mark.parametrize(
    "form", [np.asarray, jnp.asarray, jaxkv.HostIds], ids=["NumPy", "device", "HostIds"]
)
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_platforms_copy_without_handlers(platform, direction, inside_jit, form):
    case = make_case()
    numpy_ids = np.array([3, -1, 0, 5], np.int32), np.array([8, 2, -1, 1], np.int32)
    pool, cache = case.pool(), case.cache()
    out = runner(direction, inside_jit)(pool, cache, *map(form, numpy_ids))
    jaxkv.check_errors(out)
    new_pool, new_cache = after(direction, out, pool, cache)
    case.assert_holds(new_pool, new_cache, **case.expected(direction, *numpy_ids))
    assert new_pool.data.sharding.memory_kind == "pinned_host"
    new_pool.close()


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_platforms_start_copies_without_handlers(platform, direction):
    case = make_case()
    numpy_ids, args = ids_of(case, 5, None)
    pool, cache = case.pool(), case.cache()

    @jax.jit
    def step(pool, cache, *args):
        started = start(direction, pool, cache, *args)
        for layer in range(case.spec.num_layers):
            started.wait(layer, after=args)
        return started

    started = step(pool, cache, *args)
    jax.block_until_ready(started)
    assert started.done()
    check(case, direction, numpy_ids, finish(direction, started), pool)


def test_other_platforms_swap_blocks_without_handlers(platform):
    src, dst = np.arange(6, dtype=np.int32), np.zeros(4, np.int32)
    out = jax.jit(jaxkv.swap_blocks)(src, dst, np.array([1, 5]), np.array([3, 0]))
    np.testing.assert_array_equal(out, [5, 0, 0, 1])


@pytest.mark.parametrize("name", ["load_pages", "start_store"])
def test_explain_reports_the_fallback(platform, name):
    case = make_case()
    text = jaxkv.explain(getattr(jaxkv, name), case.pool(), case.cache(), [1], [2])
    reason = f"fallback: the platform is {platform}, which has no CUDA handlers"
    if name == "start_store":
        reason += "; not overlapped: the copy is complete at its start"
    first, *others = text.splitlines()
    assert first == f"{name}: xla ({reason})"
    assert f"  not dma: requires a CUDA device, the platform is {platform}" in others
    assert f"  not host: CPU backend only, the platform is {platform}" in others
    call = partial(jaxkv.load_pages, case.pool(), case.cache(), [1], [2], implementation="kernel")
    assert_rejected(call, NotImplementedError, "'kernel'", f"the platform is {platform}")


def test_view_on_other_platforms_is_rejected(platform):
    assert_rejected(make_case().pool().view, ValueError, "view", "np.asarray")


def test_platform_without_pinned_memory_is_rejected(monkeypatch):
    monkeypatch.setattr(pinned_memory, "PINNED", "hbm2")
    words = "hbm2", "only device, pinned_host"
    assert_rejected(lambda: jaxkv.pinned_zeros(3, np.int8), ValueError, *words)


def test_rocm_is_not_cuda():
    class Client:
        platform_version = "rocm 60300"

    class Device:
        platform, client = "gpu", Client()

    device: Any = Device()
    assert devices.platform_of(device) == "rocm"
    device.client.platform_version = "cuda 13000"
    assert devices.platform_of(device) == "gpu"


def test_default_is_another_implementation():
    case = make_case()
    text = jaxkv.explain(jaxkv.load_pages, case.pool(), case.cache(), [1], [2])
    assert "not xla: slower than the handlers of jaxkv: only if requested" in text


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", SKIPPED)
@pytest.mark.parametrize("kind, layout", KIND_LAYOUTS)
def test_skipped_entries_inside_jit(kind, layout, name, direction):
    case = make_case(layout, kind=kind)
    pages, good = SKIPPED[name]
    pool, cache = case.pool(), case.cache()
    step = donating(direction, implementation="xla")
    out = step(pool, cache, *(jnp.array(side, jnp.int32) for side in pages))
    jaxkv.check_errors(out)
    want = case.expected(direction, *([side[i] for i in good] for side in pages))
    case.assert_holds(*after(direction, out, pool, cache), **want)


def valid_entries(sources, destinations, limit: int) -> list[int]:
    in_range = [
        i
        for i, pair in enumerate(zip(sources, destinations, strict=True))
        if min(pair) >= 0 and max(pair) < limit
    ]
    used = [destinations[i] for i in in_range]
    return [i for i in in_range if used.count(destinations[i]) == 1]


@settings(max_examples=50)
@given(pairs=st.lists(st.tuples(st.integers(-1, 7), st.integers(-1, 7)), min_size=1, max_size=8))
def test_duplicate_destinations_are_skipped(pairs):
    sources, destinations = (np.array(side, np.int32) for side in zip(*pairs, strict=True))
    src, dst = np.arange(6, dtype=np.int32), -np.arange(6, dtype=np.int32)
    swap = jax.jit(partial(jaxkv.swap_blocks, implementation="xla"))
    out = swap(src, dst, jnp.asarray(sources), jnp.asarray(destinations))
    want = dst.copy()
    valid = valid_entries(sources.tolist(), destinations.tolist(), 6)
    want[destinations[valid]] = src[sources[valid]]
    np.testing.assert_array_equal(out, want)


@settings(max_examples=30)
@given(data=st.data())
def test_sizes_of_one_match_the_other_implementation(data):
    """With any ids, "xla" copies the valid pairs, also where two axes have the same stride."""
    num_layers, pages, host_pages = (data.draw(st.integers(1, 3)) for _ in range(3))
    page = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    stacked = data.draw(st.booleans())
    shape, size = (pages, *page), num_layers * pages * int(np.prod(page))
    every = jnp.arange(1, 1 + size, dtype=jnp.int32).reshape(num_layers, *shape)
    cache: Any = (every,) if stacked else list(every)
    spec = jaxkv.ArrayCacheSpec.from_arrays(cache, stacked=stacked)
    layout = data.draw(st.sampled_from(["page_first_direct", "layer_first"]))
    pool = jaxkv.HostPool.create(spec, num_pages=host_pages, layout=layout)
    entry = st.tuples(st.integers(-1, host_pages), st.integers(-1, pages))
    pairs = data.draw(st.lists(entry, min_size=1, max_size=4))
    layers = tuple(data.draw(st.lists(st.integers(0, num_layers - 1), min_size=1, unique=True)))
    limits = host_pages, pages
    for direction, written in (("store", 0), ("load", 1)):
        ids = np.array(pairs, np.int32)
        valid = ((ids >= 0) & (ids < limits)).all(axis=1)
        repeated = [(ids[valid, written] == entry).sum() > 1 for entry in ids[:, written]]
        padded = np.where((valid & ~np.array(repeated))[:, None], ids, -1)
        step = jax.jit(partial(copy, direction, layers=layers, implementation="xla"))
        got = step(pool, cache, *jnp.asarray(ids).T)
        want = copy(direction, pool, cache, *padded.T, layers=layers)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
        pool = want if direction == "store" else pool
        cache = jax.tree.map(jnp.negative, cache)


def test_padding_does_not_reach_another_layer():
    """Of one page: the axes of layers and pages have the same stride."""
    cache = (jnp.arange(24, dtype=jnp.float32).reshape(3, 1, 2, 4) + 1,)
    pool = jaxkv.HostPool.create(jaxkv.ArrayCacheSpec.from_arrays(cache, stacked=True), num_pages=4)
    options: Any = {"layers": [0], "implementation": "xla"}
    (got,) = jaxkv.load_pages(pool, cache, [1, -1], [0, -1], **options)
    np.testing.assert_array_equal(got, cache[0].at[0].set(0))


@pytest.mark.parametrize("operation", ["load_pages", "start_load"])
def test_ids_known_while_tracing_are_checked(operation):
    case = make_case()
    call = partial(getattr(jaxkv, operation), implementation="xla")
    step = jax.jit(lambda pool, cache: call(pool, cache, [1, 99], [2, 3]))
    assert_rejected(
        lambda: step(case.pool(), case.cache()), jaxkv.PageIndexError, "host_pages[1] = 99"
    )


# On CPUs XLA converts smaller floats to float32.
@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "int16"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS["mha"])
def test_program_copies_no_entire_array(layout, direction, dtype):
    """If donated; the pool and the cache are the only arrays that grow with their pages."""
    case = make_case(layout, host_pages=500, device_pages=300, dtype=dtype)
    args = case.pool(), case.cache(), *map(jnp.asarray, distinct_ids(case, 3))
    step = donating(direction, implementation="xla")
    entire = {leaf.shape for leaf in jax.tree.leaves(args[:2])}
    assert not entire & copied_shapes(step, *args)
    analysis: Any = step.lower(*args).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < case.cache().layers[0][0].nbytes
    undonated = jax.jit(partial(copy, direction, implementation="xla"))
    assert entire & copied_shapes(undonated, *args)


DTYPES = [
    np.dtype(dtype)
    for dtype in (bool, np.int8, np.complex64, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16)
]


@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
@pytest.mark.parametrize("layers", [None, (2, 0)], ids=["all", "backwards"])
def test_every_dtype_of_an_array_cache(layers, layout):
    rng = np.random.default_rng(0)

    def random(dtype: np.dtype) -> np.ndarray:
        values = rng.integers(
            0, 2 if dtype.kind == "b" else 256, 7 * 3 * 5 * dtype.itemsize, np.uint8
        )
        return values.view(dtype).reshape(7, 3, 5)

    caches = [[random(dtype) for dtype in DTYPES] for _ in range(LAYERS)]
    spec = jaxkv.ArrayCacheSpec.from_arrays(jax.device_put(caches))
    pool = jaxkv.HostPool.create(spec, num_pages=9, layout=layout)
    target, back = np.array([8, 0, 5], np.int32), np.array([6, 2, 0], np.int32)
    options: Any = {"implementation": "xla", "layers": layers}
    pool = jaxkv.store_pages(pool, jax.device_put(caches), target, back, **options)
    zeros = jax.tree.map(jnp.zeros_like, caches)
    got = jaxkv.load_pages(pool, zeros, target, back, **options)
    for layer in range(LAYERS):
        for array, want in zip(got[layer], caches[layer], strict=True):
            kept = np.zeros_like(want)
            if layers is None or layer in layers:
                kept[back] = want[back]
            assert np.asarray(array).tobytes() == kept.tobytes()


def test_scan_waits_for_traced_layer():
    pool, stored = stored_pool("fused", "page_first_direct", True)
    cache = random_arrays("fused", stacked=True)
    host, device = np.array([4, 1], np.int32), np.array([0, 6], np.int32)

    @jax.jit
    def step(pool, cache, host, device):
        loading = jaxkv.start_load(pool, cache, host, device, implementation="xla")

        def layer_step(loading, layer):
            return loading, loading.wait(layer)[layer].astype(jnp.float32).sum()

        loading, _ = jax.lax.scan(layer_step, loading, jnp.arange(LAYERS))
        return loading.cache

    got = step(pool, jax.device_put(cache), jnp.asarray(host), jnp.asarray(device))

    def loaded(before: np.ndarray, source: np.ndarray) -> np.ndarray:
        before = before.copy()
        before[device] = source[host]
        return before

    assert_pages(got, loaded, cache, stored, stacked=True)


def test_shared_pools_on_other_platforms_are_rejected(platform):
    spec = make_case().spec
    call = partial(jaxkv.HostPool.create, spec, num_pages=3, shared="test-other-platform")
    assert_rejected(call, NotImplementedError, "shared='test-other-platform'", "CUDA", "omit it")
