"""Engines' own arrays and groups, relative to a `KVCacheSpec`: `python -m bench.array_caches`.

All caches have the bytes of one `KVCacheSpec` cache: 32 layers, 64 tokens per page, 8 heads of 128
elements, bf16. The same number of pages is copied in each: fused K and V as in sglang-jax and
tpu-inference, one stacked array each of K and V, 8-bit K and V with scales (as many bytes in all),
two groups of layers (hybrid) and four. Every cache is verified before it is timed. Caches alternate
in rounds. Their pools share the memory that the machine allows, each at most 32 GiB; the copied
pages are at random places of it.
"""

import functools
import sys
from collections.abc import Callable, Mapping
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
from jaxkv._src.autotune.pools import pool_bytes

BASELINE = "KVCacheSpec"
ROUNDS = 12
MOST_RATIO = {
    "fused": 1.03, "stacked": 1.03, "hybrid": 1.03, "with scales": 1.05, "4 groups": 1.05,
}  # fmt: skip


class Size(NamedTuple):
    """Shape of the caches, their least number of pages, and number of copied pages."""

    layers: int
    page_size: int
    heads: int
    head_dim: int
    num_pages: int
    copied: int

    def as_memory_allows(self) -> "Size":
        """With as many pages as the memory has room for, in a cache of each kind."""
        page_bytes = self.spec(self.layers).page_bytes
        room = pool_bytes(self.num_pages * page_bytes, 1 + len(MOST_RATIO))
        return self._replace(num_pages=room // page_bytes)

    def spec(self, layers: int) -> jaxkv.KVCacheSpec:
        return jaxkv.KVCacheSpec(
            num_layers=layers, page_size=self.page_size, num_kv_heads=self.heads,
            head_dim=self.head_dim, dtype=jnp.bfloat16,
        )  # fmt: skip


FULL = Size(32, 64, 8, 128, 160, 128)
QUICK = Size(4, 16, 2, 64, 16, 2)


class Case:
    """A pool and a cache, or a dict of each, and the pages that every method copies."""

    def __init__(self, pool: Any, cache: Any, what: Size):
        self.pool = pool
        self.ends = {"host": pool, "device": cache}
        rng = np.random.default_rng(0)
        self.pages = [
            {
                name: rng.permutation(what.num_pages)[: what.copied].astype(np.int32)
                for name in groups
            }
            for groups in [pool if isinstance(pool, dict) else [""]] * 2
        ]

    def programs(self, method: Method) -> dict[str, Program]:
        """Verified programs by direction."""
        made = [{name: method.converted(ids) for name, ids in side.items()} for side in self.pages]
        ids = made if isinstance(self.pool, dict) else [side[""] for side in made]
        programs = {
            way: Program(self.ends, way, copy_pages(way, implementation=method.name), ids)
            for way in DIRECTIONS
        }
        before = self.copied_pages()
        programs["store"].run()
        zeros = jax.tree.map(jnp.zeros_like, self.ends["device"])
        self.ends["device"] = jax.block_until_ready(zeros)
        programs["load"].run()
        for old, new in zip(before, self.copied_pages(), strict=True):
            if old.tobytes() != new.tobytes():
                raise AssertionError(f"{method}: wrong pages")
        return programs

    def copied_pages(self) -> list[np.ndarray]:
        spec, cache = getattr(self.pool, "spec", None), self.ends["device"]
        axis = int(isinstance(spec, jaxkv.ArrayCacheSpec) and spec.stacked)
        return [
            np.asarray(jnp.take(array, ids, axis))
            for name, ids in self.pages[1].items()
            for array in jax.tree.leaves(cache[name] if name else cache)
        ]

    def close(self) -> None:
        for pool in jax.tree.leaves(self.ends["host"], is_leaf=is_pool):
            pool.close()


def is_pool(node: Any) -> bool:
    return isinstance(node, jaxkv.HostPool)


def caches(what: Size) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Functions that make a pool and a cache."""
    layers, dim = what.layers, what.head_dim
    page = (what.num_pages, what.page_size, what.heads)
    as_shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)

    def of_arrays(shapes: Any, stacked: bool = False) -> tuple[Any, Any]:
        arrays = randomized(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
        spec = jaxkv.ArrayCacheSpec.from_arrays(arrays, stacked=stacked)
        return jaxkv.HostPool.create(spec, num_pages=what.num_pages), arrays

    def baseline(layers: int = layers) -> tuple[Any, Any]:
        spec = what.spec(layers)
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


def compare(cases: Mapping[str, Case], method: Method) -> dict[str, timing.Samples[str]]:
    """Seconds per call in every round, by direction and cache."""
    programs = {name: case.programs(method) for name, case in cases.items()}
    samples = {}
    for direction in DIRECTIONS:
        runs = {name: sampler(by_way[direction]) for name, by_way in programs.items()}
        samples[direction] = timing.compare(runs, ROUNDS, warmup=1)
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
    what = QUICK if flags.quick else FULL.as_memory_allows()
    cases = {name: Case(*make(), what) for name, make in caches(what).items()}
    # "pallas" supports neither stacked arrays nor blocks of several sizes.
    for method in implementations(without="pallas"):
        for direction, samples in compare(cases, method).items():
            for cache in samples:
                case = f"{direction}, {what.copied} pages, {cache}, {method}"
                milliseconds = samples.median(cache) * 1e3
                results.row(case, "time per call (chained)", "ms", milliseconds)
                if cache != BASELINE:
                    ratio = samples.ratio(cache, BASELINE)
                    name, want = f"time relative to {BASELINE}", ("<=", MOST_RATIO[cache])
                    results.row(case, name, "ratio", ratio, want=want)
    for made in cases.values():
        made.close()


main = benchmark("array_caches", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
