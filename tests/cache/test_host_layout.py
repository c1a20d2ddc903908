"""`host_layout` against brute force over element coordinates."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.cache.host_layout import HostLayout
from tests.util.layout_reference import (
    KIND_LAYOUTS,
    LAYOUTS,
    Layers,
    ReferenceLayout,
    assert_same_bytes,
    load,
    random_array,
    selected_layers,
    spec_of,
    store,
)
from tests.util.strategies import layer_selections, page_ids, reference_layouts, token_ranges

pytestmark = pytest.mark.host_only


@st.composite
def copies(draw) -> tuple[ReferenceLayout, int, list[int], list[int], Layers]:
    """A layout, a number of device pages, ids with padding, and layers."""
    reference = draw(reference_layouts())
    device_pages = draw(st.integers(1, 5))
    ids = draw(page_ids(reference.num_pages, device_pages))
    return reference, device_pages, *ids, draw(layer_selections(reference.spec.num_layers))


def host_layout(reference: ReferenceLayout) -> HostLayout:
    return HostLayout(
        reference.spec, reference.name, reference.num_pages, head_groups=reference.head_groups
    )


def coordinates(reference: ReferenceLayout):
    """Every (kv, layer, page, token, head, dim)."""
    spec = reference.spec
    return itertools.product(
        range(reference.num_kv),
        range(spec.num_layers),
        range(reference.num_pages),
        range(spec.page_size),
        range(spec.num_kv_heads),
        range(spec.head_dim),
    )


@pytest.mark.parametrize("kind, name", KIND_LAYOUTS)
def test_reference_maps_every_element_once(kind, name):
    reference = ReferenceLayout(spec_of(kind, head_dim=3), name, num_pages=5)
    offsets = sorted(reference.offset(*at) for at in coordinates(reference))
    assert offsets == list(range(int(np.prod(reference.shape))))


@given(reference_layouts())
@settings(max_examples=60, deadline=None)
def test_shape_and_strides(reference):
    layout = host_layout(reference)
    assert layout.shape == reference.shape
    assert layout.strides_bytes == np.empty(reference.shape, reference.spec.dtype).strides


@given(reference_layouts(), st.data())
@settings(max_examples=60, deadline=None)
def test_page_geometry_locates_every_byte(reference, data):
    """Byte b of a device block, or some tokens of it, is where the geometry says."""
    layout, spec = host_layout(reference), reference.spec
    itemsize = np.dtype(spec.dtype).itemsize
    tokens = data.draw(st.none() | token_ranges(spec.page_size))
    geometry = layout.page_geometry(tokens)
    first, last = (tokens.start, tokens.stop) if tokens else (0, spec.page_size)
    (n0, n1), (s0, s1) = geometry.counts, geometry.strides_bytes
    block_bytes = (last - first) * spec.num_kv_heads * spec.head_dim * itemsize
    assert geometry.block_bytes == n0 * n1 * geometry.run_bytes == block_bytes
    assert geometry.dense_stride_bytes == spec.block_bytes
    i0, i1, byte = np.ogrid[:n0, :n1, : geometry.run_bytes]
    within = (i0 * s0 + i1 * s1 + byte).reshape(-1)
    places = itertools.product(
        range(reference.num_kv), range(spec.num_layers), range(reference.num_pages)
    )
    for kv, layer, page in places:
        elements = reference.page_offsets(kv, layer, page)[first:last].reshape(-1, 1)
        want = (elements * itemsize + np.arange(itemsize)).reshape(-1)
        start = layout.buffer_offset_bytes(kv, layer, first) + page * geometry.page_stride_bytes
        np.testing.assert_array_equal(start + within, want)


@given(reference_layouts())
@settings(max_examples=60, deadline=None)
def test_runs_are_maximal(reference):
    """`run_bytes` is the longest range that is contiguous on both sides in every page."""
    spec = reference.spec
    itemsize = np.dtype(spec.dtype).itemsize
    offsets = reference.page_offsets(0, 0, 0).reshape(-1)
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    lengths = np.diff([0, *breaks, offsets.size])
    assert host_layout(reference).page_geometry().run_bytes == lengths.min() * itemsize


# The last page of layer 0 and the first of layer 1 are adjacent on both sides, yet are two device
# arrays.
ACROSS_LAYERS = ReferenceLayout(spec_of("mla"), "layer_first", 2), 2, [0, 1], [1, 0], None


def runs_of(layout: HostLayout, host_ids, device_ids, layers) -> list[tuple[int, int, int, int]]:
    """(buffer, device offset, host offset, bytes) of each run, according to `page_geometry`."""
    geometry = layout.page_geometry()
    offsets = [
        i * geometry.strides_bytes[0] + j * geometry.strides_bytes[1]
        for i in range(geometry.counts[0])
        for j in range(geometry.counts[1])
    ]
    buffers = itertools.product(layers, range(layout.spec.num_kv))
    pairs = [pair for pair in zip(host_ids, device_ids, strict=True) if min(pair) >= 0]
    return [
        (
            buffer,
            device * geometry.block_bytes + run * geometry.run_bytes,
            layout.buffer_offset_bytes(kv, layer) + host * geometry.page_stride_bytes + offset,
            geometry.run_bytes,
        )
        for buffer, (layer, kv) in enumerate(buffers)
        for host, device in pairs
        for run, offset in enumerate(offsets)
    ]


@given(copies())
@example(ACROSS_LAYERS)
@settings(max_examples=80, deadline=None)
def test_geometry_copy_equals_reference_copy(args):
    reference, device_pages, host_ids, device_ids, layers = args
    spec = reference.spec
    rng = np.random.default_rng(0)
    host = random_array(rng, reference.shape, spec.dtype)
    shape = (device_pages, spec.page_size, spec.num_kv_heads, spec.head_dim)
    device = [
        tuple(random_array(rng, shape, spec.dtype) for _ in range(reference.num_kv))
        for _ in range(spec.num_layers)
    ]
    chosen = selected_layers(spec, layers)

    loaded = [[buffer.copy() for buffer in buffers] for buffers in device]
    stored = host.copy()
    runs = runs_of(host_layout(reference), host_ids, device_ids, chosen)
    for buffer, device_at, host_at, size in runs:
        layer, kv = chosen[buffer // reference.num_kv], buffer % reference.num_kv
        on_host, on_device = slice(host_at, host_at + size), slice(device_at, device_at + size)
        as_bytes(loaded[layer][kv])[on_device] = as_bytes(host)[on_host]
        as_bytes(stored)[on_host] = as_bytes(device[layer][kv])[on_device]

    case = (reference, host, device, host_ids, device_ids, layers)
    for layer, buffers in enumerate(load(*case)):
        for kv, want in enumerate(buffers):
            assert_same_bytes(loaded[layer][kv], want, f"layer {layer}, kv {kv}")
    assert_same_bytes(stored, store(*case), "pool")


def as_bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def test_layouts_compare_and_hash_by_value():
    one, two = (HostLayout(spec_of(), "page_head", 4) for _ in range(2))
    assert one == two and hash(one) == hash(two)
    assert one != HostLayout(spec_of(), "page_head", 5)


@pytest.mark.parametrize(
    "kind, name, pages, groups, words",
    [
        ("mha", "page_last", 4, 1, ["page_last", *LAYOUTS["mha"]]),
        ("mla", "page_head", 4, 1, ["page_head", "mla"]),
        ("mha", "page_unified", 4, 3, ["head_groups", "3", "2"]),
        ("mla", "page_unified", 4, 2, ["head_groups", "2", "1"]),
        ("mha", "page_unified", 4, 0, ["head_groups", "0"]),
        ("mha", "page_first", 4, 2, ["head_groups", "2", "page_unified"]),
        ("mha", "layer_first", 0, 1, ["num_pages", "0"]),
    ],
)
def test_invalid_layout_is_rejected(kind, name, pages, groups, words):
    wrong: Any = "spec"
    with pytest.raises(TypeError, match="spec must be a KVCacheSpec, got 'spec'"):
        HostLayout(wrong, name, pages)
    with pytest.raises(ValueError) as error:
        HostLayout(spec_of(kind), name, pages, head_groups=groups)
    for word in words:
        assert word.lower() in str(error.value).lower()


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_layers", 0),
        ("page_size", -1),
        ("page_size", 2.5),
        ("num_kv_heads", 0),
        ("head_dim", 0),
        ("num_layers", True),
        ("kind", "gqa"),
        ("dtype", "int4"),
        ("dtype", "float64"),
        ("dtype", "int64"),
        ("dtype", "complex128"),
        ("dtype", None),
        ("dtype", object),
        ("dtype", "S3"),
        ("dtype", ">f4"),
    ],
)
def test_invalid_spec_is_rejected(field, value):
    fields = {"kind": "mha", field: value}
    with pytest.raises(ValueError) as error:
        spec_of(**fields)
    assert field in str(error.value) and str(value) in str(error.value)


def test_mla_with_several_heads_is_rejected():
    with pytest.raises(ValueError, match="num_kv_heads"):
        spec_of("mla", num_kv_heads=2)


def test_64_bit_dtype_with_x64_enabled():
    jax.config.update("jax_enable_x64", True)
    try:
        assert spec_of(dtype="float64").dtype == np.float64
        with pytest.raises(ValueError, match="dtype must be"):
            spec_of(dtype=np.longdouble)
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("layers", [[0.5, 1.7], [True, False], True, 1.0, [None], "01"])
def test_non_integer_layers_are_rejected(layers):
    with pytest.raises(ValueError, match="layers must be integers"):
        spec_of(num_layers=3).select_layers(layers)


@pytest.mark.parametrize("layers", [[2, 0], (2, 0), np.array([2, 0]), range(2, -1, -2)])
def test_layers_from_any_sequence(layers):
    chosen = spec_of(num_layers=3).select_layers(layers)
    assert chosen == (2, 0) and all(type(layer) is int for layer in chosen)


@pytest.mark.parametrize("layers", [[1, 1], np.array([2, 0, 2])], ids=str)
def test_duplicate_layers_are_rejected(layers):
    with pytest.raises(ValueError, match="duplicates"):
        spec_of(num_layers=3).select_layers(layers)


@pytest.mark.parametrize("kind, name", KIND_LAYOUTS)
def test_page_bytes_cover_all_layers(kind, name):
    for dtype in ("bfloat16", "int8"):
        reference = ReferenceLayout(spec_of(kind, dtype=dtype), name, num_pages=1)
        spec = reference.spec
        assert spec.page_bytes == np.zeros(reference.shape, spec.dtype).nbytes


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int32])
def test_sizes_are_those_of_python_integers(integer):
    """Products of NumPy's would overflow."""
    spec = jaxkv.KVCacheSpec(integer(60), integer(64), integer(8), integer(127), "bfloat16")
    expected = jaxkv.KVCacheSpec(60, 64, 8, 127, dtype="bfloat16")
    assert spec == expected and spec.page_bytes == expected.page_bytes == 60 * 2 * 64 * 8 * 127 * 2
    layout = HostLayout(spec, "layer_first", integer(100))
    assert layout.nbytes == 100 * expected.page_bytes
    assert layout.buffer_offset_bytes(1, 0) == layout.nbytes // 2
    sizes = [spec.num_layers, spec.page_size, spec.num_kv_heads, spec.head_dim]
    assert {type(size) for size in (*sizes, layout.num_pages, layout.head_groups)} == {int}
