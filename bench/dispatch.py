"""Host time of a copy, and its dependence on a busy stream.

Usage: `python -m bench.dispatch`.

A program multiplies matrices for some milliseconds and then loads scattered blocks of 64 KiB with
ids in `HostIds`: by the implementation that `jaxkv` chooses and, if different, by dma, for which
the host submits a descriptor per block. The call should return long before the products are
complete.

Then `load_pages` of one page in 80 layers: host time per call, relative to the same program without
the copy. The two alternate.

The arrays are no larger than the copied blocks: host time depends on the number of addresses that
are submitted, not on the memory around them. `bench.transfer` measures bandwidth.

Creating the ids of a call, a `HostIdPair` or two `HostIds`, is host time of a step, too. It is
timed separately from calls.
"""

import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

import jaxkv
from bench.harness import timing
from bench.harness.blocks import Program, copy_pages
from bench.harness.main import Flags, benchmark, on_gpu
from bench.harness.records import Results
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
        width = WIDTH if on_gpu() else 64
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


def measure_load(results: Results, count: int) -> None:
    load = Load(count)
    chosen = load.chosen
    names: tuple[Implementation, ...] = (chosen, "dma") if on_gpu() else (chosen,)
    for name in dict.fromkeys(names):
        for products in (0, 8):
            call = load.time(name, products)
            case = f"{name}, {count} x 64 KiB after {products} matrix products"
            results.row(case, "host time per call", "us", call.returns * 1e6)
            results.row(case, "latency (data available)", "us", call.done * 1e6)


def measure_program(results: Results, rounds: int) -> None:
    """Rows and target of a program with one copy of many layers."""
    spec = jaxkv.KVCacheSpec(
        num_layers=LAYERS, page_size=16, num_kv_heads=1, head_dim=64, dtype=jnp.bfloat16
    )
    pool = jaxkv.HostPool.create(spec, num_pages=8)
    ids = jnp.array([1], jnp.int32)

    def without_copy(pool: Any, cache: Any, ids: Any) -> Any:
        # Without the barrier, jit would return the arguments without running the program.
        return jax.lax.optimization_barrier((pool, cache, ids))[1]

    def host_time(copy: Any) -> Any:
        ends = {"host": pool, "device": jaxkv.DeviceCache.create(spec, num_pages=8)}
        program = Program(ends, "load", copy, (ids, ids))

        def enqueue(cache: Any) -> tuple[float, Any]:
            cache = jax.block_until_ready(program.step(cache))
            start = time.perf_counter()
            for _ in range(CALLS):
                cache = program.step(cache)
            return (time.perf_counter() - start) / CALLS, cache

        return functools.partial(program.advance, enqueue)

    runs = {"with": host_time(copy_pages("load")), "without": host_time(without_copy)}
    samples = timing.compare(runs, rounds)
    case = f"load_pages of one page, {LAYERS} layers"
    for name, microseconds in samples.medians(1e6).items():
        results.row(f"{case}, {name} the copy", "host time per call", "us", microseconds)
    metric = "host time relative to the program without the copy"
    ratio = samples.ratio("with", "without")
    results.row(case, metric, "ratio", ratio, want=("<=", MOST_DISPATCH))


def time_of(make: Callable[[], Any]) -> float:
    """Seconds until the ids of a call are created, on an idle device."""
    start = time.perf_counter()
    made = make()
    taken = time.perf_counter() - start
    jax.block_until_ready(made)
    return taken


def measure_creation(results: Results, rounds: int) -> None:
    """Host time of creating the ids of a call; `rounds` of all forms and ways."""
    rng = np.random.default_rng(0)
    permutations = [rng.permutation(NUM_IDS) for _ in range(2)]
    host = SingleDeviceSharding(jax.local_devices()[0], memory_kind="pinned_host")

    def put(*ids: Any) -> tuple[jax.Array, ...]:
        return tuple(jax.device_put(np.asarray(entry, np.int32), host) for entry in ids)

    forms = {
        form: [p.tolist() if form == "list" else p.astype(form) for p in permutations]
        for form in ("int32", "int64", "list")
    }
    makers: dict[str, Callable[..., Any]] = {
        "pair": jaxkv.HostIdPair,
        "two HostIds": lambda *ids: tuple(map(jaxkv.HostIds, ids)),
        "jax.device_put": put,
    }
    runs = {
        (form, name): functools.partial(time_of, functools.partial(make, *ids))
        for form, ids in forms.items()
        for name, make in makers.items()
    }
    medians = timing.compare(runs, rounds, warmup=rounds // 10).medians(1e6)
    for form in forms:
        case = f"both id lists of a call, {NUM_IDS} ids as {form}"
        # A list is converted first; the target is for arrays.
        want = None if form == "list" else ("<=", WANTED_CREATION_US)
        pair, *others = (medians[form, name] for name in makers)
        baselines = dict(zip([*makers][1:], others, strict=True))
        results.row(case, "host time", "us", pair, None, baselines, want)


def measure(results: Results, flags: Flags) -> None:
    for count in COUNTS[:2] if flags.quick else COUNTS:
        measure_load(results, count)
    measure_program(results, rounds=5 if flags.quick else ROUNDS)
    measure_creation(results, rounds=100 if flags.quick else CREATIONS)


main = benchmark("dispatch", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
