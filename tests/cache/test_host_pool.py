"""`jaxkv.HostPool`: pinned host memory as an array, its limits and its release."""

import dataclasses
import mmap
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxkv
from jaxkv._src.cache import host_memory, pinned_memory
from tests.util.layout_reference import KIND_LAYOUTS, ReferenceLayout, assert_same_bytes, spec_of
from tests.util.transfer_cases import assert_rejected, mesh_of


@pytest.mark.parametrize("kind, layout", KIND_LAYOUTS)
def test_new_pool_is_zero_in_pinned_memory(kind, layout):
    spec = spec_of(kind)
    pool = jaxkv.HostPool.create(spec, num_pages=5, layout=layout)
    shape = ReferenceLayout(spec, layout, 5).shape
    assert pool.data.sharding.memory_kind == "pinned_host"
    assert (pool.spec, pool.layout, pool.head_groups, pool.num_pages) == (spec, layout, 1, 5)
    assert_same_bytes(pool.data, np.zeros(shape, spec.dtype), "new pool")


def test_pool_is_a_pytree_of_one_array():
    pool = jaxkv.HostPool.create(spec_of(), num_pages=5, layout="page_head")
    leaves, structure = jax.tree.leaves(pool), jax.tree.structure(pool)
    assert len(leaves) == 1 and leaves[0] is pool.data
    again = jax.tree.unflatten(structure, leaves)
    assert (again.spec, again.layout, again.num_pages) == (pool.spec, "page_head", 5)
    assert hash(structure) == hash(jax.tree.structure(again))
    other = jaxkv.HostPool.create(spec_of(), num_pages=5, layout="page_first")
    assert jax.tree.structure(other) not in {structure}


def test_new_pool_is_written_in_place():
    """From the first step on, at any address."""
    cache = jaxkv.DeviceCache.create(spec_of(), num_pages=5)
    page = np.zeros(1, np.int32)
    step = jax.jit(jaxkv.store_pages, donate_argnames="pool")
    for _ in range(20):
        pool = jaxkv.HostPool.create(spec_of(), num_pages=5)
        address = pool.data.unsafe_buffer_pointer()
        out = step(pool, cache, page, page)
        assert out.data.unsafe_buffer_pointer() == address
        assert out.data.sharding.memory_kind == "pinned_host"


def large_pool(**arguments):
    """200 MiB, three times what is allocated at once."""
    spec = dataclasses.replace(spec_of(), num_layers=1, page_size=64, num_kv_heads=8, head_dim=128)
    return jaxkv.HostPool.create(spec, num_pages=800, **arguments)


def test_progress_increases_to_the_size_of_the_pool():
    calls = []
    pool = large_pool(progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {pool.data.nbytes} and list(done) == sorted(done)
    assert 0 < done[0] <= done[-1] == pool.data.nbytes


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs 2 devices")
def test_progress_covers_all_shards():
    calls = []
    pool = large_pool(mesh=mesh_of(2), head_axis="tp", progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {pool.data.nbytes} and list(done) == sorted(done)
    assert pool.data.nbytes // 2 in done and done[-1] == pool.data.nbytes


def test_exception_of_progress_cancels_the_creation():
    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def cancel(done, total):
        raise KeyboardInterrupt(f"{0 < done <= total}")

    before = resident_bytes()
    with pytest.raises(KeyboardInterrupt, match="True"):
        large_pool(progress=cancel)
    assert resident_bytes() - before < 50 << 20


@pytest.mark.parametrize("layout", ["page_first_direct", "page_unified"])
def test_pool_on_mesh_of_one_device(layout):
    mesh = mesh_of(1)
    arguments = {"num_pages": 5, "layout": layout, "mesh": mesh}
    for head_axis in (None, "tp"):
        pool = jaxkv.HostPool.create(spec_of(), head_axis=head_axis, **arguments)
        assert pool.num_pages == 5
        assert pool.data.sharding.memory_kind == "pinned_host"
        assert isinstance(pool.data.sharding, jax.NamedSharding)
        assert pool.data.sharding.spec == pool.partition_spec


@pytest.mark.multigpu
def test_pool_without_head_axis_is_replicated():
    mesh = mesh_of(2)
    pool = jaxkv.HostPool.create(spec_of("mla"), num_pages=5, mesh=mesh)
    assert [shard.data.shape for shard in pool.data.addressable_shards] == [pool.data.shape] * 2


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "spec, arguments, words",
    [
        ({"num_kv_heads": 3}, {"layout": "page_first"}, ["num_kv_heads", "3", "tp", "2"]),
        ({"kind": "mla"}, {"layout": "page_first"}, ["num_kv_heads", "1", "tp", "2"]),
        ({"num_kv_heads": 2}, {"layout": "page_unified"}, ["head_groups", "1", "tp", "2"]),
        ({}, {"layout": "page_first", "head_axis": "heads"}, ["head_axis", "heads", "tp"]),
    ],
)
def test_indivisible_heads_are_rejected(spec, arguments, words):
    mesh = mesh_of(2)
    arguments = {"num_pages": 4, "mesh": mesh, "head_axis": "tp", **arguments}
    assert_rejected(lambda: jaxkv.HostPool.create(spec_of(**spec), **arguments), ValueError, *words)


@pytest.mark.parametrize("owner", [jaxkv.HostPool, jaxkv.DeviceCache])
def test_head_axis_without_mesh_is_rejected(owner):
    call = partial(owner.create, spec_of(), num_pages=4, head_axis="tp")
    assert_rejected(call, ValueError, "head_axis", "tp", "mesh", "None")


@pytest.mark.parametrize("spec", [None, {"full": spec_of()}], ids=["None", "dict"])
@pytest.mark.parametrize("owner", [jaxkv.HostPool, jaxkv.DeviceCache], ids=lambda t: t.__name__)
def test_spec_of_another_type_is_rejected(owner, spec):
    call = partial(owner.create, spec, num_pages=4)
    words = f"{owner.__name__}.create: spec", "KVCacheSpec", f"got {type(spec).__name__}", "group"
    assert_rejected(call, TypeError, *words)


def test_device_cache_of_an_array_spec_is_rejected():
    spec: Any = jaxkv.ArrayCacheSpec.from_arrays([jnp.zeros((2, 4))])
    call = partial(jaxkv.DeviceCache.create, spec, num_pages=4)
    assert_rejected(call, TypeError, "got ArrayCacheSpec", "the engine's arrays")


@pytest.mark.parametrize("head_axis", [None, "tp"])
@pytest.mark.parametrize("owner", [jaxkv.HostPool, jaxkv.DeviceCache], ids=lambda t: t.__name__)
def test_mesh_of_another_type_is_rejected(owner, head_axis):
    call = partial(owner.create, spec_of(), num_pages=4, head_axis=head_axis)
    for mesh in (jax.devices(), NamedSharding(mesh_of(1), PartitionSpec())):
        words = "mesh must be a jax.sharding.Mesh", f"got {type(mesh).__name__}"
        assert_rejected(partial(call, mesh=mesh), TypeError, *words)


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize("owner", [jaxkv.HostPool, jaxkv.DeviceCache], ids=lambda t: t.__name__)
def test_creation_inside_jit_is_rejected(owner, on_mesh):
    mesh = mesh_of(1) if on_mesh else None
    make = jax.jit(lambda x: (owner.create(spec_of(), num_pages=5, mesh=mesh), x)[1])
    assert_rejected(lambda: make(1.0), RuntimeError, "pools", "caches", "outside of jit")


def test_data_of_another_rank_is_rejected():
    pool = jaxkv.HostPool.create(spec_of(), num_pages=5, layout="layer_first")
    flat = dataclasses.replace(pool, data=jnp.zeros(pool.data.size, pool.data.dtype))
    words = "layer_first", f"{pool.data.ndim} dimensions", f"({pool.data.size},)"
    assert_rejected(lambda: flat.num_pages, ValueError, *words)


def test_close_frees_and_is_idempotent():
    pool = jaxkv.HostPool.create(spec_of(), num_pages=5)
    sharing = jax.tree.map(lambda leaf: leaf, pool)
    pool.close()
    assert pool.data.is_deleted() and sharing.data.is_deleted()
    pool.close()


def test_close_waits_for_in_flight_loads():
    """Loads in flight keep their source: the result is correct after the pool is closed."""
    spec = spec_of(page_size=64, head_dim=64)
    pool = jaxkv.HostPool.create(spec, num_pages=64)
    ones = jax.device_put(np.ones(pool.data.shape, spec.dtype), pool.data.sharding)
    pool = jax.tree.map(lambda _: ones, pool)
    cache = jaxkv.DeviceCache.create(spec, num_pages=64)
    pages = np.arange(64, dtype=np.int32)
    cache = jax.jit(jaxkv.load_pages, donate_argnames="cache")(pool, cache, pages, pages)
    pool.close()
    want = np.ones((64, *cache.layers[0][0].shape[1:]), spec.dtype)
    for buffers in cache.layers:
        for buffer in buffers:
            assert_same_bytes(buffer, want, "loaded page")


def test_oversized_pool_is_rejected_before_allocation():
    spec = spec_of()
    pages = 2**31 - 1
    with pytest.raises(jaxkv.HostMemoryError) as raised:
        jaxkv.HostPool.create(spec, num_pages=pages)
    error = raised.value
    assert error.needed_bytes == pages * 3 * 2 * 4 * 2 * 16 * 2  # layers, K V, tokens, heads, ...
    assert 0 <= error.available_bytes < error.needed_bytes
    for figure in (error.needed_bytes, error.available_bytes):
        assert f"{figure} bytes" in str(error)


@pytest.mark.multigpu
@pytest.mark.parametrize("head_axis", [None, "tp"], ids=["replicated", "shards"])
def test_memory_check_counts_every_part_once(head_axis, monkeypatch):
    checked_bytes: list[int] = []
    monkeypatch.setattr(pinned_memory, "check_host_memory", checked_bytes.append)
    pool = jaxkv.HostPool.create(spec_of(), num_pages=5, mesh=mesh_of(2), head_axis=head_axis)
    assert checked_bytes == [pool.data.nbytes]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes a file of a simulated machine; `host_pool` sees no other files."""
    monkeypatch.setattr(host_memory, "Path", lambda path: tmp_path / str(path).lstrip("/"))

    def write(path: str, text: str) -> None:
        file: Path = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    write("/proc/meminfo", "MemTotal:  9000 kB\nMemAvailable:  5000 kB\nSwapFree:  9 kB")
    return write


def available() -> int:
    """Available bytes according to the check."""
    with pytest.raises(jaxkv.HostMemoryError) as raised:
        host_memory.check_host_memory(2**60)
    left = raised.value.available_bytes
    host_memory.check_host_memory(left)
    with pytest.raises(jaxkv.HostMemoryError):
        host_memory.check_host_memory(left + 1)
    return left


def write_group(machine, directory: str, limit: str, used: int, cached: int = 0) -> None:
    machine(f"{directory}/memory.max", limit)
    machine(f"{directory}/memory.current", str(used))
    machine(f"{directory}/memory.stat", f"anon 7\ninactive_file {cached}")


def test_available_memory_without_control_groups(machine):
    assert available() == 5000 * 1024


def test_limit_of_the_address_space(machine, monkeypatch):
    limits = {resource.RLIMIT_AS: (4 << 20, resource.RLIM_INFINITY)}
    monkeypatch.setattr(host_memory.resource, "getrlimit", limits.__getitem__)
    machine("/proc/self/statm", "500 7 7 7 0 7 0")
    assert available() == (4 << 20) - 500 * mmap.PAGESIZE
    with pytest.raises(jaxkv.HostMemoryError, match="RLIMIT_AS"):
        host_memory.check_host_memory(4 << 20)
    machine("/proc/self/statm", "5000 7 7 7 0 7 0")
    assert_rejected(lambda: host_memory.check_host_memory(1), jaxkv.HostMemoryError, " 0 bytes")


@pytest.mark.cpu_only  # CUDA reserves more address space than any such limit
def test_pool_above_the_address_space_is_rejected():
    """By the check, before an allocation fails.

    1 GiB is left for the threads that XLA starts later, of which each may reserve 64 MiB.
    """
    program = (
        "import resource, jaxkv\n"
        "spec = jaxkv.KVCacheSpec(1, 16, 1, 64, 'int8')\n"
        "jaxkv.HostPool.create(spec, num_pages=2)\n"
        "pages = int(open('/proc/self/statm').read().split()[0])\n"
        "left = (pages * resource.getpagesize() + (1 << 30), resource.RLIM_INFINITY)\n"
        "resource.setrlimit(resource.RLIMIT_AS, left)\n"
        "try:\n"
        "    jaxkv.HostPool.create(spec, num_pages=1 << 20)\n"
        "except jaxkv.HostMemoryError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "RLIMIT_AS" in ran.stdout, ran.stderr


@pytest.mark.cpu_only
def test_pool_where_no_thread_can_be_started():
    """A thread needs 8 MiB for its stack: here 5 MiB are left beside the pool."""
    program = (
        "import resource, threading, jaxkv\n"
        "def leave(num_bytes):\n"
        "    pages = int(open('/proc/self/statm').read().split()[0])\n"
        "    left = pages * resource.getpagesize() + num_bytes\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (left, resource.RLIM_INFINITY))\n"
        "spec = jaxkv.KVCacheSpec(1, 16, 1, 64, 'int8')\n"
        "jaxkv.HostPool.create(spec, num_pages=2)\n"
        "leave(5 << 20)\n"
        "try:\n"
        "    while True:  # glibc keeps stacks of threads that have ended\n"
        "        threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
        "except RuntimeError:\n"
        "    leave((256 << 20) + (5 << 20))\n"
        "pool = jaxkv.HostPool.create(spec, num_pages=1 << 17)\n"
        "resource.setrlimit(resource.RLIMIT_AS, 2 * (resource.RLIM_INFINITY,))\n"
        "print(pool.num_pages)\n"
    )
    # A new arena of glibc would take these 5 MiB, or more.
    variables = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=variables
    )
    assert ran.stdout == f"{1 << 17}\n", ran.stderr


def test_limit_of_a_control_group(machine):
    machine("/proc/self/cgroup", "0::/job/step")
    write_group(machine, "/sys/fs/cgroup/job/step", "100000", 40000, cached=1000)
    assert available() == 61000


def test_tightest_limit_of_nested_control_groups(machine):
    machine("/proc/self/cgroup", "0::/job/step")
    write_group(machine, "/sys/fs/cgroup/job/step", "max", 40000)
    write_group(machine, "/sys/fs/cgroup/job", "90000", 50000)
    assert available() == 40000


def test_control_groups_version_1(machine):
    machine("/proc/self/cgroup", "5:cpu:/job\n4:memory:/job")
    directory = "/sys/fs/cgroup/memory/job"
    machine(f"{directory}/memory.limit_in_bytes", "100000")
    machine(f"{directory}/memory.usage_in_bytes", "30000")
    machine(f"{directory}/memory.stat", "total_inactive_file 500")
    assert available() == 70500


def test_control_group_limit_above_available_memory_is_ignored(machine):
    machine("/proc/self/cgroup", "0::/")
    write_group(machine, "/sys/fs/cgroup", str(2**50), 40000)
    assert available() == 5000 * 1024


def test_exhausted_control_group_reports_zero_bytes(machine):
    machine("/proc/self/cgroup", "0::/")
    write_group(machine, "/sys/fs/cgroup", "1000", 4000)
    assert_rejected(lambda: host_memory.check_host_memory(1), jaxkv.HostMemoryError, " 0 bytes")


@pytest.mark.parametrize("progress", [3, True, "each"])
def test_progress_that_is_not_callable_is_rejected(progress):
    with pytest.raises(TypeError, match=f"HostPool.create: progress must be .* {progress!r}"):
        jaxkv.HostPool.create(spec_of(), num_pages=5, progress=progress)


def test_close_inside_of_jit_is_rejected():
    pool = jaxkv.HostPool.create(spec_of(), num_pages=5)
    with pytest.raises(RuntimeError, match="close: the pool is traced; call it outside of jit"):
        jax.jit(lambda pool: pool.close())(pool)
    pool.view()
