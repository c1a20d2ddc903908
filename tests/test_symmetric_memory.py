"""`SymmetricMemory`: what it is made of, ranks that do not come, and its end."""

import gc
import time

import jax
import numpy as np
import pytest
from ranks import AXIS, ON_CPU, memory_of, mesh_of, on_ranks, sums

import jaxkv
from jaxkv import _native

pytestmark = pytest.mark.multigpu

NATIVE = ("low_latency", "one_shot", "two_shot")
X = np.arange(8, dtype=np.float32).reshape(2, 4)


# ---------------------------------------------------------------------------------------------
# Creation


def test_only_some_numbers_of_ranks():
    device = np.array(jax.devices()[:1])
    for world in (1, 3, 5, 7, 16):
        mesh = jax.sharding.Mesh(np.repeat(device, world), (AXIS,)) if world > 1 else None
        mesh = mesh or jax.sharding.Mesh(device, (AXIS,))
        with pytest.raises(ValueError, match=f"'tp' must have 2, 4, 6, 8 devices, got {world}"):
            jaxkv.SymmetricMemory.create(mesh, AXIS)


def test_arguments():
    mesh = mesh_of(2)
    with pytest.raises(
        ValueError, match=r"axis_name must be one of the mesh's \('tp',\), got 'dp'"
    ):
        jaxkv.SymmetricMemory.create(mesh, "dp")
    with pytest.raises(ValueError, match="max_bytes must be at least 1 byte, got 0"):
        jaxkv.SymmetricMemory.create(mesh, AXIS, max_bytes=0)
    with pytest.raises(ValueError, match="timeout_s must be more than 0 seconds, got 0"):
        jaxkv.SymmetricMemory.create(mesh, AXIS, timeout_s=0)


def test_groups_add_up_by_themselves():
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp", "tp"))
    spec = jax.sharding.PartitionSpec("dp", "tp")
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    for axis, name in enumerate(mesh.axis_names):
        with jaxkv.SymmetricMemory.create(mesh, name, max_bytes=4096) as memory:
            step = jax.shard_map(
                lambda x, m=memory, n=name: m.all_reduce(x, n),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
            want = np.broadcast_to(x.sum(axis, keepdims=True), x.shape)
            assert np.array_equal(jax.jit(step)(x), want)


def test_calls_of_several_memories_are_ordered_by_data():
    """Devices that waited in calls of different memories would keep each other's threads."""
    with memory_of(2) as first, memory_of(2) as second:
        memories = (first, second, first)

        def step(x):
            return [
                memory.all_reduce(x + i, AXIS, implementation="one_shot")
                for i, memory in enumerate(memories)
            ]

        text = on_ranks(first, step).lower(X).as_text()
    calls = [line for line in text.splitlines() if "@jaxkv_all_reduce" in line]
    results = [line.split("=")[0].strip().split(":")[0] for line in calls]
    assert len(calls) == 3
    for before, call in zip(results, calls[1:], strict=False):
        assert f"{before}#1" in call


@pytest.mark.cpu_only
def test_a_handle_that_is_of_something_else():
    """Another process's number and descriptor mean something else in another container."""
    native = _native.extension()
    ours, theirs = (
        native.create_communicator("cpu", [devices], 1, 1, 10**9) for devices in ([0, -1], [-1, 0])
    )
    handles = [[native.communicator_handles(ours)[0][0], native.communicator_handles(theirs)[0][1]]]
    native.map_communicator(ours, handles)
    handle = handles[0][1]
    handle[-1] ^= 1  # in the number of its file
    with pytest.raises(
        RuntimeError, match=r"symmetric memory: /proc/\d+/fd/\d+: Stale file handle"
    ):
        native.map_communicator(ours, handles)
    handle.pop()
    with pytest.raises(RuntimeError, match="not a handle of memory"):
        native.map_communicator(ours, handles)
    for communicator in (ours, theirs):
        native.close_communicator(communicator)
        native.free_communicator(communicator)


# ---------------------------------------------------------------------------------------------
# Ranks that do not come


def run_without(memory, missing: int, algorithm: str):
    """A step in which one rank does not call; returns what the others got, or the error's text."""

    def step(x):
        return jax.lax.cond(
            jax.lax.axis_index(AXIS) == missing,
            lambda x: x,
            lambda x: memory.all_reduce(x, AXIS, implementation=algorithm),
            x,
        )

    x = np.ones((memory.world_size, 4), np.float32)
    try:
        return np.asarray(on_ranks(memory, step)(x))
    except jax.errors.JaxRuntimeError as error:
        return str(error)


@pytest.mark.parametrize("algorithm", NATIVE)
def test_a_rank_that_does_not_come_is_named(algorithm):
    with memory_of(2, timeout_s=0.3) as memory:
        memory.preset(41)
        good = sums(memory, algorithm)
        good(X)
        memory.check()
        begin = time.monotonic()
        outcome = run_without(memory, 1, algorithm)
        assert time.monotonic() - begin > 0.3
        if ON_CPU:
            assert "PeerTimeoutError: rank 0 waited in vain for rank 1" in outcome
        else:  # the kernel can't raise
            assert np.isnan(outcome[0]).all()
        with pytest.raises(jaxkv.PeerTimeoutError) as raised:
            memory.check()
        error = raised.value
        phase = "low_latency" if algorithm == "low_latency" else "scatter"
        assert (error.rank, error.peer, error.phase) == (0, 1, phase)
        numbers = {"low_latency": (1, 0), "one_shot": (43, 42), "two_shot": (44, 43)}
        assert (error.expected, error.seen) == numbers[algorithm]
        # Later calls fail at once, compiled before or not.
        begin = time.monotonic()
        with pytest.raises(jax.errors.JaxRuntimeError, match="PeerTimeoutError: rank 0 waited"):
            jax.block_until_ready(good(X))
        with pytest.raises(jaxkv.PeerTimeoutError):
            sums(memory, algorithm)(X)
        assert time.monotonic() - begin < 30


def test_all_ranks_give_up_together():
    """Who times out tells the others, so that none waits for the whole time again."""
    with memory_of(4, timeout_s=1.0) as memory:
        begin = time.monotonic()
        run_without(memory, 3, "one_shot")
        with pytest.raises(
            jaxkv.PeerTimeoutError, match="waited in vain for rank 3 in phase scatter"
        ):
            memory.check()
        assert time.monotonic() - begin < 20


# ---------------------------------------------------------------------------------------------
# The end


def test_an_executable_that_outlives_the_memory_fails():
    with memory_of(2) as memory:
        step = sums(memory)
        step(X)
    with pytest.raises(jax.errors.JaxRuntimeError, match="SymmetricMemory was closed"):
        jax.block_until_ready(step(X))
    with pytest.raises(RuntimeError, match="SymmetricMemory was closed"):
        memory.check()
    with pytest.raises(RuntimeError, match="SymmetricMemory was closed"):
        sums(memory)(X)
    memory.close()


def test_memory_that_nobody_holds_is_freed():
    memory = memory_of(2)
    close = memory._close
    del memory
    gc.collect()
    assert not close.alive
