"""Engines' own arrays and groups, relative to a `KVCacheSpec`: `python -m bench.array_caches`.

All caches have the bytes of one `KVCacheSpec` cache: 32 layers, 64 tokens per page, 8 heads of 128
elements, bf16. The same number of pages is copied in each: fused K and V as in sglang-jax and
tpu-inference, one stacked array each of K and V, 8-bit K and V with scales (as many bytes in all),
two groups of layers (hybrid) and four. Every cache is verified before it is timed. Caches alternate
in rounds.
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
    DIRECTIONS,
    Method,
    Program,
    copy_pages,
    implementations,
    randomized,
)
from bench.harness.main import Flags, benchmark
from bench.harness.records import Results

BASELINE = "KVCacheSpec"
ROUNDS = 12
MOST_RATIO = {
    "fused": 1.03, "stacked": 1.03, "hybrid": 1.03, "with scales": 1.05, "4 groups": 1.05,
}  # fmt: skip


class Size(NamedTuple):
    """Shape of the caches, and number of copied pages."""

    layers: int
    page_size: int
    heads: int
    head_dim: int
    num_pages: int
    copied: int


FULL = Size(32, 64, 8, 128, 160, 128)
QUICK = Size(4, 16, 2, 64, 16, 2)


class Case:
    """A pool and a cache, or a dict of each, with programs that copy the same pages."""

    def __init__(self, pool: Any, cache: Any, what: Size, method: Method):
        self.pool, self.method = pool, method
        self.ends = {"host": pool, "device": cache}
        rng, grouped = np.random.default_rng(0), isinstance(pool, dict)
        plain = [
            {
                name: rng.permutation(what.num_pages)[: what.copied].astype(np.int32)
                for name in groups
            }
            for groups in [pool if grouped else [""]] * 2
        ]
        self.device_pages = plain[1]
        made = [{name: method.converted(ids) for name, ids in side.items()} for side in plain]
        ids = made if grouped else [side[""] for side in made]
        self.programs = {
            way: Program(self.ends, way, copy_pages(way, implementation=method.name), ids)
            for way in DIRECTIONS
        }

    def verify(self) -> None:
        """Raises unless a store and a load restore the pages."""
        before = self.copied_pages()
        self.programs["store"].run()
        zeros = jax.tree.map(jnp.zeros_like, self.ends["device"])
        self.ends["device"] = jax.block_until_ready(zeros)
        self.programs["load"].run()
        for old, new in zip(before, self.copied_pages(), strict=True):
            if old.tobytes() != new.tobytes():
                raise AssertionError(f"{self.method}: wrong pages")

    def copied_pages(self) -> list[np.ndarray]:
        spec, cache = getattr(self.pool, "spec", None), self.ends["device"]
        axis = int(isinstance(spec, jaxkv.ArrayCacheSpec) and spec.stacked)
        return [
            np.asarray(jnp.take(array, ids, axis))
            for name, ids in self.device_pages.items()
            for array in jax.tree.leaves(cache[name] if name else cache)
        ]

    def close(self) -> None:
        for pool in jax.tree.leaves(self.ends["host"], is_leaf=is_pool):
            pool.close()


def is_pool(node: Any) -> bool:
    return isinstance(node, jaxkv.HostPool)


def caches(what: Size) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Functions that make a pool and a cache."""
    layers, size_, heads, dim = what.layers, what.page_size, what.heads, what.head_dim
    page = (what.num_pages, size_, heads)
    as_shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def of_arrays(shapes: Any, stacked: bool = False) -> tuple[Any, Any]:
        arrays = randomized(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
        spec = jaxkv.ArrayCacheSpec.from_arrays(arrays, stacked=stacked)
        return jaxkv.HostPool.create(spec, num_pages=what.num_pages), arrays

    def baseline(layers: int = layers) -> tuple[Any, Any]:
        spec = jaxkv.KVCacheSpec(
            num_layers=layers, page_size=size_, num_kv_heads=heads, head_dim=dim,
            dtype=jnp.bfloat16,
        )  # fmt: skip
        cache = randomized(jaxkv.DeviceCache.create(spec, num_pages=what.num_pages))
        return jaxkv.HostPool.create(spec, num_pages=what.num_pages), cache

    def groups(number: int) -> tuple[Any, Any]:
        made = {f"group {i}": baseline(layers // number) for i in range(number)}
        pools, group_caches = ({n: pair[i] for n, pair in made.items()} for i in range(2))
        return pools, group_caches

    # Quantized to 2 * dim - 4 bytes, and one float32 scale.
    quantized = jax.ShapeDtypeStruct((*page, 2 * dim - 4), jnp.uint8)
    scale = jax.ShapeDtypeStruct(page, jnp.float32)
    scaled = {"k": quantized, "k_scale": scale, "v": quantized, "v_scale": scale}
    fused = as_shape((*page, 2, dim))  # 2*H/packing, packing, D
    stacked = as_shape((layers, *page, dim))
    return {
        BASELINE: baseline,
        "fused": lambda: of_arrays([fused] * layers),
        "stacked": lambda: of_arrays({"k": stacked, "v": stacked}, stacked=True),
        "with scales": lambda: of_arrays([scaled] * layers),
        "hybrid": lambda: groups(2),
        "4 groups": lambda: groups(4),
    }


def compare(what: Size, method: Method) -> dict[str, timing.Samples[str]]:
    """Seconds per call in every round, by direction and cache."""
    cases: dict[str, Case] = {}
    for name, make in caches(what).items():
        cases[name] = Case(*make(), what, method)
        cases[name].verify()
    samples = {}
    for direction in DIRECTIONS:
        runs = {name: sampler(case.programs[direction]) for name, case in cases.items()}
        samples[direction] = timing.compare(runs, ROUNDS, warmup=1)
    for case in cases.values():
        case.close()
    return samples


def sampler(program: Program) -> Callable[[], float]:
    """Seconds per call in a chain, whose length follows from the chain before."""
    program.calls = 3
    program.chain()
    program.chain()

    def sample() -> float:
        taken = program.chain()
        program.calls = timing.chain_length(taken)
        return taken

    return sample


def measure(results: Results, flags: Flags) -> None:
    what = QUICK if flags.quick else FULL
    # "pallas" supports neither stacked arrays nor blocks of several sizes.
    for method in implementations(without="pallas"):
        for direction, samples in compare(what, method).items():
            for cache in samples:
                case = f"{direction}, {what.copied} pages, {cache}, {method}"
                milliseconds = samples.median(cache) * 1e3
                results.row(case, "time per call (chained)", "ms", milliseconds)
                if cache != BASELINE:
                    ratio = samples.ratio(cache, BASELINE)
                    name, want = f"time relative to {BASELINE}", ("<=", MOST_RATIO[cache])
                    results.row(case, name, "ratio", ratio, want=want)


main = benchmark("array_caches", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
