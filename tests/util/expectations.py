"""Replacements for those of pytest, which the processes of several ranks do not load."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
    rendezvous = Rendezvous([0, 1], timeout_s=20.0)
    for waits in (lambda: rendezvous.step("creation", lambda: None), rendezvous.leave):
        interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        begin = time.monotonic()
        with raises(KeyboardInterrupt):
            waits()
        assert time.monotonic() - begin < 5


# ---------------------------------------------------------------------------------------------
# Timeouts and closing


def timeout_aborts_all_ranks(order: list[int]) -> None:
    """Rank 0 never calls, and rank 1, of the same process, calls late; the others stop rank 1."""
    mesh, timeout_s = mesh_of(order), 4.0
    with create(mesh, timeout_s=timeout_s) as memory:

        def without_rank_0(x: Any) -> Any:
            def call(x: Any) -> Any:
                return jaxkv.all_reduce(memory, x, AXIS, implementation="one_shot")

            return jax.lax.cond(jax.lax.axis_index(AXIS) == 0, lambda x: x, call, x)

        rows = spread(memory, operand(mesh.size, 10))
        jax.block_until_ready(sums(memory, "one_shot")(rows))  # the first call waits longer
        step = on_ranks(memory, without_rank_0).lower(rows).compile()
        hooks.barrier(memory)  # only after all have compiled it
        begin = time.monotonic()
        late = mesh.devices[0].process_index == ME
        if late:
            time.sleep(0.8 * timeout_s)
        with suppress(*FROM_HANDLER):
            jax.block_until_ready(step(rows))
        assert time.monotonic() - begin < 1.5 * timeout_s
        first = (
            r"^rank 1 aborted, because rank [23] timed out waiting" if late else r"^rank [23] .*"
        )
        expected = rf"{first} for rank 0\b"
        with raises(jaxkv.PeerTimeoutError, expected) as caught:
            memory.check_errors()
        error = caught[0]
        assert isinstance(error, jaxkv.PeerTimeoutError)
        assert (error.phase == "aborted") == late


def close_waits_for_other_processes(order: list[int]) -> None:
    mesh = mesh_of(order)
    x = operand(mesh.size, 10)
    memory = create(mesh, timeout_s=20.0)
    assert_sums(sums(memory, "one_shot")(spread(memory, x)), x)
    begin = time.monotonic()
    if ME == LAST:
        time.sleep(1.0)
    memory.close()
    assert time.monotonic() - begin > 0.9  # none before the last process
    memory.close()

    memory = create(mesh, timeout_s=2.0)
    if ME == LAST:
        return time.sleep(3.0)  # and never closes
    begin = time.monotonic()
    with warns(rf"timed out after 2 s waiting for processes \[{LAST}\] to close"):
        memory.close()
    assert 1.9 < time.monotonic() - begin < 10


def killed_process(order: list[int]) -> str:
    """The last one, during continuous all-reduces; returns the error of this process."""
    mesh, timeout_s = mesh_of(order), 2.0
    create(mesh).close()  # gives all processes the time to start
    memory = create(mesh, timeout_s=timeout_s)

    def each_algorithm(x: Any) -> list[Any]:
        return [jaxkv.all_reduce(memory, x, AXIS, implementation=algorithm) for algorithm in NATIVE]

    x = operand(mesh.size, 1000)
    rows = spread(memory, x)
    step = on_ranks(memory, each_algorithm).lower(rows).compile()
    hooks.barrier(memory)  # only after all have compiled it
    if ME == LAST:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    last_good = time.monotonic()
    going_on = True
    while going_on:
        try:
            sums_of_step = jax.block_until_ready(step(rows))
            memory.check_errors()
        except (jaxkv.PeerTimeoutError, *FROM_HANDLER):
            going_on = False
        else:
            last_good = time.monotonic()
            for y in sums_of_step:
                assert_sums(y, x)
    assert time.monotonic() - last_good < timeout_s + 4
    with raises(jaxkv.PeerTimeoutError) as caught:
        memory.check_errors()
    error = caught[0]
    assert isinstance(error, jaxkv.PeerTimeoutError)
    assert mesh.devices[error.rank].process_index == ME
    assert mesh.devices[error.peer].process_index == LAST
    begin = time.monotonic()
    with warns(rf"waiting for processes \[{LAST}\] to close"):
        memory.close()
    assert time.monotonic() - begin < timeout_s + 4
    with raises(FROM_HANDLER, "SymmetricMemory was closed"):
        jax.block_until_ready(step(rows))
    return str(error)


# ---------------------------------------------------------------------------------------------
# Replacements for pytest's, which the processes do not load


@contextmanager
def raises(kind: Any, pattern: str = "") -> Iterator[list[BaseException]]:
    caught: list[BaseException] = []
    try:
        yield caught
    except kind as error:
        assert re.search(pattern, str(error)), error
        caught.append(error)
    assert caught, f"no {kind}"


@contextmanager
def warns(pattern: str) -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    assert any(re.search(pattern, str(warning.message)) for warning in caught), caught
