"""Attention over a random batch: dense, and over pages named by metadata.

The cache contains the tokens of earlier steps and noise everywhere else. A consumer writes the new
tokens to the slots of `slot_mapping` and reads pages back, so it must get both right.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.util.batches import Case

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16


@dataclasses.dataclass(frozen=True)
class Problem:
    """A batch's queries, keys and values.

    Attributes:
      case: the batch.
      queries: float32[T, H, D].
      new: float32[T, 2, K, D], keys and values of the query tokens.
      contexts: of each request float32[seq_len, 2, K, D].
    """

    case: Case
    queries: np.ndarray
    new: np.ndarray
    contexts: list[np.ndarray]

    @classmethod
    def random(cls, case: Case, *, head_dim: int = HEAD_DIM) -> "Problem":
        rng = np.random.default_rng(case.num_tokens)
        tokens, kv = case.bounds.max_num_tokens, (2, NUM_KV_HEADS, head_dim)
        contexts = [rng.standard_normal((n, *kv), np.float32) for n in case.seq_lens]
        queries = rng.standard_normal((tokens, NUM_Q_HEADS, head_dim), np.float32)
        queries /= np.float32(head_dim**0.5)
        new = np.zeros((tokens, *kv), np.float32)
        for start, query, context in zip(case.starts, case.query_lens, contexts, strict=False):
            new[start : start + query] = context[len(context) - query :]
        return cls(case, queries, new, contexts)

    def cache(self, *, world_size: int = 1, rank: int = 0, interleave: int = 1) -> np.ndarray:
        """float32[num_blocks, block_size, 2, K, D] of one rank, before this step."""
        size = self.case.bounds.block_size
        rng = np.random.default_rng(rank)
        cache = 9 + rng.standard_normal(
            (self.case.num_blocks, size, *self.new.shape[1:]), np.float32
        )
        for query, context, table in zip(
            self.case.query_lens, self.contexts, self.case.tables, strict=True
        ):
            earlier = np.arange(len(context) - query)
            mine = context[earlier[earlier // interleave % world_size == rank]]
            for i, entry in enumerate(mine):
                cache[table[i // size], i % size] = entry
        return cache

    def attention(self, chunk: int | None = None) -> np.ndarray:
        """float64[num_tokens, H, D]: each query token sees its context up to itself.

        With `chunk`, only the part in the same chunk of that number of tokens.
        """
        out = [np.zeros((0, *self.queries.shape[1:]))]
        for start, query, context in zip(
            self.case.starts, self.case.query_lens, self.contexts, strict=False
        ):
            keys, values = np.repeat(context, NUM_Q_HEADS // NUM_KV_HEADS, axis=2).swapaxes(0, 1)
            logits = np.einsum(
                "qhd,khd->hqk", self.queries[start : start + query], keys, dtype=np.float64
            )
            key, token = np.arange(len(context)), np.arange(len(context) - query, len(context))
            seen = key <= token[:, None]
            if chunk:
                seen &= key // chunk == token[:, None] // chunk
            weights = np.where(seen, np.exp(logits - logits.max(initial=0)), 0)
            weights /= weights.sum(axis=-1, keepdims=True)
            out.append(np.einsum("hqk,khd->qhd", weights, values))
        return np.concatenate(out)

    def check(self, got: Any, *, tolerance: float = 2e-5, chunk: int | None = None) -> None:
        got, want = np.asarray(got)[: self.case.num_tokens], self.attention(chunk)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def written(cache: Any, new: Any, slot_mapping: Any) -> Any:
    """`cache` with the new tokens in their slots."""
    slots = cache.reshape(-1, *cache.shape[2:])
    out_of_range = slots.shape[0]
    at = jnp.where(slot_mapping < 0, out_of_range, slot_mapping)
    return slots.at[at].set(new, mode="drop").reshape(cache.shape)


def attend(queries: Any, entries: Any, seen: Any) -> tuple[Any, Any]:
    """Attention of each token over its own keys and values.

    Args:
      queries: float32[T, H, D].
      entries: float32[T, S, 2, K, D].
      seen: bool[T, S].

    Returns:
      float32[T, H, D], zero where nothing is seen, and float32[T, H], the log-sum-exp.
    """
    entries = jnp.repeat(entries, NUM_Q_HEADS // NUM_KV_HEADS, axis=3)
    keys, values = entries[:, :, 0], entries[:, :, 1]
    logits = jnp.einsum("thd,tshd->ths", queries, keys, precision="highest")
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    sums = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(sums), sums, 0)[..., None])
    return jnp.einsum("ths,tshd->thd", weights, values, precision="highest"), sums


def attend_pages(queries: Any, cache: Any, pages: Any, kv_lens: Any) -> tuple[Any, Any]:
    """Attention of each token over the first `kv_lens` tokens of its own pages.

    Args:
      queries: float32[T, H, D].
      cache: float32[num_blocks, block_size, 2, K, D].
      pages: int32[T, W].
      kv_lens: int32[T].
    """
    entries = cache[pages].reshape(pages.shape[0], -1, *cache.shape[2:])
    seen = jnp.arange(entries.shape[1]) < kv_lens[:, None]
    return attend(queries, entries, seen)


def merge(*parts: tuple[Any, Any]) -> Any:
    """float32[T, H, D]: attention over all keys, merged from attention over subsets."""
    outputs = jnp.stack([output for output, _ in parts])
    sums = jnp.stack([part_sums for _, part_sums in parts])
    total = jax.nn.logsumexp(sums, axis=0)
    weights = jnp.where(jnp.isfinite(sums), jnp.exp(sums - total), 0)
    return jnp.sum(outputs * weights[..., None], axis=0)
