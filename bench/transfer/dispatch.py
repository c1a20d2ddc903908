"""Host time of a copy, and its dependence on a busy stream.

Usage: `python -m bench.transfer.dispatch`.

A program multiplies matrices for some milliseconds and then loads scattered blocks of 64 KiB with
ids in `HostIds`: by the implementation that `jaxkv` chooses and, if different, by dma, for which
the host submits a descriptor per block. The call should return long before the products are
complete.

Then `load_pages` of one page in 80 layers: host time per call, relative to the same program without
the copy. The two take turns.

Creating the two `HostIds` of a call is host time of a step, too. It is timed apart from calls.
"""

import functools
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import jaxkv
from bench.harness import timing
from bench.harness.records import Results, arguments
from jaxkv._src.explain import selections_of
from jaxkv._src.tuning.copy_table import Implementation

BLOCK_BYTES = 65536
COUNTS = (1, 64, 1024, 4096, 16384)
WIDTH = 8192
REPEATS = 20
LAYERS, MOST_DISPATCH = 80, 1.1
ROUNDS, CALLS = 50, 40
NUM_IDS = 256
CREATIONS = 2000
WANTED_CREATION_US = 40

State = tuple[jax.Array, jax.Array]  # activations, and the destination of the load


class Load:
    """A number of blocks, and their ids."""

    def __init__(self, count: int):
        self.count = count
        device = jax.local_devices()[0]
        host = SingleDeviceSharding(device, memory_kind="pinned_host")
        self.source = jax.device_put(np.ones((count, BLOCK_BYTES // 4), np.int32), host)
        rng = np.random.default_rng(0)
        self.ids = tuple(jaxkv.HostIds(rng.permutation(count)) for _ in range(2))

    @property
    def chosen(self) -> Implementation:
        """The implementation that jaxkv chooses."""
        blocks = jax.ShapeDtypeStruct(self.source.shape, jnp.int32)
        (choice,) = selections_of(jaxkv.swap_blocks, self.source, blocks, *self.ids)
        return choice.implementation

    def time(self, implementation: Implementation, products: int) -> timing.Call:
        """Times a step with `products` products and then the load; verifies the bytes."""
        platform = jax.default_backend()
        width = WIDTH if platform == "gpu" else 64
        matrix = jnp.full((width, width), 1 / width, jnp.bfloat16)
        state = matrix, jnp.zeros(self.source.shape, jnp.int32)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: State, source: jax.Array, ids: Any) -> State:
            x, blocks = state
            for _ in range(products):
                x = x @ x
            # Data dependency: the load is ordered after the products, as if they made its
            # destination.
            blocks, x = jax.lax.optimization_barrier((blocks, x))
            return x, jaxkv.swap_blocks(source, blocks, *ids, implementation=implementation)

        def run(state: State) -> State:
            return step(state, self.source, self.ids)

        call, state = timing.single_call(run, run(run(state)), repeats=REPEATS)
        jaxkv.check_errors()
        if not bool((state[1] == 1).all()):
            raise AssertionError(f"{self.count} blocks after {products} products: wrong bytes")
        return call


def measure(results: Results, count: int) -> None:
    load = Load(count)
    chosen = load.chosen
    on_gpu = jax.default_backend() == "gpu"
    names: tuple[Implementation, ...] = (chosen, "dma") if on_gpu else (chosen,)
    for name in dict.fromkeys(names):
        for products in (0, 8):
            call = load.time(name, products)
            case = f"{name}, {count} x 64 KiB after {products} matrix products"
            results.row(case, "host time per call", "us", call.returns * 1e6)
            results.row(case, "latency (data available)", "us", call.done * 1e6)
            print(
                f"{case}: host time {call.returns * 1e6:.0f} us, latency {call.done * 1e6:.0f} us"
            )


def without_copy(
    pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, host_pages: jax.Array, device_pages: jax.Array
) -> jaxkv.DeviceCache:
    # Without the barrier, jit would return the arguments without running the program.
    return jax.lax.optimization_barrier((pool, cache, host_pages, device_pages))[1]


def measure_program(results: Results) -> None:
    """Rows and target of a program with one copy of many layers."""
    spec = jaxkv.KVCacheSpec(
        num_layers=LAYERS, page_size=16, num_kv_heads=1, head_dim=64, dtype=jnp.bfloat16
    )
    pool = jaxkv.HostPool.create(spec, num_pages=8)
    ids = jnp.array([1], jnp.int32)
    programs = {
        "with": jax.jit(jaxkv.load_pages, donate_argnames="cache"),
        "without": jax.jit(without_copy, donate_argnames="cache"),
    }
    caches = {name: jaxkv.DeviceCache.create(spec, num_pages=8) for name in programs}

    def host_time(name: str) -> float:
        program = programs[name]
        cache = jax.block_until_ready(program(pool, caches[name], ids, ids))
        start = time.perf_counter()
        for _ in range(CALLS):
            cache = program(pool, cache, ids, ids)
        taken = (time.perf_counter() - start) / CALLS
        caches[name] = jax.block_until_ready(cache)
        return taken

    seconds = timing.rounds({name: functools.partial(host_time, name) for name in programs}, ROUNDS)
    jaxkv.check_errors()
    ratio = timing.ratio(seconds["with"], seconds["without"])
    case = f"load_pages of one page, {LAYERS} layers"
    for name, samples in seconds.items():
        label = f"{case}, {name} the copy"
        results.row(label, "host time per call", "us", timing.median(samples) * 1e6)
    results.row(case, "host time relative to the program without the copy", "ratio", ratio)
    name = f"{case}: host time relative to the program without the copy"
    if jax.default_backend() == "gpu":
        results.target(name, ratio, "<=", MOST_DISPATCH, "ratio")
    print(f"{name}: {ratio:.3f} +- {2 * ratio.error:.3f}")


def measure_creation(results: Results) -> None:
    """Host time of creating the two `HostIds` of a call; the median of `CREATIONS`."""
    rng = np.random.default_rng(0)
    permutations = [rng.permutation(NUM_IDS) for _ in range(2)]
    host = SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")
    for form in ("int32", "int64", "list"):
        ids = [p.tolist() if form == "list" else p.astype(form) for p in permutations]

        def create(_: Any, ids: list[Any] = ids) -> Any:
            return tuple(map(jaxkv.HostIds, ids))

        def put(_: Any, ids: list[Any] = ids) -> Any:
            return tuple(jax.device_put(np.asarray(entry, np.int32), host) for entry in ids)

        made = [
            timing.single_call(make, make(None), repeats=CREATIONS)[0] for make in (create, put)
        ]
        microseconds, device_put = (call.returns * 1e6 for call in made)
        case = f"both HostIds of a call, {NUM_IDS} ids as {form}"
        baselines = {"jax.device_put": device_put}
        results.row(case, "host time", "us", microseconds, baselines=baselines)
        print(f"{case}: host time {microseconds:.1f} us, of jax.device_put {device_put:.1f} us")
        if form != "list" and jax.default_backend() == "gpu":  # NumPy takes 4 us to convert a list
            results.target(f"{case}: host time", microseconds, "<=", WANTED_CREATION_US, "us")


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    results = Results("dispatch")
    for count in COUNTS[:2] if flags.quick else COUNTS:
        measure(results, count)
    measure_program(results)
    measure_creation(results)
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
