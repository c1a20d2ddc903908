"""XLA's gather of rows in pinned host memory, in its own process: `measure`.

XLA:GPU does not compile a gather from an array in pinned host memory, and may abort the process.
Two ways around it, of which the faster one is the baseline:

  - HOST: the gather as host compute, and a transfer of its result, all in one program;
  - VIEW: a gather from a view of the pinned memory that XLA takes for device memory.
"""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compute_on import compute_on

from bench.harness import timing
from bench.harness.records import REPOSITORY
from bench.sparse.inputs import PAGE_SIZE, Cache

HOST, VIEW = "XLA gather, host compute", "XLA gather, view"


def measure(row_bytes: int, pool_bytes: int, count: int) -> dict[str, float]:
    """Seconds of a gather of `count` random rows; without those that failed."""
    command = [sys.executable, "-m", __name__, *map(str, (row_bytes, pool_bytes, count))]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    if ran.returncode or len(found) < 2:
        last = ran.stderr.strip().splitlines()[-1:] or ["no message"]
        print(f"XLA gather: {len(found)} of 2 ways measured: {last[0][:200]}", flush=True)
    return dict(found)


def of_view(data: jax.Array, rows: int, row_bytes: int) -> Callable[[jax.Array], Any]:
    pointer = data.unsafe_buffer_pointer()

    class Memory:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "shape": (rows, row_bytes // 4), "typestr": "<i4", "data": (pointer, False),
            "version": 3, "strides": None,
        }  # fmt: skip

    view = jnp.asarray(Memory())
    if view.unsafe_buffer_pointer() != pointer:
        raise RuntimeError("JAX has copied the memory")
    gather = jax.jit(lambda view, wanted: view[wanted])
    return lambda wanted: gather(view, wanted)


def on_host(data: jax.Array, row_bytes: int) -> Callable[[jax.Array], Any]:
    def take(data: jax.Array, wanted: jax.Array) -> jax.Array:
        return data.reshape(-1, row_bytes)[wanted]

    def take_on_host(data: jax.Array, wanted: jax.Array) -> jax.Array:
        on_host: Any = compute_on
        host = jax.memory.Space.Host
        wanted = jax.device_put(wanted, host)
        if "out_memory_spaces" in inspect.signature(compute_on).parameters:  # from jax 0.11 on
            return on_host(take, compute_type="device_host", out_memory_spaces=host)(data, wanted)
        with on_host("device_host"):
            return take(data, wanted)

    @jax.jit
    def gather(data: jax.Array, wanted: jax.Array) -> jax.Array:
        return jax.device_put(take_on_host(data, wanted), jax.memory.Space.Device)

    return lambda wanted: gather(data, wanted)


def seconds_of(gather: Callable[[jax.Array], Any], wanted: jax.Array) -> float:
    return timing.seconds_per_call(lambda _: gather(wanted), None, calls=4, repeats=3)[0]


def main() -> None:
    row_bytes, pool_bytes, count = map(int, sys.argv[1:])
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cache = Cache(row_bytes, pool_bytes)
    data, rows = cache.pool.data, cache.num_pages * PAGE_SIZE
    numbers = np.random.default_rng(0).integers(0, rows, count, np.int32)
    wanted = jnp.asarray(numbers)
    for name, prepare in (
        (VIEW, lambda: of_view(data, rows, row_bytes)),
        (HOST, lambda: on_host(data, row_bytes)),
    ):
        try:
            gather = prepare()
            found = np.asarray(gather(wanted)).reshape(count, -1).view(np.int32)[:, 0]
            assert np.array_equal(found, numbers), "gathered rows are wrong"
        except Exception as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(json.dumps([name, seconds_of(gather, wanted)]), flush=True)


if __name__ == "__main__":
    main()
