"""The Qwen3 architecture in plain JAX, over the pages of a `jaxkv.DeviceCache`.

One function for prefill and decode, which differ only in the shape of the batch.
"""

import dataclasses
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

import jaxkv
from jaxkv import metadata
from jaxkv.metadata import BatchMetadata

Params = dict[str, Any]

# Full float32 products (no TF32), so that keys and values depend on the batch composition only up
# to float32 rounding.
einsum = partial(jnp.einsum, precision="highest")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a Qwen3 model, named as in Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True

    def build(self, make: Callable[[str, tuple[int, ...]], jax.Array]) -> Params:
        """The parameters, each built from its checkpoint name and shape; matrices are [out, in]."""
        hidden, inner, head = self.hidden_size, self.intermediate_size, self.head_dim
        queries, keys = self.num_attention_heads * head, self.num_key_value_heads * head
        layer = {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        embedding = make("model.embed_tokens.weight", (self.vocab_size, hidden))
        tied = self.tie_word_embeddings
        return {
            "embed_tokens": embedding,
            "layers": [
                {name: make(f"model.layers.{i}.{name}.weight", layer[name]) for name in layer}
                for i in range(self.num_hidden_layers)
            ],
            "norm": make("model.norm.weight", (hidden,)),
            "lm_head": embedding if tied else make("lm_head.weight", embedding.shape),
        }


def init_params(config: Config, seed: int, dtype: DTypeLike) -> Params:
    """Random weights for which each token depends on its entire context.

    Matrices preserve variance. The embedding is small, so that layer outputs dominate the input
    token in the residual stream, and attention is sharper than with unit norms, so that it does not
    degenerate to an average.
    """

    def make(name: str, shape: tuple[int, ...]) -> jax.Array:
        if len(shape) == 1:
            return jnp.full(shape, 2 if "q_norm" in name else 1, dtype)
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
        scale = 0.02 if name.startswith(("model.embed", "lm_head")) else shape[1] ** -0.5
        return scale * jax.random.normal(key, shape, dtype)

    return config.build(make)


class Batch(NamedTuple):
    """Up to T new tokens, concatenated by sequence."""

    tokens: jax.Array | np.ndarray  # int32[T]
    rows: BatchMetadata  # sequences of the tokens, and their pages


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding of x [T, heads, head_dim]."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def extend(
    pages: jax.Array, new: jax.Array, slots: jax.Array, tables: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes new [T, H, D] to pages [P, s, H, D] and gathers full sequences, [B, S, H, D]."""
    flat = pages.reshape(-1, *pages.shape[2:]).at[slots].set(new, mode="drop")
    pages = flat.reshape(pages.shape)
    return pages, pages[tables].reshape(len(tables), -1, *new.shape[1:])


def attend(q: jax.Array, keys: jax.Array, values: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention of q [T, heads, D] to [B, S, H, D] with mask [T, B, S].

    Computes the scores of every token with every sequence and masks the other sequences. A paged
    attention kernel would not; `jaxkv.metadata` builds its metadata from the same batch.
    """
    grouped = q.reshape(len(q), keys.shape[2], -1, q.shape[-1])
    scores = einsum("thgd,bshd->hgtbs", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(mask, scores * q.shape[-1] ** -0.5, -1e30)
    weights = jax.nn.softmax(scores, axis=(-2, -1)).astype(values.dtype)
    return einsum("hgtbs,bshd->thgd", weights, values).reshape(len(q), -1)


def forward(
    config: Config, params: Params, cache: jaxkv.DeviceCache, batch: Batch
) -> tuple[jax.Array, jaxkv.DeviceCache]:
    """Writes the keys and values of new tokens to their pages and computes causal attention.

    Returns:
      The logits after the last new token of each sequence, float32[B, vocab_size], and the cache.
    """
    rows, eps = batch.rows, config.rms_norm_eps
    positions = metadata.token_positions(rows)
    slots = metadata.slot_mapping(rows, positions)
    slots = jnp.where(slots < 0, cache.num_pages * rows.block_size, slots)  # past the end: dropped
    row = metadata.token_to_request(rows.query_start_loc, rows.max_num_tokens)
    own = row[:, None] == jnp.arange(rows.max_num_reqs)
    past = jnp.arange(rows.max_blocks * rows.block_size) <= positions[:, None]
    mask = own[:, :, None] & past[:, None, :]
    heads = (*positions.shape, -1, config.head_dim)
    x, layers = params["embed_tokens"][batch.tokens], []
    for layer, (k_pages, v_pages) in zip(params["layers"], cache.layers, strict=True):
        h = rms_norm(x, layer["input_layernorm"], eps)
        q, k, v = (
            einsum("ti,oi->to", h, layer[f"self_attn.{name}_proj"]).reshape(heads) for name in "qkv"
        )
        q = rotate(rms_norm(q, layer["self_attn.q_norm"], eps), positions, config.rope_theta)
        k = rotate(rms_norm(k, layer["self_attn.k_norm"], eps), positions, config.rope_theta)
        k_pages, keys = extend(k_pages, k, slots, rows.block_table)
        v_pages, values = extend(v_pages, v, slots, rows.block_table)
        layers.append((k_pages, v_pages))
        x += einsum("ti,oi->to", attend(q, keys, values, mask), layer["self_attn.o_proj"])
        h = rms_norm(x, layer["post_attention_layernorm"], eps)
        gate, up = (einsum("ti,oi->to", h, layer[f"mlp.{n}_proj"]) for n in ("gate", "up"))
        x += einsum("ti,oi->to", jax.nn.silu(gate) * up, layer["mlp.down_proj"])
    x = rms_norm(x[metadata.logits_indices(rows)], params["norm"], eps)
    logits = einsum("bi,oi->bo", x, params["lm_head"], preferred_element_type=jnp.float32)
    return logits, dataclasses.replace(cache, layers=tuple(layers))


@partial(jax.jit, static_argnames="config", donate_argnames="cache")
def next_tokens(
    config: Config, params: Params, cache: jaxkv.DeviceCache, batch: Batch
) -> tuple[jax.Array, jaxkv.DeviceCache]:
    """Greedy sampling after the last new token of each sequence, int32[B]; see `forward`."""
    logits, cache = forward(config, params, cache, batch)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache
