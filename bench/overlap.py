"""64 MiB loaded layer by layer, overlapped with a step: `python -m bench.overlap`.

The step has 32 layers and takes about 14 ms alone. A layer computes, then needs its pages: one of
their elements is added to the activations, so the wait is at that point. Two kinds of step:
compute-bound (a bf16 matrix product per layer) and memory-bound (a pass over an array in HBM). The
same step is timed without any load, with `load_pages` before it ("sequential", the baseline), and
with `start_load` and a `wait` in each layer, by each implementation and as jaxkv chooses with
device ids and HostIds, in rounds; as jaxkv chooses also with a wait for each four layers. Host time
per call is measured on an idle device.

Pool and cache have 32 GiB, where memory allows. Consecutive steps cycle through sets of random
pages, because the host would cache 64 MiB that are loaded by every step.
"""

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import timing
from bench.harness.blocks import (
    CHOICES,
    CHOSEN,
    SM_IMPLEMENTATIONS,
    Method,
    equal,
    gathered,
    implementations,
    randomized,
)
from bench.harness.main import Flags, benchmark, on_gpu
from bench.harness.records import Results
from jaxkv._src.autotune.pools import pool_bytes

NO_LOAD, SEQUENTIAL = "without a load", "sequential"
STEP_TIME, RATIO_UNIT = "time per step", f"x step {NO_LOAD}"
WANTED_RATIO = 1.02
FEW_WAITS = 4  # layers of a wait
SETS = 8  # of pages, in all more than last-level caches hold


class Size(NamedTuple):
    """Loaded pages, and the duration of the step and of the measurement."""

    layers: int
    pages: int
    step_seconds: float
    calls: int
    rounds: int
    few_sms: tuple[int, ...]

    @property
    def spec(self) -> jaxkv.KVCacheSpec:
        return jaxkv.KVCacheSpec(
            num_layers=self.layers, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16
        )

    @property
    def label(self) -> str:
        return f"{self.pages * self.spec.page_bytes / 2**20:g} MiB"


FULL = Size(32, 8, 14e-3, 5, 40, (4, 2, 1))
QUICK = Size(4, 1, 2e-3, 2, 3, (4,))


# Kind of step: activations for a number of units of work, and the function of a layer.


def compute_bound(units: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    width = 8192 if on_gpu() else 128
    # Of variance 1 / width, so that products neither grow nor decay; zeros would take less power.
    weight = jax.random.normal(jax.random.key(1), (width, width), jnp.bfloat16) / width**0.5
    rows = jax.random.normal(jax.random.key(2), (128 * units, width), jnp.bfloat16)
    return (rows, weight), lambda x, weight: x @ weight


def memory_bound(units: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    length = 8 << 20 if on_gpu() else 1 << 16
    x = jax.random.normal(jax.random.key(1), (units, length), jnp.bfloat16)
    return (x, jnp.bfloat16(0.5)), lambda x, factor: x * factor + factor


KINDS = {"compute-bound": (compute_bound, 16), "memory-bound": (memory_bound, 52)}


class Bench:
    """A pool with known pages, a cache as their destination, and one kind of step.

    Attributes:
      pages: ids in the pool and in the cache, int32[SETS, pages] each, all different.
      state: of all steps: activations and the cache.
    """

    def __init__(self, what: Size):
        self.what = what
        loaded = SETS * what.pages
        num_pages = pool_bytes(2 * loaded * what.spec.page_bytes) // what.spec.page_bytes
        self.pool = jaxkv.HostPool.create(what.spec, num_pages=num_pages)
        rng = np.random.default_rng(0)
        self.pages = [
            rng.choice(num_pages, (SETS, what.pages), replace=False).astype(np.int32)
            for _ in range(2)
        ]
        cache = randomized(jaxkv.DeviceCache.create(what.spec, num_pages=num_pages))
        host_pages, self.loaded = map(np.ravel, self.pages)
        stored = self.loaded[::-1].copy()
        store = jax.jit(jaxkv.store_pages, donate_argnums=0)
        self.pool = store(self.pool, cache, host_pages, stored)
        self.wanted = gathered(cache, stored)
        self.state: Any = (None, cache)

    def calibrate(self, kind: str) -> None:
        """Makes a step of about the required duration: its state, constants, and layer."""
        self.kind = kind
        make, units = KINDS[kind]
        for _ in range(2):
            (x, self.fixed), self.layer = make(units)
            run = self.program(Method(NO_LOAD))
            self.state = run(run((x, self.state[1])))
            call, self.state = timing.single_call(run, self.state, repeats=5)
            units = max(1, round(units * self.what.step_seconds / call.done))

    def program(self, method: Method, layers_per_wait: int = 1) -> Any:
        """The step, `state -> state`."""
        layer, page = self.layer, int(self.loaded[0])
        started = functools.partial(_started, layers_per_wait=layers_per_wait)
        load = {NO_LOAD: _without, SEQUENTIAL: _sequential}.get(method.name, started)

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, pool: jaxkv.HostPool, fixed: Any, ids: Any) -> Any:
            x, cache = state
            wait, loaded = load(pool, cache, ids)
            for number in range(self.what.layers):
                # Keeps XLA from fusing several layers, which it can do only in the step without
                # waits.
                x = jax.lax.optimization_barrier(layer(x, fixed))
                k, v = wait(number, x)
                x = x + (k[page, 0, 0, 0] + v[page, 0, 0, 0]) * jnp.bfloat16(1e-3)
            return x, loaded()

        sets = zip(*self.pages, strict=True)
        ids_of_step = itertools.cycle([tuple(map(method.converted, ids)) for ids in sets])
        return lambda state: step(state, self.pool, self.fixed, next(ids_of_step))

    def runs(self) -> dict[str, Callable[[Any], Any]]:
        """Compiled and verified steps by name."""
        compiled: dict[str, Callable[[Any], Any]] = {}
        others = Method(NO_LOAD), Method(SEQUENTIAL)
        for method in (*others, *implementations(without="pallas"), *CHOICES):
            for sms in (None, *self.what.few_sms) if method.name in SM_IMPLEMENTATIONS else (None,):
                run = self.program(method)
                ids = (method.converted(pages[0]) for pages in self.pages)
                of = method._replace(num_sms=sms)
                num_sms = of.sms_for(jaxkv.start_load, self.pool, self.state[1], *ids)
                with of.taken(num_sms):
                    self.first_calls(method, run)
                compiled.setdefault(f"{method}, {num_sms} SMs" if num_sms else str(method), run)
        for method in CHOICES:
            run = self.program(method, FEW_WAITS)
            self.first_calls(method, run)
            compiled[f"{method}, a wait for {FEW_WAITS} layers"] = run
        return compiled

    def first_calls(self, method: Method, run: Callable[[Any], Any]) -> None:
        """Compiles a step and verifies the loaded bytes."""
        loads = method.name != NO_LOAD
        if loads:
            self.state = (self.state[0], _forget(self.state[1], self.loaded))
        for _ in range(SETS):
            self.state = jax.block_until_ready(run(self.state))
        jaxkv.check_errors()
        if loads and not equal(gathered(self.state[1], self.loaded), self.wanted):
            raise AssertionError(f"{self.kind}, {method}: wrong pages")

    def measure(self, results: Results, kind: str) -> None:
        self.calibrate(kind)
        runs = self.runs()

        def sample(run: Callable[[Any], Any]) -> float:
            seconds, self.state = timing.seconds_per_call(
                run, self.state, calls=self.what.calls, repeats=1, warmup=0
            )
            return seconds

        samples = timing.compare(
            {name: functools.partial(sample, run) for name, run in runs.items()}, self.what.rounds
        )
        medians = samples.medians(1e3)
        baselines = {other: medians[other] for other in (NO_LOAD, SEQUENTIAL)}
        for name, run in runs.items():
            case = f"{self.kind} step, {self.what.label}: {name}"
            call, self.state = timing.single_call(run, self.state, repeats=5)
            ratio = samples.ratio(name, NO_LOAD)
            results.row(case, STEP_TIME, "ms", medians[name], None, baselines)
            results.row(case, "host time per call", "us", call.returns * 1e6)
            if name != NO_LOAD:
                results.row(case, STEP_TIME, RATIO_UNIT, ratio)
            if name.startswith(CHOSEN):
                target = f"{self.kind} step with {self.what.label} loaded, {name}"
                results.target(target, ratio, "<=", WANTED_RATIO, RATIO_UNIT)
        jaxkv.check_errors()


# How a step loads: `(pool, cache, ids) -> (wait of a layer, the cache at the end)`.


def _without(_: Any, cache: jaxkv.DeviceCache, __: Any) -> tuple[Callable, Callable]:
    return lambda layer, _: cache.layers[layer], lambda: cache


def _sequential(pool: Any, cache: jaxkv.DeviceCache, ids: Any) -> tuple[Callable, Callable]:
    return _without(pool, jaxkv.load_pages(pool, cache, *ids), ids)


def _started(
    pool: Any, cache: jaxkv.DeviceCache, ids: Any, *, layers_per_wait: int
) -> tuple[Callable, Callable]:
    loading = jaxkv.start_load(pool, cache, *ids)
    waited: dict[int, Any] = {}

    def wait(layer: int, x: Any) -> Any:
        if layer % layers_per_wait == 0:
            layers = range(layer, layer + layers_per_wait)
            waited.update(zip(layers, loading.wait(layers, after=x), strict=True))
        return waited[layer]

    return wait, lambda: loading.cache


@functools.partial(jax.jit, donate_argnums=0)
def _forget(cache: jaxkv.DeviceCache, pages: jax.Array) -> jaxkv.DeviceCache:
    return jax.tree.map(lambda x: x.at[pages].set(0), cache)


def measure(results: Results, flags: Flags) -> None:
    bench = Bench(QUICK if flags.quick else FULL)
    for kind in [*KINDS][: 1 if flags.quick else None]:
        bench.measure(results, kind)


main = benchmark("overlap", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
