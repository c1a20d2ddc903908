"""Checks made by each process of test_multiprocess.py; run by rank_process.py."""

import dataclasses
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from jaxkv._src.collectives.all_reduce import Implementation
from jaxkv._src.collectives.rendezvous import Rendezvous
from jaxkv._src.runtime import native as runtime_native
from jaxkv._src.tuning.all_reduce_table import VARIABLE, WORLD_SIZES, packaged_table
from tests.collectives.soak import soak
from tests.util import hooks
from tests.util.expectations import raises, warns
from tests.util.ranks import AXIS, late, on_ranks, sums

NATIVE: tuple[Implementation, ...] = ("low_latency", "one_shot", "two_shot")
RULES = ((0, "low_latency"), (999, "one_shot"))
ME = jax.process_index()
LAST = jax.process_count() - 1
FROM_HANDLER = (ValueError, jax.errors.JaxRuntimeError)  # while dispatching, or from a result


def mesh_of(order: list[int]) -> jax.sharding.Mesh:
    devices = sorted(jax.devices(), key=lambda device: device.id)
    return jax.sharding.Mesh(np.array([devices[i] for i in order]), (AXIS,))


def create(
    mesh: jax.sharding.Mesh,
    *,
    axis_name: str = AXIS,
    max_bytes: int = 1 << 14,
    timeout_s: float = 30.0,
) -> Any:
    return jaxkv.SymmetricMemory.create(mesh, axis_name, max_bytes=max_bytes, timeout_s=timeout_s)


def spread(memory: Any, x: np.ndarray, spec: P | None = None) -> jax.Array:
    """`x[world_size, ...]`, a row on each rank."""
    sharding = NamedSharding(memory.mesh, P(AXIS) if spec is None else spec)
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)


def here(y: jax.Array) -> list[np.ndarray]:
    """The rows of this process's ranks."""
    return [np.asarray(shard.data)[0] for shard in y.addressable_shards]


def assert_sums(y: jax.Array, x: np.ndarray) -> None:
    rows = here(y)
    assert len(rows) == jax.local_device_count()
    for row in rows:
        assert np.array_equal(row.astype(np.float64), x.astype(np.float64).sum(0))


def operand(world_size: int, n: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    return (
        np.random.default_rng([n, seed]).integers(-15, 16, (world_size, n)).astype(jnp.dtype(dtype))
    )


def maps_symmetric_memory() -> bool:
    """Whether this process still maps any symmetric memory; supports platform cpu only."""
    with open("/proc/self/maps") as maps:
        return "memfd:jaxkv" in maps.read()


# ---------------------------------------------------------------------------------------------
# All-reduces


def sums_are_exact(order: list[int]) -> None:
    mesh = mesh_of(order)
    world_size = mesh.size
    with create(mesh) as memory:
        for algorithm in NATIVE:
            step = sums(memory, algorithm)
            for round_, n in enumerate([1, 4096, 7, 1000, 4096, 5, 64]):
                dtype = "bfloat16" if n in (7, 64) else "float32"
                x = operand(world_size, n, dtype, round_)
                assert_sums(step(spread(memory, x)), x)
        _accumulation_is_in_rank_order(memory)
        _delayed_rank_does_not_change_results(memory)
        _epoch_overflow_wraps(memory)
        memory.check_errors()
    _several_memories_and_a_successor(mesh)
    if jax.process_count() == 4:
        _subset_of_processes(order)
    if jax.default_backend() == "cpu":
        assert not maps_symmetric_memory()


def _accumulation_is_in_rank_order(memory: Any) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(memory.world_size, 777)) * 10.0 ** rng.integers(-4, 5, (1, 777))
    x = x.astype(np.float32)
    want = x[0]
    for row in x[1:]:
        want = want + row
    backwards = x[-1]
    for row in x[-2::-1]:
        backwards = backwards + row
    assert memory.world_size == 2 or not np.array_equal(want, backwards)
    for algorithm in NATIVE:
        for row in here(sums(memory, algorithm)(spread(memory, x))):
            assert row.tobytes() == want.tobytes()
    rank_of = on_ranks(memory, lambda x: x + jax.lax.axis_index(AXIS))
    ranks = sorted(int(row) for row in here(rank_of(spread(memory, np.zeros(len(x), np.int32)))))
    local_ranks = [i for i, device in enumerate(memory.mesh.devices) if device.process_index == ME]
    assert ranks == local_ranks


def _delayed_rank_does_not_change_results(memory: Any) -> None:
    world_size = memory.world_size

    def one_shot(x: Any, late_rank: Any) -> Any:
        return jaxkv.all_reduce(memory, late(x, late_rank), AXIS, implementation="one_shot")

    step = on_ranks(memory, one_shot)
    for round_ in range(2 * world_size):
        x = operand(world_size, 500, seed=round_)
        late_rank = np.full(world_size, round_ % world_size, np.int32)
        assert_sums(step(spread(memory, x), spread(memory, late_rank)), x)


def _epoch_overflow_wraps(memory: Any) -> None:
    if not hooks.available():
        return
    for epoch in (2**32, 2**64):
        hooks.preset(memory, epoch - 3)
        for round_ in range(3):
            for algorithm in NATIVE:
                x = operand(memory.world_size, 300, seed=round_)
                assert_sums(sums(memory, algorithm)(spread(memory, x)), x)


def _several_memories_and_a_successor(mesh: jax.sharding.Mesh) -> None:
    with create(mesh) as first:
        with create(mesh, max_bytes=512) as second:

            def both(x: Any) -> Any:
                a = jaxkv.all_reduce(first, x, AXIS, implementation="two_shot")
                b = jaxkv.all_reduce(second, x[:100] * 2, AXIS, implementation="one_shot")
                return a, b, jaxkv.all_reduce(first, x * 3, AXIS, implementation="low_latency")

            for round_ in range(5):
                x = operand(mesh.size, 1000, seed=round_)
                a, b, c = on_ranks(first, both)(spread(first, x))
                assert_sums(a, x)
                assert_sums(b, x[:, :100] * 2)
                assert_sums(c, x * 3)
            step = sums(second, "one_shot")
            x = operand(mesh.size, 10)
            assert_sums(step(spread(second, x)), x)
        with raises(FROM_HANDLER, "SymmetricMemory was closed"):
            jax.block_until_ready(step(spread(second, x)))
        with create(mesh, max_bytes=512) as third:
            assert_sums(sums(third, "one_shot")(spread(third, x)), x)
        assert_sums(sums(first, "one_shot")(spread(first, x)), x)


def _subset_of_processes(order: list[int]) -> None:
    half = order[:2] if ME in order[:2] else order[2:]  # one device each
    with create(mesh_of(half)) as memory:
        x = operand(2, 10, seed=half[0])
        assert_sums(sums(memory, "one_shot")(spread(memory, x)), x)


def groups_are_independent(order: list[int]) -> None:
    """Including groups within one process, and groups across both."""
    mesh = jax.sharding.Mesh(mesh_of(order).devices.reshape(2, 2), ("dp", "tp"))
    x = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    spec = P("dp", "tp")
    for axis, name in enumerate(mesh.axis_names):
        with jaxkv.SymmetricMemory.create(mesh, name, max_bytes=4096) as memory:

            def step(x: Any, memory: Any = memory, name: str = name) -> Any:
                return jaxkv.all_reduce(memory, x, name, implementation="one_shot")

            step = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
            got = jax.jit(step)(spread(memory, x, spec))
            want = np.broadcast_to(x.sum(axis, keepdims=True), x.shape)
            for shard in got.addressable_shards:
                assert np.array_equal(np.asarray(shard.data), want[shard.index])
    of_others = [i for i, d in enumerate(mesh_of([0, 1, 2, 3]).devices) if d.process_index != ME]
    with raises(ValueError, f"has no device of this process, process index {ME}"):
        create(mesh_of(of_others))


def short_soak(order: list[int]) -> int:
    return soak(mesh_of(order), 2.0, max_bytes=1 << 16)


# ---------------------------------------------------------------------------------------------
# Failed creation


def creation_failure_raises_in_all_processes(order: list[int]) -> list[str]:
    """The errors of this process, which must be equal in all processes."""
    mesh, errors = mesh_of(order), []
    for name in ("create_communicator", "communicator_handles", "map_communicator"):
        with fails_in_last_process(name), raises(RuntimeError) as caught:
            create(mesh, timeout_s=20.0)
        errors.append(str(caught[0]))
        if jax.default_backend() == "cpu":
            assert not maps_symmetric_memory()
    with raises(ValueError) as caught:
        create(mesh, max_bytes=1024 * (1 + ME))
    errors.append(str(caught[0]))
    with different_table_in_last_process(), raises(ValueError) as caught:
        create(mesh)
    errors.append(str(caught[0]))
    # An error of a single process must not desynchronize the others.
    invalid: list[dict[str, Any]] = [{"max_bytes": 0}, {"timeout_s": -1.0}, {"axis_name": "dp"}]
    for arguments in invalid:
        with raises(RuntimeError) as caught:
            create(mesh, **(arguments if ME == LAST else {}))
        errors.append(str(caught[0]))
    # A process that arrives after the timeout raises the others' error.
    if ME == LAST:
        hooks.wait_for_others()
    with raises(RuntimeError) as caught:
        create(mesh, timeout_s=10.0)
    errors.append(str(caught[0]))
    if ME != LAST:
        hooks.tell_last()
    with create(mesh) as memory:  # failed attempts left no state behind
        x = operand(mesh.size, 10)
        assert_sums(sums(memory, "one_shot")(spread(memory, x)), x)
    return errors


@contextmanager
def different_table_in_last_process() -> Iterator[None]:
    table = packaged_table("any")
    table = dataclasses.replace(table, rules=table.rules | dict.fromkeys(WORLD_SIZES, RULES))
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(table.to_text())
        file.flush()
        if ME == LAST:
            os.environ[VARIABLE] = file.name
        yield
        os.environ.pop(VARIABLE, None)


@contextmanager
def fails_in_last_process(name: str) -> Iterator[None]:
    native = runtime_native.extension()
    real = getattr(native, name)

    def fail(*_: Any) -> None:
        raise RuntimeError(f"{name} was made to fail")

    if ME == LAST:
        setattr(native, name, fail)
    yield
    setattr(native, name, real)


def block_limits_are_equal(order: list[int]) -> None:
    """The least of all processes: block b of a rank waits for block b of its peers."""
    native: Any = runtime_native.extension()
    real = native.block_limits
    mine = [3, 9, 2, 8, 1 + ME] if ME == 0 else [4, 7, 5, 6, 1 + ME]
    native.block_limits = lambda id: mine
    with create(mesh_of(order)) as memory:
        assert real(memory._id) == [3, 7, 2, 6, 1]
    native.block_limits = real


def creation_can_be_interrupted(order: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    rendezvous = Rendezvous([0, 1], timeout_s=20.0)
    for waits in (lambda: rendezvous.step("creation", lambda: None), rendezvous.leave):
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        begin = time.monotonic()
        with raises(KeyboardInterrupt):
            waits()
        assert time.monotonic() - begin < 15


# ---------------------------------------------------------------------------------------------
# Timeouts and closing


def timeout_aborts_all_ranks(order: list[int]) -> None:
    """Rank 0 never calls, and rank 1, of the same process, calls late; the others stop rank 1."""
    mesh, timeout_s = mesh_of(order), 12.0
    with create(mesh, timeout_s=timeout_s) as memory:

        def without_rank_0(x: Any) -> Any:
            def call(x: Any) -> Any:
                return jaxkv.all_reduce(memory, x, AXIS, implementation="one_shot")

            return jax.lax.cond(jax.lax.axis_index(AXIS) == 0, lambda x: x, call, x)

        rows = spread(memory, operand(mesh.size, 10))
        jax.block_until_ready(sums(memory, "one_shot")(rows))  # the first call waits longer
        step = on_ranks(memory, without_rank_0).lower(rows).compile()
        hooks.barrier(memory)  # only after all have compiled it
        late = mesh.devices[0].process_index == ME
        if late:
            time.sleep(0.5 * timeout_s)
        with suppress(*FROM_HANDLER):
            jax.block_until_ready(step(rows))
        first = (
            r"^rank 1 aborted, because rank [23] timed out waiting" if late else r"^rank [23] .*"
        )
        expected = rf"{first} for rank 0\b"
        with raises(jaxkv.PeerTimeoutError, expected) as caught:
            memory.check_errors()
        error = caught[0]
        assert isinstance(error, jaxkv.PeerTimeoutError)
        assert (error.phase == "aborted") == late


def close_waits_for_other_processes(order: list[int]) -> list[float]:
    """When the first close began and ended, on a clock that all processes share."""
    mesh = mesh_of(order)
    x = operand(mesh.size, 10)
    memory = create(mesh, timeout_s=20.0)
    assert_sums(sums(memory, "one_shot")(spread(memory, x)), x)
    if ME == LAST:
        time.sleep(1.0)
    begin = time.monotonic()
    memory.close()
    times = [begin, time.monotonic()]
    memory.close()

    memory = create(mesh, timeout_s=10.0)
    if ME == LAST:
        hooks.wait_for_others()  # and never closes
        return times
    begin = time.monotonic()
    with warns(rf"timed out after 10 s waiting for processes \[{LAST}\] to close"):
        memory.close()
    assert time.monotonic() - begin > 9.9
    hooks.tell_last()
    return times


def killed_process(order: list[int]) -> str:
    """The last one, during continuous all-reduces; returns the error of this process."""
    mesh, timeout_s = mesh_of(order), 8.0
    create(mesh).close()  # gives all processes the time to start
    memory = create(mesh, timeout_s=timeout_s)

    def each_algorithm(x: Any) -> list[Any]:
        return [jaxkv.all_reduce(memory, x, AXIS, implementation=algorithm) for algorithm in NATIVE]

    x = operand(mesh.size, 1000)
    rows = spread(memory, x)
    step = on_ranks(memory, each_algorithm).lower(rows).compile()
    hooks.barrier(memory)  # only after all have compiled it
    last_good, dying = time.monotonic(), False
    while True:
        try:
            sums_of_step = jax.block_until_ready(step(rows))
            memory.check_errors()
        except (jaxkv.PeerTimeoutError, *FROM_HANDLER):
            break
        else:
            last_good = time.monotonic()
            for y in sums_of_step:
                assert_sums(y, x)
            if ME == LAST and not dying:
                dying = True
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    with raises(jaxkv.PeerTimeoutError) as caught:
        memory.check_errors()
    error = caught[0]
    assert isinstance(error, jaxkv.PeerTimeoutError)
    assert mesh.devices[error.rank].process_index == ME
    assert mesh.devices[error.peer].process_index == LAST
    assert time.monotonic() - last_good < 5 * timeout_s
    begin = time.monotonic()
    with warns(rf"waiting for processes \[{LAST}\] to close"):
        memory.close()
    assert time.monotonic() - begin < 5 * timeout_s
    with raises(FROM_HANDLER, "SymmetricMemory was closed"):
        jax.block_until_ready(step(rows))
    return str(error)
