"""The same steps with asynchronous and with synchronous scheduling.

Accepted counts are produced on the device. In `run_async` they stay there: a step computes the next
step's batch itself (`jaxkv.recurrent.advance`), and the host reads the counts while the next step
runs. The host then knows the start of this step's rows and whether any may have reached a block
boundary, and only in that case dispatches the program that saves states. `run_sync` reads the
counts after every step, builds every batch on the host and always saves. Both run the same compiled
programs, so their results must be bitwise identical.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.metadata import BatchMetadata, num_computed_tokens

from .model import Cache, Config, Params, forward, make_grid

Array = jax.Array | np.ndarray


class Rows(NamedTuple):
    """Per-row inputs of a step."""

    batch: BatchMetadata
    drafts: Array  # int32[B], draft tokens among the query tokens
    accepted: Array  # int32[B], accepted tokens of the last step, consistent with its states
    state_idx: Array  # int32[B], column of each running state, -1 if there is none


class Requests(NamedTuple):
    """Constants of the requests, int32[B] each."""

    ids: Array
    prompt_lens: Array
    limits: Array  # number of computed tokens at which a row becomes idle


class Stepped(NamedTuple):
    """Results of a step."""

    cache: Cache
    tokens: jax.Array  # int32[B, L], prompt, generated tokens, draft tokens
    rows: Rows  # inputs of the next step, before states are saved
    sampled: jax.Array  # int32[B], accepted tokens
    deferred: jaxkv.recurrent.DeferredCounts


def to_device(arrays: Any) -> Any:
    """Places arrays like the results of a step; another placement would cause a recompilation."""
    return jax.device_put(arrays, jax.devices()[0])


def plan(config: Config, valid: Array, requests: Requests) -> tuple[Any, Any]:
    """Query and draft tokens of each row in the next step, int32[B]; for NumPy or JAX arrays."""
    left = requests.prompt_lens - valid
    decodes = (left <= 0) & (valid < requests.limits)
    query_lens = left.clip(0, 1 + config.drafts) + decodes * (1 + config.drafts)
    return query_lens.astype(np.int32), (decodes * config.drafts).astype(np.int32)


@partial(jax.jit, static_argnames="config", donate_argnames=("cache", "tokens"))
def step(
    config: Config,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    rows: Rows,
    requests: Requests,
    number: np.int32,
) -> Stepped:
    """Computes the query tokens of all rows and, from the accepted counts, the next inputs."""
    batch, drafts = rows.batch, rows.drafts
    states, accepted, state_idx = jaxkv.recurrent.align_preprocess(
        cache.states, batch, rows.accepted, kinds=config.kinds, state_idx=rows.state_idx
    )
    row = jnp.arange(batch.max_num_reqs, dtype=jnp.int32)
    num_blocks = states[0]["conv"].shape[0]
    grid = make_grid(config, batch, drafts, accepted, num_blocks)
    logits, cache = forward(
        config,
        params,
        cache._replace(states=states),
        batch,
        tokens[row[:, None], grid.positions],
        grid,
    )
    # Synthetic acceptance: the number of accepted draft tokens is random, independent of logits.
    key = jax.random.fold_in(jax.random.key(0), number)
    drawn = 1 + jax.random.randint(key, row.shape, 0, config.drafts + 1, jnp.int32)
    active = batch.query_lens > 0
    sampled = jnp.where(active, jnp.minimum(drawn, 1 + drafts), accepted)

    last = jnp.clip(grid.certain + sampled - 2, 0, config.drafts)
    chosen = jnp.argmax(logits[row, last], axis=-1).astype(jnp.int32)
    valid = num_computed_tokens(batch) + jnp.where(active, last + 1, 0)
    query = jnp.concatenate([chosen[:, None], params["drafter"][chosen]], axis=1)
    places = valid[:, None] + jnp.arange(1 + config.drafts, dtype=jnp.int32)
    answers = (active & (valid >= requests.prompt_lens))[:, None]
    places = jnp.where(answers, places, tokens.shape[1])
    tokens = tokens.at[row[:, None], places].set(query, mode="drop")

    next_query_lens, next_drafts = plan(config, valid, requests)
    next_batch = jaxkv.recurrent.advance(
        batch, sampled, num_drafts=drafts, next_query_lens=next_query_lens
    )
    deferred = jaxkv.recurrent.DeferredCounts.start(sampled, step=number, request_ids=requests.ids)
    next_rows = Rows(next_batch, next_drafts, sampled, state_idx)
    return Stepped(cache, tokens, next_rows, sampled, deferred)


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def save(
    config: Config, cache: Cache, batch: BatchMetadata, sampled: jax.Array, drafts: jax.Array
) -> tuple[Cache, jax.Array]:
    """Saves the states at block boundaries reached in the step; returns the updated counts too."""
    states, accepted = jaxkv.recurrent.align_postprocess(
        cache.states, batch, sampled, kinds=config.kinds, num_drafts=drafts
    )
    return cache._replace(states=states), accepted


class Start(NamedTuple):
    """Requests with all their blocks allocated in advance."""

    requests: Requests
    tokens: np.ndarray  # int32[B, L]
    block_table: np.ndarray  # int32[B, W]

    @classmethod
    def of(cls, config: Config, prompts: Sequence[Sequence[int]], new_tokens: int) -> "Start":
        lens = np.array([len(prompt) for prompt in prompts], np.int32)
        # The last sampled token is never processed.
        requests = Requests(np.arange(len(lens), dtype=np.int32), lens, lens + new_tokens - 1)
        longest = int(requests.limits.max()) + 2 * (1 + config.drafts)
        tokens = np.zeros((len(lens), longest), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        columns = -(-longest // config.block_size) + config.drafts  # blocks of draft states
        table = 1 + np.arange(len(lens) * columns, dtype=np.int32).reshape(-1, columns)
        return cls(requests, tokens, table)

    def batch(self, config: Config, query_lens: np.ndarray, valid: np.ndarray) -> BatchMetadata:
        rows, columns = self.block_table.shape
        return BatchMetadata.from_host(
            query_lens,
            valid + query_lens,
            self.block_table,
            max_num_reqs=rows,
            max_num_tokens=rows * (1 + config.drafts),
            max_blocks=columns,
            block_size=config.block_size,
        )

    def first_rows(self, config: Config) -> Rows:
        valid = np.zeros_like(self.requests.ids)
        query_lens, drafts = plan(config, valid, self.requests)
        batch = self.batch(config, query_lens, valid)
        return to_device(Rows(batch, drafts, np.ones_like(drafts), np.full_like(drafts, -1)))

    def outcome(self, config: Config) -> "Outcome":
        """Initial outcome, before the first step."""
        cache, tokens = to_device((Cache.create(config, 1 + self.block_table.size), self.tokens))
        return Outcome(cache, tokens, np.zeros_like(self.requests.ids))


@dataclasses.dataclass
class Outcome:
    """Results and statistics of a run."""

    cache: Cache
    tokens: jax.Array  # int32[B, L]
    valid: np.ndarray  # int32[B], number of computed tokens of each row
    steps: int = 0
    saves: int = 0

    def answers(self, requests: Requests) -> list[list[int]]:
        lens = zip(requests.prompt_lens, requests.limits, strict=True)
        rows = np.asarray(self.tokens).tolist()
        return [row[first : last + 1] for row, (first, last) in zip(rows, lens, strict=True)]


def run_async(config: Config, params: Params, start: Start) -> Outcome:
    """Asynchronous scheduling: dispatches each step before the previous counts are known."""
    requests, run = start.requests, start.outcome(config)
    rows, pending = start.first_rows(config), None
    while True:
        query_lens, drafts = plan(config, run.valid, requests)
        number = run.steps
        done = step(config, params, run.cache, run.tokens, rows, requests, np.int32(number))
        if pending is not None:
            # The step just dispatched keeps the device busy while the host blocks.
            with jaxkv.allow_host_sync("counts are read while the next step runs"):
                counts = pending.read(step=number - 1, request_ids=requests.ids)
            run.valid = run.valid + np.where(query_lens > 0, query_lens - drafts + counts - 1, 0)
            query_lens, drafts = plan(config, run.valid, requests)
        run.cache, run.tokens, pending = done.cache, done.tokens, done.deferred
        if not query_lens.any():  # the step just dispatched is empty
            return run
        run.steps += 1
        batch, device_drafts, rows = rows.batch, rows.drafts, done.rows
        if not jaxkv.recurrent.can_skip_align_postprocess(
            run.valid, query_lens, drafts, config.block_size
        ):
            run.saves += 1
            run.cache, accepted = save(config, run.cache, batch, done.sampled, device_drafts)
            rows = rows._replace(accepted=accepted)


def run_sync(config: Config, params: Params, start: Start) -> Outcome:
    """Synchronous scheduling: the host reads the counts of each step before building the next."""
    requests, run = start.requests, start.outcome(config)
    rows, state_idx = start.first_rows(config), np.full_like(requests.ids, -1)
    query_lens, drafts = plan(config, run.valid, requests)
    while query_lens.any():
        done = step(config, params, run.cache, run.tokens, rows, requests, np.int32(run.steps))
        run.cache, accepted = save(config, done.cache, rows.batch, done.sampled, rows.drafts)
        run.tokens = done.tokens
        run.steps, run.saves = run.steps + 1, run.saves + 1
        ran, ends = query_lens > 0, run.valid + query_lens
        state_idx = np.where(ran, -(-ends // config.block_size) - 1, state_idx)
        run.valid = np.where(ran, ends - drafts + np.asarray(done.sampled) - 1, run.valid)
        query_lens, drafts = plan(config, run.valid, requests)
        batch = start.batch(config, query_lens, run.valid)
        rows = to_device(Rows(batch, drafts, np.asarray(accepted), state_idx))
    return run
