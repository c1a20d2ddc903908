"""`SymmetricMemory`: creation, missing ranks, and closing."""

import gc
import re
import time
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import jaxkv
from jaxkv._src.collectives import symmetric_memory
from jaxkv._src.collectives.all_reduce import Implementation
from jaxkv._src.runtime import native as runtime_native
from jaxkv._src.tuning.all_reduce_table import WORLD_SIZES
from tests.util import hooks
from tests.util.ranks import AXIS, NATIVE, ON_CPU, memory_of, mesh_of, on_ranks, sums

pytestmark = [pytest.mark.multigpu, pytest.mark.usefixtures("multicast")]

X = np.arange(8, dtype=np.float32).reshape(2, 4)


# ---------------------------------------------------------------------------------------------
# Creation


def test_unsupported_world_size_raises():
    device = np.array(jax.devices()[:1])
    for world_size in (1, 3, 5, 7, 16):
        mesh = jax.sharding.Mesh(np.repeat(device, world_size), (AXIS,)) if world_size > 1 else None
        mesh = mesh or jax.sharding.Mesh(device, (AXIS,))
        with pytest.raises(
            ValueError, match=f"'tp' must have 2, 4, 6 or 8 devices, got {world_size}"
        ):
            jaxkv.SymmetricMemory.create(mesh, AXIS)


def test_arguments_are_validated():
    mesh = mesh_of(2)
    with pytest.raises(
        ValueError, match=r"axis_name must be one of the mesh's \('tp',\), got 'dp'"
    ):
        jaxkv.SymmetricMemory.create(mesh, "dp")
    wrong: Any
    for wrong in (None, jax.sharding.AbstractMesh((2,), (AXIS,))):
        message = f"mesh must be a jax.sharding.Mesh, got {type(wrong).__name__}"
        with pytest.raises(TypeError, match=f"^SymmetricMemory.create: {message}"):
            jaxkv.SymmetricMemory.create(wrong, AXIS)
    for wrong in (0, 1e6, "1", None):
        message = f"max_bytes must be an integer of at least 1 byte, got {wrong!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            jaxkv.SymmetricMemory.create(mesh, AXIS, max_bytes=wrong)
    for wrong in (0, -1.0, float("inf"), float("nan"), 2e9, "1", True):
        message = f"timeout_s must be more than 0 and at most 1e+09 seconds, got {wrong!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            jaxkv.SymmetricMemory.create(mesh, AXIS, timeout_s=wrong)
    numbers: Any = {"max_bytes": np.int32(64), "timeout_s": np.float32(30)}
    with jaxkv.SymmetricMemory.create(mesh, AXIS, **numbers) as memory:
        assert (np.asarray(sums(memory, "one_shot")(X)) == X.sum(0)).all()
    with jaxkv.SymmetricMemory.create(mesh, AXIS, timeout_s=1e9) as memory:
        assert (np.asarray(sums(memory, "one_shot")(X)) == X.sum(0)).all()
        memory.check_errors()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("max_bytes", [130, 5000, 64 << 20])
def test_buffers_are_aligned_to_cache_lines(world_size, max_bytes):
    """So does a part of a two_shot, in a half of an LL buffer."""
    with memory_of(world_size, max_bytes=max_bytes) as memory:
        assert memory.low_latency_bytes % 256 == 0
        assert memory.slot_bytes % 128 == 0 or memory.slot_bytes < 128
        assert memory._tile_bytes() % 128 == 0
        assert min(max_bytes, (8 << 20) // world_size) <= memory.slot_bytes


def test_groups_are_independent():
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    spec = jax.sharding.PartitionSpec("dp", "tp")
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    for axis, name in enumerate(mesh.axis_names):
        with jaxkv.SymmetricMemory.create(mesh, name, max_bytes=4096) as memory:
            step = jax.shard_map(
                lambda x, m=memory, n=name: jaxkv.all_reduce(m, x, n),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
            want = np.broadcast_to(x.sum(axis, keepdims=True), x.shape)
            assert np.array_equal(jax.jit(step)(x), want)


def test_calls_of_several_memories_have_data_dependences():
    """Devices waiting in calls of different memories would block each other's threads."""
    with memory_of(2) as first, memory_of(2) as second:
        memories = (first, second, first)

        def step(x):
            return [
                jaxkv.all_reduce(memory, x + i, AXIS, implementation="one_shot")
                for i, memory in enumerate(memories)
            ]

        text = on_ranks(first, step).lower(X).as_text()
    calls = [line for line in text.splitlines() if "@jaxkv_all_reduce" in line]
    results = [line.split("=")[0].strip().split(":")[0] for line in calls]
    assert len(calls) == 3
    for before, call in zip(results, calls[1:], strict=False):
        assert f"{before}#1" in call


@pytest.mark.cpu_only
def test_handle_of_a_smaller_memory_raises():
    """An access beyond its end would kill the process."""
    native = runtime_native.extension()
    local, remote = (
        native.create_communicator("cpu", [devices], words, 1, 1, 0, 10**9)
        for devices, words in (([0, -1], 4096), ([-1, 0], 1))
    )
    handles = [
        [native.communicator_handles(local)[0][0], native.communicator_handles(remote)[0][1]]
    ]
    with pytest.raises(RuntimeError, match=r"that of a peer has \d+ bytes, expected \d{6}: create"):
        native.map_communicator(local, handles)
    native.map_communicator(remote, handles)  # a larger one
    for communicator in (local, remote):
        native.close_communicator(communicator)
        native.free_communicator(communicator)


@pytest.mark.cpu_only
def test_invalid_handle_raises():
    """Process id and descriptor of another process name something else in another container."""
    native = runtime_native.extension()
    local, remote = (
        native.create_communicator("cpu", [devices], 1, 1, 1, 0, 10**9)
        for devices in ([0, -1], [-1, 0])
    )
    handles = [
        [native.communicator_handles(local)[0][0], native.communicator_handles(remote)[0][1]]
    ]
    native.map_communicator(local, handles)
    handle = handles[0][1]
    handle[-1] ^= 1  # in the inode number
    with pytest.raises(
        RuntimeError, match=r"symmetric memory: /proc/\d+/fd/\d+: Stale file handle"
    ):
        native.map_communicator(local, handles)
    handle.pop()
    with pytest.raises(RuntimeError, match=r"handle of \d+ bytes, expected"):
        native.map_communicator(local, handles)
    for communicator in (local, remote):
        native.close_communicator(communicator)
        native.free_communicator(communicator)


# ---------------------------------------------------------------------------------------------
# Multicast

WITHOUT_VARIABLE = "JAXKV_MULTICAST=1 was not set when its SymmetricMemory was created"


def test_multicast_requires_environment_variable(monkeypatch):
    monkeypatch.setenv("JAXKV_MULTICAST", "0")
    with memory_of(2) as memory:
        monkeypatch.setenv("JAXKV_MULTICAST", "1")  # later
        with pytest.raises(
            NotImplementedError,
            match=f"'multimem' does not support this call: {WITHOUT_VARIABLE}",
        ):
            sums(memory, "multimem")(X)


def devices(*processes):
    """Devices of one GPU each."""
    return np.array(
        [
            [
                SimpleNamespace(id=10 + i, platform="gpu", process_index=p, local_hardware_id=i)
                for i, p in enumerate(processes)
            ]
        ]
    )


def test_mixed_device_kinds_raise():
    """Numbers of thread blocks may differ, and block b synchronizes only with block b."""
    mixed: Any = SimpleNamespace(axis_names=(AXIS,), shape={AXIS: 2}, devices=devices(0, 0)[0])
    for device, mixed_kind in zip(mixed.devices, ("H200", "H100"), strict=True):
        device.device_kind = mixed_kind
    with pytest.raises(ValueError, match="all devices must be of one kind, got H100, H200"):
        symmetric_memory._groups(mixed, AXIS)


@pytest.mark.parametrize(
    "variable, processes, expected_queries, message",
    [
        ("0", [0, 0], [], WITHOUT_VARIABLE),
        ("1", [0, 1], [], "devices must belong to one process, got processes [0, 1]"),
        ("1", [0, 0, 0], [0, 1, 2], "the driver reports no multicast support for devices [11, 12]"),
        ("1", [0], [0], None),
    ],
)
def test_driver_is_queried_last(monkeypatch, variable, processes, expected_queries, message):
    monkeypatch.setenv("JAXKV_MULTICAST", variable)
    queried = []

    def supported(ordinal):
        queried.append(ordinal)
        return ordinal == 0

    driver = SimpleNamespace(multicast_supported=supported)
    monkeypatch.setattr(runtime_native, "extension", lambda: driver)
    got = symmetric_memory._multicast_unsupported_reason(devices(*processes))
    assert queried == expected_queries
    assert got == message


@pytest.mark.cpu_only
@pytest.mark.parametrize("sizes", [[1], [3], [9], [10], [2, 3]], ids=str)
def test_native_communicators_check_the_group_sizes(sizes):
    devices = [list(range(size)) for size in sizes]
    with pytest.raises(ValueError, match="groups must have 2, 4, 6 or 8 devices"):
        runtime_native.extension().create_communicator("cpu", devices, 8, 8, 0, 0, 10**9)


@pytest.mark.parametrize(
    ("algorithm", "limit"), [("low_latency", "low_latency_bytes"), ("one_shot", "slot_bytes")]
)
def test_handlers_check_the_receive_buffer(algorithm, limit):
    """A program that was traced with another memory's limits."""
    with memory_of(2, max_bytes=1 << 24) as memory:
        x = np.ones((2, getattr(memory, limit) // 4 + 4), np.float32)
        setattr(memory, limit, x.nbytes)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"exceeds the receive buffer of"):
            jax.block_until_ready(sums(memory, algorithm)(x))


# ---------------------------------------------------------------------------------------------
# Missing ranks


def run_without(memory, missing: int, algorithm: Implementation):
    """A step in which one rank does not call; returns the others' results, or the error's text."""

    def step(x):
        return jax.lax.cond(
            jax.lax.axis_index(AXIS) == missing,
            lambda x: x,
            lambda x: jaxkv.all_reduce(memory, x, AXIS, implementation=algorithm),
            x,
        )

    x = np.ones((memory.world_size, 4), np.float32)
    try:
        return np.asarray(on_ranks(memory, step)(x))
    except jax.errors.JaxRuntimeError as error:
        return str(error)


@pytest.mark.parametrize("algorithm", NATIVE)
def test_timeout_names_the_missing_rank(algorithm):
    with memory_of(2, timeout_s=3.0) as memory:  # the good call must end before it
        hooks.preset(memory, 41)
        good = sums(memory, algorithm)
        good(X)
        memory.check_errors()
        begin = time.monotonic()
        outcome = run_without(memory, 1, algorithm)
        assert time.monotonic() - begin > 3.0
        if ON_CPU:
            assert re.search("PeerTimeoutError: rank 0 .* for rank 1 ", outcome)
        else:  # the kernel can't raise
            assert np.isnan(outcome[0]).all()
        with pytest.raises(jaxkv.PeerTimeoutError) as raised:
            memory.check_errors()
        error = raised.value
        expected = {  # a barrier, or a number of words
            "low_latency": ("low_latency", 1, 0),
            "one_shot": ("barrier", 43, 42),
            "two_shot": ("scatter", 1, 0),
            "multimem": ("barrier", 44, 43),  # a call has two
        }
        assert (error.rank, error.peer) == (0, 1)
        assert (error.phase, error.expected, error.seen) == expected[algorithm]
        of_program = rf"{algorithm} of float32\[4\], all_reduce 1 of jit__lambda-\w{{6}}"
        assert re.search(
            rf"; rank 0 has called {of_program} \(call 2\), "
            rf"but rank 1 last called {of_program} \(call 1\)$",
            str(error),
        )
        # Later calls fail at once, compiled before or not.
        begin = time.monotonic()
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"PeerTimeoutError: rank 0 .* for rank 1"
        ):
            jax.block_until_ready(good(X))
        with pytest.raises(jaxkv.PeerTimeoutError):
            sums(memory, algorithm)(X)
        assert time.monotonic() - begin < 30


# ---------------------------------------------------------------------------------------------
# Mismatched calls


def run_differently(memory, *calls):
    """Rank 0 makes the first call and rank 1 the second: dicts of algorithm, size, dtype, times.

    Returns each rank's result summed over the elements, or the error's text.
    """

    def branch(x, call):
        for _ in range(call.get("times", 1)):
            x = jaxkv.all_reduce(memory, x, AXIS, implementation=call["algorithm"])
        return x.astype(np.float32).sum()

    def step(x, y):
        first, second = (lambda x=x, c=c: branch(x, c) for x, c in zip((x, y), calls, strict=True))
        return jax.lax.cond(jax.lax.axis_index(AXIS) == 0, first, second)

    operands = (
        np.ones((2, call.get("size", 4)), jax.numpy.dtype(call.get("dtype", "float32")))
        for call in calls
    )
    try:
        return np.asarray(on_ranks(memory, step)(*operands))
    except jax.errors.JaxRuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    "first, second",
    [
        ({}, {"size": 2}),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}),
        ({}, {"algorithm": "two_shot"}),
        *(({"algorithm": name}, {}) for name in NATIVE),  # differ only in their position
    ],
)
def test_mismatched_calls_are_reported(first, second):
    default = {"algorithm": "low_latency", "size": 4, "dtype": "float32"}
    calls = [default | first, default | first | second]
    with memory_of(2, timeout_s=20.0) as memory:
        sums(memory, "one_shot")(X)
        outcome = run_differently(memory, *calls)
        if not ON_CPU:  # the kernel can't raise
            assert np.isnan(outcome).all()
        with pytest.raises(jaxkv.PeerTimeoutError) as raised:
            memory.check_errors()
    error = raised.value
    assert error.phase == "mismatch"
    texts = [f"{c['algorithm']} of {c['dtype']}[{c['size']}], all_reduce" for c in calls]
    texts = [re.escape(text) for text in texts]
    called, peer_called = texts if error.rank == 0 else texts[::-1]
    expected = (
        rf"rank {error.rank} has called {called} [12] of jit__lambda-\w{{6}} \(call 2\), "
        rf"but rank {error.peer} has called {peer_called} [12] of jit__lambda-\w{{6}} \(call 2\)"
    )
    assert re.fullmatch(expected, str(error))
    if ON_CPU:
        assert "PeerTimeoutError: rank" in outcome


# ---------------------------------------------------------------------------------------------
# Closing


def test_executable_after_close_raises():
    with memory_of(2) as memory:
        step = sums(memory, "one_shot")
        step(X)
    with (
        memory_of(2),  # must not take its place
        pytest.raises(jax.errors.JaxRuntimeError, match="SymmetricMemory was closed"),
    ):
        jax.block_until_ready(step(X))
    with pytest.raises(RuntimeError, match="SymmetricMemory was closed"):
        memory.check_errors()
    with pytest.raises(RuntimeError, match="SymmetricMemory was closed"):
        sums(memory)(X)
    memory.close()


def test_unreferenced_memory_is_closed():
    memory = memory_of(2)
    close = memory._close
    del memory
    gc.collect()
    assert not close.alive
