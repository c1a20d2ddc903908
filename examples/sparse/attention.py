"""Attention to chosen rows of latents, which are read by their indices, without a gathered copy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

CHUNK, NUM_WARPS, NUM_STAGES = 64, 4, 2  # rows at a time
PROGRAMS = 256  # at most two for each of 132 SMs
NEVER = -1e30  # score of a row that is not attended to


def attend_rows(
    query: jax.Array, rows: jax.Array, places: jax.Array, *, latent: int, scale: float
) -> jax.Array:
    """Multi-query attention over the rows at `places`: keys are rows, values their first part.

    A Pallas kernel on GPUs, plain JAX elsewhere. Sums are float32.

        mixed = attend_rows(query, state.rows, places, latent=512, scale=576**-0.5)

    Args:
      query: `dtype[B, heads, width]`.
      rows: `dtype[n, width]`.
      places: int32[B, k], row of each chosen token; below 0: none.
      latent: leading elements of a row that are the value. On GPUs it and `width - latent` are
        powers of two from 16 on, the latter also 0.
      scale: factor of the scores.

    Returns:
      `dtype[B, heads, latent]`; 0 for a request without places.
    """
    run = attend_kernel if jax.default_backend() == "gpu" else attend_gathered
    return run(query, rows, places, latent=latent, scale=scale)


def attend_gathered(
    query: jax.Array, rows: jax.Array, places: jax.Array, *, latent: int, scale: float
) -> jax.Array:
    """As `attend_rows`, in plain JAX: all chosen rows are gathered first."""
    # The barrier keeps the gather out of the products, whose rounding would depend on its source.
    chosen = lax.optimization_barrier(rows[jnp.maximum(places, 0)])
    product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)
    scores = product("bnr,bkr->bnk", query, chosen) * scale
    valid = (places >= 0)[:, None]
    scores = jnp.where(valid, scores, NEVER)
    weights = jnp.where(valid, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0)
    total = weights.sum(axis=-1, keepdims=True)
    mixed = product("bnk,bkr->bnr", weights, chosen[..., :latent].astype(jnp.float32))
    return _divided(mixed, total).astype(query.dtype)


def _divided(mixed: jax.Array, total: jax.Array) -> jax.Array:
    return jnp.where(total > 0, mixed / jnp.where(total > 0, total, 1), 0)


def attend_kernel(
    query: jax.Array, rows: jax.Array, places: jax.Array, *, latent: int, scale: float,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """As `attend_rows`: the places of a request are split over several programs."""
    from jax.experimental.pallas import triton

    batch, heads, _ = query.shape
    chunks = pl.cdiv(places.shape[1], CHUNK)
    splits = 1
    while 2 * splits <= min(chunks, PROGRAMS // batch):
        splits *= 2
    chunks = pl.cdiv(chunks, splits)  # of a program
    padding = splits * chunks * CHUNK - places.shape[1]
    places = jnp.pad(places, ((0, 0), (0, padding)), constant_values=-1)
    padded = max(16, pl.next_power_of_2(heads))  # of a product of matrices
    query = jnp.pad(query, ((0, 0), (0, padded - heads), (0, 0)))
    parts = jax.ShapeDtypeStruct((batch, splits, padded), jnp.float32)
    mixed, largest, total = pl.pallas_call(
        functools.partial(_attend_part, latent, scale, chunks),
        name="attend_rows",
        out_shape=[parts.update(shape=(*parts.shape, latent)), parts, parts],
        grid=(batch, splits),
        compiler_params=triton.CompilerParams(num_warps=NUM_WARPS, num_stages=NUM_STAGES),
        interpret=interpret,
    )(query, rows, places)
    weights = jnp.exp(largest - largest.max(axis=1, keepdims=True))
    mixed = (mixed * weights[..., None]).sum(axis=1)[:, :heads]
    total = (total * weights).sum(axis=1)[:, :heads, None]
    return _divided(mixed, total).astype(query.dtype)


def _attend_part(
    latent: int, scale: float, chunks: int, query: Any, rows: Any, places: Any,
    mixed: Any, largest: Any, total: Any,
) -> None:  # fmt: skip
    """The kernel: `chunks` chunks of a request, with the maximum and the sum of their scores."""
    from jax.experimental.pallas import triton

    request, split = pl.program_id(0), pl.program_id(1)
    heads, width = query.shape[1:]
    head = jnp.arange(heads)
    # Sizes of arrays are powers of two in Triton, hence a row in two parts.
    parts = [jnp.arange(latent)]
    if width > latent:
        parts.append(latent + jnp.arange(width - latent))
    queries = [triton.load(query.at[request, head[:, None], part[None]]) for part in parts]
    precision = "highest" if rows.dtype == jnp.float32 else None
    product = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )

    def attend_chunk(chunk: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mixed, largest, total = carry
        first = (split * chunks + chunk) * CHUNK
        place = triton.load(places.at[request, first + jnp.arange(CHUNK)])
        row = jnp.maximum(place, 0)
        keys = [triton.load(rows.at[row[:, None], part[None]]) for part in parts]
        scores = sum(
            product(of_query, key, (((1,), (1,)), ((), ())))
            for of_query, key in zip(queries, keys, strict=True)
        )
        valid = (place >= 0)[None]
        scores = jnp.where(valid, scores * scale, NEVER)
        new = jnp.maximum(largest, scores.max(axis=1))
        weights = jnp.where(valid, jnp.exp(scores - new[:, None]), 0.0)
        before = jnp.exp(largest - new)
        value = product(weights.astype(rows.dtype), keys[0], (((1,), (0,)), ((), ())))
        return (
            mixed * before[:, None] + value,
            new,
            total * before + weights.sum(axis=1),
        )

    none = jnp.zeros((heads, latent)), jnp.full(heads, NEVER), jnp.zeros(heads)
    results = lax.fori_loop(0, chunks, attend_chunk, none)
    triton.store(mixed.at[request, split, head[:, None], parts[0][None]], results[0])
    triton.store(largest.at[request, split, head], results[1])
    triton.store(total.at[request, split, head], results[2])
