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

from jaxkv.metadata.common import BatchMetadata
from jaxkv.metadata.segments import Array, int32_on_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FastPrefill:
    """A batch reduced to the tokens whose logits are needed.

    Attributes:
      batch: the same rows and contexts with at most N query tokens. The tokens of each row must be
        the last ones of its context, because causal masks are aligned to the end.
      logits_indices_padded: int32[N], indices of the tokens in the original batch, to gather hidden
        states, positions and slots; padded with the last index.
      num_logits_indices: int32[], number of valid indices.
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
      logits_indices: int32[N], token indices in increasing order, which may repeat for rows without
        tokens; see `metadata.logits_indices`.
      num_logits: int32[], number of valid indices; up to N.

    Raises:
      ValueError: `logits_indices` are not integers of shape [N] with N >= 1, or, if known on the
        host, `num_logits` is outside [0, N], or valid indices are decreasing or outside [0, T).

    Example: `kv_sharing.build(batch, logits_indices(batch), batch.num_reqs)`.
    """
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
    # Masked reduction as in `prefix_sum`: needed tokens before the first one of each row.
    before = wanted & (logits_indices < batch.query_start_loc[:, None])
    last = logits_indices[jnp.maximum(num_logits - 1, 0)]
    return FastPrefill(
        batch=dataclasses.replace(
            batch,
            query_start_loc=jnp.sum(before, axis=1, dtype=jnp.int32),
            num_tokens=num_logits,
            max_num_tokens=size,
        ),
        logits_indices_padded=jnp.where(wanted, logits_indices, jnp.where(num_logits > 0, last, 0)),
        num_logits_indices=num_logits,
    )


def _check_order(indices: np.ndarray, max_num_tokens: int) -> None:
    in_order = np.all(indices[1:] >= indices[:-1])
    if indices.size and not (in_order and indices[0] >= 0 and indices[-1] < max_num_tokens):
        raise ValueError(
            "logits_indices must be indices of the batch's tokens in increasing order, in "
            f"[0, {max_num_tokens}), got {indices.tolist()}"
        )
