"""Scheduler metadata of FlashAttention-3: what its prepare kernel computes, on the device.

Follows `get_scheduler_metadata` of FlashAttention's `hopper` directory as of commit 0251105
(August 2026), for Hopper, and equals that of flash-attn3-jax 0.2.3. Earlier versions have another
layout: pass the result only to a kernel of that layout. The tile sizes and the upper bound of
splits are those of the attention kernel that reads the result; the kernel chooses them from its
static arguments, so they are arguments here.

Where the prepare kernel is undefined (no tile in the batch), no row is split. It is compiled with
fast division: where a number of blocks per SM is an integer up to rounding, it may differ by one
from the correctly rounded value computed here. Any number of splits up to the bound is correct.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.metadata.checks import at_least_1, check_has_rows
from jaxkv.metadata.common import BatchMetadata, check_batch
from jaxkv.metadata.segments import cdiv, on_device

MAX_SORTED_BATCH = 992  # rows of one thread block of the prepare kernel: 32 warps of 31 rows

_L2_BYTES = 8 * 2**20  # an underestimate, as in FlashAttention
_MOST_TILES = 2**30  # of a batch; no context is split for as many


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SchedulerMetadata:
    """See `build`. Row v of the sorted arrays is row `varlen_batch_idx[v]` of the batch.

    Attributes:
      num_splits_dynamic: int32[B], parts into which the context of each row is split, sorted.
      num_m_blocks: int32[B], query tiles of each row, sorted; 0 for padding.
      varlen_batch_idx: int32[B], row of the batch; None if rows are not sorted, with a window.
      num_nheads_in_l2: int32[B], heads whose KV fits the L2 cache, sorted; None unless attention is
        causal or has a window.
      packed: int32[4 * ceil(B / 4) * vectors + 1], the present arrays in this order, each padded
        with zeros to a multiple of 4, then the tile-count semaphore, 0. The kernel's
        `scheduler_metadata`. It changes the semaphore, which FlashAttention's own callers reset
        after each call, so that all layers can use one array; other calls need a fresh copy each.
    """

    num_splits_dynamic: jax.Array
    num_m_blocks: jax.Array
    varlen_batch_idx: jax.Array | None
    num_nheads_in_l2: jax.Array | None
    packed: jax.Array


def build(
    batch: BatchMetadata,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_m: int,
    block_n: int,
    num_splits: int,
    num_sms: int,
    head_dim_v: int | None = None,
    pack_gqa: bool = True,
    causal: bool = True,
    local: bool = False,
    bytes_per_element: int = 2,
) -> SchedulerMetadata:
    """Scheduler metadata for a call with `cu_seqlens_q` and `seqused_k`.

    Args:
      batch: the batch. Padding rows are sorted with the others, as by the kernel.
      num_q_heads: query heads on this device.
      num_kv_heads: KV heads on this device.
      head_dim: elements per head of Q and K.
      block_m: query rows per tile of the kernel; with `pack_gqa`, a row per token and head.
      block_n: context tokens per tile of the attention kernel.
      num_splits: upper bound of parts of a context; 1 for no splits.
      num_sms: SMs the kernel may use.
      head_dim_v: elements per head of V; None for `head_dim`.
      pack_gqa: whether the query heads of a KV head share tiles: always with `num_splits` > 1. No
        effect on a single query head per KV head.
      causal: as the kernel has it. FlashAttention clears it in a step whose queries all have one
        token, except with pages and a head size in (64, 128].
      local: whether attention has a window or chunks; not together with `causal`.
      bytes_per_element: of K and V.

    Raises:
      TypeError: a size that is not an integer.
      ValueError: a size below 1, no rows or more than `MAX_SORTED_BATCH`, `num_q_heads` that is not
        a multiple of `num_kv_heads`, or conflicting arguments.

    Example: `flash_attention.build(batch, num_q_heads=32, num_kv_heads=8, head_dim=128,
    block_m=128, block_n=128, num_splits=4, num_sms=132)` on an H200.
    """
    check_batch("flash_attention.build", batch)
    num_q_heads, num_kv_heads, head_dim, v_dim, bytes_per_element = at_least_1(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        bytes_per_element=bytes_per_element,
    )
    block_m, block_n, num_splits, num_sms = at_least_1(
        block_m=block_m, block_n=block_n, num_splits=num_splits, num_sms=num_sms
    )
    _check_arguments(batch.max_num_reqs, num_q_heads, num_kv_heads, causal, local)
    group = num_q_heads // num_kv_heads
    if group > 1 and num_splits > 1 and not pack_gqa:
        raise ValueError(
            f"pack_gqa must be True with num_splits={num_splits}, got {pack_gqa}: FlashAttention "
            "has no kernel that splits contexts without packing"
        )
    heads, packed, spread = (num_kv_heads, group, 1) if pack_gqa else (num_q_heads, 1, group)
    batch = on_device(batch)
    m_blocks = cdiv(batch.query_lens * packed, block_m)
    n_blocks = cdiv(batch.seq_lens, block_n)
    splits = _splits(m_blocks, n_blocks, heads, num_splits, num_sms)
    n_blocks = (n_blocks + splits - 1) // splits
    length = n_blocks * block_n - m_blocks * block_m if causal else n_blocks
    order = None if local else _longest_first(length)
    if order is not None:
        m_blocks, n_blocks, splits = m_blocks[order], n_blocks[order], splits[order]
    in_l2 = None
    if causal or local:
        tile_bytes = block_n * (head_dim + v_dim) * bytes_per_element
        in_l2 = jnp.minimum(_heads_in_l2(n_blocks, tile_bytes) * spread, heads)
    return SchedulerMetadata(splits, m_blocks, order, in_l2, _pack(splits, m_blocks, order, in_l2))


def _check_arguments(
    max_num_reqs: int, num_q_heads: int, num_kv_heads: int, causal: bool, local: bool
) -> None:
    check_has_rows(max_num_reqs)
    if max_num_reqs > MAX_SORTED_BATCH:
        raise ValueError(
            f"batch: {max_num_reqs} rows exceed the {MAX_SORTED_BATCH} rows that FlashAttention's "
            "prepare kernel schedules together; use smaller bounds, or no scheduler metadata"
        )
    if num_q_heads % num_kv_heads:
        raise ValueError(
            f"num_q_heads={num_q_heads} must be a multiple of num_kv_heads={num_kv_heads}"
        )
    if causal and local:
        raise ValueError("causal and local exclude each other: a causal window is local=True")


def _splits(
    m_blocks: jax.Array, n_blocks: jax.Array, heads: int, num_splits: int, num_sms: int
) -> jax.Array:
    """int32[B], parts of each context such that the tiles of the batch fill the SMs once."""
    if num_splits == 1:
        return jnp.ones_like(n_blocks)
    total = jnp.sum(m_blocks * n_blocks, dtype=jnp.int32)
    # A margin of 10 %, then heads: XLA would multiply the constants first, and round differently.
    share = jax.lax.optimization_barrier(total.astype(jnp.float32) * jnp.float32(1.1))
    share = jnp.minimum(jnp.ceil(share * jnp.float32(heads)), _MOST_TILES).astype(jnp.int32)
    # In integers: XLA divides by a constant through its reciprocal, and GPUs divide approximately.
    # Equal to the correctly rounded quotient's ceiling as long as the dividend is below 2^24.
    per_sm = jnp.maximum(cdiv(share, num_sms), 1)
    splits = jnp.clip((n_blocks + per_sm - 1) // per_sm, 1, num_splits)
    return jnp.where(total > 0, splits, 1)


def _longest_first(length: jax.Array) -> jax.Array:
    """int32[B], rows in descending order of length; equal ones in the order of the batch."""
    return jnp.argsort(length, stable=True, descending=True).astype(jnp.int32)


def _heads_in_l2(n_blocks: jax.Array, tile_bytes: int) -> jax.Array:
    """int32[B], KV heads, a power of two up to 16, whose tiles fit the L2 cache."""
    capacity = _L2_BYTES // tile_bytes
    n_blocks = jnp.maximum(n_blocks, 1)
    fit = [jnp.where(n_blocks * heads <= capacity, heads, 1) for heads in (2, 4, 8, 16)]
    return jnp.max(jnp.stack(fit), axis=0).astype(jnp.int32)


def _pack(*vectors: jax.Array | None) -> jax.Array:
    present = [vector for vector in vectors if vector is not None]
    padding = -present[0].shape[0] % 4
    parts = [jnp.pad(vector, (0, padding)) for vector in present]
    return jnp.concatenate([*parts, jnp.zeros(1, jnp.int32)])
