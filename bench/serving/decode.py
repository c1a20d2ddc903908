"""Decode at the bandwidth of HBM, and metadata on the device: `python -m bench.serving.decode`.

Parts (`--part`), with the attention of examples/serving (FlashAttention-3 where available):

  attention  paged attention of all layers of Qwen3-8B, 64 sequences of 4,096 tokens, over the time
             to read the keys and values; metadata is built once, as in a step
  step       a step of Qwen3-8B for the same batch, over the time to read weights, keys and values
  scenario   32 requests of 256 tokens and 2,048 of answer: metadata built on the device and tokens
             that stay there, against both on the host

Shares are of the rate at which XLA sums 4 GiB, in rounds with it: their median, with its error. A
copy by the driver (bytes read and written) takes its place where it is faster.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import peak_bandwidth, timing
from bench.harness.records import Results
from bench.harness.timing import Figure
from bench.serving import runs, workloads
from bench.serving.runs import THROUGHPUT, Case, Wanted
from bench.serving.systems import HOST_METADATA, IN_HBM, Memory
from examples.serving import attention
from examples.serving.engine import Limits
from examples.serving.model import Config
from examples.serving.packed import pack
from examples.serving.presets import PRESETS, TINY, init_params
from examples.serving.sampling import GREEDY, SamplingRows
from examples.serving.step import Inputs, Program, State, jitted
from jaxkv.metadata import BatchMetadata

PARTS = ("scenario", "attention", "step")
WANTED_ATTENTION, WANTED_STEP = 0.80, 0.70
SCENARIO = Wanted("scenario", THROUGHPUT, HOST_METADATA, ">=", 1.05, IN_HBM)
ROUNDS = 45  # the share of attention is close to its target


class Size(NamedTuple):
    config: Config
    dtype: str
    batch: int
    tokens: int
    page_size: int
    read: int  # bytes of the sum

    @property
    def pages(self) -> int:
        """Pages of a sequence."""
        return self.tokens // self.page_size


FULL = Size(PRESETS["qwen3-8b"], "bfloat16", 64, 4096, 64, 4 << 30)
SMALL = Size(TINY, "float32", 4, 64, 16, 1 << 20)


def cases(flags: argparse.Namespace) -> list[Case]:
    """The scenario: concurrent requests, all pages in HBM."""
    if "scenario" not in (flags.part or PARTS):
        return []
    page_size, concurrent, prompt, answer = 64, 32, 256, 256 if flags.quick else 2048
    if flags.tiny:
        page_size, concurrent, prompt, answer = 16, 3, 8, 12
    model = "tiny" if flags.tiny else "qwen3-0.6b"
    pages = -(-(prompt + answer) // page_size)
    limits = Limits(page_size, concurrent, concurrent + 8 * page_size, pages)
    make = partial(  # other prompts in each repeat, as equal ones would be in HBM
        workloads.random_prompts, concurrent, prompt, answer, concurrent, PRESETS[model].vocab_size
    )
    in_hbm = pages * concurrent
    return [
        Case(
            f"{{}}, {model}", (IN_HBM, HOST_METADATA), limits, Memory(in_hbm, in_hbm, 0),
            {"scenario": make}, {} if flags.tiny else {"scenario": 10}, (SCENARIO,), model,
            "float32" if flags.tiny else "bfloat16",
        )
    ]  # fmt: skip


def measure(results: Results, flags: argparse.Namespace) -> None:
    size = SMALL if flags.tiny else FULL
    if "attention" in (flags.part or PARTS):
        measure_attention(results, size)
    if "step" in (flags.part or PARTS):
        measure_step(results, size)


class Chain:
    """Calls that follow each other on the device.

    Attributes:
      state: after the last call.
    """

    def __init__(self, step: Callable[[Any], Any], state: Any, num_bytes: int) -> None:
        """`step` reads `num_bytes` and is compiled here."""
        self.num_bytes = num_bytes
        self._run = partial(timing.seconds_per_call, step, repeats=1)
        taken, self.state = self._run(state, calls=2)
        self._calls = timing.chain_length(taken)

    def __call__(self) -> float:
        """Seconds per byte."""
        taken, self.state = self._run(self.state, calls=self._calls, warmup=0)
        return taken / self.num_bytes


def sum_by_xla(num_bytes: int) -> Chain:
    array = jnp.ones(num_bytes // 4, jnp.float32)
    # The sum depends on the one before: chained calls cannot be merged or reordered.
    step = jax.jit(lambda before, array: jnp.sum(jnp.abs(array + before * 0)))
    return Chain(lambda before: step(before, array), jnp.zeros(()), num_bytes)


def batch_of(size: Size) -> BatchMetadata:
    """A decode batch of full sequences at random pages."""
    rng = np.random.default_rng(0)
    pages = rng.permutation(size.batch * size.pages).reshape(size.batch, -1)
    return BatchMetadata.from_host(
        [1] * size.batch,
        [size.tokens] * size.batch,
        pages.tolist(),
        max_num_reqs=size.batch,
        max_num_tokens=size.batch,
        max_blocks=size.pages,
        block_size=size.page_size,
    )


def measure_attention(results: Results, size: Size) -> None:
    config = size.config
    kind = attention.select(None, np.dtype(size.dtype), config.head_dim)
    shape = (size.batch * size.pages, size.page_size, config.num_key_value_heads, config.head_dim)
    num_layers = config.num_hidden_layers
    arrays = [
        jax.random.normal(jax.random.key(i), shape, size.dtype) for i in range(2 * num_layers)
    ]
    layers = [*zip(arrays[::2], arrays[1::2], strict=True)]
    q = jnp.ones((size.batch, config.num_attention_heads, config.head_dim), size.dtype)

    @jax.jit
    def chain(q: jax.Array, layers: Any, rows: BatchMetadata) -> jax.Array:
        for k, v in layers:
            q = attention.attend(kind, q, k, v, rows)
        return q

    rows = jax.device_put(batch_of(size))
    attend = Chain(lambda q: chain(q, layers, rows), q, sum(array.nbytes for array in arrays))
    if not bool(jnp.isfinite(attend.state.astype(jnp.float32)).all()):
        raise AssertionError("attention is not finite")
    case = f"{kind}, {size.batch} x {size.tokens} tokens"
    case += f", heads {config.num_attention_heads}/{config.num_key_value_heads}"
    _record(results, f"decode attention, {case}", attend, size, num_layers, WANTED_ATTENTION)


def measure_step(results: Results, size: Size) -> None:
    config = size.config
    params = init_params(config, 0, size.dtype)
    spec = config.cache_spec(size.page_size, size.dtype)
    cache = jaxkv.DeviceCache.create(spec, num_pages=size.batch * size.pages)
    state = State(cache, jnp.zeros(size.batch, jnp.int32))
    kind = attention.select(None, np.dtype(size.dtype), config.head_dim)
    slots = np.arange(size.batch, dtype=np.int32)
    inputs = Inputs(
        np.zeros(size.batch, np.int32), slots, batch_of(size), slots,
        SamplingRows.of([GREEDY], size.batch), jaxkv.OffloadEngine(0).padding_batches()[0],
    )  # fmt: skip
    run = partial(jitted(inputs), Program(config, kind), params)
    uploaded = jax.device_put(pack(inputs))
    # Of the embedding, only a row for each token is read.
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - params["embed_tokens"].nbytes
    num_bytes = weights + spec.page_bytes * size.batch * size.pages
    step = Chain(lambda state: run(state, None, uploaded)[0], state, num_bytes)
    case = f"decode step, {size.batch} x {size.tokens} tokens, {num_bytes / 1e9:.1f} GB"
    _record(results, case, step, size, 1, WANTED_STEP)
    jaxkv.check_errors(step.state)
    for leaf in jax.tree.leaves((params, step.state)):
        leaf.delete()


def _record(
    results: Results, case: str, chain: Chain, size: Size, calls: int, wanted: float
) -> None:
    """Compares a chain, each step of which has `calls` calls of the case, with reading HBM."""
    samples = timing.compare({"sum": sum_by_xla(size.read), "chain": chain}, ROUNDS)
    name, copied = peak_bandwidth.device_copy()
    rates = {name + ", read and written": Figure(2 * copied)}
    rates["sum by XLA"] = 1e-9 / samples.median("sum")
    rate = 1e-9 / samples.median("chain")
    results.row(case, "time", "us", samples.median("chain") * (chain.num_bytes / calls * 1e6))
    results.row(case, "bandwidth", "GB/s", rate, max(rates.items(), key=lambda item: item[1]))
    share = min(samples.ratio("sum", "chain"), rate / (2 * copied))
    if jax.default_backend() == "gpu":
        results.target(f"{case}: share of HBM bandwidth", share, ">=", wanted, "x", 1.0)


main = partial(runs.main, "serving_decode", __doc__, cases, PARTS, also=measure)

if __name__ == "__main__":
    sys.exit(main())
