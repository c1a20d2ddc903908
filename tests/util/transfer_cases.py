"""One pool, one cache and their reference bytes; and the expected result of a copy between them."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxkv
from jaxkv._src.cache.host_layout import Layout
from tests.util.layout_reference import (
    Device,
    Layers,
    ReferenceLayout,
    assert_same_bytes,
    load,
    random_array,
    spec_of,
    store,
)

DIRECTIONS = ("load", "store")
DESTINATION = {"load": "cache", "store": "pool"}


@dataclass(frozen=True)
class Case:
    """Random contents of a pool and a cache of one spec."""

    layout: ReferenceLayout
    host: np.ndarray
    device: Device

    @property
    def spec(self) -> jaxkv.KVCacheSpec:
        return self.layout.spec

    @property
    def num_device_pages(self) -> int:
        return len(self.device[0][0])

    def pool(self, **mesh) -> jaxkv.HostPool:
        """A new pool with a copy of `host`."""
        layout = self.layout
        pool = jaxkv.HostPool.create(
            self.spec,
            num_pages=layout.num_pages,
            layout=layout.name,
            head_groups=layout.head_groups,
            **mesh,
        )
        return filled(pool, [self.host])

    def cache(self, **mesh) -> jaxkv.DeviceCache:
        """A new cache with a copy of `device`."""
        cache = jaxkv.DeviceCache.create(self.spec, num_pages=self.num_device_pages, **mesh)
        return filled(cache, [buffer for buffers in self.device for buffer in buffers])

    def assert_holds(self, pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, **want) -> None:
        """Compares every byte; `want` replaces the case's own `host` or `device`."""
        assert_same_bytes(pool.data, want.get("host", self.host), "pool")
        for layer, buffers in enumerate(want.get("device", self.device)):
            for kv, buffer in enumerate(buffers):
                name = f"cache.layers[{layer}][{kv}]"
                assert_same_bytes(cache.layers[layer][kv], buffer, name)

    def expected(self, direction: str, host_pages, device_pages, layers=None, tokens=None) -> dict:
        """Changes made by a copy: `{"device": ...}` for a load, `{"host": ...}` for a store."""
        args = (self.layout, self.host, self.device, host_pages, device_pages, layers, tokens)
        return {"device": load(*args)} if direction == "load" else {"host": store(*args)}


def filled(tree, contents: Sequence[np.ndarray]):
    """The same pytree with different contents, placed like the original."""
    leaves, structure = jax.tree.flatten(tree)
    assert [leaf.shape for leaf in leaves] == [array.shape for array in contents]
    placed = [put(array, leaf.sharding) for array, leaf in zip(contents, leaves, strict=True)]
    return jax.tree.unflatten(structure, placed)


def put(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    """A JAX array with its own memory and the contents of `array`.

    The CPU backend adopts NumPy memory that is aligned to 64 bytes whatever `may_alias` says, and
    then copies on donation: so pass memory that is not.
    """
    words = np.empty(array.nbytes + 64 + 16, np.uint8)
    start = (16 - words.ctypes.data) % 64
    copy = words[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return jax.device_put(copy, sharding)


def make_case(
    layout: Layout = "page_first_direct",
    *,
    host_pages: int = 12,
    device_pages: int = 9,
    head_groups: int = 1,
    seed: int = 0,
    **spec,
) -> Case:
    """A case of random bytes; `spec` is passed to `spec_of`."""
    rng = np.random.default_rng(seed)
    reference = ReferenceLayout(spec_of(**spec), layout, host_pages, head_groups)
    of = reference.spec
    shape = (device_pages, of.page_size, of.num_kv_heads, of.head_dim)
    buffers = range(reference.num_kv)
    return Case(
        reference,
        random_array(rng, reference.shape, of.dtype),
        [tuple(random_array(rng, shape, of.dtype) for _ in buffers) for _ in range(of.num_layers)],
    )


def distinct_ids(case: Case, count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """`count` random host pages and device pages, each without repetition and not sorted."""
    rng = np.random.default_rng(seed)
    sides = case.layout.num_pages, case.num_device_pages
    host, device = (rng.permutation(pages)[:count].astype(np.int32) for pages in sides)
    return host, device


def as_ids(values, implementation: str | None, sharding: jax.sharding.Sharding | None = None):
    """Page ids in the form required by the implementation."""
    ids = np.asarray(values, np.int32)
    if implementation in ("dma", "unordered"):
        return jaxkv.HostIds(ids, sharding=sharding)
    return jax.numpy.asarray(ids)


def copy(direction: str, pool, cache, host_pages, device_pages, **options):
    """Runs `load_pages` or `store_pages`; returns the written pytree."""
    operation = jaxkv.load_pages if direction == "load" else jaxkv.store_pages
    return operation(pool, cache, host_pages, device_pages, **options)


def donating(direction: str, **options) -> jax.stages.Wrapped:
    """A jitted `copy` that donates, and so writes in place."""

    @partial(jax.jit, donate_argnames=(DESTINATION[direction],))
    def step(pool, cache, host_pages, device_pages):
        return copy(direction, pool, cache, host_pages, device_pages, **options)

    return step


def runner(direction: str, inside_jit: bool, **options) -> Callable:
    """`copy` unchanged, or jitted with donation."""
    return donating(direction, **options) if inside_jit else partial(copy, direction, **options)


def check_copy(
    case: Case,
    direction: str,
    host_pages,
    device_pages,
    implementation: str | None = None,
    layers: Layers = None,
    tokens: range | None = None,
) -> None:
    """Copies outside jit; compares every byte of both sides, and of the inputs afterwards."""
    pool, cache = case.pool(), case.cache()
    ids = [as_ids(pages, implementation) for pages in (host_pages, device_pages)]
    options = {"layers": layers, "tokens": tokens, "implementation": implementation}
    out = copy(direction, pool, cache, *ids, **options)
    jaxkv.check_errors()
    want = case.expected(direction, host_pages, device_pages, layers, tokens)
    case.assert_holds(*after(direction, out, pool, cache), **want)
    case.assert_holds(pool, cache)


def after(direction: str, out, pool, cache) -> tuple[jaxkv.HostPool, jaxkv.DeviceCache]:
    """The pool and the cache after `out` has replaced the written one."""
    return (pool, out) if direction == "load" else (out, cache)


def pointers(tree) -> list[int]:
    """Addresses of all buffers of a pytree."""
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def copied_shapes(step: jax.stages.Wrapped, *args) -> set[tuple[int, ...]]:
    """Shapes of all entire arrays copied by the optimized program of a jitted `step`."""
    text = step.lower(*args).compile().as_text() or ""
    found = re.findall(r"= \(?\w+\[([\d,]*)\]\S* (?:\S+ )*?copy(?:-start)?\(", text)
    return {tuple(int(n) for n in dims.split(",") if n) for dims in found}


def assert_rejected(call, error, *words):
    """`call` raises `error`, and its message contains all the words, case-insensitively."""
    with pytest.raises(error) as raised:
        call()
    message = str(raised.value)
    missing = [word for word in words if str(word).lower() not in message.lower()]
    assert not missing, f"{missing} not in: {message}"


def assert_not_copied(num_entries: int) -> None:
    """A GPU counted this number of wrong entries."""
    words = "1 entry was" if num_entries == 1 else f"{num_entries} entries were"
    assert_rejected(jaxkv.check_errors, jaxkv.PageIndexError, f"{words} not copied")


def fails_at_once(implementation: str | None, inside_jit: bool) -> bool:
    """Whether wrong ids fail the call itself; a GPU counts those that the host does not see."""
    if implementation == "xla" and inside_jit:
        return False
    if jax.default_backend() == "cpu":
        return True
    return implementation == "dma" and not inside_jit


def mesh_of(devices: int, axis_type: str = "Auto") -> Mesh:
    """A mesh with one axis; `jax.make_mesh` makes explicit ones."""
    found = jax.devices()
    if len(found) < devices:
        pytest.skip(f"needs {devices} devices, found {len(found)} on {found[0].platform}")
    axis_types = (getattr(jax.sharding.AxisType, axis_type),)
    return Mesh(np.array(found[:devices]), ("tp",), axis_types=axis_types)
