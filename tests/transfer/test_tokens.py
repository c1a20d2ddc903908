"""Copies of some tokens of each page: their bytes, and those of the other tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv._src.transfer.pallas_chunks import unsupported_reason
from jaxkv._src.transfer.resolve import resolve
from tests.util.array_cases import HOST_PAGES, PAGES, random_arrays, stored_pool
from tests.util.async_cases import STARTED, check, finish, ids_of, start
from tests.util.implementations import IMPLEMENTATIONS
from tests.util.layout_reference import KIND_LAYOUTS
from tests.util.strategies import layer_selections, page_ids, reference_layouts, token_ranges
from tests.util.transfer_cases import (
    DIRECTIONS,
    as_ids,
    assert_rejected,
    check_copy,
    distinct_ids,
    make_case,
    mesh_of,
)

OPERATIONS = ["load_pages", "store_pages", "start_load", "start_store"]
PAGE_SIZE = 16  # of `array_cases`
WITH_TOKENS = ("fused", "separate", "latent")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind, layout", KIND_LAYOUTS)
@pytest.mark.parametrize("tokens", [range(5), range(3, 4), range(2, 8), range(8)], ids=str)
def test_every_layout(kind, layout, direction, tokens, implementation):
    if implementation == "pallas" and len(tokens) < 8:
        pytest.skip("whole blocks only")
    heads = {"num_kv_heads": 4, "head_groups": 2} if layout == "page_unified" else {}
    case = make_case(layout, kind=kind, page_size=8, **(heads if kind == "mha" else {}))
    ids = distinct_ids(case, 5)
    check_copy(case, direction, *ids, implementation, tokens=tokens)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_random_layouts_tokens_layers_and_ids(data):
    layout = data.draw(reference_layouts())
    case = make_case(
        layout.name,
        host_pages=layout.num_pages,
        device_pages=data.draw(st.integers(1, 4)),
        head_groups=layout.head_groups,
        **vars(layout.spec),
    )
    sides = data.draw(page_ids(layout.num_pages, case.num_device_pages))
    host, device = (np.array(side, np.int32) for side in sides)
    names = [name for name in IMPLEMENTATIONS[jax.default_backend()] if name != "pallas"]
    check_copy(
        case,
        data.draw(st.sampled_from(DIRECTIONS)),
        host,
        device,
        data.draw(st.sampled_from(names)),
        data.draw(layer_selections(layout.spec.num_layers)),
        data.draw(token_ranges(layout.spec.page_size)),
    )


@pytest.mark.parametrize("started_by", STARTED)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("inside_jit", [False, True], ids=["eager", "jit"])
def test_started_copies(direction, inside_jit, started_by):
    case, tokens = make_case(), range(1, 3)
    numpy_ids, ids = ids_of(case, 5, started_by)
    pool = case.pool()
    begin = partial(start, direction, implementation=started_by, layers=(2, 0), tokens=tokens)

    def step(pool, cache, *ids):
        started = begin(pool, cache, *ids)
        started.wait(2)
        return finish(direction, started)

    run = jax.jit(step, donate_argnames=("cache",)) if inside_jit else step
    out = run(pool, case.cache(), *ids)
    check(case, direction, numpy_ids, out, pool, (2, 0), tokens)


def test_last_page_is_stored_as_it_fills(implementation):
    """Two stores into one page, each of the new tokens: as an engine without a full page."""
    if implementation == "pallas":
        pytest.skip("whole blocks only")
    case = make_case("page_first")
    pages = np.array([7], np.int32), np.array([2], np.int32)
    ids = [as_ids(side, implementation) for side in pages]
    pool, cache = case.pool(), case.cache()
    for tokens in (range(0, 1), range(1, 3)):
        options = {"tokens": tokens, "implementation": implementation}
        pool = jaxkv.store_pages(pool, cache, *ids, **options)
    jaxkv.check_errors()
    case.assert_holds(pool, cache, **case.expected("store", *pages, None, range(0, 3)))


@pytest.mark.parametrize("stacked", [False, True], ids=["layers", "stacked"])
@pytest.mark.parametrize("layout", ["page_first_direct", "layer_first"])
@pytest.mark.parametrize("form", WITH_TOKENS)
@pytest.mark.parametrize("tokens", [range(5), range(7, 16), range(15, 16)], ids=str)
def test_engine_arrays(form, layout, stacked, tokens, implementation):
    if implementation == "pallas":
        pytest.skip("whole blocks only")
    pool, stored = pool_of_tokens(form, layout, stacked)
    cache = random_arrays(form, stacked=stacked)
    host, device = ids_of_arrays()
    ids = [as_ids(entry, implementation) for entry in (host, device)]
    options = {"tokens": tokens, "implementation": implementation}
    got = jaxkv.load_pages(pool, jax.device_put(cache), *ids, **options)
    jaxkv.check_errors(got)
    assert_tokens(got, cache, stored, device, host, tokens, stacked)
    back = jaxkv.store_pages(pool, jax.device_put(cache), *ids, **options)
    every = np.arange(HOST_PAGES, dtype=np.int32)
    read = jaxkv.load_pages(back, jax.device_put(stored), every, every)
    assert_tokens(read, stored, cache, host, device, tokens, stacked)


def pool_of_tokens(form, layout="page_first_direct", stacked=False):
    """A filled pool whose spec has a page size, and the arrays of its pages."""
    _, arrays = stored_pool(form, layout, stacked)
    placed = jax.device_put(arrays)
    spec = jaxkv.ArrayCacheSpec.from_arrays(placed, stacked=stacked, page_size=PAGE_SIZE)
    pool = jaxkv.HostPool.create(spec, num_pages=HOST_PAGES, layout=layout)
    every = np.arange(HOST_PAGES, dtype=np.int32)
    return jaxkv.store_pages(pool, placed, every, every), arrays


def ids_of_arrays():
    rng = np.random.default_rng(0)
    return [rng.permutation(pages)[:5].astype(np.int32) for pages in (HOST_PAGES, PAGES)]


def assert_tokens(got, old, source, to, from_, tokens, stacked):
    """`got` is `old` with these tokens of pages `from_` of `source` in its pages `to`."""
    for new, before, other in zip(*map(jax.tree.leaves, (got, old, source)), strict=True):
        new, want, other = (np.asarray(a).view(np.uint8) for a in (new, before.copy(), other))
        of_page = (slice(None),) * stacked
        part = slice(tokens.start, tokens.stop)
        for target, page in zip(to, from_, strict=True):
            want[(*of_page, target, part)] = other[(*of_page, page, part)]
        np.testing.assert_array_equal(new, want)


def test_shards_copy_the_same_tokens():
    case, mesh = make_case("page_unified", num_kv_heads=4, head_groups=2), mesh_of(2)
    numpy_ids, tokens = distinct_ids(case, 5), range(1, 3)
    placed = {"mesh": mesh, "head_axis": "tp"}
    pool, cache = case.pool(**placed), case.cache(**placed)
    specs = pool.partition_spec, cache.partition_spec

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(*specs, P(), P()), out_specs=specs[1])
    def step(pool, cache, *ids):
        return jaxkv.load_pages(pool, cache, *ids, tokens=tokens)

    got = step(pool, cache, *map(jnp.asarray, numpy_ids))
    case.assert_holds(pool, got, **case.expected("load", *numpy_ids, None, tokens))


@pytest.mark.parametrize(
    "given_tokens, part_of",
    [
        (range(4), {"full": range(4), "window": range(4)}),
        ({"window": range(4)}, {"full": range(16), "window": range(4)}),
        ({"window": range(4), "full": None}, {"full": range(16), "window": range(4)}),
    ],
    ids=["one for all", "of one group", "None for a group"],
)
def test_groups(given_tokens, part_of):
    pools, stored, caches = {}, {}, {}
    for name, form in {"full": "fused", "window": "separate"}.items():
        pools[name], stored[name] = pool_of_tokens(form)
        caches[name] = random_arrays(form, stacked=False)
    host, device = ids_of_arrays()
    ids = [dict.fromkeys(pools, side) for side in (host, device)]
    got = jaxkv.load_pages(pools, jax.device_put(caches), *ids, tokens=given_tokens)
    started = jaxkv.start_load(pools, jax.device_put(caches), *ids, tokens=given_tokens)
    for name, part in part_of.items():
        for result in (got[name], started[name].cache):
            assert_tokens(result, caches[name], stored[name], device, host, part, False)


def test_tokens_of_unknown_groups_are_rejected():
    pool, _ = pool_of_tokens("fused")
    cache = jax.device_put(random_arrays("fused", stacked=False))
    call = partial(jaxkv.load_pages, {"a": pool}, {"a": cache}, {"a": [0]}, {"a": [0]})
    assert_rejected(lambda: call(tokens={"b": range(1)}), ValueError, "load_pages: tokens", "'a'")


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    "tokens, error, words",
    [
        (range(0, 4, 2), ValueError, ["step 1", "range(0, 4, 2)"]),
        (range(3, -1, -1), ValueError, ["step 1"]),
        (range(2, 2), ValueError, ["at least one", "range(2, 2)", "empty id lists"]),
        (range(0, 5), ValueError, ["[0, page_size=4)", "range(0, 5)"]),
        (range(-1, 2), ValueError, ["[0, page_size=4)", "range(-1, 2)"]),
        ([0, 1], TypeError, ["range", "None, got list"]),
        (3, TypeError, ["range", "None, got int"]),
    ],
    ids=str,
)
def test_invalid_tokens_are_rejected(operation, tokens, error, words):
    case = make_case()
    run = getattr(jaxkv, operation)
    call = partial(run, case.pool(), case.cache(), [0], [1], tokens=tokens)
    assert_rejected(call, error, "tokens must be" if error is TypeError else "tokens must", *words)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_traced_tokens_are_rejected(operation):
    case = make_case()
    run = getattr(jaxkv, operation)

    @jax.jit
    def step(pool, cache, tokens):
        return run(pool, cache, [0], [1], tokens=tokens)

    call = partial(step, case.pool(), case.cache(), jnp.int32(2))
    assert_rejected(call, TypeError, "tokens must be a static range", "static_argnames")


def test_arrays_without_a_page_size_are_rejected():
    pool, _ = stored_pool("fused", "page_first_direct", False)
    cache = jax.device_put(random_arrays("fused", stacked=False))
    call = partial(jaxkv.load_pages, pool, cache, [0], [1], tokens=range(4))
    assert_rejected(call, ValueError, "tokens", "page_size", "from_arrays")


def test_array_without_tokens_is_named():
    pool, _ = pool_of_tokens("quantized")
    cache = jax.device_put(random_arrays("quantized", stacked=False))
    call = partial(jaxkv.load_pages, pool, cache, [0], [1])
    call()  # whole pages
    words = "load_pages: tokens", "[page_size=16, ...]", "array 2", "int8[3]"
    assert_rejected(partial(call, tokens=range(4)), ValueError, *words)


def test_page_size_of_no_array_is_rejected():
    arrays = random_arrays("recurrent", stacked=False)
    call = partial(jaxkv.ArrayCacheSpec.from_arrays, arrays, page_size=PAGE_SIZE)
    assert_rejected(call, ValueError, "page_size=16", "first dimension of a page", "[num_pages, 5,")


@pytest.mark.cpu_only
def test_arrays_sharded_over_tokens_are_rejected():
    mesh = mesh_of(2)
    array = jax.device_put(np.zeros((4, 16, 8), np.float32), NamedSharding(mesh, P(None, "tp")))
    spec = jaxkv.ArrayCacheSpec.from_arrays([array], page_size=16)
    assert_rejected(lambda: spec.select_tokens(range(4)), ValueError, "array 0", "tp", "sharded")


@pytest.mark.parametrize("page_size", [0, -1, 1.5])
def test_invalid_page_size_is_rejected(page_size):
    call = partial(jaxkv.ArrayCacheSpec.from_arrays, [jnp.zeros((2, 4))], page_size=page_size)
    assert_rejected(call, ValueError, "page_size", page_size)


def test_all_tokens_are_the_whole_page():
    case = make_case()
    args = case.pool(), case.cache(), jnp.array([1, 2]), jnp.array([0, 1])
    whole, every = (
        jax.jit(partial(jaxkv.load_pages, tokens=tokens)).lower(*args).as_text()
        for tokens in (None, range(case.spec.page_size))
    )
    assert whole == every


@pytest.mark.parametrize("operation", OPERATIONS)
def test_explain_takes_tokens(operation):
    case = make_case()
    call = partial(jaxkv.explain, getattr(jaxkv, operation), case.pool(), case.cache(), [1], [0])
    assert f"{operation}: " in call(tokens=range(2))
    assert_rejected(lambda: call(tokens=range(9)), ValueError, "page_size=4")


def test_pallas_copies_whole_blocks_only():
    case = make_case(dtype="float32")
    state = case.pool(), case.cache()
    [whole] = resolve("load_pages", state, ([1], [0]), None).copies
    [part] = resolve("load_pages", state, ([1], [0]), None, range(2)).copies
    assert unsupported_reason(whole, 1) is None
    assert "parts of larger blocks" in (unsupported_reason(part, 1) or "")
