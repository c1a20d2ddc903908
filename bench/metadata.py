"""Metadata built on the device, and NumPy with device_put: `python -m bench.metadata`.

- Each builder as a separate compiled program, for 256 rows and 8192 tokens: number of kernels,
  GPU time (the sum of the durations of its kernels, from a profile), and wall clock time of a call.
  Host baseline, where implemented here: wall clock time until its arrays, in one upload, are on the
  device.
- `flex.update` of the metadata of the previous step, in which each row has one token less, for two
  sizes of batches; baseline of its GPU time: `flex.build` of the same batch.
- Host time of `BatchMetadata.from_host` with a scheduler's padded block table, the largest input of
  a step.
- A decode step of 64 requests with all metadata of its attention: with precomputed metadata,
  with metadata built in the step from the batch that the previous step left on the device, and with
  metadata built on the host before the step. Each step ends with its tokens on the host, as in an
  engine that does not schedule ahead.
"""

import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness import host_metadata, profiler, timing
from bench.harness.main import Flags, benchmark, on_gpu
from bench.harness.records import Results
from jaxkv import metadata
from jaxkv.metadata import BatchMetadata

BLOCK_SIZE = 16
MAX_BLOCKS = 256
SHARED_BLOCKS = 16
NUM_BLOCKS = 65536  # of the cache
TREE = metadata.tree.tree_attn_bias([(0,), (0, 0), (0, 1), (1,), (1, 0)])
CHUNK = 1024  # of local attention
ROWS, TOKENS = 256, 8192
WANTED_US = 50
WANTED_UPDATE_US = {(ROWS, TOKENS): 25, (1024, 16384): 45}  # by rows and tokens
TABLE, WANTED_TABLE_US = (1024, 2048), 1000  # rows and blocks per row of `from_host`
UPDATES = 64  # steps of the same requests
STEP_REQUESTS = 64

STEP = f"decode step of {STEP_REQUESTS} requests"
PRECOMPUTED = "metadata precomputed"
IN_STEP, ON_HOST = "metadata built in the step", "metadata built on the host"
LATENCY = "latency (data available)"
HOST_BASELINE = "NumPy + one packed device_put"
QUICK_BUILDERS = 3


def make_batch(num_reqs: int, num_tokens: int) -> BatchMetadata:
    """A full batch on the host: half the rows decode, the others share the remaining tokens.

    Contexts start with the same blocks and otherwise have blocks of their own, as far as the cache
    has room.
    """
    rng = np.random.default_rng(0)
    query = np.ones(num_reqs, np.int64)
    rest = num_tokens - num_reqs
    query[num_reqs // 2 :] += rest // (num_reqs - num_reqs // 2)
    capacity = min(MAX_BLOCKS, SHARED_BLOCKS + (NUM_BLOCKS - SHARED_BLOCKS - 1) // num_reqs)
    computed = rng.integers(0, capacity * BLOCK_SIZE - query + 1)
    blocks = rng.permutation(np.arange(1, NUM_BLOCKS))
    table = np.zeros((num_reqs, capacity), np.int64)
    table[:, :SHARED_BLOCKS] = blocks[:SHARED_BLOCKS]
    own = blocks[SHARED_BLOCKS:][: num_reqs * (capacity - SHARED_BLOCKS)]
    table[:, SHARED_BLOCKS:] = own.reshape(num_reqs, -1)
    return BatchMetadata.from_host(
        query,
        query + computed,
        table,
        max_num_reqs=num_reqs,
        max_num_tokens=num_tokens,
        max_blocks=MAX_BLOCKS,
        block_size=BLOCK_SIZE,
    )


class Builder(NamedTuple):
    """A builder, and its host baseline where implemented here."""

    build: Callable[[BatchMetadata], Any]
    on_host: Callable[[BatchMetadata], Any] | None = None


def tokens(batch: BatchMetadata) -> Any:
    """Positions, rows and slots of all query tokens."""
    positions = metadata.token_positions(batch)
    rows = metadata.token_to_request(batch.query_start_loc, batch.max_num_tokens)
    return positions, rows, metadata.slot_mapping(batch, positions)


def reordered_sections(batch: BatchMetadata) -> Any:
    """Decodes, extends and prefills of the batch, put in order first."""
    batch, _, moved = metadata.reorder_batch_on_device(batch, batch.seq_lens)
    split = metadata.split_decodes_prefills_and_extends(batch)
    return metadata.sections(batch, split), moved


BUILDERS = {
    "tokens": Builder(tokens, host_metadata.tokens),
    "flashinfer": Builder(metadata.flashinfer.build, host_metadata.flashinfer),
    "ragged_paged": Builder(metadata.ragged_paged.build, host_metadata.ragged_paged),
    "flashinfer, dense": Builder(metadata.flashinfer.build_dense),
    "triton": Builder(
        functools.partial(metadata.triton.build, num_q_heads=32, num_kv_heads=8, head_dim=128)
    ),
    "turboquant": Builder(metadata.turboquant.build),
    "flex": Builder(functools.partial(metadata.flex.build, num_blocks=NUM_BLOCKS)),
    "mamba2, align": Builder(
        lambda batch: metadata.mamba.build(
            batch, is_prefilling=batch.query_lens > 1, mode="align", chunk_size=256
        )
    ),
    "gdn": Builder(
        lambda batch: metadata.gdn.build(
            batch,
            num_draft_tokens=jnp.where(batch.query_lens > 1, -1, 1),
            num_accepted_tokens=jnp.ones_like(batch.seq_lens),
            num_spec_tokens=1,
        )
    ),
    "reorder and sections": Builder(reordered_sections),
    "tree": Builder(functools.partial(metadata.tree.build, bias=TREE)),
    "cascade": Builder(functools.partial(metadata.cascade.build, num_common_blocks=16)),
    "fast_prefill": Builder(
        lambda batch: metadata.kv_sharing.build(
            batch, metadata.logits_indices(batch), batch.num_reqs
        )
    ),
    "local_attention": Builder(
        functools.partial(metadata.local_attention.build, chunk_size=CHUNK),
        functools.partial(host_metadata.local_attention, chunk=CHUNK),
    ),
}


def until_ready(call: Callable[[], Any]) -> timing.Figure:
    """Median latency of a call on an idle device, in microseconds."""
    jax.block_until_ready(call())
    return timing.single_call(lambda _: call(), None, repeats=20)[0].done * 1e6


def updates(batch: BatchMetadata) -> Callable[[], Any]:
    """Each call updates the metadata of the previous call, whose map of blocks it overwrites."""
    longest = (batch.block_table > 0).sum(axis=1) * BLOCK_SIZE
    grown = [jnp.minimum(batch.seq_lens + i, longest) for i in range(1, UPDATES + 1)]
    batches = itertools.cycle([dataclasses.replace(batch, seq_lens=lens) for lens in grown])
    build = jax.jit(functools.partial(metadata.flex.build, num_blocks=NUM_BLOCKS, updatable=True))

    def split(made: Any) -> tuple[jax.Array, Any]:
        """The map, which the next update overwrites, and the rest."""
        return made.physical_to_logical, dataclasses.replace(made, physical_to_logical=None)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(logical: jax.Array, others: Any, batch: BatchMetadata) -> tuple[jax.Array, Any]:
        before = dataclasses.replace(others, physical_to_logical=logical)
        return split(metadata.flex.update(before, batch))

    logical, others = split(build(batch))

    def call() -> Any:
        nonlocal logical, others
        logical, others = step(logical, others, next(batches))
        return others

    return call


def measure_builders(results: Results, quick: bool) -> None:
    on_host = make_batch(ROWS, TOKENS)
    batch = jax.device_put(on_host)
    for name, builder in [*BUILDERS.items()][: QUICK_BUILDERS if quick else None]:
        build = functools.partial(jax.jit(builder.build), batch)
        latency, baselines = until_ready(build), {}
        if host := builder.on_host:
            baselines[HOST_BASELINE] = until_ready(functools.partial(_put, host, on_host))
        case = f"{name}, {ROWS} rows, {TOKENS} tokens"
        results.row(case, LATENCY, "us", latency, None, baselines)
        add_kernels(results, case, build, WANTED_US)


def measure_updates(results: Results, quick: bool) -> None:
    build = jax.jit(BUILDERS["flex"].build)
    for (rows, tokens), wanted in [*WANTED_UPDATE_US.items()][: 1 if quick else None]:
        batch = jax.device_put(make_batch(rows, tokens))
        update, case = updates(batch), f"flex.update, {rows} rows, {tokens} tokens"
        results.row(case, LATENCY, "us", until_ready(update))
        built = profiler.profile(functools.partial(build, batch))
        baselines = {"flex.build": built.busy * 1e6} if built else {}
        add_kernels(results, case, update, wanted, baselines)


def add_kernels(
    results: Results,
    case: str,
    call: Callable[[], Any],
    wanted_us: float,
    baselines: Mapping[str, float] = MappingProxyType({}),
) -> None:
    if ran := profiler.profile(call):
        results.row(case, "kernels", "kernels", ran.number)
        results.row(case, "GPU time", "us", ran.busy * 1e6, None, baselines, ("<=", wanted_us))


def measure_tables(results: Results, rounds: int) -> None:
    """Host time of a batch from a padded block table, whose rows use random parts of it."""
    rows, width = TABLE
    rng = np.random.default_rng(0)
    used = rng.integers(1, width + 1, rows)
    table = rng.integers(1, NUM_BLOCKS, TABLE) * (np.arange(width) < used[:, None])

    def seconds(table: np.ndarray) -> float:
        start = time.perf_counter()
        BatchMetadata.from_host(
            np.ones(rows, np.int64),
            used * BLOCK_SIZE,
            table,
            max_num_reqs=rows,
            max_num_tokens=rows,
            max_blocks=width,
            block_size=BLOCK_SIZE,
        )
        return time.perf_counter() - start

    runs = {kind: functools.partial(seconds, table.astype(kind)) for kind in ("int32", "int64")}
    for kind, taken in timing.compare(runs, rounds, warmup=1).medians(1e6).items():
        case = f"BatchMetadata.from_host, table of {rows} x {width} blocks as {kind}"
        results.row(case, "host time", "us", taken, want=("<=", WANTED_TABLE_US))


def _put(build: Callable[[BatchMetadata], Any], batch: BatchMetadata) -> Any:
    return host_metadata.uploaded(build(batch))[0]


# A decode step


class Model(NamedTuple):
    """Weights of a decode step, and its activations."""

    weights: list[jax.Array]
    x: jax.Array


def make_model() -> Model:
    width, layers = (4096, 16) if on_gpu() else (256, 2)
    keys = jax.random.split(jax.random.key(0), layers + 1)
    weights = [jax.random.normal(key, (width, width), jnp.bfloat16) / 64 for key in keys[1:]]
    return Model(weights, jax.random.normal(keys[0], (STEP_REQUESTS, width), jnp.bfloat16))


def compute(model: Model, attention: Any) -> jax.Array:
    """Tokens, int32[STEP_REQUESTS], of a step that reads all of its metadata once."""
    read = jax.lax.optimization_barrier(jax.tree.leaves(attention))
    x = model.x + sum(jnp.sum(leaf).astype(jnp.bfloat16) for leaf in read)
    for weight in model.weights:
        x = jnp.tanh(x @ weight)
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def on_device(batch: BatchMetadata) -> Any:
    """All metadata for the attention of a step."""
    positions, _, slots = tokens(batch)
    return positions, slots, metadata.flashinfer.build(batch)


def on_host(batch: BatchMetadata) -> Any:
    made = host_metadata.tokens(batch)
    return made["positions"], made["slot_mapping"], host_metadata.flashinfer(batch)


@functools.partial(jax.jit, static_argnums=2)
def step_precomputed(model: Model, flat: jax.Array, layout: host_metadata.Layout) -> jax.Array:
    return compute(model, host_metadata.unpacked(flat, layout))


@functools.partial(jax.jit, donate_argnums=1)
def step_with_build(model: Model, batch: BatchMetadata) -> tuple[jax.Array, BatchMetadata]:
    """The tokens, and the batch of the next step: one more token in each row."""
    tokens = compute(model, on_device(batch))
    return tokens, dataclasses.replace(batch, seq_lens=batch.seq_lens + 1)


def measure_step(results: Results, quick: bool) -> None:
    """Wall clock time of a step for each method; interleaved, so that clock changes affect all."""
    model = make_model()
    steps, rounds = (5, 2) if quick else (50, 9)
    first = make_batch(STEP_REQUESTS, STEP_REQUESTS)
    room = MAX_BLOCKS * BLOCK_SIZE - steps
    seq_lens: Any = np.minimum(first.seq_lens, room)
    first = dataclasses.replace(first, seq_lens=seq_lens)

    def precomputed(attention: Any) -> Any:
        np.asarray(step_precomputed(model, *attention))
        return attention

    def built_in_step(batch: BatchMetadata) -> BatchMetadata:
        tokens, batch = step_with_build(model, batch)
        np.asarray(tokens)
        return batch

    def built_on_host(batch: BatchMetadata) -> BatchMetadata:
        np.asarray(step_precomputed(model, *host_metadata.uploaded(on_host(batch))))
        return dataclasses.replace(batch, seq_lens=batch.seq_lens + 1)

    methods: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
        PRECOMPUTED: (precomputed, lambda: host_metadata.uploaded(on_host(first))),
        IN_STEP: (built_in_step, lambda: jax.device_put(first)),
        ON_HOST: (built_on_host, lambda: first),
    }

    def seconds(run: Callable[[Any], Any], begin: Callable[[], Any]) -> float:
        state = begin()
        jax.block_until_ready(jax.tree.leaves(state))
        start = time.perf_counter()
        for _ in range(steps):
            state = run(state)
        return (time.perf_counter() - start) / steps

    runs = {name: functools.partial(seconds, *method) for name, method in methods.items()}
    for name, taken in timing.compare(runs, rounds, warmup=1).medians(1e6).items():
        results.row(f"{STEP}, {name}", LATENCY, "us", taken)


def measure(results: Results, flags: Flags) -> None:
    measure_updates(results, flags.quick)
    measure_builders(results, flags.quick)
    measure_tables(results, rounds=9 if flags.quick else 100)
    measure_step(results, flags.quick)


main = benchmark("metadata", __doc__, measure)

if __name__ == "__main__":
    sys.exit(main())
