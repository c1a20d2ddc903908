"""Sampling on the device, with one seed for each request."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are chosen; greedy by default.

    Attributes:
      temperature: divisor of the logits; 0: the most likely token.
      top_p: sum of the probabilities of the tokens to choose from, in (0, 1]; at least one token.
      top_k: number of tokens to choose from; 0, or more than there are: all. As in vLLM, tokens as
        likely as the last one are kept, too.
      seed: modulo 2**32; equal seeds and prompts give equal answers, in float32 whatever else is in
        the batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            got = f"{self.temperature}, {self.top_p} and {self.top_k}"
            raise ValueError(f"temperature must be >= 0, top_p in (0, 1], top_k >= 0, got {got}")


GREEDY = Sampling()
_MAX_TEMPERATURE = float(np.finfo(np.float32).max)
_MAX_TOP_K = np.iinfo(np.int32).max


class SamplingRows(NamedTuple):
    """The parameters of a batch, one entry for each row."""

    temperature: Array  # float32[B]
    top_p: Array  # float32[B]
    top_k: Array  # int32[B]
    seed: Array  # uint32[B]

    @classmethod
    def of(cls, rows: list[Sampling], max_rows: int) -> "SamplingRows":
        rows = rows + [GREEDY] * (max_rows - len(rows))
        return cls(
            np.array([min(row.temperature, _MAX_TEMPERATURE) for row in rows], np.float32),
            np.array([row.top_p for row in rows], np.float32),
            np.array([min(row.top_k, _MAX_TOP_K) for row in rows], np.int32),
            np.array([row.seed % 2**32 for row in rows], np.uint32),
        )


def sample(logits: jax.Array, rows: SamplingRows, positions: jax.Array) -> jax.Array:
    """A token for each row, int32[B], from logits float32[B, vocab_size].

    The random numbers of a token depend on the seed of its request and its position only.
    """

    def noise(seed: Array, position: Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[1:])

    # Not above 0: a quotient by a small temperature must not overflow.
    scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
    scaled /= jnp.where(rows.temperature > 0, rows.temperature, 1)[:, None]
    descending = -jnp.sort(-scaled, axis=-1)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    rank = jnp.arange(logits.shape[1])
    top_k = jnp.where(rows.top_k > 0, rows.top_k, len(rank))[:, None]
    kept = ((before < rows.top_p[:, None]) | (rank == 0)) & (rank < top_k)
    least = jnp.min(jnp.where(kept, descending, jnp.inf), axis=-1, keepdims=True)
    drawn = jnp.where(scaled >= least, scaled + jax.vmap(noise)(rows.seed, positions), -jnp.inf)
    return jnp.where(rows.temperature > 0, drawn.argmax(-1), greedy(logits)).astype(jnp.int32)


def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row, int32[B]."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)
