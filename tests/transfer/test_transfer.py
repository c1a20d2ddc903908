"""Page copies outside jit: every byte of both sides, against the NumPy reference.

The first three tests are the reference system's grid of 192 cases at page granularity, with its
names and sizes, on smaller rows and pools. Upstream draws one token for some pages of many, which
then copies nothing; here that case copies one page.
"""

from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.cache.host_layout import Layout
from tests.util.implementations import IMPLEMENTATIONS
from tests.util.layout_reference import (
    DTYPES,
    KIND_LAYOUTS,
    assert_same_bytes,
    random_array,
    spec_of,
)
from tests.util.strategies import layer_selections, page_ids, reference_layouts
from tests.util.transfer_cases import (
    DIRECTIONS,
    Case,
    after,
    as_ids,
    check_copy,
    copy,
    distinct_ids,
    make_case,
)

HALF_DTYPES = ["bfloat16", "float16"]
KINDS = ["mha", "mla"]


def parametrize(**values):
    """`pytest.mark.parametrize` of one argument, with the argument's name in the ids."""
    (name, choices), *_ = values.items()
    return pytest.mark.parametrize(name, choices, ids=lambda value: f"{name}={value}")


def grid_case(layout, page_size, tokens, *, kind="mha", heads=2, row, dtype) -> Case:
    """A case of (host, device) pools with these numbers of tokens and elements per row."""
    host_pages, device_pages = (count // page_size for count in tokens)
    heads = 1 if kind == "mla" else heads
    return make_case(
        layout,
        host_pages=host_pages,
        device_pages=device_pages,
        num_layers=4,
        page_size=page_size,
        kind=kind,
        num_kv_heads=heads,
        head_dim=row // heads,
        dtype=dtype,
    )


def pages_of(case: Case, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Random pages for this number of tokens: at least one."""
    return distinct_ids(case, max(1, items // case.spec.page_size))


@parametrize(dtype=HALF_DTYPES)
@parametrize(items=[1, 128, 1024])
@parametrize(page_size=[1, 16, 64])
@parametrize(kind=KINDS)
@parametrize(all_layers=[False, True])
def test_transfer_kv(dtype, items, page_size, kind, all_layers, native_implementation):
    case = grid_case("layer_first", page_size, (4096, 2048), kind=kind, row=64, dtype=dtype)
    layers = None if all_layers else 0
    check_copy(case, "load", *pages_of(case, items), native_implementation, layers)


@parametrize(dtype=HALF_DTYPES)
@parametrize(items=[128, 1024, 8192])
@parametrize(page_size=[16, 64, 128])
@parametrize(kind=KINDS)
@parametrize(lf_to_pf=[False, True])
def test_pf_direct(dtype, items, page_size, kind, lf_to_pf, native_implementation):
    case = grid_case("page_first_direct", page_size, (10240, 9216), kind=kind, row=64, dtype=dtype)
    direction, layers = ("store", None) if lf_to_pf else ("load", 0)
    check_copy(case, direction, *pages_of(case, items), native_implementation, layers)


@parametrize(dtype=HALF_DTYPES)
@parametrize(items=[256, 1024])
@parametrize(page_size=[16, 64, 128])
@parametrize(heads=[8, 16])
@parametrize(lf_to_ph=[False, True])
def test_page_head(dtype, items, page_size, heads, lf_to_ph, native_implementation):
    case = grid_case("page_head", page_size, (2048, 1536), heads=heads, row=128, dtype=dtype)
    direction, layers = ("store", None) if lf_to_ph else ("load", 0)
    check_copy(case, direction, *pages_of(case, items), native_implementation, layers)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind, layout", KIND_LAYOUTS)
@parametrize(
    layers=[
        None,
        0,
        2,
        pytest.param(range(1, 3), marks=pytest.mark.sanitizer),
        range(3, 0, -2),
    ]
)
def test_every_layout_and_layer_range(kind, layout, direction, layers, implementation):
    case = make_case(layout, kind=kind, num_layers=4)
    check_copy(case, direction, *distinct_ids(case, 5), implementation, layers)


def test_layer_as_numpy_integer(implementation):
    case = make_case()
    check_copy(case, "load", *distinct_ids(case, 5), implementation, np.int64(1))


ID_PATTERNS = {
    "empty": ([], []),
    "single": ([7], [3]),
    "sorted run": ([2, 3, 4, 5], [4, 5, 6, 7]),
    "unsorted": ([5, 11, 0, 8], [8, 1, 6, 0]),
    "run backwards": ([6, 5, 4, 3], [3, 4, 5, 6]),
    "swapped": ([4, 9], [9 - 1, 4]),
    "padding on the host side": ([-1, -3], [2, 3]),
    "padding on the device side": ([2, 3], [-1, -(2**31)]),
    "padding between": ([-1, 9, 2, -1, 0, 5, -1], [4, 1, -1, -1, 0, 8, 2]),
    "padding hides equal destinations": ([1, 2, -1, -1], [-1, -1, 5, 5]),
    "every page": ([*range(9)], [*range(9)]),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_head"])
@pytest.mark.parametrize("pattern", ID_PATTERNS)
def test_page_ids(layout, direction, pattern, implementation):
    check_copy(make_case(layout), direction, *ID_PATTERNS[pattern], implementation)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind, layout", KIND_LAYOUTS)
def test_many_consecutive_pages(kind, layout, direction, implementation):
    """70 pages that the copy engine may copy as rows, 70 that it may not, and one alone."""
    case = make_case(layout, kind=kind, host_pages=200, device_pages=190)
    host_pages = [*range(100, 170), *range(20, 90), 3]
    device_pages = [*range(5, 75), *range(150, 80, -1), 189]
    check_copy(case, direction, host_pages, device_pages, implementation)


@pytest.mark.parametrize(
    "direction, ids", [("load", ([4, 4], [1, 7])), ("store", ([1, 7], [4, 4]))]
)
def test_one_source_to_two_destinations(direction, ids, implementation):
    host_pages, device_pages = ids
    check_copy(make_case(), direction, host_pages, device_pages, implementation)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kind, layout", [("mha", "page_head"), ("mla", "page_first")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype, kind, layout, direction, native_implementation):
    case = make_case(layout, kind=kind, dtype=dtype)
    check_copy(case, direction, *distinct_ids(case, 5), native_implementation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_in_plain_jax(dtype):
    case = make_case("page_head", kind="mha", dtype=dtype)
    check_copy(case, "store", *distinct_ids(case, 5), "xla")


@pytest.mark.parametrize("direction", DIRECTIONS)
@parametrize(head_groups=[1, 2, 4])
def test_head_groups_of_page_unified(head_groups, direction, implementation):
    case = make_case("page_unified", num_kv_heads=4, head_groups=head_groups)
    check_copy(case, direction, *distinct_ids(case, 5), implementation, range(1, 3))


ID_FORMS: dict[str, Callable] = {
    "numpy": np.asarray,
    "device": jax.numpy.asarray,
    "HostIds": jaxkv.HostIds,
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("device_form", ID_FORMS)
@pytest.mark.parametrize("host_form", ID_FORMS)
def test_ids_as_numpy_device_or_host_ids(direction, host_form, device_form):
    case = make_case()
    ids = np.array([3, -1, 0, 5], np.int32), np.array([8, 2, -1, 1], np.int32)
    pool, cache = case.pool(), case.cache()
    out = copy(direction, pool, cache, ID_FORMS[host_form](ids[0]), ID_FORMS[device_form](ids[1]))
    case.assert_holds(*after(direction, out, pool, cache), **case.expected(direction, *ids))


@st.composite
def round_trips(draw):
    """A case, a cache's number of pages, ids of source, host and target, and layers."""
    reference = draw(reference_layouts(max_pages=6))
    case = make_case(
        reference.name,
        host_pages=reference.num_pages,
        device_pages=draw(st.integers(1, 6)),
        head_groups=reference.head_groups,
        seed=draw(st.integers(0, 99)),
        **vars(reference.spec),
    )
    ids = draw(page_ids(case.num_device_pages, case.layout.num_pages, case.num_device_pages))
    return case, *ids, draw(layer_selections(case.spec.num_layers))


@given(round_trips())
@settings(max_examples=30, deadline=None)
def test_store_and_load_round_trip(implementation, args):
    """Store, then load to other pages: identity where all three ids name a page."""
    case, source, on_host, target, layers = args
    options = {"layers": layers, "implementation": implementation}
    source_ids, host_ids, target_ids = (
        as_ids(i, implementation) for i in (source, on_host, target)
    )
    cache = case.cache()
    pool = jaxkv.store_pages(case.pool(), cache, host_ids, source_ids, **options)
    back = jaxkv.load_pages(pool, cache, host_ids, target_ids, **options)
    jaxkv.check_errors()

    stored = case.expected("store", on_host, source, layers)
    case.assert_holds(pool, cache, **stored)
    case = type(case)(case.layout, stored["host"], case.device)
    case.assert_holds(pool, back, **case.expected("load", on_host, target, layers))


@pytest.mark.parametrize("kind", KINDS)
def test_two_pools_of_one_cache_are_independent(kind, implementation):
    """Two calls of one shape but different layouts must not share a plan."""
    layouts: list[Layout] = ["page_first", "page_first_direct", "page_first"]
    cases = [
        make_case(layout, kind=kind, page_size=2, num_layers=2, host_pages=9, seed=seed)
        for seed, layout in enumerate(layouts)
    ]
    for case in cases:
        check_copy(case, "load", *distinct_ids(case, 4), implementation)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_explain_reports_selection_and_reasons(direction, implementation):
    case = make_case()
    ids = [as_ids(side, implementation) for side in distinct_ids(case, 5)]
    pool, cache = case.pool(), case.cache()
    operation = jaxkv.load_pages if direction == "load" else jaxkv.store_pages
    first, *others = jaxkv.explain(
        operation, pool, cache, *ids, implementation=implementation
    ).splitlines()
    default = IMPLEMENTATIONS[jax.default_backend()][0]  # the default for device ids
    assert f"{operation.__name__}: {implementation or default}" in first
    for name in {"dma", "kernel", "pallas", "host", "xla"} - {implementation or default}:
        assert any(f"not {name}: " in line for line in others), name


@pytest.mark.parametrize("name", ["load_pages", "store_pages", "start_load", "start_store"])
def test_explain_accepts_keyword_arguments(name):
    case = make_case()
    operation, state = getattr(jaxkv, name), {"pool": case.pool(), "cache": case.cache()}
    ids = dict(zip(("host_pages", "device_pages"), distinct_ids(case, 5), strict=True))
    want = jaxkv.explain(operation, *state.values(), *ids.values())
    assert jaxkv.explain(operation, **ids, **state) == want
    assert jaxkv.explain(operation, **ids, **state, layers=[]) == f"{name}: nothing to copy"
    with pytest.raises(TypeError, match="device_pages"):
        jaxkv.explain(operation, **state, host_pages=ids["host_pages"])


def test_new_cache_is_zero():
    spec = spec_of()
    cache = jaxkv.DeviceCache.create(spec, num_pages=3)
    zeros = np.zeros((3, spec.page_size, spec.num_kv_heads, spec.head_dim), spec.dtype)
    assert cache.num_pages == 3 and len(cache.layers) == spec.num_layers
    for buffers in cache.layers:
        for buffer in buffers:
            assert_same_bytes(buffer, zeros, "new cache")


def test_negative_control_one_wrong_bit_is_detected():
    want = random_array(np.random.default_rng(0), (3, 4), "bfloat16")
    got = want.copy()
    got.view(np.uint16)[2, 1] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 12 elements differ, first at \(2, 1\)"):
        assert_same_bytes(got, want, "page")
