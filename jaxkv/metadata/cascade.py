"""Cascade attention: a prefix that all requests share is attended once, for all their tokens.

Level 0 attends from every token to the common prefix, level 1 from each request's tokens to the
rest of its context; a kernel merges them by their log-sum-exp. The rule when this pays is that of
vLLM up to 0.21. There, level 1 of the FlashInfer path read the table's first blocks again; here it
has a table without the prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata
from jaxkv.metadata.segments import cdiv, on_device

# What vLLM's rule takes for granted: shorter prefixes and smaller batches do not pay.
_MIN_PREFIX_TOKENS = 256
_MIN_REQUESTS = 8
_TILE = 128  # query rows and keys that one thread block of its kernels takes


def common_prefix_blocks(
    num_common_blocks: int, num_computed: Sequence[int] | np.ndarray, block_size: int
) -> int:
    """Blocks of the common prefix that cascade attention may use, on the host.

    Only what every request has computed counts, so that each keeps a token of its own at least and
    no token attends to a later one at level 0.

    Args:
      num_common_blocks: first blocks that all requests share, as the cache manager counts them.
      num_computed: tokens of each request that earlier steps computed.
      block_size: tokens a block.
    """
    if not len(num_computed):
        return 0
    return min(num_common_blocks, int(np.min(num_computed)) // block_size)


def use_cascade(
    num_prefix_blocks: int,
    query_lens: Sequence[int] | np.ndarray,
    *,
    block_size: int,
    num_query_heads: int,
    num_kv_heads: int,
    num_sms: int,
    full_attention: bool = True,
    dcp_world_size: int = 1,
) -> bool:
    """Whether cascade attention should be faster, decided on the host.

    Args:
      num_prefix_blocks: see `common_prefix_blocks`.
      query_lens: query tokens of each request.
      block_size: tokens a block.
      num_query_heads: of the layer, on this device.
      num_kv_heads: of the layer, on this device.
      num_sms: multiprocessors of the device.
      full_attention: whether tokens attend to all earlier ones alike: no ALiBi, sliding window or
        local attention.
      dcp_world_size: ranks that share each context.
    """
    prefix, num_reqs = num_prefix_blocks * block_size, len(query_lens)
    if prefix < _MIN_PREFIX_TOKENS or num_reqs < _MIN_REQUESTS:
        return False
    if not full_attention or dcp_world_size > 1:
        return False
    group = num_query_heads // num_kv_heads
    if group == 1 or np.any(np.asarray(query_lens) != 1):
        return True
    # Decodes could also run on a kernel that packs the heads of a group and splits the keys.
    key_tiles = cdiv(prefix, _TILE)
    cascade = cdiv(num_query_heads * cdiv(num_reqs, _TILE), num_sms) * key_tiles
    decode = cdiv(num_reqs * num_kv_heads * cdiv(group, _TILE) * key_tiles, num_sms)
    return cascade < decode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cascade:
    """Both levels, each a batch for any backend's builder.

    Attributes:
      prefix: level 0, without a causal mask: one row of all query tokens, whose context is the
        common prefix, whole blocks.
      suffix: level 1, causal: the batch's rows with the rest of their contexts, and `block_table`
        without the prefix; its last columns hold NULL_BLOCK.
    """

    prefix: BatchMetadata
    suffix: BatchMetadata


def build(batch: BatchMetadata, num_common_blocks: Any) -> Cascade:
    """Both levels of cascade attention over one batch.

    Args:
      batch: the batch.
      num_common_blocks: int32[], blocks of the prefix, see `common_prefix_blocks`; at most W. With
        0 level 0 has no context, and level 1 is the batch.

    Raises:
      ValueError: `num_common_blocks` outside [0, W], where the host knows it; on the device it is
        taken as it is, and level 0 would claim a context that its table does not hold.
    """
    on_host = isinstance(num_common_blocks, int | np.integer | np.ndarray)
    if on_host and not 0 <= num_common_blocks <= batch.max_blocks:
        raise ValueError(
            f"num_common_blocks={num_common_blocks} is outside [0, {batch.max_blocks}], the "
            "columns of block_table"
        )
    batch = on_device(batch)
    column = jnp.arange(batch.max_blocks, dtype=jnp.int32)
    first_row = jnp.where(column < num_common_blocks, batch.block_table[0], NULL_BLOCK)
    num_prefix_tokens = jnp.asarray(num_common_blocks * batch.block_size, jnp.int32)
    own = column + num_common_blocks
    rest = batch.block_table[:, jnp.minimum(own, batch.max_blocks - 1)]
    return Cascade(
        prefix=dataclasses.replace(
            batch,
            query_start_loc=jnp.stack([jnp.int32(0), batch.query_start_loc[-1]]),
            seq_lens=num_prefix_tokens.reshape(1),
            block_table=first_row[None],
            num_reqs=jnp.int32(1),
        ),
        suffix=dataclasses.replace(
            batch,
            seq_lens=jnp.maximum(batch.seq_lens - num_prefix_tokens, 0),
            block_table=jnp.where(own < batch.max_blocks, rest, NULL_BLOCK),
        ),
    )
