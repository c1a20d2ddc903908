"""Engines' own arrays and groups, relative to a `KVCacheSpec`.

`python -m bench.transfer.array_caches`. All caches have the bytes of one `KVCacheSpec` cache: 32
layers, 64 tokens per page, 8 heads of 128 elements, bf16. The same number of pages is copied in
each: fused K and V as in sglang-jax and tpu-inference, one stacked array each of K and V, 8-bit K
and V with scales (as many bytes in all), two groups of layers (hybrid) and four. Every cache is
verified before it is timed. Caches take turns in each round; a ratio is the median over rounds,
with its standard error.
"""

import functools
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import timing
from bench.harness.records import Results, arguments
from bench.transfer.blocks import DIRECTIONS

# "pallas" supports neither stacked arrays nor blocks of several sizes.
IMPLEMENTATIONS = {"cpu": ("host",), "gpu": ("kernel", "dma")}
BASELINE = "KVCacheSpec"
ROUNDS = 11
MOST_RATIO = {"fused": 1.03, "stacked": 1.03, "hybrid": 1.03, "4 groups": 1.05}


class Size(NamedTuple):
    """Shape of the caches, and numbers of copied pages."""

    layers: int
    page_size: int
    heads: int
    head_dim: int
    num_pages: int
    copied: tuple[int, ...]


class Case:
    """A pool and a cache, or a dict of each, with the ids of the copied pages."""

    def __init__(self, pool: Any, cache: Any, copied: int, num_pages: int, implementation: Any):
        self.pool, self.cache, self.implementation = pool, cache, implementation
        rng = np.random.default_rng(0)
        as_ids = jaxkv.HostIds if implementation == "dma" else jnp.asarray

        def ids() -> Any:
            plain = rng.permutation(num_pages)[:copied].astype(np.int32)
            return as_ids(plain)

        per_group = (lambda: {name: ids() for name in pool}) if isinstance(pool, dict) else ids
        self.host_pages, self.device_pages = per_group(), per_group()

        self._steps: dict[str, Callable[[Any], Any]] = {}

    def program(self, direction: str) -> Callable[[Any], Any]:
        if direction not in self._steps:
            copy = jaxkv.load_pages if direction == "load" else jaxkv.store_pages
            step = jax.jit(
                functools.partial(copy, implementation=self.implementation),
                donate_argnames="cache" if direction == "load" else "pool",
            )
            ids = self.host_pages, self.device_pages
            self._steps[direction] = (
                (lambda cache: step(self.pool, cache, *ids))
                if direction == "load"
                else (lambda pool: step(pool, self.cache, *ids))
            )
        return self._steps[direction]

    def verify(self) -> None:
        """Raises unless a store and a load restore the pages."""
        before = self._copied_pages()
        self.pool = self.program("store")(self.pool)
        self.cache = jax.block_until_ready(jax.tree.map(jnp.zeros_like, self.cache))
        self.cache = self.program("load")(self.cache)
        jaxkv.check_errors(self.cache)
        for old, new in zip(before, self._copied_pages(), strict=True):
            if old.tobytes() != new.tobytes():
                raise AssertionError(f"{self.implementation}: wrong pages")

    def _copied_pages(self) -> list[np.ndarray]:
        return [
            np.asarray(jnp.take(array, self._ids(self.device_pages, name), int(name == "stacked")))
            for name, part in self._parts(self.cache).items()
            for array in jax.tree.leaves(part)
        ]

    def _parts(self, tree: Any) -> dict[str, Any]:
        if isinstance(self.pool, dict):
            return tree
        spec = self.pool.spec
        stacked = isinstance(spec, jaxkv.ArrayCacheSpec) and spec.stacked
        return {"stacked" if stacked else "layers": tree}

    def _ids(self, ids: Any, name: str) -> np.ndarray:
        chosen = ids[name] if isinstance(ids, dict) else ids
        return np.asarray(chosen.ids if isinstance(chosen, jaxkv.HostIds) else chosen)

    def close(self) -> None:
        for pool in self.pool.values() if isinstance(self.pool, dict) else [self.pool]:
            pool.close()


def size(platform: str, quick: bool) -> Size:
    if platform == "cpu":
        return Size(4, 16, 2, 64, 16, (2, 8))
    return Size(32, 64, 8, 128, 64 if quick else 160, (2, 16) if quick else (2, 128))


def random_leaf(index: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    bits = jax.random.bits(jax.random.key(index), shape, jnp.uint8)
    return bits.astype(jnp.float32).astype(dtype)


def caches(what: Size) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Functions that make a pool and a cache."""
    layers, size_, heads, dim = what.layers, what.page_size, what.heads, what.head_dim
    page = (what.num_pages, size_, heads, dim)
    fused = (what.num_pages, size_, heads, 2, dim)  # 2*H/packing, packing, D

    def of_arrays(arrays: Any, stacked: bool = False) -> tuple[Any, Any]:
        spec = jaxkv.ArrayCacheSpec.from_arrays(arrays, stacked=stacked)
        return jaxkv.HostPool.create(spec, num_pages=what.num_pages), arrays

    def baseline(layers: int = layers) -> tuple[Any, Any]:
        spec = jaxkv.KVCacheSpec(
            num_layers=layers, page_size=size_, num_kv_heads=heads, head_dim=dim,
            dtype=jnp.bfloat16,
        )  # fmt: skip
        cache = jaxkv.DeviceCache.create(spec, num_pages=what.num_pages)
        leaves, tree = jax.tree.flatten(cache)
        fresh = [random_leaf(i, leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
        pool = jaxkv.HostPool.create(spec, num_pages=what.num_pages)
        return pool, jax.tree.unflatten(tree, fresh)

    def groups(number: int) -> tuple[Any, Any]:
        made = {f"group {i}": baseline(layers // number) for i in range(number)}
        return {n: pool for n, (pool, _) in made.items()}, {
            n: cache for n, (_, cache) in made.items()
        }

    def scaled() -> tuple[Any, Any]:
        quantized = (what.num_pages, size_, heads, 2 * dim - 4)  # and one float32 scale
        scales = (what.num_pages, size_, heads)
        return of_arrays([
            {
                "k": random_leaf(4 * i, quantized, jnp.uint8),
                "k_scale": random_leaf(4 * i + 1, scales, jnp.float32),
                "v": random_leaf(4 * i + 2, quantized, jnp.uint8),
                "v_scale": random_leaf(4 * i + 3, scales, jnp.float32),
            }
            for i in range(layers)
        ])  # fmt: skip

    return {
        BASELINE: baseline,
        "fused": lambda: of_arrays([random_leaf(i, fused, jnp.bfloat16) for i in range(layers)]),
        "stacked": lambda: of_arrays(
            {name: random_leaf(i, (layers, *page), jnp.bfloat16) for i, name in enumerate("kv")},
            stacked=True,
        ),
        "with scales": scaled,
        "hybrid": lambda: groups(2),
        "4 groups": lambda: groups(4),
    }


class Sampler:
    """Seconds per call in a chain, whose length follows from the chain before."""

    def __init__(self, case: Case, direction: str):
        self.case, self.step = case, case.program(direction)
        self.state = "cache" if direction == "load" else "pool"
        self.calls, self.warmup = 3, 2

    def __call__(self) -> float:
        taken, new = timing.seconds_per_call(
            self.step, getattr(self.case, self.state), calls=self.calls, repeats=1,
            warmup=self.warmup,
        )  # fmt: skip
        setattr(self.case, self.state, new)
        self.calls, self.warmup = timing.chain_length(taken), 0
        return taken


def compare(what: Size, copied: int, implementation: str) -> dict[tuple[str, str], list[float]]:
    """Seconds per call in every round, by cache and direction."""
    cases: dict[str, Case] = {}
    for name, make in caches(what).items():
        case = Case(*make(), copied, what.num_pages, implementation)
        case.verify()
        cases[name] = case
    seconds: dict[tuple[str, str], list[float]] = {}
    for direction in DIRECTIONS:
        runs = {name: Sampler(case, direction) for name, case in cases.items()}
        for name, taken in timing.rounds(runs, 1 + ROUNDS).items():
            seconds[name, direction] = taken[1:]
    jaxkv.check_errors()
    for case in cases.values():
        case.close()
    return seconds


def report(
    results: Results, copied: int, name: str, seconds: dict[tuple[str, str], list[float]],
    nbytes: int,
) -> dict[str, float]:  # fmt: skip
    """Rows of one implementation; the larger ratio of the two directions, by cache."""
    worst: dict[str, float] = {}
    for (cache, direction), samples in seconds.items():
        label = f"{direction}, {copied} pages, {cache}, {name}"
        milliseconds = timing.median(samples) * 1e3
        results.row(label, "time per call (chained)", "ms", milliseconds)
        line = f"{label:40} {milliseconds:9.3f} ms {nbytes / milliseconds / 1e6:7.1f} GB/s"
        if cache != BASELINE:
            ratio = timing.ratio(samples, seconds[BASELINE, direction])
            results.row(label, f"time relative to {BASELINE}", "ratio", ratio)
            worst[cache] = max(worst.get(cache, 0), ratio)
            line += f"  {ratio:.4f} +- {2 * ratio.error:.4f}"
        print(line, flush=True)
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    flags = arguments(__doc__, argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    platform = jax.default_backend()
    results = Results("array_caches")
    what = size(platform, flags.quick)
    page_bytes = 4 * math.prod(what[:4])
    for name in IMPLEMENTATIONS[platform]:
        worst: dict[str, float] = {}
        for copied in what.copied:
            seconds = compare(what, copied, name)
            worst = report(results, copied, name, seconds, copied * page_bytes)
        for cache, most in MOST_RATIO.items() if platform == "gpu" else ():
            results.target(
                f"{cache}, {what.copied[-1]} pages, {name}: time relative to {BASELINE}, worse "
                "direction", worst.get(cache), "<=", most, "ratio",
            )  # fmt: skip
    results.save(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
