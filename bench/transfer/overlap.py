"""64 MiB loaded layer by layer, overlapped with a step: `python -m bench.transfer.overlap`.

The step has 32 layers and takes about 14 ms alone. A layer computes, then needs its pages: one of
their elements is added to the activations, so the wait is at that point. Two kinds of step:
compute-bound (a bf16 matrix product per layer) and memory-bound (a pass over an array in HBM). The
same step is timed without any load, with `load_pages` before it ("sequential", the baseline), and
with `start_load` and a `wait` in each layer, by each implementation. The runs alternate, so that
clock changes affect all. Host time per call is measured on an idle device.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import timing
from bench.harness.records import Results, arguments
from bench.transfer.blocks import IMPLEMENTATIONS, SM_IMPLEMENTATIONS, Method, equal

NO_LOAD, SEQUENTIAL = "without a load", "sequential"
RATIO_UNIT = f"x step {NO_LOAD}"
WANTED_RATIO = 1.02


class Size(NamedTuple):
    """Loaded pages, and the duration of the step and of the measurement."""

    spec: jaxkv.KVCacheSpec
    pages: int
    step_seconds: float
    calls: int
    rounds: int
    few_sms: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.pages * self.spec.page_bytes / 2**20:g} MiB"


def size(platform: str, quick: bool) -> Size:
    layers, seconds = (4, 2e-3) if platform == "cpu" else (32, 14e-3)
    spec = jaxkv.KVCacheSpec(
        num_layers=layers, page_size=64, num_kv_heads=8, head_dim=128, dtype=jnp.bfloat16
    )
    effort = (2, 3, (4,)) if quick or platform == "cpu" else (5, 40, (4, 2, 1))
    return Size(spec, 1 if platform == "cpu" else 8, seconds, *effort)


# Kind of step: activations for a number of units of work, and the function of a layer.


def compute_bound(units: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    width = 8192 if jax.default_backend() == "gpu" else 128
    # Of variance 1 / width, so that products neither grow nor decay; zeros would take less power.
    weight = jax.random.normal(jax.random.key(1), (width, width), jnp.bfloat16) / width**0.5
    rows = jax.random.normal(jax.random.key(2), (128 * units, width), jnp.bfloat16)
    return (rows, weight), lambda x, weight: x @ weight


def memory_bound(units: int) -> tuple[Any, Callable[[Any, Any], Any]]:
    length = 8 << 20 if jax.default_backend() == "gpu" else 1 << 16
    x = jax.random.normal(jax.random.key(1), (units, length), jnp.bfloat16)
    return (x, jnp.bfloat16(0.5)), lambda x, factor: x * factor + factor


KINDS = {"compute-bound": (compute_bound, 16), "memory-bound": (memory_bound, 52)}


class Bench:
    """A pool with known pages, a cache as their destination, and one kind of step."""

    def __init__(self, what: Size, kind: str):
        self.what, self.kind = what, kind
        num_pages = 2 * what.pages
        self.pool = jaxkv.HostPool.create(what.spec, num_pages=num_pages)
        rng = np.random.default_rng(0)
        self.pages = [rng.permutation(num_pages)[: what.pages].astype(np.int32) for _ in range(2)]
        cache = jaxkv.DeviceCache.create(what.spec, num_pages=num_pages)
        self.cache = jax.tree.map(_random_like, cache)
        host_pages, device_pages = self.pages
        store = jax.jit(jaxkv.store_pages, donate_argnums=0)
        self.pool = store(self.pool, self.cache, host_pages, device_pages[::-1].copy())
        self.wanted = jax.tree.map(lambda x: jnp.copy(x[device_pages[::-1]]), self.cache)
        self.state, self.fixed, self.layer = self._calibrated()

    def _calibrated(self) -> tuple[Any, Any, Callable[[Any, Any], Any]]:
        """A step of about the required duration: its state, constants, and layer."""
        make, units = KINDS[self.kind]
        for _ in range(2):
            (x, fixed), layer = make(units)
            state = (x, jax.tree.map(jnp.copy, self.cache))
            step = self._program(layer, None)
            ids = self._ids(NO_LOAD)
            run = functools.partial(_call, step, self.pool, fixed, ids)
            state = run(run(state))
            call, state = timing.single_call(run, state, repeats=5)
            units = max(1, round(units * self.what.step_seconds / call.done))
        return state, fixed, layer

    def _ids(self, title: str) -> tuple[Any, Any]:
        as_ids = jaxkv.HostIds if title == "dma" else jnp.asarray
        host_pages, device_pages = map(as_ids, self.pages)
        return host_pages, device_pages

    def _program(self, layer: Callable, load: Callable | None) -> Callable:
        """The step; `load` starts the load and returns the wait of a layer, and the cache."""
        page = int(self.pages[1][0])

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: Any, pool: jaxkv.HostPool, fixed: Any, ids: Any) -> Any:
            x, cache = state
            wait, loaded = load(pool, cache, ids) if load else (_loaded(cache), lambda: cache)
            for number in range(self.what.spec.num_layers):
                # Keeps XLA from fusing several layers, which it can do only in the step without
                # waits.
                x = jax.lax.optimization_barrier(layer(x, fixed))
                k, v = wait(number, x)
                x = x + (k[page, 0, 0, 0] + v[page, 0, 0, 0]) * jnp.bfloat16(1e-3)
            return x, loaded()

        return step

    def runs(self) -> dict[str, Callable[[Any], Any]]:
        """Compiled and verified steps by name."""
        platform = jax.default_backend()
        names = [name for name in IMPLEMENTATIONS[platform] if name != "pallas"]
        compiled: dict[str, Callable[[Any], Any]] = {}
        for title, load in (
            (NO_LOAD, None),
            (SEQUENTIAL, _sequential),
            *((name, _started) for name in names),
        ):
            for sms in (None, *self.what.few_sms) if title in SM_IMPLEMENTATIONS else (None,):
                step = self._program(self.layer, load)
                ids = self._ids(title)
                run = functools.partial(_call, step, self.pool, self.fixed, ids)
                method = Method(title, sms)
                num_sms = method.sms_for(jaxkv.start_load, self.pool, self.cache, *ids)
                with method.taken(num_sms):
                    self._first_calls(title, run, check=load is not None)
                compiled.setdefault(f"{title}, {num_sms} SMs" if num_sms else title, run)
        return compiled

    def _first_calls(self, title: str, run: Callable[[Any], Any], check: bool) -> None:
        """Compiles a step and verifies the loaded bytes."""
        if check:
            self.state = (self.state[0], _forget(self.state[1]))
        for _ in range(2):
            self.state = jax.block_until_ready(run(self.state))
        jaxkv.check_errors()
        if check:
            loaded = jax.tree.map(lambda x: x[self.pages[1]], self.state[1])
            if not equal(loaded, self.wanted):
                raise AssertionError(f"{self.kind}, {title}: wrong pages")

    def measure(self, results: Results) -> None:
        runs = self.runs()

        def sample(run: Callable[[Any], Any]) -> float:
            seconds, self.state = timing.seconds_per_call(
                run, self.state, calls=self.what.calls, repeats=1, warmup=0
            )
            return seconds

        samples = timing.rounds(
            {name: functools.partial(sample, run) for name, run in runs.items()}, self.what.rounds
        )
        returns = {}
        for name, run in runs.items():
            call, self.state = timing.single_call(run, self.state, repeats=5)
            returns[name] = call.returns
        jaxkv.check_errors()
        self._record(results, samples, returns)

    def _record(
        self, results: Results, samples: dict[str, list[float]], returns: Mapping[str, float]
    ) -> None:
        seconds = {name: timing.median(taken) for name, taken in samples.items()}
        ratios = {name: timing.ratio(taken, samples[NO_LOAD]) for name, taken in samples.items()}
        for name, value in seconds.items():
            case = f"{self.kind} step, {self.what.label}: {name}"
            baselines = {other: seconds[other] * 1e3 for other in (NO_LOAD, SEQUENTIAL)}
            results.row(case, "time per step", "ms", value * 1e3, None, baselines)
            results.row(case, "host time per call", "us", returns[name] * 1e6)
            if name != NO_LOAD:
                results.row(case, "time per step", RATIO_UNIT, ratios[name])
            print(
                f"{case:60} {value * 1e3:8.3f} ms, {ratios[name]:.4f} {RATIO_UNIT}, "
                f"host time {returns[name] * 1e6:.0f} us",
                flush=True,
            )
        if jax.default_backend() == "gpu":
            best = min(
                (r for n, r in ratios.items() if n not in (NO_LOAD, SEQUENTIAL)), default=None
            )
            name = f"{self.kind} step with {self.what.label} loaded, best implementation"
            results.target(name, best, "<=", WANTED_RATIO, RATIO_UNIT)


def _call(step: Callable, pool: jaxkv.HostPool, fixed: Any, ids: Any, state: Any) -> Any:
    return step(state, pool, fixed, ids)


def _loaded(cache: jaxkv.DeviceCache) -> Callable[[int, Any], Any]:
    return lambda layer, _: cache.layers[layer]


def _sequential(
    pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, ids: Any
) -> tuple[Callable[[int, Any], Any], Any]:
    cache = jaxkv.load_pages(pool, cache, *ids)
    return _loaded(cache), lambda: cache


def _started(
    pool: jaxkv.HostPool, cache: jaxkv.DeviceCache, ids: Any
) -> tuple[Callable[[int, Any], Any], Any]:
    loading = jaxkv.start_load(pool, cache, *ids)
    return lambda layer, x: loading.wait(layer, after=x), lambda: loading.cache


@jax.jit
def _random_like(x: jax.Array) -> jax.Array:
    return x + jax.random.normal(jax.random.key(0), x.shape, x.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _forget(cache: jaxkv.DeviceCache) -> jaxkv.DeviceCache:
    return jax.tree.map(jnp.zeros_like, cache)


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform = jax.default_backend()
    results = Results("overlap")
    for kind in KINDS:
        Bench(size(platform, flags.quick), kind).measure(results)
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
