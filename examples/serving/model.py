"""The Qwen3 architecture in JAX, over the pages of a `jaxkv.DeviceCache`.

One function for prefill and decode, which differ only in the shape of the batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

import jaxkv
from jaxkv import metadata
from jaxkv.metadata import BatchMetadata

from .attention import attend, einsum

Params = dict[str, Any]


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

    def cache_spec(self, page_size: int, dtype: DTypeLike) -> jaxkv.KVCacheSpec:
        heads, layers = self.num_key_value_heads, self.num_hidden_layers
        return jaxkv.KVCacheSpec(layers, page_size, heads, self.head_dim, dtype)

    def build(self, make: Callable[[str, tuple[int, ...]], Any]) -> Params:
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


def partition(name: str, shape: tuple[int, ...]) -> jax.P:
    """Tensor-parallel sharding of a parameter: heads and MLP columns over the axis "tp"."""
    layer = name.removesuffix(".weight")
    if layer.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
        return jax.P("tp", None)
    return jax.P(None, "tp") if layer.endswith(("o_proj", "down_proj")) else jax.P()


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


def write(pages: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """Writes new [T, heads, head_dim] to slots of pages [pages, page_size, heads, head_dim]."""
    return pages.reshape(-1, *pages.shape[2:]).at[slots].set(new, mode="drop").reshape(pages.shape)


def forward(
    config: Config, params: Params, layer_pages: Callable[..., tuple[jax.Array, ...]],
    tokens: jax.Array, rows: BatchMetadata, attention: str = "xla",
    reduce: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, tuple[tuple[jax.Array, jax.Array], ...]]:  # fmt: skip
    """Writes the keys and values of new tokens to their pages and computes causal attention.

    Args:
      config, params: the model; under tensor parallelism the shards of this device.
      layer_pages: `layer_pages(layer, after=x)` returns the (k, v) pages of a layer,
        `[pages, page_size, kv_heads, head_dim]`; its input x is computed before a wait for them.
      tokens: int32[T], concatenated by sequence.
      rows: sequences of the tokens, and their pages.
      attention: implementation, see attention.py.
      reduce: sum over the tensor-parallel devices.

    Returns:
      Logits after the last new token of each sequence, float32[B, vocab_size]; pages of all layers.
    """
    eps, theta = config.rms_norm_eps, config.rope_theta
    positions = metadata.token_positions(rows)
    slots = metadata.slot_mapping(rows, positions)
    slots = jnp.where(slots < 0, jnp.iinfo(jnp.int32).max, slots)  # past the end: dropped
    heads = (*positions.shape, -1, config.head_dim)
    x, layers = params["embed_tokens"][tokens], []
    for i, layer in enumerate(params["layers"]):
        h = rms_norm(x, layer["input_layernorm"], eps)
        q, k, v = (
            einsum("ti,oi->to", h, layer[f"self_attn.{n}_proj"]).reshape(heads) for n in "qkv"
        )
        q = rotate(rms_norm(q, layer["self_attn.q_norm"], eps), positions, theta)
        k = rotate(rms_norm(k, layer["self_attn.k_norm"], eps), positions, theta)
        k_pages, v_pages = layer_pages(i, after=x)
        k_pages, v_pages = write(k_pages, k, slots), write(v_pages, v, slots)
        layers.append((k_pages, v_pages))
        h = attend(attention, q, k_pages, v_pages, rows).reshape(len(x), -1)
        x += reduce(einsum("ti,oi->to", h, layer["self_attn.o_proj"]))
        h = rms_norm(x, layer["post_attention_layernorm"], eps)
        gate, up = (einsum("ti,oi->to", h, layer[f"mlp.{n}_proj"]) for n in ("gate", "up"))
        x += reduce(einsum("ti,oi->to", jax.nn.silu(gate) * up, layer["mlp.down_proj"]))
    x = rms_norm(x[metadata.logits_indices(rows)], params["norm"], eps)
    logits = einsum("bi,oi->bo", x, params["lm_head"], preferred_element_type=jnp.float32)
    return logits, tuple(layers)
