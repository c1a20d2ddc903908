"""The program of a step: copies of pages beside the model, then sampling.

Compiled once for each `Program`, kind of copies, and bound of the batch.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxkv
from jaxkv.metadata import BatchMetadata

from .model import Config, Params, forward, partition
from .sampling import Array, SamplingRows, greedy, sample

P = jax.P
CACHE = P(None, None, "tp")  # sharding of `DeviceCache`, over KV heads


class Program(NamedTuple):
    """Static arguments of a step."""

    config: Config
    attention: str  # implementation, see attention.py
    memory: jaxkv.SymmetricMemory | None = None  # of the tensor-parallel axis "tp"
    pool: P | None = None  # sharding of the host pool
    sampling: bool = False  # False: all rows are greedy


class Inputs(NamedTuple):
    """Arrays of a step from the host: T tokens, B rows."""

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


Result = tuple[State, jax.Array, jaxkv.HostPool | None]


def _step(
    program: Program, params: Params, state: State, pool: jaxkv.HostPool | None, inputs: Inputs
) -> Result:
    """A step on one device; returns the state, the sampled tokens int32[B], and a stored pool."""
    cache, last = state
    copies: Any = inputs.copies.start(pool, cache)

    def reduce(x: jax.Array) -> jax.Array:
        summed: jax.Array = jaxkv.all_reduce(program.memory, x, "tp") if program.memory else x
        return summed

    chosen = last.at[inputs.source].get(mode="clip")
    tokens = jnp.where(inputs.source < 0, inputs.tokens, chosen)
    logits, layers = forward(
        program.config, params, copies.wait, tokens, inputs.rows, program.attention, reduce
    )
    sampled = greedy(logits)
    if program.sampling:
        sampled = sample(logits, inputs.sampling, inputs.rows.seq_lens)
    last = last.at[inputs.slots].set(sampled, mode="drop")
    stored = copies.pool if inputs.copies.kind == "store" else None
    return State(dataclasses.replace(cache, layers=layers), last), sampled, stored


def _sharded_step(
    program: Program, params: Params, state: State, pool: jaxkv.HostPool | None, inputs: Inputs
) -> Result:
    if program.memory is None:
        return _step(program, params, state, pool, inputs)
    state_spec: Any = State(CACHE, P())  # type: ignore[arg-type]  # a prefix of its pytree
    sharded = jax.shard_map(
        partial(_step, program),
        mesh=program.memory.mesh,
        in_specs=(program.config.build(partition), state_spec, program.pool, P()),
        out_specs=(state_spec, P(), program.pool),
        check_vma=False,
    )
    result: Result = sharded(params, state, pool, inputs)
    return result


# The pool is donated where it is written, and otherwise stays the caller's.
_jit = partial(jax.jit, static_argnums=0)
_run = _jit(_sharded_step, donate_argnames="state")
_run_store = _jit(_sharded_step, donate_argnames=("state", "pool"))


def jitted(inputs: Inputs) -> Any:
    """The compiled function for these copies: takes a program, parameters, state, pool, inputs."""
    return _run_store if inputs.copies.kind == "store" else _run
