"""Continuous batching with sparse attention: the rows of all requests in HBM, or in host memory."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from examples.sparse.model import Config, Params, decode, prefill
from jaxkv import sparse


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of an engine: requests at a time, and tokens."""

    batch: int = 4
    max_length: int = 256
    max_prompt: int = 128
    page_size: int = 16
    slots: int = 48  # rows of a request and layer in HBM, if the others are in host memory


def spec_of(config: Config, sizes: Sizes) -> jaxkv.KVCacheSpec:
    return jaxkv.KVCacheSpec(
        config.layers, sizes.page_size, 1, config.latent, jnp.float32, kind="mla"
    )


class InHbm:
    """The rows of all tokens in HBM: `[L, B, T, latent]`."""

    def __init__(self, config: Config, sizes: Sizes):
        shape = config.layers, sizes.batch, sizes.max_length, config.latent
        self.arrays = jnp.zeros(shape)

    def admit(self, place: int, rows: jax.Array) -> None:
        self.arrays = self.arrays.at[:, place, : rows.shape[1]].set(rows)

    def end(self, places: np.ndarray) -> None:
        """Nothing to free: a new request overwrites the rows of the ended one."""

    def table(self) -> np.ndarray:
        return np.zeros((self.arrays.shape[1], 1), np.int32)

    @staticmethod
    def find(arrays: Any, layer: int, rows: jax.Array, ids: jax.Array, lengths: Any, _: Any):
        _, batch, max_length, latent = arrays.shape
        request = jnp.arange(batch)
        arrays = arrays.at[layer, request, lengths - 1].set(rows)
        places = (layer * batch + request[:, None]) * max_length + ids
        places = jnp.where(ids >= 0, places, -1)
        return arrays.reshape(-1, latent), places, arrays, jnp.int32(0)


class InHostMemory:
    """The rows of all tokens in a host pool, those in use also in a hot buffer."""

    def __init__(self, config: Config, sizes: Sizes):
        self.spec, columns = spec_of(config, sizes), sizes.max_length // sizes.page_size
        state = sparse.SparseState.create(
            self.spec, batch=sizes.batch, slots=sizes.slots, max_length=sizes.max_length
        )
        # Twice as many pages as in use: those of an ended request are used again by a later one.
        pool = jaxkv.HostPool.create(self.spec, num_pages=2 * sizes.batch * columns)
        self.arrays = state, pool
        self.free = [*range(pool.num_pages)]
        self.pages = np.full((sizes.batch, columns), -1, np.int32)

    def admit(self, place: int, rows: jax.Array) -> None:
        """Stores the prompt's pages; those of later tokens are filled by `append`."""
        self.pages[place] = [self.free.pop(0) for _ in self.pages[place]]
        state, pool = self.arrays
        number = rows.shape[1] // self.spec.page_size
        pool = _store(self.spec, pool, rows, jnp.asarray(self.pages[place, :number]))
        self.arrays = state, pool

    def end(self, places: np.ndarray) -> None:
        """Frees the pages and the rows in the hot buffer."""
        state, pool = self.arrays
        self.arrays = _release(state, jnp.asarray(places)), pool
        for pages in self.pages[places]:
            self.free.extend(map(int, pages))

    def table(self) -> np.ndarray:
        return self.pages.copy()

    @staticmethod
    def find(arrays: Any, layer: int, rows: jax.Array, ids: jax.Array, lengths: Any, table: Any):
        state, pool = arrays
        call = {"layer": layer, "block_table": table}
        state, pool = sparse.append(state, pool, rows[:, None], lengths[:, None] - 1, **call)
        slots = jnp.take_along_axis(
            state.slot_of[layer].astype(jnp.int32), jnp.maximum(ids, 0), axis=1
        )
        held = jnp.take_along_axis(state.positions[layer], slots, axis=1)
        places, state = sparse.fetch(state, pool, ids, lengths=lengths, **call)
        missing = ((held != ids) & (ids >= 0)).sum(dtype=jnp.int32)
        return state.rows, places, (state, pool), missing


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _store(spec: Any, pool: Any, rows: jax.Array, pages: jax.Array) -> Any:
    shape = spec.num_layers, len(pages), *spec.block_shape
    cache = jaxkv.DeviceCache(spec=spec, layers=tuple((r,) for r in rows.reshape(shape)))
    return jaxkv.start_store(pool, cache, pages, jnp.arange(len(pages))).pool


_release = jax.jit(sparse.release, donate_argnames="state")
_prefill = jax.jit(prefill, static_argnums=0)


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def _step(
    config: Config, find: Any, params: Params, arrays: Any, keys: Any, tokens: Any,
    lengths: jax.Array, table: jax.Array,
) -> Any:  # fmt: skip
    missing = []

    def of_layer(layer: int, rows: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        nonlocal arrays
        found, places, arrays, misses = find(arrays, layer, rows, ids, lengths, table)
        missing.append(misses)
        return found, places

    chosen = jnp.minimum(lengths, config.top_k).sum() * config.layers
    tokens, keys = decode(config, params, keys, tokens, lengths, of_layer)
    return tokens, arrays, keys, (sum(missing), chosen)


class Engine:
    """Generates greedily, `sizes.batch` requests at a time; `tier` has the rows.

    Attributes:
      missing, chosen: rows of all steps that were not in the hot buffer, and rows read.
    """

    def __init__(self, config: Config, sizes: Sizes, params: Params, tier: Any):
        self.config, self.sizes, self.params, self.tier = config, sizes, params, tier
        shape = config.layers, sizes.batch, sizes.max_length, config.index_dim
        self.keys = jnp.zeros(shape)
        self.missing = self.chosen = 0

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The answers, of `new_tokens` tokens each; ValueError if a request is too long."""
        longest = max(map(len, prompts), default=0)
        if longest > self.sizes.max_prompt or longest + new_tokens > self.sizes.max_length:
            raise ValueError(
                f"prompts of up to {longest} tokens and new_tokens={new_tokens}: at most "
                f"{self.sizes.max_prompt} and, in all, {self.sizes.max_length} tokens"
            )
        waiting = [*enumerate(prompts)]
        answers: list[list[int]] = [[] for _ in prompts]
        running = np.full(self.sizes.batch, -1)
        tokens, lengths = np.zeros_like(running), np.zeros_like(running)
        while waiting or (running >= 0).any():
            for place in np.flatnonzero(running < 0)[: len(waiting)]:
                request, prompt = waiting.pop(0)
                running[place], lengths[place] = request, len(prompt)
                tokens[place] = self._admit(int(place), prompt)
                answers[request].append(int(tokens[place]))
            lengths += running >= 0
            tokens = np.array(self._step(tokens, np.where(running >= 0, lengths, 0)))
            for place in np.flatnonzero(running >= 0):
                answers[running[place]].append(int(tokens[place]))
            ended = np.array([r >= 0 and len(answers[r]) >= new_tokens for r in running])
            if ended.any():
                self.tier.end(ended)
                running[ended] = -1
        jaxkv.check_errors(self.tier.arrays)
        return [answer[:new_tokens] for answer in answers]

    def _admit(self, place: int, prompt: list[int]) -> int:
        padded = np.zeros(self.sizes.max_prompt, np.int32)
        padded[: len(prompt)] = prompt
        token, rows, keys = _prefill(self.config, self.params, padded, jnp.int32(len(prompt)))
        self.keys = self.keys.at[:, place, : keys.shape[1]].set(keys)
        self.tier.admit(place, rows)
        return int(token)

    def _step(self, tokens: np.ndarray, lengths: np.ndarray) -> jax.Array:
        given = (values.astype(np.int32) for values in (tokens, lengths, self.tier.table()))
        following, self.tier.arrays, self.keys, (missing, chosen) = _step(
            self.config, self.tier.find, self.params, self.tier.arrays, self.keys, *given
        )
        self.missing += int(missing)
        self.chosen += int(chosen)
        return following
