"""How long dma holds the host, and whether a busy stream does: `python -m bench.dispatch`.

A program multiplies matrices for some milliseconds and then loads scattered blocks of 8 KiB by
dma, each a descriptor that the host submits. The call should return long before the products are
done. (A single batch of thousands of descriptors was seen to hold the host until then.)
"""

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import jaxkv
from bench import timing
from bench.results import Results, arguments

BLOCK_BYTES = 8192
WIDTH = 8192
WANTED_SHARE = 0.5
REPEATS = 20


def program(products: int) -> Any:
    """A step on (matrix, destination blocks): so many products, then the load."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, source: Any, source_ids: Any, destination_ids: Any) -> Any:
        x, blocks = state
        for _ in range(products):
            x = x @ x
        # The load waits for the products, as if they made the blocks that it overwrites.
        blocks, x = jax.lax.optimization_barrier((blocks, x))
        ids = source_ids, destination_ids
        return x, jaxkv.swap_blocks(source, blocks, *ids, implementation=_implementation())

    return step


def _implementation() -> str:
    return "dma" if jax.default_backend() == "gpu" else "host"


def measure(results: Results, count: int, products: int) -> None:
    device = jax.local_devices()[0]
    words = BLOCK_BYTES // 4
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    source = jax.device_put(np.ones((count, words), np.int32), host)
    width = WIDTH if device.platform == "gpu" else 64
    state = jnp.full((width, width), 1 / width, jnp.bfloat16), jnp.zeros((count, words), jnp.int32)
    rng = np.random.default_rng(0)
    ids = [jaxkv.HostIds(rng.permutation(count)) for _ in range(2)]
    step = program(products)

    def run(state: Any) -> Any:
        return step(state, source, *ids)

    call, state = timing.single_call(run, run(run(state)), repeats=REPEATS)
    jaxkv.check_errors()
    if not bool((state[1] == 1).all()):
        raise AssertionError(f"{count} blocks behind {products} products: wrong bytes")
    case = f"{_implementation()}, {count} x 8 KiB behind {products} products"
    results.row(case, "call returns after", "us", call.returns * 1e6)
    results.row(case, "data is there after", "us", call.done * 1e6)
    print(f"{case}: returns after {call.returns * 1e6:.0f} us, done {call.done * 1e6:.0f} us")
    if products and device.platform == "gpu":
        share = call.returns / call.done
        results.target(f"{case}: host held", share, "<=", WANTED_SHARE, "of the time to the data")


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = Results("dispatch")
    for count in (1, 64) if flags.quick else (1, 64, 1024, 4096, 16384):
        for products in (0, 8):
            measure(results, count, products)
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
