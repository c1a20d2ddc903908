"""Cascade attention: attention to a prefix common to all requests, computed once for all tokens.

Level 0 attends from every token to the common prefix, level 1 from each request's tokens to the
rest of its context; a kernel merges the results by log-sum-exp. The heuristic for its use is that
of vLLM up to 0.21. There, level 1 of the FlashInfer path read the first blocks of the table again;
here its block table excludes the prefix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.metadata.checks import check_has_rows
from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata, check_batch
from jaxkv.metadata.segments import Array, cdiv, on_device

# Minima of vLLM's heuristic: no benefit for shorter prefixes or smaller batches.
_MIN_PREFIX_TOKENS = 256
_MIN_REQUESTS = 8
_TILE = 128  # query rows and keys per thread block of its kernels


def common_prefix_blocks(
    num_common_blocks: int, num_computed: Sequence[int] | np.ndarray, block_size: int
) -> int:
    """Number of prefix blocks that cascade attention may use; computed on the host.

    Limited to blocks that every request has computed, so that each request has at least one token
    at level 1 and no token attends to a later one at level 0.

    Args:
      num_common_blocks: number of leading blocks shared by all requests, from the cache manager.
      num_computed: tokens of each request computed in earlier steps.
      block_size: tokens per block.

    Example: `common_prefix_blocks(4, [40, 55], 16)` is 2.
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
    """Whether cascade attention is expected to be faster; computed on the host.

    Args:
      num_prefix_blocks: see `common_prefix_blocks`.
      query_lens: query tokens of each request.
      block_size: tokens per block.
      num_query_heads: query heads of the layer on this device.
      num_kv_heads: KV heads of the layer on this device.
      num_sms: number of SMs of the device.
      full_attention: whether the layer uses plain full attention: no ALiBi, sliding window or
        local attention.
      dcp_world_size: ranks that share each context.

    Example: `use_cascade(64, [1] * 32, block_size=16, num_query_heads=32, num_kv_heads=8,
    num_sms=132)` is True.
    """
    prefix, num_reqs = num_prefix_blocks * block_size, len(query_lens)
    if prefix < _MIN_PREFIX_TOKENS or num_reqs < _MIN_REQUESTS:
        return False
    if not full_attention or dcp_world_size > 1:
        return False
    group = num_query_heads // num_kv_heads
    if group == 1 or np.any(np.asarray(query_lens) != 1):
        return True
    # Alternative for decodes: FlashDecoding, which packs the heads of a group and splits the keys.
    key_tiles = cdiv(prefix, _TILE)
    cascade = cdiv(num_query_heads * cdiv(num_reqs, _TILE), num_sms) * key_tiles
    decode = cdiv(num_reqs * num_kv_heads * cdiv(group, _TILE) * key_tiles, num_sms)
    return cascade < decode


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cascade:
    """Both levels, each a batch for the builder of any backend.

    Attributes:
      prefix: level 0, without a causal mask: one row with all query tokens, whose context is the
        common prefix of full blocks.
      suffix: level 1, causal: the rows of the batch with the rest of their contexts. Its
        `block_table` excludes the prefix and ends with columns of NULL_BLOCK (0).
    """

    prefix: BatchMetadata
    suffix: BatchMetadata


def build(batch: BatchMetadata, num_common_blocks: int | Array) -> Cascade:
    """Both levels of cascade attention over one batch.

    Args:
      batch: the batch.
      num_common_blocks: int32[], blocks of the prefix, at most W, see `common_prefix_blocks`. With
        0, level 0 has no context and level 1 is the batch.

    Raises:
      ValueError: a batch without rows, or `num_common_blocks` outside [0, W], if the host knows its
        value. A value on the device is not checked; above W the context of level 0 exceeds its
        block table.

    Example: `cascade.build(batch, 2)`, for a prefix of two blocks.
    """
    check_batch("cascade.build", batch)
    check_has_rows(batch.max_num_reqs)
    on_host = isinstance(num_common_blocks, int | np.integer | np.ndarray)
    if on_host and not 0 <= num_common_blocks <= batch.max_blocks:
        raise ValueError(
            f"num_common_blocks must be in [0, {batch.max_blocks}], the columns of block_table, "
            f"got {num_common_blocks}"
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
