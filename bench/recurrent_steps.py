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
same states, and run in rounds.
"""

import functools
import gc
import math
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import timing
from bench.harness.main import on_gpu
from bench.harness.records import Results
from jaxkv.metadata import BatchMetadata
from jaxkv.recurrent import StateKind

DRAFTS = 3
MAX_BYTES = {"cpu": 16 << 20, "gpu": 32 << 30}
BLOCKING, PREDICATE, FUSED, COMBINED = "blocking", "predicate", "fused", "combined"
METHODS = (BLOCKING, PREDICATE, FUSED, COMBINED)
GPU_WORK = "GPU work only"
KINDS = (StateKind.CONV_SD, StateKind.TEMPORAL)
ACCEPTED = (1, 2, 2, 3, 3, 3, 4, 4, 4, 4)  # uniform choice
QUERY = 1 + DRAFTS
COLUMNS = 3 + DRAFTS  # an unused one, two for the context, and those for drafts
CALIBRATION_BATCH, HOST_SHARE = 16, 0.5
SKIP_RATE = "steps in which no state needs to be saved, by the predicate"
AS_FAST = 1.02  # of methods that run the same programs in most steps
MIN_ROUNDS, SECONDS = 15, 15.0


class Model(NamedTuple):
    """Recurrent states of a model, 2 bytes an element.

    Attributes:
      name: model name.
      layers: number of layers with recurrent states.
      width, dim: tokens of a convolution's window, including drafts, and their elements.
      temporal: shape of a temporal state.
      block_size: tokens per block.
    """

    name: str
    layers: int
    width: int
    dim: int
    temporal: tuple[int, int, int]
    block_size: int

    def shapes(self, conv: StateKind) -> dict[StateKind, tuple[int, ...]]:
        """Block shapes of the layer's two arrays."""
        window = (self.width, self.dim) if conv is StateKind.CONV_SD else (self.dim, self.width)
        return {conv: window, StateKind.TEMPORAL: self.temporal}

    def moved_bytes(self, bias: int) -> int:
        """Bytes copied per layer for a row whose state is `bias` tokens past its window's start."""
        return 2 * ((self.width - bias) * self.dim + math.prod(self.temporal))

    def states(self, num_blocks: int, conv: StateKind) -> list[tuple[jax.Array, ...]]:
        """Pseudorandom states of all layers, or of as many as fit into MAX_BYTES.

        Placed as the output of programs, which avoids a second compilation.
        """
        shapes, device = self.shapes(conv).values(), jax.devices()[0]
        per_layer = num_blocks * sum(2 * math.prod(shape) for shape in shapes)
        layers = min(self.layers, MAX_BYTES[jax.default_backend()] // per_layer)
        return [
            tuple(jax.device_put(scrambled((num_blocks, *shape)), device) for shape in shapes)
            for _ in range(max(1, layers))
        ]


MODELS = (
    Model("120B-class hybrid", 40, 3 + DRAFTS, 10240, (128, 64, 128), 4336),
    Model("small hybrid", 36, 3 + DRAFTS, 3328, (48, 64, 128), 400),
)


@functools.partial(jax.jit, static_argnums=0)
def scrambled(shape: tuple[int, ...]) -> jax.Array:
    """Pseudorandom uint16, made without the scratch memory of random bits."""
    index = jnp.arange(math.prod(shape), dtype=jnp.uint32)
    return ((index * jnp.uint32(2654435761)) >> 16).astype(jnp.uint16).reshape(shape)


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
    """States, rest, int32[B] accepted tokens, and their asynchronous copy to the host."""
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
        self.skipped = 0  # steps without state saving, by the predicate

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


def batch_of(model: Model, computed: np.ndarray, table: np.ndarray) -> BatchMetadata:
    """A batch of rows with QUERY tokens each."""
    rows, columns = table.shape
    return BatchMetadata.from_host(
        [QUERY] * rows, computed + QUERY, table, max_num_reqs=rows, max_num_tokens=rows * QUERY,
        max_blocks=columns, block_size=model.block_size,
    )  # fmt: skip


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
        self.ids = np.arange(batch, dtype=np.int32)
        self.device_ids = jax.device_put(self.ids, device)
        first = batch_of(model, self.computed, table)
        ones = np.ones(batch, np.int32)
        self.first = jax.device_put(StepState(first, ones, ones, np.int32(0)), device)
        self.refill()

    def refill(self) -> None:
        """Initial states."""
        self.states: Any = None  # frees the memory of the previous ones
        self.states = self.model.states(self.num_blocks, KINDS[0])

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
            host.skipped += skips
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

    def samples(self, budget: float) -> timing.Samples[str]:
        """Seconds of a step for each method, by round, for about `budget` seconds."""
        methods = (*METHODS, GPU_WORK)
        runs = {method: functools.partial(self.seconds, method) for method in methods}
        gc.collect()
        gc.disable()  # a collection within a round would distort one method's time
        samples = timing.compare(runs, MIN_ROUNDS, seconds=budget)
        gc.enable()
        return samples

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


def measure_steps(results: Results, *, quick: bool) -> None:
    """All models and batches."""
    width = 8192 if on_gpu() else 256
    weight = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16) * width**-0.5
    for model in MODELS[1:] if quick else MODELS:
        products = calibrate(results, model, weight, 6 if quick else 48)
        for batch in (1, 16) if quick else (1, 16, 64, 512, 1024):
            steps = 6 if quick else max(10, min(48, 1024 // batch))
            case = Case(model, batch, steps, weight, products)
            tokens = case.check() / steps  # per step
            rate = 100 * case.round(PREDICATE).skipped / steps
            case.refill()
            samples = case.samples(budget=0.0 if quick else SECONDS)
            name = f"{model.name}, {len(case.states)} layers, batch {batch}"
            results.row(name, SKIP_RATE, "%", timing.Figure(rate))
            gpu_work = GPU_WORK, samples.median(GPU_WORK) * 1e3
            for method in METHODS:
                seconds, of_method = samples.median(method), f"{name}: {method}"
                results.row(of_method, "time per step", "ms", seconds * 1e3, gpu_work)
                results.row(of_method, "token throughput", "tokens/s", tokens / seconds)
            record_ratios(results, name, samples)
            del case


def record_ratios(results: Results, name: str, samples: timing.Samples[str]) -> None:
    got = samples.ratio(COMBINED, BLOCKING)
    results.row(f"{name}: time per step", "combined vs. blocking", "x", got)
    faster = min(PREDICATE, FUSED, key=samples.median)
    got = samples.ratio(COMBINED, faster)
    case = f"{name}: time per step, combined vs. the faster alternative"
    results.target(case, got, "<=", AS_FAST, "x")
