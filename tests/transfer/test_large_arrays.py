"""Arrays of more than 2 GiB and more than 2^31 blocks."""

import fcntl
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.cache.host_layout import HostLayout
from jaxkv._src.transfer import dispatch
from jaxkv._src.transfer.dispatch import Machine
from tests.util.transfer_cases import assert_rejected

IDS = np.zeros(2, np.int32)
PAGES, LAYERS = 10_000_000, 128


def described(num_pages: int, page_size: int) -> tuple[jaxkv.HostPool, jaxkv.DeviceCache]:
    """A pool and a cache of shapes only, with 128 bytes per token and layer."""
    spec = jaxkv.KVCacheSpec(LAYERS, page_size, 1, 128, jnp.int8)
    layout = HostLayout(spec, "page_first_direct", num_pages)
    data: Any = jax.ShapeDtypeStruct(layout.shape, spec.dtype)
    pool = jaxkv.HostPool(data, spec, "page_first_direct", 1)
    block: Any = jax.ShapeDtypeStruct((8, *spec.block_shape), spec.dtype)
    return pool, jaxkv.DeviceCache(((block, block),) * LAYERS, spec)


@pytest.fixture(autouse=True)
def h200(monkeypatch, request):
    if "native" not in request.node.name:
        monkeypatch.setattr(dispatch, "_machine", lambda: Machine("gpu", "NVIDIA H200", True))


@pytest.mark.parametrize("operation", [jaxkv.load_pages, jaxkv.store_pages], ids=["load", "store"])
class TestDispatch:
    def test_pallas_rejects_block_numbers_beyond_int32(self, operation):
        pool, cache = described(PAGES, 1)
        call = lambda: jaxkv.explain(operation, pool, cache, IDS, IDS, implementation="pallas")  # noqa: E731
        words = ("2560000000 blocks of 128 bytes", "the limit of int32 block numbers is 2147483647")
        assert_rejected(call, NotImplementedError, "pallas", *words)
        text = jaxkv.explain(operation, pool, cache, IDS, IDS)
        assert not text.splitlines()[0].startswith(f"{operation.__name__}: pallas")

    def test_pallas_accepts_the_largest_number_of_blocks(self, operation):
        largest = (2**31 - 1) // (2 * LAYERS)
        for pages, supported in ((largest, True), (largest + 1, False)):
            text = jaxkv.explain(operation, *described(pages, 1), IDS, IDS, implementation="kernel")
            assert ("int32 block numbers" not in text) == supported

    @pytest.mark.parametrize("name", ["kernel", "dma"])
    def test_cuda_implementations_accept_any_number_of_blocks(self, operation, name):
        """They have 64-bit byte offsets."""
        ids = jaxkv.HostIds(IDS)
        state = described(PAGES, 1)
        text = jaxkv.explain(operation, *state, ids, ids, implementation=name)
        assert f"{operation.__name__}: {name}" in text

    @pytest.mark.parametrize("name", ["kernel", "dma", "pallas"])
    def test_arrays_beyond_2_gib_are_accepted(self, operation, name):
        ids = jaxkv.HostIds(IDS)
        state = described(1_000_000, 16)
        text = jaxkv.explain(operation, *state, ids, ids, implementation=name)
        assert f"{operation.__name__}: {name}" in text


def test_pallas_rejects_block_numbers_beyond_int32_of_the_dense_side():
    src, dst = (jax.ShapeDtypeStruct((n, 128), jnp.int8) for n in (8, 2**31 - 1))
    call = lambda: jaxkv.explain(jaxkv.swap_blocks, src, dst, IDS, IDS, implementation="pallas")  # noqa: E731
    assert "swap_blocks: pallas" in call()
    dst = jax.ShapeDtypeStruct((2**31, 128), jnp.int8)
    assert_rejected(call, ValueError, "dst", "2147483648 blocks", "int32")


@pytest.fixture
def alone(tmp_path_factory):
    """Workers of pytest-xdist would all find the same memory available, and allocate it."""
    with (tmp_path_factory.getbasetemp().parent / "large_arrays.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def pool_or_skip(make):
    try:
        return make()
    except jaxkv.HostMemoryError as error:
        pytest.skip(str(error))


@pytest.mark.cpu_only
@pytest.mark.usefixtures("alone")
def test_native_copies_beyond_2_to_the_31_blocks():
    """Blocks of one byte: 2.56e9 of them in 2.4 GiB."""
    spec = jaxkv.KVCacheSpec(LAYERS, 1, 1, 1, jnp.int8)
    pool = pool_or_skip(lambda: jaxkv.HostPool.create(spec, num_pages=PAGES))
    rng = np.random.default_rng(0)
    layers = jax.tree.map(
        lambda array: jnp.asarray(rng.integers(1, 99, array.shape, np.int8)),
        jaxkv.DeviceCache.create(spec, num_pages=4),
    )
    host_pages, device_pages = np.array([[PAGES - 1, 3, PAGES // 2], [1, 3, 0]], np.int32)
    store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
    pool = jax.block_until_ready(store(pool, layers, host_pages, device_pages))
    assert pool.data.size > 2**31
    written = np.flatnonzero(pool.view().reshape(-1)) // LAYERS % PAGES  # [2, P, L]
    pages, counts = np.unique(written, return_counts=True)
    assert sorted(host_pages) == pages.tolist() and (counts == 2 * LAYERS).all()
    empty = jax.tree.map(jnp.zeros_like, layers)
    loaded = jax.jit(jaxkv.load_pages)(pool, empty, host_pages, device_pages)
    for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(layers), strict=True):
        np.testing.assert_array_equal(got[device_pages], want[device_pages])
    pool.close()


@pytest.mark.cpu_only
@pytest.mark.usefixtures("alone")
def test_native_copies_into_a_dense_side_beyond_2_gib():
    num_blocks, width = 10_000_000, 256
    dst = pool_or_skip(lambda: jaxkv.pinned_zeros((num_blocks, width), np.int8))
    src = jnp.asarray(np.random.default_rng(0).integers(1, 99, (3, width), np.int8))
    last = np.array([num_blocks - 1, 0, 2**31 // width + 1], np.int32)
    swap = jax.jit(jaxkv.swap_blocks, donate_argnames="dst")
    dst = swap(src, dst, np.arange(3, dtype=np.int32), last)
    back = jax.jit(jaxkv.swap_blocks)(dst, jnp.zeros_like(src), last, np.arange(3, dtype=np.int32))
    np.testing.assert_array_equal(back, src)
    dst.delete()
