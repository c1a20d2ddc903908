"""A small hybrid language model in plain JAX: Mamba2-style layers and attention layers.

One function for prefill and draft verification: a step processes up to 1 + `drafts` tokens of each
row and stores the recurrent state after each draft token in the layout expected by
`jaxkv.recurrent.align_preprocess` and `jaxkv.recurrent.align_postprocess`.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata import BatchMetadata, num_computed_tokens, slot_mapping, token_positions
from jaxkv.metadata.mamba import state_indices
from jaxkv.recurrent import StateKind

Params = dict[str, Any]

einsum = partial(jnp.einsum, precision="highest")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    vocab: int = 512
    layers: str = "MMAM"  # M: recurrent, A: attention
    heads: int = 4
    head_dim: int = 16
    state_dim: int = 16
    window: int = 3  # previous tokens seen by the convolution
    drafts: int = 3
    block_size: int = 64  # tokens per block, for states and KV

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def kinds(self) -> list[dict[str, StateKind]]:
        """State kinds of the arrays in `Cache.states`."""
        kinds = {"conv": StateKind.CONV_SD, "temporal": StateKind.TEMPORAL}
        return [kinds] * self.layers.count("M")


class Cache(NamedTuple):
    """Recurrent states and KV cache, N blocks each."""

    # conv [N, window + drafts, C], temporal [N, heads, dim, state]
    states: list[dict[str, jax.Array]]
    kv: list[jax.Array]  # [N, block_size, 2, heads, head_dim]

    @classmethod
    def create(cls, config: Config, num_blocks: int) -> "Cache":
        channels = config.hidden + 2 * config.state_dim
        conv = (num_blocks, config.window + config.drafts, channels)
        temporal = (num_blocks, config.heads, config.head_dim, config.state_dim)
        pages = (num_blocks, config.block_size, 2, config.heads, config.head_dim)
        return cls(
            [{"conv": jnp.zeros(conv), "temporal": jnp.zeros(temporal)} for _ in config.kinds],
            [jnp.zeros(pages) for _ in range(config.layers.count("A"))],
        )


@partial(jax.jit, static_argnums=(0, 1))
def init_params(config: Config, seed: int) -> Params:
    """Random weights, and a draft model that is a random table of next tokens."""
    keys = iter(jax.random.split(jax.random.key(seed), 3 + 4 * len(config.layers)))

    def matrix(rows: int, columns: int) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns)) * rows**-0.5

    hidden, channels = config.hidden, config.hidden + 2 * config.state_dim
    layers = []
    for kind in config.layers:
        if kind == "A":
            layers.append({"in": matrix(hidden, 3 * hidden), "out": matrix(hidden, hidden)})
            continue
        layers.append(
            {
                "in": matrix(hidden, hidden + channels + config.heads),
                "conv": matrix(config.window + 1, channels),
                "decay": jax.random.uniform(next(keys), (config.heads,), minval=0.1),
                "out": matrix(hidden, hidden),
            }
        )
    table = jax.random.randint(next(keys), (config.vocab, config.drafts), 0, config.vocab)
    return {
        "embedding": matrix(config.vocab, hidden),
        "layers": layers,
        "head": matrix(hidden, config.vocab),
        "drafter": table.astype(jnp.int32),
    }


class Grid(NamedTuple):
    """The batch in padded form, Q = 1 + drafts tokens per row, with its read and write indices."""

    positions: jax.Array  # int32[B, Q], position of each token in its context
    slots: jax.Array  # int32[B, Q], KV slots; out of range for padding
    fresh: jax.Array  # bool[B], rows whose context begins in this step
    certain: jax.Array  # int32[B], query tokens other than draft tokens
    ahead: jax.Array  # int32[B], draft tokens of the last step before the row's state
    read: jax.Array  # int32[B, Q], blocks of the state and of the draft tokens' states
    write: jax.Array  # int32[B, Q], likewise; out of range for no write


def make_grid(
    config: Config,
    batch: BatchMetadata,
    drafts: jax.Array | np.ndarray,
    accepted: jax.Array,
    num_blocks: int,
) -> Grid:
    place = jnp.arange(1 + config.drafts, dtype=jnp.int32)
    token = jnp.minimum(batch.query_start_loc[:-1, None] + place, batch.max_num_tokens - 1)
    used = place < batch.query_lens[:, None]
    positions = token_positions(batch)
    slots = slot_mapping(batch, positions)[token]
    blocks = state_indices(batch, mode="align", num_spec_tokens=config.drafts)
    written = (batch.query_lens[:, None] > 0) & (place <= drafts[:, None])
    return Grid(
        positions[token],
        jnp.where(used, slots, num_blocks * config.block_size),
        num_computed_tokens(batch) == 0,
        batch.query_lens - drafts,
        accepted - 1,
        blocks,
        jnp.where(written, blocks, num_blocks),
    )


def forward(
    config: Config,
    params: Params,
    cache: Cache,
    batch: BatchMetadata,
    tokens: jax.Array,
    grid: Grid,
) -> tuple[jax.Array, Cache]:
    """Logits [B, Q, vocab] of tokens int32[B, Q], and the updated cache."""
    states, kv = list(cache.states), list(cache.kv)
    x = params["embedding"][tokens]
    for i, (kind, weights) in enumerate(zip(config.layers, params["layers"], strict=True)):
        nth = config.layers[:i].count(kind)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
        if kind == "M":
            y, states[nth] = recurrent(config, weights, states[nth], y, grid)
        else:
            y, kv[nth] = attention(config, weights, kv[nth], y, batch.block_table, grid)
        x = x + einsum("bqi,io->bqo", y, weights["out"])
    return einsum("bqi,io->bqo", x, params["head"]), Cache(states, kv)


def recurrent(
    config: Config, weights: Params, state: dict[str, jax.Array], x: jax.Array, grid: Grid
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A short causal convolution, then h = decay * h + dt * x B, y = h C, head by head."""
    rows, places, hidden = x.shape
    row = jnp.arange(rows, dtype=jnp.int32)
    channels = hidden + 2 * config.state_dim
    gate, u, dt = jnp.split(
        einsum("bqi,io->bqo", x, weights["in"]), [hidden, hidden + channels], axis=-1
    )

    behind = grid.ahead[:, None] + jnp.arange(config.window)
    window = state["conv"][grid.read[:, :1], behind]
    seen = jnp.concatenate([jnp.where(grid.fresh[:, None, None], 0, window), u], axis=1)
    conv = sum(seen[:, k : k + places] * weight for k, weight in enumerate(weights["conv"]))
    inner, b, c = jnp.split(jax.nn.silu(conv), [hidden, hidden + config.state_dim], axis=-1)
    inner = inner.reshape(rows, places, config.heads, config.head_dim)

    dt = jax.nn.softplus(dt)[..., None, None]
    decay = jnp.exp(-dt * weights["decay"][:, None, None])
    h = state["temporal"][grid.read[row, grid.ahead]]
    h = jnp.where(grid.fresh[:, None, None, None], 0, h)
    after, y = [], []
    for t in range(places):
        h = decay[:, t] * h + dt[:, t] * inner[:, t, :, :, None] * b[:, t, None, None, :]
        after.append(h)
        y.append(einsum("bhds,bs->bhd", h, c[:, t]).reshape(rows, hidden))

    # The window up to the last non-draft token, followed by the inputs of the draft tokens.
    length = config.window + config.drafts
    indices = jnp.minimum(grid.certain[:, None] + jnp.arange(length), seen.shape[1] - 1)
    ends = jnp.clip(grid.certain[:, None] - 1 + jnp.arange(places), 0, places - 1)
    windows, temporal = seen[row[:, None], indices], jnp.stack(after, axis=1)[row[:, None], ends]
    return jnp.stack(y, axis=1) * jax.nn.silu(gate), {
        "conv": state["conv"].at[grid.write[:, 0]].set(windows, mode="drop"),
        "temporal": state["temporal"].at[grid.write].set(temporal, mode="drop"),
    }


def attention(
    config: Config, weights: Params, kv: jax.Array, x: jax.Array, block_table: jax.Array, grid: Grid
) -> tuple[jax.Array, jax.Array]:
    """Causal attention over the pages of each row."""
    rows, places, hidden = x.shape
    made = einsum("bqi,io->bqo", x, weights["in"])
    made = made.reshape(rows, places, 3, config.heads, config.head_dim)
    flat = kv.reshape(-1, *kv.shape[2:]).at[grid.slots].set(made[:, :, 1:], mode="drop")
    kv = flat.reshape(kv.shape)
    context = kv[block_table].reshape(rows, -1, *kv.shape[2:])
    scores = einsum("bqhd,bkhd->bhqk", made[:, :, 0], context[:, :, 0]) * config.head_dim**-0.5
    place = jnp.arange(context.shape[1], dtype=jnp.int32)
    visible = place <= grid.positions[:, None, :, None]
    probabilities = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    y = einsum("bhqk,bkhd->bqhd", probabilities, context[:, :, 1])
    return y.reshape(rows, places, hidden), kv
