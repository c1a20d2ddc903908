"""Shared pools: files that are no objects, creations that fail, shardings of arrays."""

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv._src.cache import shared_memory
from tests.util.layout_reference import spec_of
from tests.util.shared_memory import needs_shared_memory
from tests.util.transfer_cases import assert_rejected, mesh_of

pytestmark = needs_shared_memory


@pytest.fixture
def name():
    name = f"test-{uuid.uuid4().hex}"
    yield name
    for path in shared_memory.DIRECTORY.glob(f"jaxkv.{name}*"):
        path.rmdir() if path.is_dir() else path.unlink()


def object_of(name: str) -> Path:
    return shared_memory.DIRECTORY / f"jaxkv.{name}.0"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


MAKE: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "symlink": lambda path: path.symlink_to("/dev/zero"),
    "directory": lambda path: path.mkdir(),
    "socket": make_socket,
}
# In a process of its own, because it hung.
CALLS = """
import sys, jaxkv
from tests.util.layout_reference import spec_of

for call in (
    lambda name: jaxkv.HostPool.create(spec_of(), num_pages=2, shared=name),
    jaxkv.HostPool.shared_id,
):
    try:
        call(sys.argv[1])
    except PermissionError as error:
        print(error)
"""


@pytest.mark.parametrize("kind", MAKE)
def test_a_file_of_another_kind_is_rejected(name, kind):
    MAKE[kind](object_of(name))
    command = [sys.executable, "-c", CALLS, name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    created, identified = ran.stdout.splitlines()
    assert created.startswith("HostPool.create: ") and identified.startswith("HostPool.shared_id: ")
    for message in created, identified:
        assert f"{object_of(name)} has owner" in message and "remove the file" in message
    assert os.path.lexists(object_of(name))


@pytest.mark.parametrize("mode", [0o640, 0o400])
def test_the_identity_of_a_file_of_another_mode_is_rejected(name, mode):
    jaxkv.HostPool.create(spec_of(), num_pages=2, shared=name)
    object_of(name).chmod(mode)
    words = "shared_id", object_of(name), "expected owner", "-rw-------", "remove the file"
    assert_rejected(lambda: jaxkv.HostPool.shared_id(name), PermissionError, *words)


@pytest.mark.parametrize("description", [b"{", b"[]", b"\xff\xff", b""])
def test_a_damaged_header_is_rejected(name, description):
    header = shared_memory._HEADER.pack(b"jaxkv-kv", 2, len(description), bytes(16))
    object_of(name).write_bytes(header + description)
    object_of(name).chmod(0o600)
    for call, operation in (
        (lambda: jaxkv.HostPool.create(spec_of(), num_pages=2, shared=name), "create"),
        (lambda: jaxkv.HostPool.shared_id(name), "shared_id"),
    ):
        words = f"HostPool.{operation}", object_of(name), "damaged", "remove the file"
        assert_rejected(call, ValueError, *words)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_failed_creation_keeps_the_object_of_another_process(name, replaced):
    shared = shared_memory.SharedPool(name, {})
    with pytest.raises(KeyboardInterrupt), shared.opened(0, 4096, {}):
        jaxkv.HostPool.unlink(name)
        if replaced:
            with shared.opened(0, 4096, {}):
                pass
        raise KeyboardInterrupt
    assert object_of(name).exists() == replaced


@pytest.mark.multigpu
def test_a_cancelled_creation_leaves_no_shard(name):
    """Also not the first one, of half a pool, or its identity."""

    def cancel(done, total):
        if 2 * done > total:  # in the second shard
            assert object_of(name).exists()
            assert_rejected(lambda: jaxkv.HostPool.shared_id(name), ValueError, "not a complete")
            raise KeyboardInterrupt

    mesh = mesh_of(2)
    with pytest.raises(KeyboardInterrupt):
        jaxkv.HostPool.create(
            spec_of(), num_pages=2, mesh=mesh, head_axis="tp", shared=name, progress=cancel
        )
    assert not list(shared_memory.DIRECTORY.glob(f"jaxkv.{name}*"))


def cache_of(spec: P, *specs: P, sizes: tuple[int, ...] = (2, 2), names="ab"):
    """A layer of arrays whose pages `[4, 4]` have 16 different elements."""
    devices = np.array(jax.devices()[:4]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, tuple(names))
    pages = np.broadcast_to(np.arange(16, dtype=np.float32).reshape(4, 4), (3, 4, 4))
    return [tuple(jax.device_put(pages, jax.NamedSharding(mesh, s)) for s in (spec, *specs))]


def attach(name: str, cache) -> jaxkv.HostPool:
    return jaxkv.HostPool.create(jaxkv.ArrayCacheSpec.from_arrays(cache), num_pages=2, shared=name)


def copy(operation, pool: jaxkv.HostPool, cache):
    mesh = cache[0][0].sharding.mesh
    specs = pool.partition_spec, jax.tree.map(lambda array: array.sharding.spec, cache)
    step = jax.shard_map(
        lambda pool, cache: operation(pool, cache, np.array([1]), np.array([2])),
        mesh=mesh,
        in_specs=specs,
        out_specs=specs[operation is jaxkv.load_pages],
    )
    written = operation is jaxkv.load_pages
    return jax.block_until_ready(jax.jit(step, donate_argnums=int(written))(pool, cache))


COLUMNS = P(None, None, ("a", "b")), P(None, None, ("b", "a"))
SQUARE = P(None, "a", "b"), P(None, "b", "a")
ROWS = P(None, "a"), P(None, "b")


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "stored, attached",
    [
        ([COLUMNS[0]], [COLUMNS[1]]),
        ([SQUARE[0]], [SQUARE[1]]),
        (ROWS, ROWS[::-1]),
    ],
    ids=["axes of a dimension", "dimensions", "arrays"],
)
def test_swapped_mesh_axes_are_rejected(name, stored, attached):
    copy(jaxkv.store_pages, attach(name, cache_of(*stored)), cache_of(*stored))
    words = "blocks of each array by shard", "expected", f"HostPool.unlink({name!r})"
    assert_rejected(lambda: attach(name, cache_of(*attached)), ValueError, *words)
    attach(name, cache_of(*stored))


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "attached, mesh",
    [
        ([P(None, None, ("x", "y"))], {"names": "xy"}),
        ([P(None, None, "x")], {"names": "x", "sizes": (4,)}),
        ([P(None, None, ("x", "one"))], {"names": ("one", "x"), "sizes": (1, 4)}),
    ],
    ids=["renamed axes", "one axis", "axis of size 1"],
)
def test_other_meshes_with_the_same_shards_are_attached(name, attached, mesh):
    stored = cache_of(COLUMNS[0])
    want = np.asarray(stored[0][0][0])
    copy(jaxkv.store_pages, attach(name, stored), stored)
    cache = jax.tree.map(lambda array: array * 0, cache_of(*attached, **mesh))
    cache = copy(jaxkv.load_pages, attach(name, cache), cache)
    np.testing.assert_array_equal(np.asarray(cache[0][0][2]), want)
