"""Pinned memory of the library: `pinned_zeros`, `HostPool.view`, NUMA nodes, and its release."""

import gc
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.cache import pinned_memory
from jaxkv._src.runtime import native
from tests.util.layout_reference import spec_of
from tests.util.pinned_memory import is_allocated, is_freed
from tests.util.transfer_cases import assert_rejected, mesh_of

DTYPES = (
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32",
    "complex64", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_new_array_is_zero_and_typed_as_in_host_memory(dtype):
    array = jaxkv.pinned_zeros((3, 5, 7), jnp.dtype(dtype))
    assert (array.dtype.name, array.shape, array.committed) == (dtype, (3, 5, 7), True)
    assert array.sharding.memory_kind == "pinned_host"
    assert jax.typeof(array).memory_space == jax.memory.Space.Host
    assert np.asarray(array).tobytes() == bytes(array.nbytes)
    view = pinned_memory.view_of(array, None)
    assert (view.dtype, view.shape) == (array.dtype, array.shape)


@pytest.mark.parametrize("shape", [(), 6, (0, 4), (1,), (2**22, 3)])
def test_shapes(shape):
    array = jaxkv.pinned_zeros(shape, np.uint8)
    assert array.shape == ((shape,) if isinstance(shape, int) else shape)
    assert not np.asarray(array).any()


@pytest.mark.multigpu
def test_a_sharded_array_is_typed_as_in_host_memory():
    mesh = mesh_of(2)
    sharding = jax.NamedSharding(mesh, jax.P("tp"))
    array = jaxkv.pinned_zeros((4, 6), np.float32, sharding)
    assert array.sharding == sharding.with_memory_kind("pinned_host")
    assert jax.typeof(array).memory_space == jax.memory.Space.Host
    first, second = mesh.devices
    assert pinned_memory.view_of(array, second).shape == (2, 6)
    assert_rejected(lambda: pinned_memory.view_of(array, None), ValueError, "2 devices", "device")
    with_one = jaxkv.pinned_zeros(4, np.int8, jax.sharding.SingleDeviceSharding(first))
    words = "device must be one of", second
    assert_rejected(lambda: pinned_memory.view_of(with_one, second), ValueError, *words)


def test_arrays_that_are_refused():
    assert_rejected(lambda: jaxkv.pinned_zeros(4, jnp.int4), ValueError, "dtype", "int4", "4 bits")
    assert_rejected(lambda: jaxkv.pinned_zeros(2**59, np.int8), jaxkv.HostMemoryError, 2**59)
    inside = jax.jit(lambda x: (jaxkv.pinned_zeros(4, np.int8), x)[1])
    assert_rejected(lambda: inside(1.0), RuntimeError, "outside of jit")


def test_sharding_of_another_type_is_refused():
    words = "pinned_zeros: sharding must be a jax.sharding.Sharding", "NamedSharding("
    others: list[Any] = [mesh_of(1), jax.devices()[0]]
    for sharding in others:
        call = partial(jaxkv.pinned_zeros, 4, np.int8, sharding)
        assert_rejected(call, TypeError, *words, f"got {type(sharding).__name__}")


@pytest.mark.parametrize("dtype", [object, "U4", "M8[s]", ">f4", None, [("a", "f4")]], ids=str)
def test_dtypes_that_jax_does_not_have_are_refused(dtype):
    words = "dtype must be a numeric dtype of JAX or bool", dtype
    assert_rejected(lambda: jaxkv.pinned_zeros(4, dtype), ValueError, *words)


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.complex128, float], ids=str)
def test_dtypes_of_64_bits_are_kept_or_refused(dtype):
    words = "dtype", np.dtype(dtype), "64 bits", "32 bits", "jax_enable_x64"
    assert_rejected(lambda: jaxkv.pinned_zeros(4, dtype), ValueError, *words)
    with jax.enable_x64(True):
        array = jaxkv.pinned_zeros(4, dtype)
        assert array.dtype == dtype and not np.asarray(array).any()


@pytest.mark.parametrize("shape", [2**60, (2**40, 2**40, 0), (0, 2**70)], ids=str)
def test_shapes_that_are_refused(shape):
    sizes = list(shape) if isinstance(shape, tuple) else [shape]
    words = "shape", sizes, "the limit is 2^60", "empty dimensions"
    assert_rejected(lambda: jaxkv.pinned_zeros(shape, np.int8), ValueError, *words)


def test_swap_blocks_writes_the_array_in_place():
    host = jaxkv.pinned_zeros((6, 4), np.float32)
    view, address = pinned_memory.view_of(host, None), host.unsafe_buffer_pointer()
    blocks = jnp.arange(8, dtype=np.float32).reshape(2, 4)
    swap = jax.jit(jaxkv.swap_blocks, donate_argnames="dst")
    host = swap(blocks, host, np.array([0, 1], np.int32), np.array([5, 2], np.int32))
    jax.block_until_ready(host)
    assert host.unsafe_buffer_pointer() == address
    assert jax.typeof(host).memory_space == jax.memory.Space.Host
    assert view[[5, 2]].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert not view[[0, 1, 3, 4]].any()


def pool_and_cache() -> tuple[jaxkv.HostPool, jaxkv.DeviceCache]:
    spec = spec_of()
    cache = jaxkv.DeviceCache.create(spec, num_pages=3)
    ones = jax.tree.map(jnp.ones_like, cache)
    return jaxkv.HostPool.create(spec, num_pages=5), ones


PAGES = np.array([4, 1], np.int32), np.array([0, 2], np.int32)


def test_a_view_shows_donated_stores():
    pool, cache = pool_and_cache()
    view = pool.view()
    assert view.shape == pool.host_layout.shape and not view.flags.writeable
    store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
    pool = jax.block_until_ready(store(pool, cache, *PAGES))
    assert view.tobytes() == np.asarray(pool.data).tobytes()
    assert np.count_nonzero(view.astype(np.float32)) == 2 * view.size / 5
    assert pool.view().ctypes.data == view.ctypes.data


def test_a_view_outlives_every_array_of_its_memory():
    pool, cache = pool_and_cache()
    view, address = pool.view(), pool.data.unsafe_buffer_pointer()
    store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
    pool = jax.block_until_ready(store(pool, cache, *PAGES))
    want = view.tobytes()
    pool.close()
    gc.collect()
    assert is_allocated(address)
    assert view.tobytes() == want
    del view
    assert is_freed(address)


def test_views_that_are_refused():
    pool, cache = pool_and_cache()
    copied = jaxkv.store_pages(pool, cache, *PAGES)
    assert_rejected(copied.view, ValueError, "copy", "not donated", "donate the pool")
    assert_rejected(lambda: jax.jit(lambda pool: pool.view())(pool), RuntimeError, "traced", "jit")
    if jax.default_backend() == "cpu":  # on GPUs a donation fails while NumPy holds the buffer
        held, cache = pool_and_cache()
        array = np.asarray(held.data)
        copied = jax.jit(jaxkv.store_pages, donate_argnames="pool")(held, cache, *PAGES)
        assert_rejected(copied.view, ValueError, "not by np.asarray(pool.data)")
        del array
    pool.close()
    assert_rejected(pool.view, RuntimeError, "closed or donated")


def test_memory_is_returned_when_its_array_is_gone():
    pool, _ = pool_and_cache()
    address = pool.data.unsafe_buffer_pointer()
    assert is_allocated(address)
    pool.close()
    assert is_freed(address)
    array = jaxkv.pinned_zeros(4, np.int8)
    address = array.unsafe_buffer_pointer()
    del array
    gc.collect()
    assert is_freed(address)


def test_a_tensor_that_jax_does_not_take_is_freed():
    before = resident_bytes()
    for _ in range(20):
        native.extension().PinnedMemory(16 << 20, -1, []).tensor([16 << 20], 1, 8, -1)
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_the_memory_is_as_large_as_the_array():
    size = 96 << 20  # not a power of two
    jaxkv.pinned_zeros(4, np.uint8)  # the backend starts
    before = resident_bytes()
    array = jaxkv.pinned_zeros(size, np.uint8)
    assert resident_bytes() - before < size + (16 << 20)  # less if other arrays are freed meanwhile
    view = native.extension().pinned_view(array.unsafe_buffer_pointer())
    assert view is not None and view.nbytes == size


def test_nodes_of_pages_are_read_back():
    array = jaxkv.pinned_zeros(8 << 20, np.uint8)
    try:
        nodes = pinned_memory.nodes_of(array)
    except RuntimeError as error:
        pytest.skip(f"not permitted here: {error}")
    [found] = nodes.values()
    assert sum(found.values()) == (8 << 20) // 4096
    assert min(found) >= 0


def test_the_node_of_a_page_that_is_not_present_is_an_errno():
    nodes = native.extension().nodes_of_pages(4096, 4096)
    assert len(nodes) == 1 and nodes[0] < 0


def test_each_shard_is_asked_of_the_node_of_its_device(monkeypatch):
    asked = []
    extension = native.extension()
    real = extension.PinnedMemory

    class Extension:
        def __getattr__(self, name):
            return getattr(extension, name)

        def PinnedMemory(self, num_bytes, node, *others):
            asked.append((num_bytes, node))
            return real(num_bytes, 0, *others)

    monkeypatch.setattr(pinned_memory.native, "extension", Extension)
    monkeypatch.setattr(pinned_memory, "numa_node", lambda device: 7)
    jaxkv.pinned_zeros((2, 3), np.float32)
    monkeypatch.setattr(pinned_memory, "numa_node", lambda device: None)
    jaxkv.pinned_zeros(3, np.int8)
    assert asked == [(24, 7), (3, -1)]


def test_a_new_array_that_jax_copies_is_an_error(monkeypatch):
    """Silent, it would take twice the memory, and end at XLA's limit."""
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *_: real(x + 0) if x.ndim else real(x))
    assert_rejected(lambda: jaxkv.pinned_zeros(4, np.int8), RuntimeError, "copied", jax.__version__)


def test_a_tensor_owns_no_python_object():
    """Threads of XLA delete tensors, also while the interpreter ends: without Python."""
    memory = native.extension().PinnedMemory(4096, -1, [])
    before = sys.getrefcount(memory)
    tensor = memory.tensor([4096], 1, 8, -1)
    assert sys.getrefcount(memory) == before
    del memory, tensor


def test_a_process_ends_with_arrays_and_views_alive():
    program = (
        "import jax, numpy as np, jaxkv\n"
        "spec = jaxkv.KVCacheSpec(num_layers=1, page_size=4, num_kv_heads=1, head_dim=8,"
        " dtype=np.float32)\n"
        "pool = jaxkv.HostPool.create(spec, num_pages=4)\n"
        "view, other = pool.view(), jaxkv.pinned_zeros(8, np.int8)\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
