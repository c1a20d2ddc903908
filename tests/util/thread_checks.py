"""Checks of threads and programs, made by each process of test_multiprocess.py.

See process_checks.py.
"""

import collections
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from tests.util import hooks
from tests.util.process_checks import FROM_HANDLER, ME, create, here, mesh_of, operand, spread
from tests.util.ranks import AXIS, on_ranks

CALLS = 2000
OF_A_MEMORY = 100  # which is unusable after an error
# Of each thread: number of elements, algorithm, and the factor of the result.
PROGRAMS = {
    "shapes": [(64, "low_latency", 1), (256, "low_latency", 1)],
    "programs": [(64, "low_latency", 1), (64, "low_latency", 2)],
    "algorithms": [(64, "one_shot", 1), (64, "two_shot", 1)],
}
OTHER_CALL = r"PeerTimeoutError: rank \d has called .* but rank \d .*, all_reduce 1 of jit_"


def unordered_threads(order: list[int]) -> dict[str, dict[str, int]]:
    """Number of correct, wrong and rejected results, by the difference between the programs."""
    counts: dict[str, dict[str, int]] = {}
    for name, programs in PROGRAMS.items():
        count = collections.Counter[str]()
        for _ in range(CALLS // OF_A_MEMORY):
            with create(mesh_of(order)) as memory:
                count += _run_threads([memory, memory], programs, OF_A_MEMORY)
        counts[name] = count
    return counts


def ordered_threads(order: list[int]) -> dict[str, dict[str, int]]:
    """In an order that both processes know; the last program is the same for both threads."""
    counts: dict[str, dict[str, int]] = {}
    for name, programs in (PROGRAMS | {"operands": PROGRAMS["shapes"][:1] * 2}).items():
        with create(mesh_of(order)) as memory:
            counts[name] = _run_threads([memory, memory], programs, CALLS, in_turns=True)
    return counts


def threads_with_own_memory(order: list[int]) -> dict[str, dict[str, int]]:
    mesh, programs = mesh_of(order), PROGRAMS["shapes"][:1] * 2
    with create(mesh) as first, create(mesh) as second:
        return {"operands": _run_threads([first, second], programs, CALLS)}


def _run_threads(
    memories: list[Any], programs: list[tuple[int, str, int]], calls: int, in_turns: bool = False
) -> collections.Counter[str]:
    counts = collections.Counter[str]()
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def run(thread: int, step: Callable[[Any], Any], rows: Any, want: np.ndarray) -> None:
        for _ in range(calls // len(memories)):
            if in_turns:
                turns[thread].acquire()
            try:
                got = here(jax.block_until_ready(step(rows)))
                if np.isnan(got).all():  # a GPU finds the error after the call has begun
                    memories[thread].check_errors()
            except (*FROM_HANDLER, jaxkv.PeerTimeoutError) as error:
                end = f"{type(error).__name__}: {error}"
                counts["rejected" if re.search(OTHER_CALL, end) else end] += 1
            else:
                counts["correct" if np.array_equal(got, [want]) else "wrong"] += 1
            turns[1 - thread].release()

    threads: list[threading.Thread] = []
    for number, memory in enumerate(memories):
        n, algorithm, factor = programs[number]
        x = operand(memory.world_size, n, seed=number)
        rows = spread(memory, x)
        step = _program(memory, algorithm, factor).lower(rows).compile()
        arguments = number, step, rows, x.sum(0) * factor
        threads.append(threading.Thread(target=run, args=arguments))
    hooks.barrier(memories[0])  # only after all have compiled them
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def _program(memory: Any, algorithm: Any, factor: int) -> Any:
    return on_ranks(
        memory, lambda x: jaxkv.all_reduce(memory, x, AXIS, implementation=algorithm) * factor
    )


def signatures(order: list[int]) -> list[list[int]]:
    """Signatures of the calls of programs that all differ."""
    mesh = mesh_of(order)
    local_devices = [device for device in mesh.devices if device.process_index == ME]
    with ExitStack() as stack:
        if ME == 0:  # its memories have different numbers from here on
            stack.enter_context(create(jax.sharding.Mesh(np.array(local_devices), (AXIS,))))
        memory = stack.enter_context(create(mesh))
        reduce = [
            lambda x, name=name: jaxkv.all_reduce(memory, x, AXIS, implementation=name)
            for name in ("low_latency", "one_shot")
        ]

        def calls_back(x: Any) -> Any:
            return jax.pure_callback(lambda x: x, x, reduce[0](x))

        def in_a_loop(x: Any) -> Any:
            return jax.lax.fori_loop(0, 3, lambda _, x: reduce[0](x), x)

        def of_a_table(x: Any) -> Any:
            """A large constant may differ between processes."""
            return reduce[0](x) + jnp.asarray(np.arange(1000, dtype=np.float32) + ME)[: len(x)]

        bodies = [
            reduce[0],
            reduce[1],
            lambda x: reduce[0](x) * 2,  # differs only after the call
            lambda x: reduce[0](x) * 3,
            lambda x: reduce[0](x * 2),
            lambda x: x - reduce[0](x),
            lambda x: reduce[0](x) - x,
            lambda x: reduce[0](reduce[0](x)),
            lambda x: reduce[1](reduce[0](x)),
            jax.jit(lambda x: reduce[0](x) + 1),
            calls_back,
            in_a_loop,
            of_a_table,
        ]
        rows = spread(memory, operand(mesh.size, 8))
        texts = [on_ranks(memory, body).lower(rows).as_text() for body in bodies]
        texts.append(on_ranks(memory, reduce[0]).lower(spread(memory, operand(4, 9))).as_text())
        return [[int(n) for n in re.findall(r"signature = (\d+)", text)] for text in texts]
