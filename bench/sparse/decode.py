"""Decode throughput with the rows in host memory: `python -m bench.sparse.decode`.

HBM for 6 requests of 32,768 tokens: their rows and the keys of an indexer. Either 6 requests run at
a time with all their rows in HBM, or 32 with a hot buffer in front of a host pool, which has what
the keys of all 32 leave of the same HBM. Requests share no pages, and theirs are at random over the
32 GiB of the pool. The model is the part of one GPU of a DeepSeek-like model under tensor
parallelism (bf16 weights, rows of 1,152 bytes), without the indexer itself: the ids are a trace
with a given reuse. A step appends the new rows, fetches the chosen ones, and computes attention and
MLP. Both use one attention kernel, which reads the rows by their indices.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import timestamps
from bench.harness.main import Flags, benchmark, on_gpu
from bench.harness.records import Results
from bench.harness.timing import Figure
from bench.sparse.inputs import GIB_OPTION, PAGE_SIZE, Trace
from examples.sparse.attention import attend_rows
from jaxkv import sparse

LATENT, ROPE = 512, 64
KEY_BYTES = 132  # of DeepSeek V3.2's indexer, of each token: 128 in fp8 and a scale
WARMUP = 48
REUSE, MAIN_REUSE, WANTED = (0.8, 0.9, 0.95, 0.99), 0.95, 3.0
THROUGHPUT, GAIN = "decode throughput", "throughput over that in HBM"


class Size(NamedTuple):
    """Sizes of a model and its requests; `in_hbm` requests fit into HBM."""

    layers: int
    hidden: int
    heads: int
    inner: int
    k: int
    context: int
    in_hbm: int
    batch: int
    pool_bytes: int

    @property
    def slots(self) -> int:
        """Rows of a request's hot buffer; with the keys, all have the HBM of `in_hbm` requests."""
        row_bytes = (LATENT + ROPE) * 2
        of_request = self.in_hbm * self.context * (row_bytes + KEY_BYTES) // self.batch
        return (of_request - (KEY_BYTES + 2) * self.context) // (row_bytes + 8)


FULL = Size(8, 7168, 16, 4608, 2048, 32768, 6, 32, 32 << 30)
SMALL = Size(2, 64, 2, 64, 16, 512, 3, 6, 10 << 20)  # of the CPU backend


def init_weights(size: Size) -> list[dict[str, jax.Array]]:
    width = LATENT + ROPE
    shapes = {
        "row": (size.hidden, width),
        "query": (size.hidden, size.heads * width),
        "out": (size.heads * LATENT, size.hidden),
        "gate": (size.hidden, size.inner),
        "up": (size.hidden, size.inner),
        "down": (size.inner, size.hidden),
    }
    keys = iter(jax.random.split(jax.random.key(0), size.layers * len(shapes)))
    return [
        {
            name: jax.random.normal(next(keys), shape, jnp.bfloat16) * shape[0] ** -0.5
            for name, shape in shapes.items()
        }
        for _ in range(size.layers)
    ]


def attend(
    size: Size, weights: dict[str, jax.Array], x: jax.Array, rows: jax.Array, places: jax.Array
) -> jax.Array:
    """Latent attention of x [B, hidden] to the rows [n, width] at `places`, and the MLP."""
    width = rows.shape[-1]
    query = (x @ weights["query"]).reshape(len(x), size.heads, width)
    mixed = attend_rows(query, rows, places, latent=LATENT, scale=width**-0.5)
    x = normed(x + mixed.reshape(len(x), -1) @ weights["out"])
    inner = jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])
    return normed(x + inner @ weights["down"])


def normed(x: jax.Array) -> jax.Array:
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True))
    return x * scale.astype(x.dtype)


def seconds_per_step(size: Size, batch: int, reuse: float, tier: Any) -> float:
    """Seconds of a step of `batch` requests; of the GPU, or of the host without one."""
    weights = init_weights(size)
    trace = Trace(batch=batch, context=size.context - 1, k=size.k, reuse=reuse, calls=1)
    x = jnp.ones((batch, size.hidden), jnp.bfloat16)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(arrays: Any, ids: jax.Array, weights: Any, x: jax.Array) -> Any:
        x = timestamps.stamp(x, 0)  # all work of the step depends on it
        for number, layer in enumerate(weights):
            rows, places, arrays = tier.find(arrays, number, x @ layer["row"], ids)
            x = attend(size, layer, x, rows, places)
        return arrays, timestamps.stamp(x, 1)

    arrays = tier.create(batch)
    for _ in range(WARMUP):  # until no slot is free
        arrays, _ = step(arrays, trace.next()[0], weights, x)
    timed, (arrays, out) = timestamps.measure(
        lambda state: step(state[0], trace.next()[0], weights, x), (arrays, None)
    )
    jaxkv.check_errors(out)
    if not bool(jnp.isfinite(out.astype(jnp.float32)).all()):
        raise AssertionError("the step's results are not finite")
    del arrays
    return timed.device


class InHbm:
    """All rows in HBM."""

    def __init__(self, size: Size):
        self.size = size

    def create(self, batch: int) -> jax.Array:
        shape = self.size.layers, batch, self.size.context, LATENT + ROPE
        return jnp.zeros(shape, jnp.bfloat16)

    def find(self, arrays: jax.Array, layer: int, rows: jax.Array, ids: jax.Array) -> Any:
        batch, context = arrays.shape[1:3]
        request = jnp.arange(batch)
        arrays = arrays.at[layer, request, context - 1].set(rows)
        places = (layer * batch + request[:, None]) * context + ids
        return arrays.reshape(-1, arrays.shape[-1]), places, arrays


class InHostMemory:
    """All rows in a host pool, those in use also in a hot buffer."""

    def __init__(self, size: Size):
        self.size = size
        self.spec = jaxkv.KVCacheSpec(
            size.layers, PAGE_SIZE, 1, LATENT + ROPE, jnp.bfloat16, kind="mla"
        )

    def create(self, batch: int) -> Any:
        size, columns = self.size, self.size.context // PAGE_SIZE
        pool = jaxkv.HostPool.create(self.spec, num_pages=size.pool_bytes // self.spec.page_bytes)
        order = np.random.default_rng(1).permutation(pool.num_pages).astype(np.int32)
        table = jnp.asarray(order[: batch * columns].reshape(batch, columns))
        state = sparse.SparseState.create(
            self.spec, batch=batch, slots=size.slots, max_length=size.context
        )
        return state, pool, table

    def find(self, arrays: Any, layer: int, rows: jax.Array, ids: jax.Array) -> Any:
        state, pool, table = arrays
        lengths = jnp.full(len(rows), self.size.context, jnp.int32)
        call = {"layer": layer, "block_table": table}
        state, pool = sparse.append(state, pool, rows[:, None], lengths[:, None] - 1, **call)
        places, state = sparse.fetch(state, pool, ids, lengths=lengths, **call)
        return state.rows, places, (state, pool, table)


def measure(results: Results, flags: Flags) -> None:
    size = FULL._replace(pool_bytes=flags.gib << 30) if on_gpu() else SMALL
    results.row("host pool", "size", "GiB", Figure(size.pool_bytes / 2**30))
    for reuse in (MAIN_REUSE,) if flags.quick else REUSE:
        rates = {}
        for tier, batch in ((InHbm(size), size.in_hbm), (InHostMemory(size), size.batch)):
            seconds = seconds_per_step(size, batch, reuse, tier)
            case = f"{type(tier).__name__}, {batch} requests of {size.context}, reuse {reuse:.0%}"
            rates[batch] = batch / seconds
            results.row(case, "time per step", "us", seconds * 1e6)
            results.row(case, THROUGHPUT, "token/s", rates[batch])
        gain = rates[size.batch] / rates[size.in_hbm]
        name = f"HBM for {size.in_hbm} of {size.batch} requests, reuse {reuse:.0%}: {GAIN}"
        results.row(name, GAIN, "x", gain)
        if on_gpu() and reuse == MAIN_REUSE:
            results.target(name, gain, ">=", WANTED, "x")


main = benchmark("sparse_decode", __doc__, measure, options=GIB_OPTION)

if __name__ == "__main__":
    sys.exit(main())
