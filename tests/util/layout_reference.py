"""Slow NumPy model of the host layouts and of page copies, written from the layout table alone.

Independent of `host_layout`: every copied element is looked up by its own coordinates `(kv, layer,
page, token, head, dim)`, so a wrong stride in the library cannot hide behind the same wrong stride
here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxkv._src.cache.host_layout import Layout
from jaxkv._src.cache.spec import KVCacheSpec

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "mha": ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified"),
    "mla": ("layer_first", "page_first", "page_first_direct", "page_unified"),
}
KIND_LAYOUTS = [(kind, layout) for kind, layouts in LAYOUTS.items() for layout in layouts]
DTYPES = [
    np.dtype(d)
    for d in (
        ml_dtypes.bfloat16,
        np.float16,
        np.float32,
        np.int8,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.float8_e5m2,
    )
]

Device = list[tuple[np.ndarray, ...]]
Layers = int | np.integer | range | None


@dataclass(frozen=True)
class ReferenceLayout:
    """Location of an element of the pool according to the table."""

    spec: KVCacheSpec
    name: Layout
    num_pages: int
    head_groups: int = 1

    @property
    def num_kv(self) -> int:
        return 2 if self.spec.kind == "mha" else 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the pool array."""
        spec, pages, groups = self.spec, self.num_pages, self.head_groups
        layers, size, heads, dim = (
            spec.num_layers,
            spec.page_size,
            spec.num_kv_heads,
            spec.head_dim,
        )
        tokens = pages * size
        if self.name == "page_unified":
            if spec.kind == "mla":
                return (pages, layers, size, dim)
            return (pages, groups, layers, 2, size, heads // groups, dim)
        inner = {
            "layer_first": (layers, tokens, heads, dim),
            "page_first": (tokens, layers, heads, dim),
            "page_first_direct": (pages, layers, size, heads, dim),
            "page_head": (pages, heads, size, layers, dim),
        }[self.name]
        return ((2,) if spec.kind == "mha" else ()) + inner

    def offset(self, kv, layer, page, token, head, dim):
        """Element offset from the start of the pool; arguments are ints or arrays of them."""
        spec = self.spec
        layers, size, heads, dims = (
            spec.num_layers,
            spec.page_size,
            spec.num_kv_heads,
            spec.head_dim,
        )
        row = page * size + token
        rows = self.num_pages * size
        if self.name == "page_unified" and spec.kind == "mha":
            per_group = heads // self.head_groups
            group, within = head // per_group, head % per_group
            block = ((page * self.head_groups + group) * layers + layer) * 2 + kv
            return ((block * size + token) * per_group + within) * dims + dim
        if self.name == "layer_first":
            inner = ((layer * rows + row) * heads + head) * dims + dim
        elif self.name == "page_first":
            inner = ((row * layers + layer) * heads + head) * dims + dim
        elif self.name in ("page_first_direct", "page_unified"):
            inner = (((page * layers + layer) * size + token) * heads + head) * dims + dim
        else:
            assert self.name == "page_head"
            inner = (((page * heads + head) * size + token) * layers + layer) * dims + dim
        return kv * rows * layers * heads * dims + inner

    def page_offsets(self, kv: int, layer: int, page: int) -> np.ndarray:
        """Element offsets `[page_size, num_kv_heads, head_dim]` of one page of one layer."""
        spec = self.spec
        token, head, dim = np.ogrid[: spec.page_size, : spec.num_kv_heads, : spec.head_dim]
        return self.offset(kv, layer, page, token, head, dim)


def selected_layers(spec: KVCacheSpec, layers: Layers) -> Sequence[int]:
    """The layer numbers selected by a `layers` argument."""
    if layers is None:
        return range(spec.num_layers)
    return [int(layers)] if isinstance(layers, int | np.integer) else layers


def moves(host_pages: Iterable[int], device_pages: Iterable[int]) -> list[tuple[int, int]]:
    """The `(host_page, device_page)` pairs that are not padding."""
    pairs = zip(host_pages, device_pages, strict=True)
    return [(int(h), int(d)) for h, d in pairs if h >= 0 and d >= 0]


def _slice_of(tokens: range | None) -> slice:
    return slice(None) if tokens is None else slice(tokens.start, tokens.stop)


def load(
    layout: ReferenceLayout,
    host: np.ndarray,
    device: Device,
    host_pages: Iterable[int],
    device_pages: Iterable[int],
    layers: Layers = None,
    tokens: range | None = None,
) -> Device:
    """Returns the device cache after a load; the arguments are unchanged."""
    flat, chosen = host.reshape(-1), _slice_of(tokens)
    out = [tuple(buffer.copy() for buffer in buffers) for buffers in device]
    for host_page, device_page in moves(host_pages, device_pages):
        for layer in selected_layers(layout.spec, layers):
            for kv in range(layout.num_kv):
                page = flat[layout.page_offsets(kv, layer, host_page)]
                out[layer][kv][device_page][chosen] = page[chosen]
    return out


def store(
    layout: ReferenceLayout,
    host: np.ndarray,
    device: Device,
    host_pages: Iterable[int],
    device_pages: Iterable[int],
    layers: Layers = None,
    tokens: range | None = None,
) -> np.ndarray:
    """Returns the pool after a store; the arguments are unchanged."""
    out = host.copy()
    flat, chosen = out.reshape(-1), _slice_of(tokens)
    for host_page, device_page in moves(host_pages, device_pages):
        for layer in selected_layers(layout.spec, layers):
            for kv in range(layout.num_kv):
                offsets = layout.page_offsets(kv, layer, host_page)[chosen]
                flat[offsets] = device[layer][kv][device_page][chosen]
    return out


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype) -> np.ndarray:
    """An array of random bytes: every bit pattern of the dtype, NaNs included."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape).copy()


def assert_same_bytes(got, want: np.ndarray, name: str) -> None:
    """Fails naming the first element whose bytes differ."""
    got = np.asarray(got)
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, want {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {got.shape}, want {want.shape}"
    got_bytes, want_bytes = (
        np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (got, want)
    )
    if np.array_equal(got_bytes, want_bytes):
        return
    wrong = np.unique(np.flatnonzero(got_bytes != want_bytes) // want.itemsize)
    where = tuple(int(i) for i in np.unravel_index(wrong[0], want.shape))
    values = (array.reshape(-1)[wrong[0]].tobytes().hex() for array in (got, want))
    raise AssertionError(
        f"{name}: {wrong.size} of {want.size} elements differ, first at {where}: "
        "got 0x{}, want 0x{}".format(*values)
    )


def spec_of(kind: str = "mha", **fields) -> KVCacheSpec:
    """A small spec with 3 layers; `fields` override it."""
    heads = 2 if kind == "mha" else 1
    defaults = dict(num_layers=3, page_size=4, num_kv_heads=heads, head_dim=16, dtype=jnp.bfloat16)
    return KVCacheSpec(**{**defaults, "kind": kind, **fields})
