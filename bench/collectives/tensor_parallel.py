"""A decode step under tensor parallelism: `python -m bench.collectives.tensor_parallel`.

A stack of layers with Qwen3-8B's shapes (bf16, seeded weights), sharded over 2, 4 and 8 devices of
one process by heads and feed-forward columns: two all-reduces of `[batch, hidden]` per layer.
Attention reads a short KV cache. The step is timed with `jaxkv.all_reduce`, with `jax.lax.psum`,
and without all-reduces: a lower bound of the step time, with wrong results. The three alternate.
Calls follow each other without waits, as in an engine that schedules ahead; each is donated the
activations of the previous one. Chains are long enough to hide the launch latency of the first
step. Last, the host time to lower a program with as many all-reduces as a large model has.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkv
from bench.harness import timing
from bench.harness.main import Flags, benchmark_of_devices, on_gpu
from bench.harness.records import Results

AXIS = "tp"
JAXKV, PSUM, NO_ALL_REDUCE = "jaxkv", "psum", "no all-reduce"
WANTED = 0.85
LOWERED, BETWEEN, WANTED_LOWERING_MS = 320, 14, 250  # all-reduces, operations between two of them
Reduce = Callable[[jax.Array], jax.Array]
Step = Callable[[jax.Array, Any], jax.Array]  # (activations, caches) -> activations
TOLERANCE = 0.05  # relative to the norm: different summation order, rounding to bf16 in every layer


class Model(NamedTuple):
    """Shapes of a stack of layers, and measurement parameters.

    Attributes:
      layers, hidden, heads, kv_heads, head_dim, ffn: of the unsharded model.
      context: tokens of a request in the cache.
      rounds: timed chains of steps per method.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    rounds: int

    def specs(self) -> dict[str, tuple[tuple[int, int], P]]:
        """Shape and sharding of each weight of a layer."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        columns, rows = P(None, AXIS), P(AXIS, None)
        return {
            "q": ((self.hidden, query), columns),
            "k": ((self.hidden, kv), columns),
            "v": ((self.hidden, kv), columns),
            "o": ((query, self.hidden), rows),
            "gate": ((self.hidden, self.ffn), columns),
            "up": ((self.hidden, self.ffn), columns),
            "down": ((self.ffn, self.hidden), rows),
        }


MODEL = Model(12, 4096, 32, 8, 128, 12288, context=128, rounds=7)
SMALL = Model(2, 64, 8, 8, 8, 128, context=8, rounds=2)


@functools.cache
def _normal(sharding: NamedSharding) -> Callable[[jax.Array, tuple[int, ...], float], jax.Array]:
    def make(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16) * scale

    return jax.jit(make, static_argnums=(1, 2), out_shardings=sharding)


def rms_norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def layer(
    model: Model,
    reduce: Reduce,
    x: jax.Array,
    weights: dict[str, jax.Array],
    cache: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """One device's part: `x` is `[batch, hidden]`, the cache's two `[batch, context, KV, D]`."""
    batch, normed = x.shape[0], rms_norm(x)
    q, k, v = (
        (normed @ weights[name]).reshape(batch, -1, model.head_dim) for name in ("q", "k", "v")
    )
    keys, values = (
        jnp.concatenate([old[:, 1:], new[:, None]], axis=1)
        for old, new in zip(cache, (rms_norm(k), v), strict=True)
    )
    grouped = rms_norm(q).reshape(batch, keys.shape[2], -1, model.head_dim)
    scores = jnp.einsum("bkgd,bckd->bkgc", grouped, keys) * model.head_dim**-0.5
    weighted = jnp.einsum("bkgc,bckd->bkgd", jax.nn.softmax(scores, axis=-1), values)
    x = x + reduce(weighted.reshape(batch, -1) @ weights["o"])
    normed = rms_norm(x)
    inner = jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])
    return x + reduce(inner @ weights["down"])


class Stack:
    """The weights on the devices, and steps over them."""

    def __init__(self, model: Model, world: int):
        self.model, self.world = model, world
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:world]), (AXIS,))
        self.weights = [self._weights(number) for number in range(model.layers)]

    def _put(self, key: jax.Array, shape: tuple[int, ...], spec: P, scale: float) -> jax.Array:
        return _normal(NamedSharding(self.mesh, spec))(key, shape, scale)

    def _weights(self, number: int) -> dict[str, jax.Array]:
        specs = self.model.specs()
        keys = jax.random.split(jax.random.key(number), len(specs))
        return {
            name: self._put(key, shape, spec, shape[0] ** -0.5)
            for key, (name, (shape, spec)) in zip(keys, specs.items(), strict=True)
        }

    def state(self, batch: int) -> Any:
        """Activations and caches for a batch."""
        model = self.model
        shape = (batch, model.context, model.kv_heads, model.head_dim)
        spec = P(None, None, AXIS, None)
        cache = [self._put(jax.random.key(number), shape, spec, 1.0) for number in (1, 2)]
        x = self._put(jax.random.key(0), (batch, model.hidden), P(), 1.0)
        return x, [tuple(cache)] * model.layers

    def step(self, reduce: Reduce) -> Step:
        """Jitted step: (donated activations, caches) -> next activations."""
        model = self.model
        one_layer = jax.jit(functools.partial(layer, model, reduce))  # traced once for all layers

        def run(x: jax.Array, caches: Any, weights: Any) -> jax.Array:
            for cache, of_layer in zip(caches, weights, strict=True):
                x = one_layer(x, of_layer, cache)
            return rms_norm(x)

        sharded = {name: spec for name, (_, spec) in model.specs().items()}
        mapped = jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(P(), P(None, None, AXIS, None), [sharded] * model.layers),
            out_specs=P(),
            check_vma=False,
        )
        jitted = jax.jit(mapped, donate_argnums=0)
        return lambda x, caches: jitted(x, caches, self.weights)


def measure_batches(results: Results, stack: Stack, batches: Sequence[int]) -> None:
    """All batch sizes on one number of devices."""
    model = stack.model
    max_bytes = max(batches) * model.hidden * 2
    with jaxkv.SymmetricMemory.create(stack.mesh, AXIS, max_bytes=max_bytes) as memory:
        reductions: dict[str, Reduce] = {
            JAXKV: lambda x: jaxkv.all_reduce(memory, x, AXIS),
            PSUM: lambda x: jax.lax.psum(x, AXIS),
            NO_ALL_REDUCE: lambda x: x,
        }
        steps = {name: stack.step(reduce) for name, reduce in reductions.items()}
        for batch in batches:
            message = jax.ShapeDtypeStruct((batch, model.hidden), jnp.bfloat16)
            samples = samples_of(stack, steps, batch)
            memory.check_errors()
            record(results, stack, batch, samples)
            print(jaxkv.explain(jaxkv.all_reduce, memory, message, AXIS), flush=True)
        measure_lowering(results, stack, reductions)


def samples_of(stack: Stack, steps: dict[str, Step], batch: int) -> timing.Samples[str]:
    """Seconds of a step for each method, by round.

    Raises:
      AssertionError: jaxkv and psum give different activations.
    """
    first, caches = stack.state(batch)
    outputs = {
        name: np.asarray(step(jnp.copy(first), caches), np.float32) for name, step in steps.items()
    }
    apart = np.linalg.norm(outputs[JAXKV] - outputs[PSUM]) / np.linalg.norm(outputs[PSUM])
    if not apart <= TOLERANCE:
        raise AssertionError(f"batch {batch}: activations differ by {apart:.3f} of their norm")
    calls = steps_of_chain(lambda: steps[PSUM](jnp.copy(first), caches))

    def sample(step: Step) -> float:
        taken, _ = timing.seconds_per_call(
            lambda x: step(x, caches), jnp.copy(first), calls=calls, repeats=1, warmup=0
        )
        return taken

    runs = {name: functools.partial(sample, step) for name, step in steps.items()}
    return timing.compare(runs, stack.model.rounds, warmup=1)  # the first captures the graphs


def steps_of_chain(step: Callable[[], jax.Array]) -> int:
    """Steps for a chain; the first ones compile and capture graphs."""
    if jax.default_backend() == "cpu":  # a waiting rank blocks one of a few threads
        return 2
    taken = 0.0
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(step())
        taken = time.perf_counter() - start
    return timing.chain_length(taken)


def record(results: Results, stack: Stack, batch: int, samples: timing.Samples[str]) -> None:
    case = f"{stack.world} devices, {stack.model.layers} layers, batch {batch}"
    milliseconds = samples.medians(1e3)
    own = milliseconds.pop(JAXKV)
    results.row(case, "time per step", "ms", own, None, milliseconds)
    if on_gpu():
        ratio, bound = (samples.ratio(name, PSUM) for name in (JAXKV, NO_ALL_REDUCE))
        results.target(f"{case}: time per step", ratio, "<=", WANTED, "x psum", bound)


def measure(results: Results, world: int, flags: Flags) -> None:
    stack = Stack(MODEL if on_gpu() else SMALL, world)
    measure_batches(results, stack, (16,) if flags.quick or not on_gpu() else (1, 4, 16, 64))


def measure_lowering(results: Results, stack: Stack, reductions: dict[str, Reduce]) -> None:
    """Host time from a traced program to its module: no device takes part."""

    def seconds(reduce: Reduce) -> float:
        def run(x: jax.Array) -> jax.Array:
            for _ in range(LOWERED):
                x = functools.reduce(lambda y, _: y * 0.5, range(BETWEEN), reduce(x))
            return x

        mapped = jax.shard_map(run, mesh=stack.mesh, in_specs=P(), out_specs=P(), check_vma=False)
        traced = jax.jit(mapped).trace(jax.ShapeDtypeStruct((1, stack.model.hidden), jnp.bfloat16))
        start = time.perf_counter()
        traced.lower()
        return time.perf_counter() - start

    runs = {name: functools.partial(seconds, reductions[name]) for name in (JAXKV, PSUM)}
    milliseconds = timing.compare(runs, 9 if on_gpu() else 2, warmup=1).medians(1e3)
    own, want = milliseconds.pop(JAXKV), ("<=", WANTED_LOWERING_MS)
    case = f"{stack.world} devices, {LOWERED} all-reduces in a program"
    results.row(case, "lowering", "ms", own, None, milliseconds, want)


def device_count(flags: Flags) -> int:
    with contextlib.suppress(RuntimeError):  # too late: JAX is initialized already
        jax.config.update("jax_num_cpu_devices", 2)
    return 2 if flags.quick and not on_gpu() else jax.device_count()


main = benchmark_of_devices("tensor_parallel", __doc__, measure, device_count)

if __name__ == "__main__":
    sys.exit(main())
