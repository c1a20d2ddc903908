"""The program of a step: copies of pages beside the model, then sampling.

Variants (`Program`) differ in what they copy and in the static bounds of their batch; each is
compiled once.
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


@dataclasses.dataclass(frozen=True)
class Program:
    """Static arguments of a step.

    Attributes:
      config: the model.
      attention: implementation, see attention.py.
      copy: "load", "store" or "none"; of the pages in `Inputs.copies`.
      sampling: False: all rows are greedy.
      implementation: of copies; None: the fastest.
      memory: symmetric memory of the tensor-parallel axis "tp"; None: one device.
      pool: sharding of the host pool.
    """

    config: Config
    attention: str
    copy: str = "none"
    sampling: bool = False
    implementation: str | None = None
    memory: jaxkv.SymmetricMemory | None = None
    pool: P | None = None


class Inputs(NamedTuple):
    """Arrays of a step from the host: T tokens, B rows."""

    tokens: Array  # int32[T]; ignored where `source` is not negative
    source: Array  # int32[T], slot of the last sampled token to use instead
    rows: BatchMetadata
    slots: Array  # int32[B], place of the sampled token in `last`; out of range: not sampled
    sampling: SamplingRows
    copies: Array  # int32[2, n], host and device pages


class State(NamedTuple):
    """Arrays that stay on the device from step to step."""

    cache: jaxkv.DeviceCache
    last: jax.Array  # int32[max_num_reqs], last sampled token of each slot


def _step(
    program: Program,
    params: Params,
    state: State,
    pool: jaxkv.HostPool | None,
    inputs: Inputs,
) -> tuple[State, jax.Array, jaxkv.HostPool | None]:
    """One step on one device; returns the state, the sampled tokens int32[B], and the pool."""
    cache, last = state
    how: Any = program.implementation
    handle: jaxkv.LoadHandle | jaxkv.StoreHandle | None = None
    if program.copy == "load":
        handle = jaxkv.start_load(_given(pool), cache, *inputs.copies, implementation=how)
    elif program.copy == "store":
        handle = jaxkv.start_store(_given(pool), cache, *inputs.copies, implementation=how)

    def layer_pages(layer: int, x: jax.Array) -> tuple[jax.Array, ...]:
        pages: tuple[jax.Array, ...]
        pages = handle.wait(layer, after=x) if handle else cache.layers[layer]
        return pages

    def reduce(x: jax.Array) -> jax.Array:
        if program.memory is None:
            return x
        summed: jax.Array = jaxkv.all_reduce(program.memory, x, "tp")
        return summed

    chosen = last.at[inputs.source].get(mode="clip")
    tokens = jnp.where(inputs.source < 0, inputs.tokens, chosen)
    logits, layers = forward(
        program.config, params, layer_pages, tokens, inputs.rows, program.attention, reduce
    )
    sampled = greedy(logits)
    if program.sampling:
        sampled = sample(logits, inputs.sampling, inputs.rows.seq_lens)
    last = last.at[inputs.slots].set(sampled, mode="drop")
    if isinstance(handle, jaxkv.StoreHandle):
        pool = handle.pool
    return State(dataclasses.replace(cache, layers=layers), last), sampled, pool


def _given(pool: jaxkv.HostPool | None) -> jaxkv.HostPool:
    assert pool is not None, "copies need a host pool"
    return pool


def _sharded_step(
    program: Program, params: Params, state: State, pool: jaxkv.HostPool | None, inputs: Inputs
) -> tuple[State, jax.Array, jaxkv.HostPool | None]:
    if program.memory is None:
        state, sampled, pool = _step(program, params, state, pool, inputs)
    else:
        state_spec: Any = State(CACHE, P())  # type: ignore[arg-type]  # a prefix of its pytree
        state, sampled, pool = jax.shard_map(
            partial(_step, program),
            mesh=program.memory.mesh,
            in_specs=(program.config.build(partition), state_spec, program.pool, P()),
            out_specs=(state_spec, P(), program.pool),
            check_vma=False,
        )(params, state, pool, inputs)
    return state, sampled, pool if program.copy == "store" else None


# The pool is donated where it is written, and otherwise stays the caller's.
_jit = partial(jax.jit, static_argnames="program")
_run = _jit(_sharded_step, donate_argnames="state")
_run_store = _jit(_sharded_step, donate_argnames=("state", "pool"))


def run(
    program: Program, params: Params, state: State, pool: jaxkv.HostPool | None, inputs: Inputs
) -> tuple[State, jax.Array, jaxkv.HostPool | None]:
    """Dispatches a step; returns the state, the sampled tokens int32[B], and the pool."""
    if program.copy == "none":
        return *_run(program, params, state, None, inputs)[:2], pool
    if program.copy == "load":
        return *_run(program, params, state, pool, inputs)[:2], pool
    return _run_store(program, params, state, pool, inputs)
