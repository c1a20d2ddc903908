"""Fast prefill for layers that share the KV cache of an earlier layer.

Such layers write no keys, so they only compute the tokens whose logits are needed. Follows vLLM's
make_kv_sharing_fast_prefill_common_attn_metadata, but computes all counts on the device: no host
sync, and no host copy that a builder could read before it is complete.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.common import BatchMetadata, check_batch
from jaxkv.metadata.segments import Array, count_before, int32_on_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FastPrefill:
    """A batch reduced to the tokens whose logits are needed.

    Attributes:
      batch: the same rows and contexts with at most N query tokens. The tokens of each row must be
        the last ones of its context, because causal masks are aligned to the end.
      logits_indices_padded: int32[N], indices of the tokens in the original batch, each once, to
        gather hidden states, positions and slots; padded with the last index.
      num_logits_indices: int32[], number of valid indices.

    The output of the last token of row r is at `logits_indices(batch)[r]`, of this `batch`. A row
    without tokens has no output, and the index of a preceding row's, or 0.
    """

    batch: BatchMetadata
    logits_indices_padded: jax.Array
    num_logits_indices: jax.Array


def build(batch: BatchMetadata, logits_indices: Array, num_logits: int | Array) -> FastPrefill:
    """The batch reduced to the tokens whose logits are needed.

    A batch with one token per row is unchanged except for its bound, since every token needs its
    logits. (vLLM returns such a batch as it is.)

    Args:
      batch: the batch.
      logits_indices: int32[N], token indices in increasing order. Repeated ones, as
        `metadata.logits_indices` has for rows without tokens, count once.
      num_logits: int32[], number of valid indices, with repeated ones; up to N.

    Raises:
      ValueError: `logits_indices` are not integers of shape [N] with N >= 1, or, if known on the
        host, `num_logits` is outside [0, N], or valid indices are decreasing or outside [0, T).

    Example: `kv_sharing.build(batch, logits_indices(batch), batch.num_reqs)`.
    """
    check_batch("kv_sharing.build", batch)
    if logits_indices.ndim != 1 or not logits_indices.size:
        raise ValueError(
            f"logits_indices must be int32[N] with N >= 1, got shape {logits_indices.shape}"
        )
    size = logits_indices.shape[0]
    known = isinstance(num_logits, int | np.integer | np.ndarray)
    if known and not 0 <= num_logits <= size:
        raise ValueError(f"num_logits must be in [0, {size}], got {num_logits}")
    given = logits_indices
    logits_indices = int32_on_device("logits_indices", given)
    if known and isinstance(given, np.ndarray):
        _check_order(given[: int(num_logits)], batch.max_num_tokens)
    num_logits = int32_on_device("num_logits", num_logits)
    wanted = jnp.arange(size, dtype=jnp.int32) < num_logits
    # A token counted twice would belong to its row twice, at two positions.
    first = jnp.concatenate([jnp.ones(1, bool), logits_indices[1:] != logits_indices[:-1]])
    kept = wanted & first
    count = jnp.sum(kept, dtype=jnp.int32)
    # Masked reduction as in `prefix_sum`: needed tokens before the first one of each row.
    before = kept[None] & (logits_indices[None] < batch.query_start_loc[:, None])
    return FastPrefill(
        batch=dataclasses.replace(
            batch,
            query_start_loc=jnp.sum(before, axis=1, dtype=jnp.int32),
            num_tokens=count,
            max_num_tokens=size,
        ),
        logits_indices_padded=_packed(logits_indices, kept, num_logits),
        num_logits_indices=count,
    )


def _packed(indices: jax.Array, kept: jax.Array, num_logits: jax.Array) -> jax.Array:
    """int32[N], the kept indices, padded with the last valid one; 0 without any."""
    size = indices.shape[0]
    last = jnp.where(num_logits > 0, indices[jnp.maximum(num_logits - 1, 0)], 0)
    # Others get distinct targets past the end, as unique_indices requires.
    others = size + jnp.arange(size, dtype=jnp.int32)
    target = jnp.where(kept, count_before(kept[None])[0], others)
    return jnp.full_like(indices, last).at[target].set(indices, mode="drop", unique_indices=True)


def _check_order(indices: np.ndarray, max_num_tokens: int) -> None:
    in_order = np.all(indices[1:] >= indices[:-1])
    if indices.size and not (in_order and indices[0] >= 0 and indices[-1] < max_num_tokens):
        raise ValueError(
            "logits_indices must be indices of the batch's tokens in increasing order, in "
            f"[0, {max_num_tokens}), got {indices.tolist()}"
        )
