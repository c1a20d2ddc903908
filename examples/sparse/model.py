"""A small model with sparse attention in plain JAX: indexer, top-k, latent attention over rows.

The structure of DeepSeek V3.2's attention: the indexer scores all earlier tokens by small keys that
stay in HBM; attention reads the latent rows of the best k. Where these rows are is up to the caller
of `decode`: it passes a function that stores the row of the new token and finds the chosen ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from examples.sparse.attention import NEVER, attend_rows

Params = dict[str, Any]

einsum = partial(jnp.einsum, precision="highest")
# (layer, new rows [B, r], ids [B, k]) -> rows [n, r], and the places of the ids there, [B, k]
Find = Callable[[int, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocab: int = 256
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    latent: int = 32  # elements of a row
    index_heads: int = 2
    index_dim: int = 16
    top_k: int = 16


@partial(jax.jit, static_argnums=(0, 1))
def init_params(config: Config, seed: int) -> Params:
    """Random weights."""
    keys = iter(jax.random.split(jax.random.key(seed), 2 + 8 * config.layers))

    def matrix(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) * shape[0] ** -0.5

    def layer() -> Params:
        c = config
        return {
            "row": matrix(c.hidden, c.latent),
            "query": matrix(c.hidden, c.heads, c.latent),
            "out": matrix(c.heads * c.latent, c.hidden),
            "index_key": matrix(c.hidden, c.index_dim),
            "index_query": matrix(c.hidden, c.index_heads, c.index_dim),
            "index_weight": matrix(c.hidden, c.index_heads),
            "up": matrix(c.hidden, 2 * c.hidden),
            "down": matrix(2 * c.hidden, c.hidden),
        }

    return {
        "embedding": matrix(config.vocab, config.hidden) * config.vocab**0.5,
        "head": matrix(config.hidden, config.vocab),
        "layers": [layer() for _ in range(config.layers)],
    }


def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def choose(
    config: Config, params: Params, x: jax.Array, keys: jax.Array, lengths: jax.Array
) -> jax.Array:
    """The indexer: int32[B, k] positions of the best tokens before `lengths`, -1 if fewer.

    Args:
      x: [B, hidden], input of the layer.
      keys: [B, T, index_dim], or [T, index_dim] for all rows.
      lengths: int32[B].
    """
    query = einsum("bh,hid->bid", x, params["index_query"])
    form = "bid,btd->bit" if keys.ndim == 3 else "bid,td->bit"
    scores = jax.nn.relu(einsum(form, query, keys))
    scores = einsum("bit,bi->bt", scores, einsum("bh,hi->bi", x, params["index_weight"]))
    exists = jnp.arange(keys.shape[-2]) < lengths[:, None]
    best, ids = jax.lax.top_k(jnp.where(exists, scores, NEVER), config.top_k)
    return jnp.where(best > NEVER, ids, -1).astype(jnp.int32)


def attend(params: Params, x: jax.Array, rows: jax.Array, places: jax.Array) -> jax.Array:
    """Latent attention of x [B, hidden] to the rows at `places`, then the MLP; both added to x."""
    query = einsum("bh,hnr->bnr", norm(x), params["query"])
    latent = rows.shape[-1]
    mixed = attend_rows(query, rows, places, latent=latent, scale=latent**-0.5)
    x = x + einsum("bi,ih->bh", mixed.reshape(len(x), -1), params["out"])
    hidden = jax.nn.silu(einsum("bh,hi->bi", norm(x), params["up"]))
    return x + einsum("bi,ih->bh", hidden, params["down"])


def next_tokens(params: Params, x: jax.Array) -> jax.Array:
    logits = einsum("bh,hv->bv", norm(x), params["head"])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def decode(
    config: Config,
    params: Params,
    keys: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    find: Find,
) -> tuple[jax.Array, jax.Array]:
    """One step of a batch.

    Args:
      keys: [L, B, T, index_dim], keys of the indexer.
      tokens: int32[B], the last token of each request.
      lengths: int32[B], tokens of each request with this one; 0 for none.
      find: called for each layer with its number, the new rows [B, latent] and the chosen ids
        int32[B, k]; returns rows [n, latent] and which of them are those of the ids, int32[B, k],
        -1 for id -1.

    Returns:
      int32[B] next tokens, and the keys.
    """
    x = params["embedding"][tokens]
    request = jnp.arange(len(tokens))
    for number, layer in enumerate(params["layers"]):
        normed = norm(x)
        key = einsum("bh,hd->bd", normed, layer["index_key"])
        keys = keys.at[number, request, lengths - 1].set(key)
        ids = choose(config, layer, normed, keys[number], lengths)
        rows, places = find(number, einsum("bh,hr->br", normed, layer["row"]), ids)
        x = attend(layer, x, rows, places)
    return next_tokens(params, x), keys


def prefill(
    config: Config, params: Params, tokens: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All tokens of a padded prompt at once.

    Returns:
      The next token, rows [L, T, latent] and keys of the indexer [L, T, index_dim].
    """
    x = params["embedding"][tokens]
    lengths = jnp.arange(1, len(tokens) + 1)
    all_rows, all_keys = [], []
    for layer in params["layers"]:
        normed = norm(x)
        keys = einsum("th,hd->td", normed, layer["index_key"])
        rows = einsum("th,hr->tr", normed, layer["row"])
        ids = choose(config, layer, normed, keys, lengths)
        x = attend(layer, x, rows, ids)
        all_rows.append(rows)
        all_keys.append(keys)
    last = next_tokens(params, x[length - 1][None])[0]
    return last, jnp.stack(all_rows), jnp.stack(all_keys)
