"""Speculative decoding steps of a hybrid model, with four methods of saving its states.

`blocking` (previously upstream): in every step the host waits for the accepted counts, decides, and
issues the required copies. `predicate` (vLLM PR 42574): a step for which the host can prove that no
copy is required skips all that, and its counts are read later. `fused` (vLLM PR 40172): the step
program always saves the states itself; the counts are read later. `combined`: the host chooses
between that program and one without saving.

The model is a chain of matrix products, long enough that the host time of a step is half its GPU
time at batch 16; the states of a step are moved and saved in all layers. Contexts are spread evenly
between two block boundaries, so that the share of rows that cross one is that of a long run. Rows
that can't cross one in a round share one block: nothing reads or writes their states. All methods
run the same programs on the same acceptances (on average 3 tokens, as upstream), must produce the
same states, and are interleaved. Nearly equal methods are compared by the median of the ratios of
their rounds, with its standard error.
"""

import functools
import gc
import statistics
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import timing
from bench.harness.records import Results
from bench.recurrent.hybrid_models import DRAFTS, MAX_BYTES, MODELS, Model, scrambled
from jaxkv.metadata import BatchMetadata
from jaxkv.recurrent import StateKind

BLOCKING, PREDICATE, FUSED, COMBINED = "blocking", "predicate", "fused", "combined"
METHODS = (BLOCKING, PREDICATE, FUSED, COMBINED)
GPU_WORK = "GPU work only"
KINDS = (StateKind.CONV_SD, StateKind.TEMPORAL)
ACCEPTED = (1, 2, 2, 3, 3, 3, 4, 4, 4, 4)  # uniform choice
QUERY = 1 + DRAFTS
COLUMNS = 3 + DRAFTS  # an unused one, two for the context, and those for drafts
CALIBRATION_BATCH, HOST_SHARE = 16, 0.5
WANTED = 0.87
AS_FAST = 1.02  # of methods that run the same programs in most steps
MIN_ROUNDS = 7


class StepState(NamedTuple):
    """State carried from step to step in addition to the recurrent states.

    Attributes:
      batch: of the next step.
      counts: int32[B], accepted by the last step, matching the positions of its states.
      columns: int32[B], of the running states.
      number: int32[], of the next step.
    """

    batch: BatchMetadata
    counts: jax.Array | np.ndarray
    columns: jax.Array | np.ndarray
    number: jax.Array | np.int32


def compute(x: jax.Array, weight: jax.Array, products: int) -> jax.Array:
    """Stand-in for the model; a loop whose trip count XLA knows, as it compiles fast."""
    return jax.lax.fori_loop(0, products, lambda _, y: jnp.tanh(y @ weight), x)


@functools.partial(jax.jit, static_argnames=("products", "saves"), donate_argnames="states")
def step(
    states: Any, rest: StepState, weight: jax.Array, ids: jax.Array, *, products: int, saves: bool
) -> tuple[Any, StepState, jax.Array, jaxkv.recurrent.DeferredCounts]:
    """Also returns int32[B] accepted tokens, and their asynchronous copy to the host."""
    batch, kinds = rest.batch, [KINDS] * len(states)
    drafts = jnp.full(ids.shape, DRAFTS, jnp.int32)
    states, _, columns = jaxkv.recurrent.align_preprocess(
        states, batch, rest.counts, kinds=kinds, state_idx=rest.columns
    )
    x = jnp.ones((batch.max_num_tokens, weight.shape[0]), weight.dtype)
    x = compute(x * (rest.number % 2 + 1).astype(weight.dtype), weight, products)
    mixed = (ids * 7919 + rest.number * 104729) % 7907  # the same for every method and round
    never = (x[::QUERY, 0] > 2).astype(jnp.int32)
    sampled = jnp.asarray(ACCEPTED, jnp.int32)[(mixed + never) % len(ACCEPTED)]
    counts = sampled
    if saves:
        states, counts = jaxkv.recurrent.align_postprocess(
            states, batch, sampled, kinds=kinds, num_drafts=drafts
        )
    deferred = jaxkv.recurrent.DeferredCounts.start(sampled, step=rest.number, request_ids=ids)
    query_lens = jnp.full(ids.shape, QUERY, jnp.int32)
    batch = jaxkv.recurrent.advance(batch, sampled, num_drafts=drafts, next_query_lens=query_lens)
    return states, StepState(batch, counts, columns, rest.number + 1), sampled, deferred


@functools.partial(jax.jit, donate_argnames="states")
def save(states: Any, batch: BatchMetadata, sampled: jax.Array) -> tuple[Any, jax.Array]:
    """The state saving of `step` as a separate program."""
    kinds, drafts = [KINDS] * len(states), jnp.full(sampled.shape, DRAFTS, jnp.int32)
    return jaxkv.recurrent.align_postprocess(states, batch, sampled, kinds=kinds, num_drafts=drafts)


@jax.jit
def fingerprint(states: Any) -> jax.Array:
    """uint32 hash of states and their positions."""

    def mixed(state: jax.Array) -> jax.Array:
        index = jax.lax.iota(jnp.uint32, state.size).reshape(state.shape)
        weights = (index * jnp.uint32(2654435761)) >> 16
        return jnp.sum(state.astype(jnp.uint32) * weights, dtype=jnp.uint32)

    return jnp.stack([mixed(state) for state in states]).sum(dtype=jnp.uint32)


class Scheduler:
    """Host work of a step: an engine's work for every request and every layer."""

    def __init__(self, model: Model, computed: np.ndarray):
        self.model, self.computed = model, computed.copy()
        self.requests = [{"tokens": int(n), "blocks": 0, "done": False} for n in computed]
        self.metadata: list[dict[str, Any]] = []

    def accept(self, counts: np.ndarray) -> None:
        """Records what a step accepted, and prepares every layer's metadata for the next."""
        block_size = self.model.block_size
        self.computed += counts
        for request, count in zip(self.requests, counts.tolist(), strict=True):
            request["tokens"] += count
            request["blocks"] = -(-(request["tokens"] + QUERY) // block_size)
            request["done"] = request["tokens"] >= 1 << 20
        lens = self.computed + QUERY
        self.metadata = [
            {"seq_lens": lens.copy(), "longest": int(lens.max()), "columns": lens // block_size}
            for _ in range(self.model.layers)
        ]

    def can_skip(self, in_flight: int) -> bool:
        """Whether the next step needs no copy, for any 1 to QUERY tokens per step in flight."""
        slack, rows = DRAFTS * in_flight, np.ones_like(self.computed)
        return jaxkv.recurrent.can_skip_align_postprocess(
            self.computed + in_flight,
            (QUERY + slack) * rows,
            (DRAFTS + slack) * rows,
            self.model.block_size,
        )

    def needs_copy(self, counts: np.ndarray) -> bool:
        """Whether a context reaches another block boundary with these counts."""
        block_size = self.model.block_size
        return bool(((self.computed + counts) // block_size * block_size > self.computed).any())


class Case:
    """A batch of a model, and its states."""

    def __init__(self, model: Model, batch: int, steps: int, weight: jax.Array, products: int):
        self.model, self.steps, self.weight, self.products = model, steps, weight, products
        size, device = model.block_size, jax.devices()[0]
        self.computed = size + 1 + (2 * np.arange(batch) + 1) * (size - 1) // (2 * batch)
        near = np.flatnonzero(self.computed + (steps + 1) * QUERY >= 2 * size)
        table = np.ones((batch, COLUMNS), np.int32)  # block 1 is shared by all
        self.num_blocks = 2 + 2 * len(near)
        table[near, 1:3] = 2 + np.arange(2 * len(near)).reshape(-1, 2)
        self.shapes = [(self.num_blocks, *shape) for shape in model.shapes(KINDS[0]).values()]
        per_layer = sum(2 * int(np.prod(shape)) for shape in self.shapes)
        max_layers = MAX_BYTES[jax.default_backend()] // per_layer
        self.layers = max(1, min(model.layers, max_layers))
        self.ids = np.arange(batch, dtype=np.int32)
        self.device_ids = jax.device_put(self.ids, device)
        first = BatchMetadata.from_host(
            [QUERY] * batch,
            self.computed + QUERY,
            table,
            max_num_reqs=batch,
            max_num_tokens=batch * QUERY,
            max_blocks=COLUMNS,
            block_size=size,
        )
        ones = np.ones(batch, np.int32)
        self.first = jax.device_put(StepState(first, ones, ones, np.int32(0)), device)
        self.refill()

    def refill(self) -> None:
        """Initial states; placed as the output of steps, which avoids a second compilation."""
        device = jax.devices()[0]
        self.states: Any = None
        self.states = [
            tuple(jax.device_put(scrambled(shape), device) for shape in self.shapes)
            for _ in range(self.layers)
        ]

    def round(self, method: str) -> Scheduler:
        """Runs all steps once."""
        host, rest = Scheduler(self.model, self.computed), self.first
        in_flight: deque[tuple[int, jaxkv.recurrent.DeferredCounts]] = deque()

        def complete() -> None:
            number, deferred = in_flight.popleft()
            host.accept(deferred.read(step=number, request_ids=self.ids))

        for number in range(self.steps):
            if len(in_flight) == 2:
                complete()
            skips = method in (PREDICATE, COMBINED) and host.can_skip(len(in_flight))
            waits = method == BLOCKING or (method == PREDICATE and not skips)
            saves = method == FUSED or (method == COMBINED and not skips)
            batch = rest.batch
            rest, sampled, deferred = self.issue(rest, saves=saves)
            if not waits:
                in_flight.append((number, deferred))
                continue
            counts = np.asarray(sampled)
            while in_flight:
                complete()
            if host.needs_copy(counts):
                self.states, after = save(self.states, batch, sampled)
                rest = rest._replace(counts=after)
            host.accept(counts)
        while in_flight:
            complete()
        return host

    def issue(
        self, rest: StepState, *, saves: bool
    ) -> tuple[StepState, jax.Array, jaxkv.recurrent.DeferredCounts]:
        self.states, rest, sampled, deferred = step(
            self.states, rest, self.weight, self.device_ids, products=self.products, saves=saves
        )
        return rest, sampled, deferred

    def gpu_work(self) -> None:
        """Steps without host work."""
        rest = self.first
        for _ in range(self.steps):
            rest, *_ = self.issue(rest, saves=False)

    def check(self) -> int:
        """Compiles, and raises AssertionError if the methods' states differ; tokens of a round."""
        found = {}
        for method in METHODS:
            self.refill()
            host = self.round(method)
            jaxkv.check_errors(self.states)
            found[method] = int(fingerprint(self.states[-1])), host.computed.tobytes()
        if len(set(found.values())) > 1:
            raise AssertionError(f"the methods differ: {found}")
        save(self.states, self.first.batch, self.first.counts)  # compiles it if not used so far
        self.refill()
        return int((host.computed - self.computed).sum())

    def samples(self, budget: float) -> dict[str, list[float]]:
        """Seconds of a step for each method, by round, for about `budget` seconds."""
        methods = (*METHODS, GPU_WORK)
        runs = {method: functools.partial(self.seconds, method) for method in methods}
        return timing.rounds(runs, MIN_ROUNDS, seconds=budget)

    def seconds(self, method: str) -> float:
        """Seconds per step, in one round."""
        jax.block_until_ready(self.states)
        start = time.perf_counter()
        if method == GPU_WORK:
            self.gpu_work()
        else:
            self.round(method)
        jax.block_until_ready(self.states)
        return (time.perf_counter() - start) / self.steps


def calibrate(results: Results, model: Model, weight: jax.Array, steps: int) -> int:
    """Products per step, so that host time has its share at batch CALIBRATION_BATCH.

    Host time is that of all host work of a step, including dispatch: the time of a step with
    negligible GPU work.
    """
    case = Case(model, CALIBRATION_BATCH, steps, weight, products=1)
    case.check()
    host_time = timing.median([case.seconds(COMBINED) for _ in range(3)])
    results.row(
        f"{model.name}, batch {CALIBRATION_BATCH}", "host time per step", "ms", host_time * 1e3
    )
    chain = jax.jit(compute, static_argnames="products")
    x = jnp.ones((CALIBRATION_BATCH * QUERY, weight.shape[0]), weight.dtype)
    seconds, _ = timing.seconds_per_call(
        lambda x: chain(x, weight, products=100), x, calls=3, repeats=3
    )
    return max(1, round(host_time / HOST_SHARE / (seconds / 100)))


def measure(results: Results, *, quick: bool) -> None:
    """All models and batches."""
    on_gpu = jax.default_backend() == "gpu"
    width = 8192 if on_gpu else 256
    weight = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) * width**-0.5
    for model in MODELS[1:] if quick else MODELS:
        products = calibrate(results, model, weight, 6 if quick else 48)
        for batch in (1, 16) if quick else (1, 16, 64, 512, 1024):
            steps = 6 if quick else max(10, min(48, 1024 // batch))
            case = Case(model, batch, steps, weight, products)
            tokens = case.check() / steps  # per step
            gc.collect()
            gc.disable()  # a collection within a round would distort one method's time
            samples = case.samples(budget=0 if quick else 5)
            gc.enable()
            seconds = {method: timing.median(taken) for method, taken in samples.items()}
            name = f"{model.name}, {case.layers} layers, batch {batch}"
            gpu_work = (GPU_WORK, seconds[GPU_WORK] * 1e3)
            for method in METHODS:
                results.row(
                    f"{name}: {method}", "time per step", "ms", seconds[method] * 1e3, gpu_work
                )
                results.row(
                    f"{name}: {method}", "token throughput", "tokens/s", tokens / seconds[method]
                )
            times = ", ".join(f"{method} {value * 1e3:.3f}" for method, value in seconds.items())
            print(f"{name}, ms per step: {times}", flush=True)
            if on_gpu:
                record_targets(results, name, batch, samples)
            del case


def record_targets(
    results: Results, name: str, batch: int, samples: dict[str, list[float]]
) -> None:
    if batch == CALIBRATION_BATCH:
        got = timing.ratio(samples[COMBINED], samples[BLOCKING])
        results.target(f"{name}: time per step, combined vs. blocking", got, "<=", WANTED, "x")
    faster = min(PREDICATE, FUSED, key=lambda method: statistics.median(samples[method]))
    got = timing.ratio(samples[COMBINED], samples[faster])
    case = f"{name}: time per step, combined vs. {faster}, the faster alternative"
    results.target(case, got, "<=", AS_FAST, "x")
