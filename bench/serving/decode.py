"""Decode at the bandwidth of HBM, and metadata on the device: `python -m bench.serving.decode`.

Parts (`--part`), with the attention of examples/serving (FlashAttention-3 where available):

  attention  one layer's paged attention, 64 sequences of 4,096 tokens, heads of Qwen3-8B, over the
             time to read the keys and values
  step       a step of Qwen3-8B for the same batch, over the time to read weights, keys and values
  scenario   32 requests of 256 tokens and 2,048 of answer: metadata built on the device and tokens
             that stay there, against both on the host (NumPy, `device_put`, and a wait for the
             tokens before the next step)

The bandwidth of HBM is the higher one of a copy by the driver (bytes read and written) and of a sum
over 4 GiB by XLA, measured in the same run.
"""

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from bench.harness import peak_bandwidth, timing
from bench.harness.records import Results
from bench.metadata import host_baseline
from bench.serving import metrics, workloads
from bench.serving.systems import Measured
from examples.serving import attention
from examples.serving.engine import Limits
from examples.serving.model import PRESETS, TINY, Config, init_params
from examples.serving.sampling import GREEDY, SamplingRows
from examples.serving.step import Inputs, Program, State, run
from jaxkv.metadata import BatchMetadata

PARTS = ("attention", "step", "scenario")
WANTED_ATTENTION, WANTED_STEP, WANTED_SCENARIO = 0.80, 0.70, 1.05
REPEATS = 7


class Size(NamedTuple):
    config: Config
    dtype: str
    batch: int
    tokens: int
    page_size: int
    read: int  # bytes of the sum
    layers: int  # of the attention benchmark, so that caches do not keep any
    prompt: int
    answer: int
    concurrent: int

    @property
    def pages(self) -> int:
        """Of a sequence."""
        return self.tokens // self.page_size


FULL = Size(PRESETS["qwen3-8b"], "bfloat16", 64, 4096, 64, 4 << 30, 4, 256, 2048, 32)
SMALL = Size(TINY, "float32", 4, 64, 16, 1 << 20, 2, 8, 12, 3)


def hbm_bandwidth(size: Size) -> tuple[str, float]:
    """A description, and GB/s."""
    name, copied = peak_bandwidth.device_copy()
    array = jax.block_until_ready(jnp.ones(size.read // 4, jnp.float32))

    # The sum depends on the one before: chained calls cannot be merged or reordered.
    step = jax.jit(lambda before, array: jnp.sum(jnp.abs(array + before * 0)))
    seconds, _ = timing.seconds_per_call(
        lambda before: step(before, array), jnp.zeros(()), calls=8, repeats=REPEATS
    )
    rates = {f"{name}, read and written": 2 * copied, "sum by XLA": size.read / seconds / 1e9}
    return max(rates.items(), key=lambda item: item[1])


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


def measure_attention(results: Results, size: Size, hbm: tuple[str, float]) -> None:
    config = size.config
    kind = attention.select(None, np.dtype(size.dtype), config.head_dim)
    shape = (size.batch * size.pages, size.page_size, config.num_key_value_heads, config.head_dim)
    arrays = [
        jax.random.normal(jax.random.key(i), shape, size.dtype) for i in range(2 * size.layers)
    ]
    layers = [*zip(arrays[::2], arrays[1::2], strict=True)]
    q = jnp.ones((size.batch, config.num_attention_heads, config.head_dim), size.dtype)

    @jax.jit
    def chain(q: jax.Array, layers: Any, rows: BatchMetadata) -> jax.Array:
        for k, v in layers:
            q = attention.attend(kind, q, k, v, rows)
        return q

    rows = jax.device_put(batch_of(size))
    seconds, q = timing.seconds_per_call(
        lambda q: chain(q, layers, rows), q, calls=16, repeats=REPEATS
    )
    if not bool(jnp.isfinite(q.astype(jnp.float32)).all()):
        raise AssertionError("attention is not finite")
    seconds /= size.layers
    num_bytes = 2 * arrays[0].nbytes
    case = f"{kind}, {size.batch} x {size.tokens} tokens"
    case += f", heads {config.num_attention_heads}/{config.num_key_value_heads}"
    _record(results, f"decode attention, {case}", seconds, num_bytes, hbm, WANTED_ATTENTION)


def measure_step(results: Results, size: Size, hbm: tuple[str, float]) -> None:
    config = size.config
    params = init_params(config, 0, size.dtype)
    spec = jaxkv.KVCacheSpec(
        num_layers=config.num_hidden_layers, page_size=size.page_size,
        num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim, dtype=size.dtype,
    )  # fmt: skip
    cache = jaxkv.DeviceCache.create(spec, num_pages=size.batch * size.pages)
    state = State(cache, jnp.zeros(size.batch, jnp.int32))
    kind = attention.select(None, np.dtype(size.dtype), config.head_dim)
    slots = np.arange(size.batch, dtype=np.int32)
    inputs = jax.device_put(
        Inputs(
            np.zeros(size.batch, np.int32), slots, batch_of(size), slots,
            SamplingRows.of([GREEDY], size.batch), np.full((2, 1), -1, np.int32),
        )
    )  # fmt: skip
    program = Program(config, kind)
    seconds, state = timing.seconds_per_call(
        lambda state: run(program, params, state, None, inputs)[0], state, calls=8, repeats=REPEATS
    )
    jaxkv.check_errors(state)
    # Of the embedding, only a row for each token is read.
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) - params["embed_tokens"].nbytes
    num_bytes = weights + spec.page_bytes * size.batch * size.pages
    case = f"decode step, {size.batch} x {size.tokens} tokens, {num_bytes / 1e9:.1f} GB"
    _record(results, case, seconds, num_bytes, hbm, WANTED_STEP)
    for leaf in jax.tree.leaves((params, state)):
        leaf.delete()


def _record(
    results: Results, case: str, seconds: float, num_bytes: int, hbm: tuple[str, float], want: float
) -> None:
    rate = num_bytes / seconds / 1e9
    share = rate / hbm[1]
    print(f"{case}: {seconds * 1e6:.0f} us, {rate:.0f} GB/s, {share:.2f} of {hbm}", flush=True)
    results.row(case, "time", "us", seconds * 1e6)
    results.row(case, "bandwidth", "GB/s", rate, hbm)
    if jax.default_backend() == "gpu":
        results.target(f"{case}: share of HBM bandwidth", share, ">=", want, "x", 1.0)


class OnHost(Measured):
    """Metadata of each step in NumPy and a `device_put`, and a wait for the tokens before the next.

    The program still derives its metadata on the device, a few microseconds of GPU time more.
    """

    def step(self) -> None:
        super().step()
        if self._previous:
            previous, self._previous = self._previous, None
            self._finish(previous)

    def _run(self, inputs: Inputs, copy: str, sampling: bool) -> jax.Array:
        built = host_baseline.tokens(inputs.rows)
        self._built = jax.device_put(built | host_baseline.flashinfer(inputs.rows))
        return super()._run(inputs, copy, sampling)


def measure_scenario(results: Results, size: Size, model: str) -> None:
    config = PRESETS[model] if model else size.config
    params = init_params(config, 0, size.dtype)
    work = workloads.random_prompts(
        size.concurrent, size.prompt, size.answer, size.concurrent, config.vocab_size
    )
    pages = -(-(size.prompt + size.answer) // size.page_size)
    budget = size.concurrent + 8 * size.page_size
    limits = Limits(size.page_size, size.concurrent, budget, pages)
    rates: dict[str, float] = {}
    answers: dict[str, list[list[int]]] = {}
    engines: dict[str, Callable[..., Measured]] = {"on the device": Measured, "on the host": OnHost}
    for where, kind in engines.items():
        engine = kind(config, params, limits, pages * size.concurrent)
        engine.warm_up()
        start = time.perf_counter()
        served = workloads.run(engine, work)
        seconds = time.perf_counter() - start
        found = metrics.figures(engine, served)
        rates[where] = size.concurrent * size.answer / seconds
        answers[where] = [request.answer for request in served]
        case = f"scenario, {model or 'tiny'}, metadata and counts {where}"
        metrics.show("decode", case, found)
        for (metric, unit), value in found.items():
            results.row(case, metric, unit, value)
        for leaf in jax.tree.leaves(engine.state):
            leaf.delete()
    ratio = rates["on the device"] / rates["on the host"]
    name = f"scenario, {model or 'tiny'}: output throughput, metadata on the device / on the host"
    print(f"{name}: {ratio:.3f} x", flush=True)
    if jax.default_backend() == "gpu":
        results.target(name, ratio, ">=", WANTED_SCENARIO, "x")
    unequal = sum(
        a != b for a, b in zip(answers["on the device"], answers["on the host"], strict=True)
    )
    results.row(name, "unequal answers", "requests", unequal)  # near ties in bfloat16


def main(argv: Sequence[str] | None = None) -> int:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="DIR", help="also write the JSON file below DIR")
    parser.add_argument("--quick", action="store_true", help="answers of 256 tokens")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for any device")
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--model", choices=[*PRESETS], default="qwen3-0.6b", help="of the scenario")
    flags = parser.parse_args(argv)
    on_cpu = jax.default_backend() == "cpu"
    tiny = flags.tiny or on_cpu
    size = SMALL if tiny else FULL
    if flags.quick and not tiny:
        size = size._replace(answer=256)
    results = Results("serving_decode_tiny" if tiny and not on_cpu else "serving_decode")
    hbm = hbm_bandwidth(size)
    results.row("HBM", hbm[0], "GB/s", hbm[1])
    parts = {
        "attention": functools.partial(measure_attention, results, size, hbm),
        "step": functools.partial(measure_step, results, size, hbm),
        "scenario": functools.partial(measure_scenario, results, size, "" if tiny else flags.model),
    }
    for part in flags.part:
        parts[part]()
        results.save(flags.out)  # after each, as the next may not fit into the time
    return 0


if __name__ == "__main__":
    sys.exit(main())
