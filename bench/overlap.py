"""64 MiB loaded layer by layer, overlapped with a step: `python -m bench.overlap`.

The step has 32 layers and takes about 14 ms alone. A layer computes, then needs its pages: one of
their elements is added to the activations, so the wait is at that point. Two kinds of step:
compute-bound (a bf16 matrix product per layer) and memory-bound (a pass over an array in HBM). The
same step is timed without any load, with `load_pages` before it ("sequential", the baseline), and
with `start_load` and a `wait` in each layer, by each implementation and as jaxkv chooses with
device ids and HostIds, in rounds; as jaxkv chooses also with a wait for each four layers. Host time
per call is measured on an idle device.
"""

import functools
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
    implementations,
    randomized,
)
from bench.harness.main import Flags, benchmark, on_gpu
from bench.harness.records import Results

NO_LOAD, SEQUENTIAL = "without a load", "sequential"
STEP_TIME, RATIO_UNIT = "time per step", f"x step {NO_LOAD}"
WANTED_RATIO = 1.02
FEW_WAITS = 4  # layers of a wait


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
      state: of all steps: activations and the cache.
    """

    def __init__(self, what: Size, kind: str):
        self.what, self.kind = what, kind
        num_pages = 2 * what.pages
        self.pool = jaxkv.HostPool.create(what.spec, num_pages=num_pages)
        rng = np.random.default_rng(0)
        self.pages = [rng.permutation(num_pages)[: what.pages].astype(np.int32) for _ in range(2)]
        self.cache = randomized(jaxkv.DeviceCache.create(what.spec, num_pages=num_pages))
        host_pages, device_pages = self.pages
        store = jax.jit(jaxkv.store_pages, donate_argnums=0)
        self.pool = store(self.pool, self.cache, host_pages, device_pages[::-1].copy())
        self.wanted = jax.tree.map(lambda x: jnp.copy(x[device_pages[::-1]]), self.cache)
        self.state, self.fixed, self.layer = self.calibrated()

    def calibrated(self) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
        """A step of about the required duration: its state, constants, and layer."""
        make, units = KINDS[self.kind]
        for _ in range(2):
            (x, fixed), layer = make(units)
            state = (x, jax.tree.map(jnp.copy, self.cache))
            run = self.program(Method(NO_LOAD), layer, fixed)
            call, state = timing.single_call(run, run(run(state)), repeats=5)
            units = max(1, round(units * self.what.step_seconds / call.done))
        return state, fixed, layer

    def program(
        self, method: Method, layer: Callable[[Any, Any], Any], fixed: Any, layers_per_wait: int = 1
    ) -> Any:
        """The step, `state -> state`."""
        page = int(self.pages[1][0])
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

        ids = tuple(map(method.converted, self.pages))
        return lambda state: step(state, self.pool, fixed, ids)

    def runs(self) -> dict[str, Callable[[Any], Any]]:
        """Compiled and verified steps by name."""
        compiled: dict[str, Callable[[Any], Any]] = {}
        others = Method(NO_LOAD), Method(SEQUENTIAL)
        for method in (*others, *implementations(without="pallas"), *CHOICES):
            for sms in (None, *self.what.few_sms) if method.name in SM_IMPLEMENTATIONS else (None,):
                run = self.program(method, self.layer, self.fixed)
                ids = map(method.converted, self.pages)
                of = method._replace(num_sms=sms)
                num_sms = of.sms_for(jaxkv.start_load, self.pool, self.cache, *ids)
                with of.taken(num_sms):
                    self.first_calls(method, run)
                compiled.setdefault(f"{method}, {num_sms} SMs" if num_sms else str(method), run)
        for method in CHOICES:
            run = self.program(method, self.layer, self.fixed, FEW_WAITS)
            self.first_calls(method, run)
            compiled[f"{method}, a wait for {FEW_WAITS} layers"] = run
        return compiled

    def first_calls(self, method: Method, run: Callable[[Any], Any]) -> None:
        """Compiles a step and verifies the loaded bytes."""
        loads = method.name != NO_LOAD
        if loads:
            self.state = (self.state[0], _forget(self.state[1]))
        for _ in range(2):
            self.state = jax.block_until_ready(run(self.state))
        jaxkv.check_errors()
        if loads:
            loaded = jax.tree.map(lambda x: x[self.pages[1]], self.state[1])
            if not equal(loaded, self.wanted):
                raise AssertionError(f"{self.kind}, {method}: wrong pages")

    def measure(self, results: Results) -> None:
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
def _forget(cache: jaxkv.DeviceCache) -> jaxkv.DeviceCache:
    return jax.tree.map(jnp.zeros_like, cache)


def measure(results: Results, flags: Flags) -> None:
    for kind in [*KINDS][: 1 if flags.quick else None]:
        Bench(QUICK if flags.quick else FULL, kind).measure(results)


main = benchmark("overlap", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
