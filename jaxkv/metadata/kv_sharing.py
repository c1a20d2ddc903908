"""Fast prefill for layers that share an earlier layer's cache.

Such layers write no keys, so they need to compute only the tokens whose logits are wanted. Follows
vLLM's make_kv_sharing_fast_prefill_common_attn_metadata, but counts on the device: nothing is read
back, and no builder reads a host copy that is still on its way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxkv.metadata.common import BatchMetadata
from jaxkv.metadata.segments import on_device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FastPrefill:
    """A batch of only the tokens whose logits are wanted.

    Attributes:
      batch: the same rows and contexts with fewer query tokens, at most N. Each row's have to be
        the last of its context, as causal attention counts them from its end.
      logits_indices_padded: int32[N], the batch's tokens among those of the batch it came from,
        whose hidden states, positions and slots are to be gathered; the last repeats behind them.
      num_logits_indices: int32[], how many.
    """

    batch: BatchMetadata
    logits_indices_padded: Any
    num_logits_indices: Any


def build(batch: BatchMetadata, logits_indices: Any, num_logits: Any) -> FastPrefill:
    """The batch cut down to the tokens whose logits are wanted.

    vLLM leaves a batch of one token a row as it is; as each of them has its logits, it also comes
    back unchanged here, but for its bound.

    Args:
      batch: the batch.
      logits_indices: int32[N], tokens of the batch, increasing; see `common.logits_indices`.
      num_logits: int32[], how many of them count.

    Raises:
      ValueError: `logits_indices` is not one row of N >= 1 tokens.
    """
    if logits_indices.ndim != 1 or not logits_indices.size:
        raise ValueError(
            f"logits_indices must be int32[N] with N >= 1, got shape {logits_indices.shape}"
        )
    logits_indices = on_device(logits_indices)
    size, num_logits = logits_indices.shape[0], jnp.asarray(num_logits, jnp.int32)
    wanted = jnp.arange(size, dtype=jnp.int32) < num_logits
    # A masked reduction, as in `prefix_sum`: tokens wanted before each row's first.
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
