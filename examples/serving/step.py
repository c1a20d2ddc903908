"""The program of a step: copies of pages during the model, then sampling.

Compiled once for each `Program`, kind of copies, and bound of the batch.
"""

import contextlib
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.metadata import BatchMetadata

from .model import Config, Params, forward, partition
from .packed import Packed, unpack
from .sampling import Array, SamplingRows, greedy, sample


class Program(NamedTuple):
    """Static arguments of a step."""

    config: Config
    attention: str  # implementation, see attention.py
    memory: jaxkv.SymmetricMemory | None = None  # of the tensor-parallel axis "tp"
    pool: jax.P | None = None  # sharding of the host pool
    sampling: bool = False  # False: all rows are greedy


class Inputs(NamedTuple):
    """Arrays of a step from the host: T tokens, B rows. They are uploaded as `Packed`."""

    tokens: Array  # int32[T]; ignored where `source` is not negative
    source: Array  # int32[T], slot of the last sampled token to use instead
    rows: BatchMetadata
    slots: Array  # int32[B], place of the sampled token in `last`; out of range: not sampled
    sampling: SamplingRows
    copies: jaxkv.CopyBatch


class State(NamedTuple):
    """Arrays that stay on the device from step to step."""

    cache: jaxkv.DeviceCache
    last: jax.Array  # int32[max_num_reqs], last sampled token of each slot


def _step(
    program: Program, params: Params, state: State, pool: jaxkv.HostPool | None, packed: Packed
) -> tuple[State, jax.Array, jaxkv.HostPool | None]:
    """A step on one device; returns the state, the sampled tokens int32[B], and a stored pool."""
    (cache, last), (config, attention, memory, _, sampling) = state, program
    inputs: Inputs = unpack(packed)
    copies: Any = inputs.copies.start(pool, cache)
    reduce: Any = (lambda x: jaxkv.all_reduce(memory, x, "tp")) if memory else lambda x: x
    chosen = last.at[inputs.source].get(mode="clip")
    tokens = jnp.where(inputs.source < 0, inputs.tokens, chosen)
    logits, layers = forward(config, params, copies.wait, tokens, inputs.rows, attention, reduce)
    sampled = sample(logits, inputs.sampling, inputs.rows.seq_lens) if sampling else greedy(logits)
    last = last.at[inputs.slots].set(sampled, mode="drop")
    stored = copies.pool if inputs.copies.kind == "store" else None
    return State(dataclasses.replace(cache, layers=layers), last), sampled, stored


def _sharded_step(program: Program, *arrays: Any) -> Any:
    step = partial(_step, program)
    if program.memory:
        heads: Any = jax.P(None, None, "tp")  # of all arrays of the cache
        state: Any = State(heads, jax.P())  # type: ignore[arg-type]
        inputs = (program.config.build(partition), state, program.pool, jax.P())
        specs: Any = {"in_specs": inputs, "out_specs": (state, jax.P(), program.pool)}
        step = jax.shard_map(step, mesh=program.memory.mesh, **specs, check_vma=False)
    return step(*arrays)


# The pool is donated where it is written, and otherwise stays the caller's.
_run = jax.jit(_sharded_step, static_argnums=0, donate_argnums=2)
_run_store = jax.jit(_sharded_step, static_argnums=0, donate_argnums=(2, 3))


def jitted(inputs: Inputs) -> Any:
    """The compiled function for these copies: of a program, parameters, state, pool, `Packed`."""
    return _run_store if inputs.copies.kind == "store" else _run


def copy_implementation(
    pool: jaxkv.HostPool | None, cache: jaxkv.DeviceCache, block_bytes: int
) -> Any:
    """Implementation of stores, and of loads during prompts; None: by the tuning table.

    Kernels take SMs from the step. The copy engine does not, but needs large blocks.
    """
    page = jaxkv.HostIds([0])
    if pool and block_bytes >= 64 << 10:
        with contextlib.suppress(NotImplementedError):  # e.g. on a CPU
            jaxkv.explain(jaxkv.start_load, pool, cache, page, page, implementation="dma")
            return "dma"
    return None
