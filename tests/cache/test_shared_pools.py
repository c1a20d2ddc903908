"""Pools in shared memory: contents after SIGKILL, checks on attach, removal."""

import contextlib
import dataclasses
import fcntl
import gc
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv._src.cache import host_memory, shared_memory
from jaxkv._src.runtime import native
from tests.util.layout_reference import spec_of
from tests.util.shared_memory import needs_shared_memory, open_files
from tests.util.transfer_cases import assert_rejected, mesh_of

pytestmark = needs_shared_memory
PAGES = 6
IDS = np.array([4, 1], np.int32), np.array([0, 2], np.int32)
# Of a process that creates or attaches a pool, stores pages whose bytes are `seed`, and waits.
PROGRAM = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
import jaxkv
from tests.util.layout_reference import spec_of

name, page, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
pool = jaxkv.HostPool.create(spec_of(), num_pages=6, shared=name)
cache = jaxkv.DeviceCache.create(spec_of(), num_pages=1)
cache = jax.tree.map(lambda a: jnp.full(a.shape, seed, a.dtype), cache)
store = jax.jit(jaxkv.store_pages, donate_argnames="pool")
pool = jax.block_until_ready(store(pool, cache, np.array([page]), np.array([0])))
print("stored", flush=True)
time.sleep(300)
"""


@pytest.fixture
def name():
    name = f"test-{uuid.uuid4().hex}"
    yield name
    for path in shared_memory.DIRECTORY.glob(f"jaxkv.{name}*"):
        path.unlink()


def create(name: str, **changes) -> jaxkv.HostPool:
    arguments = {"spec": spec_of(), "num_pages": PAGES, **changes}
    return jaxkv.HostPool.create(**arguments, shared=name)


def first_object(name: str) -> Path:
    return Path(f"/dev/shm/jaxkv.{name}.0")


def random_cache(seed: int = 0) -> jaxkv.DeviceCache:
    rng = np.random.default_rng(seed)
    cache = jaxkv.DeviceCache.create(spec_of(), num_pages=3)
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), a.dtype), cache)


def store(pool: jaxkv.HostPool, seed: int = 0) -> jaxkv.HostPool:
    donated = jax.jit(jaxkv.store_pages, donate_argnames="pool")
    return jax.block_until_ready(donated(pool, random_cache(seed), *IDS))


@contextlib.contextmanager
def process(*arguments: object, program: str = PROGRAM):
    """A process that has printed its first line."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout and child.stdout.readline() == "stored\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def test_pages_outlive_a_process_that_is_killed(name):
    with process(name, 5, 3) as child:
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    pool = create(name)
    want = np.zeros(pool.host_layout.shape, np.float32)
    want[:, 5] = 3
    np.testing.assert_array_equal(pool.view().astype(np.float32), want)
    cache = jax.jit(jaxkv.load_pages)(pool, random_cache(), np.array([5]), np.array([1]))
    assert all((np.asarray(a[1], np.float32) == 3).all() for a in jax.tree.leaves(cache))


def test_processes_that_are_attached_at_the_same_time_share_pages(name):
    pool = create(name)
    view = pool.view().view(np.uint16)
    with process(name, 5, 3), process(name, 2, 7):
        seen = {page: set(pool.view()[:, page].astype(np.float32).ravel()) for page in range(PAGES)}
    assert seen == {page: {{5: 3.0, 2: 7.0}.get(page, 0.0)} for page in range(PAGES)}
    assert view.any()


def test_contents_are_those_of_donated_stores(name):
    pool = create(name)
    address, view = pool.data.unsafe_buffer_pointer(), pool.view()
    for seed in range(3):
        pool = store(pool, seed)
        assert pool.data.unsafe_buffer_pointer() == address
        assert create(name).view().tobytes() == pool.view().tobytes() == view.tobytes()
    private = jaxkv.HostPool.create(spec_of(), num_pages=PAGES)
    assert store(private, 2).view().tobytes() == view.tobytes()


def test_a_closed_pool_is_attached_again_with_its_pages(name):
    pool = store(create(name))
    want = pool.view().tobytes()
    number = jaxkv.HostPool.shared_id(name)
    pool.close()
    again = create(name)
    assert again.view().tobytes() == want
    assert jaxkv.HostPool.shared_id(name) == number


def mapped(name: str) -> bool:
    return name in Path("/proc/self/maps").read_text()


def test_memory_is_unmapped_with_its_last_array(name):
    pool = store(create(name))
    assert mapped(name)
    view = pool.view()
    pool.close()
    assert mapped(name)
    del view, pool
    gc.collect()
    deadline = time.monotonic() + 30
    while mapped(name) and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert not mapped(name)


def test_no_file_descriptors_are_left(name):
    store(create(name)).close()
    with first_object(name).open():
        assert open_files(name) == [str(first_object(name))]
    for _ in range(4):
        create(name).close()
        assert_rejected(lambda: create(name, num_pages=7), ValueError, "num_pages")
    assert open_files(name) == []


def test_unlink_removes_the_pool_and_its_shards_only(name):
    pool, other = store(create(name)), create(f"{name}.1")
    number, want = jaxkv.HostPool.shared_id(name), pool.view().tobytes()
    jaxkv.HostPool.unlink(name)
    assert pool.view().tobytes() == want
    missing = FileNotFoundError, name, first_object(name)
    assert_rejected(lambda: jaxkv.HostPool.unlink(name), *missing)
    assert_rejected(lambda: jaxkv.HostPool.shared_id(name), *missing)
    assert not create(name).view().astype(bool).any()
    assert jaxkv.HostPool.shared_id(name) != number
    assert first_object(f"{name}.1").exists()
    other.close()


@pytest.mark.multigpu
def test_each_shard_has_an_object(name):
    arguments = {"mesh": mesh_of(2), "head_axis": "tp", "spec": spec_of(num_kv_heads=4)}
    pool = create(name, **arguments)
    assert sorted(p.name for p in Path("/dev/shm").glob(f"jaxkv.{name}.*")) == [
        f"jaxkv.{name}.{i}" for i in range(2)
    ]
    shards = [shard.device for shard in pool.data.addressable_shards]
    for i in range(2):  # the fill byte of each object
        with Path(f"/dev/shm/jaxkv.{name}.{i}").open("r+b") as file:
            file.seek(native.extension().FILE_OFFSET)
            file.write(bytes([i + 1]) * (pool.data.nbytes // 2))
    again = create(name, **arguments)
    for i, device in enumerate(shards):
        assert set(again.view(device).view(np.uint8).ravel()) == {i + 1}
    words = "shard 0 of 2", "expected 0 of 1"
    assert_rejected(lambda: create(name, spec=spec_of(num_kv_heads=4)), ValueError, *words)
    jaxkv.HostPool.unlink(name)
    assert not list(Path("/dev/shm").glob(f"jaxkv.{name}.*"))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_pages": 7}, ["num_pages 6", "expected 7"]),
        ({"layout": "layer_first"}, ["layout page_first_direct", "expected layer_first"]),
        ({"spec": spec_of(page_size=8)}, ["page_size 4", "expected 8"]),
        ({"spec": spec_of(dtype=np.dtype(np.float16))}, ["dtype bfloat16", "expected float16"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_pool_of_the_name_is_rejected(name, changes, words):
    want = store(create(name)).view().tobytes()
    words = [*words, name, f"HostPool.unlink('{name}')", "arguments"]
    assert_rejected(lambda: create(name, **changes), ValueError, *words)
    assert create(name).view().tobytes() == want


def test_another_spec_of_arrays_is_rejected(name):
    arrays = [{"k": jnp.zeros((3, 4, 8)), "v": jnp.zeros((3, 4, 8))} for _ in range(2)]
    spec = jaxkv.ArrayCacheSpec.from_arrays(arrays)
    create(name, spec=spec)
    create(name, spec=jaxkv.ArrayCacheSpec.from_arrays([layer for layer in arrays]))
    renamed = jaxkv.ArrayCacheSpec.from_arrays([{"a": a["k"], "b": a["v"]} for a in arrays])
    words = "arrays of a layer", "['k']float32[4, 8]", "['a']float32[4, 8]"
    assert_rejected(lambda: create(name, spec=renamed), ValueError, *words)
    # As many bytes as the pool has.
    fewer = jaxkv.ArrayCacheSpec.from_arrays(arrays[:1])
    words = "num_pages 6", "expected 12", "unlink"
    assert_rejected(lambda: create(name, spec=fewer, num_pages=12), ValueError, *words)
    assert_rejected(lambda: create(name), ValueError, "expected", name)


def test_a_description_that_is_long_is_compared(name):
    def spec(last: str) -> jaxkv.ArrayCacheSpec:
        layer = {f"array {i:0100}": jnp.zeros((3, 4)) for i in range(60)}
        return jaxkv.ArrayCacheSpec.from_arrays([{**layer, last: jnp.zeros((3, 4))}])

    create(name, spec=spec("x"))
    create(name, spec=spec("x"))
    assert_rejected(lambda: create(name, spec=spec("y")), ValueError, "arrays of a layer sha256")


def test_a_truncated_object_is_rejected(name):
    create(name)
    size = first_object(name).stat().st_size
    os.truncate(first_object(name), size - 4096)
    words = f"size in bytes {size - 4096}", f"expected {size}", "unlink"
    assert_rejected(lambda: create(name), ValueError, *words)


def test_an_object_of_another_format_is_rejected(name):
    create(name)
    with first_object(name).open("r+b") as file:
        file.seek(8)
        file.write((1).to_bytes(4, sys.byteorder))
    assert_rejected(lambda: create(name), ValueError, "format 1", "expected 2", "unlink")


def test_a_file_that_is_not_a_pool_is_rejected(name):
    first_object(name).touch(0o600)
    first_object(name).write_bytes(b"other contents")
    words = "create", first_object(name), "b'other co'", "remove the file"
    assert_rejected(lambda: create(name), ValueError, *words)
    assert first_object(name).read_bytes() == b"other contents"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o400])
def test_another_mode_is_rejected(name, mode):
    create(name)
    first_object(name).chmod(mode)
    words = first_object(name), "expected owner", "-rw-------", "remove the file"
    assert_rejected(lambda: create(name), PermissionError, *words)


def test_another_owner_is_rejected(name, monkeypatch):
    create(name)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    words = f"owner {user}", f"expected owner {user + 1}"
    assert_rejected(lambda: create(name), PermissionError, *words)


def test_a_symbolic_link_is_rejected(name, tmp_path):
    (tmp_path / "file").write_bytes(b"contents")
    first_object(name).symlink_to(tmp_path / "file")
    assert_rejected(lambda: create(name), PermissionError, "mode l")
    assert (tmp_path / "file").read_bytes() == b"contents"


def test_a_new_object_is_private(name):
    before = os.umask(0)
    try:
        create(name)
    finally:
        os.umask(before)
    assert first_object(name).stat().st_mode & 0o777 == 0o600


# A process that is killed after the pages are populated, before the object is complete.
KILLED = """
import os, signal, sys
from jaxkv._src.cache import shared_memory
from tests.util.layout_reference import spec_of
import jaxkv

def write(fd, description):
    os.pwrite(fd, b"garbage" * 1000, 1 << 21)
    print("stored", flush=True)
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))

shared_memory._write_header = write
jaxkv.HostPool.create(spec_of(), num_pages=6, shared=sys.argv[1])
"""


def test_an_incomplete_object_of_a_killed_process_is_initialized_again(name):
    with process(name, "SIGKILL", program=KILLED) as child:
        assert child.wait() == -signal.SIGKILL
    assert first_object(name).stat().st_size > 1 << 21
    assert_rejected(lambda: jaxkv.HostPool.shared_id(name), ValueError, "not a complete pool")
    assert not create(name).view().astype(bool).any()
    jaxkv.HostPool.shared_id(name)


def test_an_object_that_another_process_creates_is_waited_for(name, monkeypatch):
    with process(name, "SIGSTOP", program=KILLED) as child:
        monkeypatch.setattr(shared_memory, "_SECONDS", 0.5)
        begin = time.monotonic()
        words = "another process", first_object(name), "unlink"
        assert_rejected(lambda: create(name), TimeoutError, *words)
        assert time.monotonic() - begin > 0.5
        monkeypatch.setattr(shared_memory, "_SECONDS", 60)
        child.kill()
        assert not create(name).view().astype(bool).any()


def test_an_object_that_is_removed_while_it_is_waited_for_is_created(name, monkeypatch):
    path = first_object(name)
    path.touch(0o600)
    first = path.stat().st_ino
    real = fcntl.flock

    def flock(fd, operation):
        if path.exists() and path.stat().st_ino == first:
            path.unlink()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    create(name)
    assert path.exists()


def test_a_failed_creation_leaves_no_object(name, monkeypatch):
    def fail(*_):
        raise OSError("no header")

    monkeypatch.setattr(shared_memory, "_write_header", fail)
    with pytest.raises(OSError, match="no header"):
        create(name)
    assert not first_object(name).exists()


def test_more_than_the_free_shared_memory_is_rejected(name, monkeypatch):
    pool = create(name)
    free = dataclasses.make_dataclass("Status", ["f_blocks", "f_bavail", "f_frsize"])(9, 5, 4096)
    monkeypatch.setattr(host_memory.os, "statvfs", lambda path: free)
    words = "20480 bytes", "/dev/shm", "--shm-size"
    assert_rejected(lambda: create(f"{name}.new"), jaxkv.HostMemoryError, *words)
    assert not first_object(f"{name}.new").exists()
    create(name).close()  # has its pages already
    pool.close()


@pytest.fixture
def small_file_system(tmp_path, monkeypatch):
    """Of 1 MiB, in place of /dev/shm."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, check=False, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("not permitted to mount a file system")
    monkeypatch.setattr(shared_memory, "DIRECTORY", tmp_path)
    yield tmp_path
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_a_full_file_system_is_an_error(name, small_file_system):
    """Filled by others after the check; a write to the pages would raise SIGBUS."""
    pages = (2 << 20) // spec_of().page_bytes
    assert_rejected(lambda: create(name, num_pages=pages), RuntimeError, "file system is full")
    assert not list(small_file_system.iterdir())


@pytest.mark.parametrize("bad", ["", "a/b", "../a", ".a", "a b", "ä", "x" * 201, 3, "a\n"])
def test_names_that_are_rejected(bad):
    for call in (create, jaxkv.HostPool.unlink, jaxkv.HostPool.shared_id):
        assert_rejected(lambda call=call: call(bad), ValueError, "name", repr(bad), "200")


def test_pages_are_aligned_in_memory_and_file(name):
    """Huge pages need both. The name is the longest one."""
    name = name.ljust(200, "x")
    pool = create(name, num_pages=4000)
    line = next(x for x in Path("/proc/self/maps").read_text().splitlines() if name in x)
    addresses, _, offset = line.split()[:3]
    address, _, _ = addresses.partition("-")
    assert int(address, 16) % (1 << 21) == int(offset, 16) % (1 << 21) == 0
    assert pool.data.unsafe_buffer_pointer() == int(address, 16)
