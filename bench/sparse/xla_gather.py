"""XLA's gather of rows in pinned host memory, in its own process: `measure`.

XLA:GPU does not compile a gather from an array in pinned host memory, and may abort the process.
Two ways around it, of which the faster one is the baseline:

  - HOST: the gather as host compute, and a transfer of its result, all in one program;
  - VIEW: a gather from a view of the pinned memory that XLA takes for device memory.
"""

import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on

from bench.harness import processes, timing
from bench.harness.timing import Figure
from bench.sparse.inputs import Cache

HOST, VIEW = "XLA gather, host compute", "XLA gather, view"
TIMEOUT_S = 300.0


def measure(row_bytes: int, pool_bytes: int, count: int) -> dict[str, Figure]:
    """Seconds of a gather of `count` random rows; without those that failed."""
    request = {"row_bytes": row_bytes, "pool_bytes": pool_bytes, "count": count}
    ran = processes.run(__name__, [request], timeout_s=TIMEOUT_S)
    (answers,) = ran.answers
    for why in (ran.failure, *(answer.get("failed") for answer in answers)):
        if why:
            print(f"XLA gather: not measured: {why}", flush=True)
    timed = [answer for answer in answers if "seconds" in answer]
    return {answer["method"]: Figure(answer["seconds"], answer["error"]) for answer in timed}


def of_view(rows: jax.Array) -> Callable[[jax.Array], Any]:
    pointer, (number, row_bytes) = rows.unsafe_buffer_pointer(), rows.shape

    class Memory:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "shape": (number, row_bytes // 4), "typestr": "<i4", "data": (pointer, False),
            "version": 3, "strides": None,
        }  # fmt: skip

    view = jnp.asarray(Memory())
    if view.unsafe_buffer_pointer() != pointer:
        raise RuntimeError("JAX has copied the memory")
    gather = jax.jit(lambda view, wanted: view[wanted])
    return lambda wanted: gather(view, wanted)


def on_host(rows: jax.Array) -> Callable[[jax.Array], Any]:
    def take(rows: jax.Array, wanted: jax.Array) -> jax.Array:
        return rows[wanted]

    def take_on_host(rows: jax.Array, wanted: jax.Array) -> jax.Array:
        on_host: Any = compute_on
        host = jax.memory.Space.Host
        wanted = jax.device_put(wanted, host)
        if "out_memory_spaces" in inspect.signature(compute_on).parameters:  # from jax 0.11 on
            return on_host(take, compute_type="device_host", out_memory_spaces=host)(rows, wanted)
        with on_host("device_host"):
            return take(rows, wanted)

    @jax.jit
    def gather(rows: jax.Array, wanted: jax.Array) -> jax.Array:
        return jax.device_put(take_on_host(rows, wanted), jax.memory.Space.Device)

    return lambda wanted: gather(rows, wanted)


def seconds_of(gather: Callable[[jax.Array], Any], wanted: jax.Array) -> Figure:
    def step(state: object) -> jax.Array:
        return gather(wanted)

    once, state = timing.seconds_per_call(step, None, calls=4, repeats=1)
    calls = timing.chain_length(once)
    return timing.seconds_per_call(step, state, calls=calls, repeats=5, warmup=1)[0]


def main(request: dict[str, int]) -> None:
    rows, count = Cache(request["row_bytes"], request["pool_bytes"]).rows, request["count"]
    numbers = np.random.default_rng(0).integers(0, len(rows), count, np.int32)
    wanted = jnp.asarray(numbers)
    for name, prepare in ((VIEW, of_view), (HOST, on_host)):
        answer: dict[str, Any] = {"method": name}
        try:
            gather = prepare(rows)
            found = np.asarray(gather(wanted)).reshape(count, -1).view(np.int32)[:, 0]
            assert np.array_equal(found, numbers), "gathered rows are wrong"
            seconds = seconds_of(gather, wanted)
            answer |= {"seconds": seconds, "error": seconds.error}
        except Exception as error:
            answer["failed"] = f"{name}: {error}"[:500]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main(json.loads(sys.argv[1]))
