"""Causal grouped-query attention over paged keys and values, for prefill chunks and decodes.

flash  FlashAttention-3 (`pip install '.[flash]'`); GPUs of compute capability 9.0 only
xla    plain JAX on any device: online softmax over blocks of a sequence's own pages
"""

import importlib.util
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxkv.metadata import BatchMetadata, flash_attention

# Full float32 products (no TF32): the batch composition changes results by float32 rounding only.
einsum = partial(jnp.einsum, precision="highest")
einsum_float32 = partial(einsum, preferred_element_type=jnp.float32)

IMPLEMENTATIONS = ("flash", "xla")
XLA_TILE = 16  # query tokens of one sequence that share a gather of keys and values
FLASH_TILE = 128  # query tokens of a thread block, and its keys in an iteration
KEY_BLOCK = {"cpu": 64, "gpu": 1024}  # keys per iteration; a GPU's host waits for each
NUM_SMS = 132  # of an H100 or H200


def select(implementation: str | None, dtype: np.dtype, head_dim: int) -> str:
    """The implementation for this device, or the requested one.

    Raises:
      ValueError: unknown implementation.
      NotImplementedError: FlashAttention-3 was requested, but does not support the device or model.
    """
    device, reason = jax.devices()[0], ""
    if device.platform != "gpu" or getattr(device, "compute_capability", None) != "9.0":
        reason = f"needs a GPU of compute capability 9.0, got {device.device_kind}"
    elif dtype.name not in ("bfloat16", "float16") or head_dim != 128:
        reason = f"needs bfloat16 or float16 and head_dim 128, got {dtype.name} and {head_dim}"
    elif not importlib.util.find_spec("flash_attn3_jax"):
        reason = "pip install '.[flash]'"
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"attention: {implementation!r}; one of {IMPLEMENTATIONS}, or None")
    if implementation == "flash" and reason:
        raise NotImplementedError(f"attention 'flash': {reason}; use 'xla'")
    return implementation or ("xla" if reason else "flash")


def attend(
    implementation: str, q: Array, k_pages: Array, v_pages: Array, rows: BatchMetadata
) -> Array:
    """Attention of new tokens to all tokens of their own sequence up to themselves.

    Args:
      implementation: see `select`.
      q: [T, heads, head_dim], concatenated by sequence.
      k_pages, v_pages: [pages, page_size, kv_heads, head_dim], including the new tokens.
      rows: sequences of the tokens, and their pages. If T equals the number of rows, each row has
        one token (a decode batch).

    Returns:
      [T, heads, head_dim]; arbitrary for padding tokens.
    """
    run = _attend_xla if implementation == "xla" else _attend_flash
    return run(q, k_pages, v_pages, rows)


def num_splits(num_rows: int, kv_heads: int, max_tokens: int) -> int:
    """Parts of each sequence that FlashAttention-3 computes in parallel: enough to use all SMs.

    A thread block computes one KV head of one row: 8 heads and one row use 8 of 132 SMs.
    """
    return max(1, min(NUM_SMS // (num_rows * kv_heads), max_tokens // 256, 32))


def _attend_flash(q: Array, k_pages: Array, v_pages: Array, rows: BatchMetadata) -> Array:
    """Rows of one token, or of any number: then each tile of query tokens is a row of the kernel.

    The package (0.2.3) rejects `cu_seqlens_q` together with a page table. A thread block computes
    FLASH_TILE query tokens of one row in any case.
    """
    from flash_attn3_jax import flash_mha_with_kvcache

    if len(q) == rows.max_num_reqs <= flash_attention.MAX_SORTED_BATCH:
        kv_heads = k_pages.shape[2]
        splits = num_splits(len(q), kv_heads, rows.max_blocks * rows.block_size)
        # XLA merges the equal metadata of all layers.
        metadata = _scheduler_metadata(rows, q.shape[1], kv_heads, q.shape[2], splits)
        return _decode_flash(q, k_pages, v_pages, rows, metadata, splits)
    cache: dict[str, Any] = {"k_cache": k_pages, "v_cache": v_pages, "is_causal": True}
    index, row = _query_tiles(len(q), rows, FLASH_TILE)
    # Causal: the last query token of a tile, which none of its padding follows, sees all keys.
    last = index[:, -1]
    keys = rows.seq_lens[row] + last + 1 - rows.query_start_loc[row + 1]
    cache |= {"cache_seqlens": jnp.where(last < len(q), keys, 0)}
    tiles = q.at[index].get(mode="fill", fill_value=0)
    out = flash_mha_with_kvcache(tiles, **cache, page_table=rows.block_table[row], num_splits=1)
    return jnp.zeros_like(q).at[index].set(out, mode="drop")


@partial(jax.jit, static_argnums=(1, 2, 3, 4))  # traced once, not for each layer
def _scheduler_metadata(
    rows: BatchMetadata, heads: int, kv_heads: int, head_dim: int, splits: int
) -> Array:
    return flash_attention.build(
        rows, num_q_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_m=FLASH_TILE,
        block_n=FLASH_TILE, num_splits=splits, num_sms=NUM_SMS,
    ).packed  # fmt: skip


def _decode_flash(
    q: Array, k_pages: Array, v_pages: Array, rows: BatchMetadata, metadata: Array, splits: int
) -> Array:
    """FlashAttention-3 of one token a row, by the package's handler, with our scheduler metadata.

    Then the handler runs no kernel of its own to prepare it, and allocates no memory. It resets the
    semaphore after the call, so all layers can use the same metadata.
    """
    ints, floats, like_q = (jnp.zeros(0, x) for x in (jnp.int32, jnp.float32, q.dtype))  # absent
    parts = (splits, *q.shape[:2], 1) if splits > 1 else (1, 1, 1)
    float32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    results = (
        jax.ShapeDtypeStruct(q[:, None].shape, q.dtype), float32((*q.shape[:2], 1)),
        float32((*parts, q.shape[2] if splits > 1 else 1)), float32(parts),
    )  # fmt: skip
    return jax.ffi.ffi_call(_graph_target(), results)(
        q[:, None], k_pages, v_pages, *[like_q] * 3, *[ints] * 4, rows.seq_lens, rows.block_table,
        *[ints] * 2, *[like_q] * 2, ints, *[floats] * 3, metadata,
        max_seqlen_q=1, max_seqlen_q_has_value=True, max_seqlen_k=0, max_seqlen_k_has_value=False,
        softmax_scale_val=q.shape[2] ** -0.5, softmax_scale_has_value=True, pack_gqa_val=False,
        pack_gqa_has_value=False, is_causal=True, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, is_rotary_interleaved=True, num_splits=splits, sm_margin=0,
    )[0][:, 0]  # fmt: skip


@cache
def _graph_target() -> str:
    """Registers the package's handler once more, as compatible with CUDA graphs; returns its name.

    The package does not, so XLA would divide a step into a graph and a call for each layer.
    """
    from flash_attn3_jax_lib import flash_api

    name, handler = "serving_flash_decode", flash_api.get_ffi_registrations()["flash_mha_fwd"]
    command_buffer_compatible = 1  # XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE
    jax.ffi.register_ffi_target(name, handler, platform="CUDA", traits=command_buffer_compatible)
    return name


def _attend_xla(q: Array, k_pages: Array, v_pages: Array, rows: BatchMetadata) -> Array:
    """Query tokens in tiles of one sequence each, which visit only the pages of that sequence."""
    num_tokens, heads, head_dim = q.shape
    kv_heads, page_size = k_pages.shape[2], rows.block_size
    size = 1 if num_tokens == rows.max_num_reqs else XLA_TILE
    index, row = _query_tiles(num_tokens, rows, size)  # [tiles, tile], [tiles]
    key_block = KEY_BLOCK.get(jax.default_backend(), 64)
    width = min(-(-key_block // page_size), rows.max_blocks)  # pages in an iteration
    num_keys = width * page_size
    before = rows.seq_lens - rows.query_lens - rows.query_start_loc[:-1]
    keys = jnp.where(index[:, -1] < num_tokens, before[row] + index[:, -1] + 1, 0)
    blocks = -(-keys // num_keys)  # of keys, by tile
    order = jnp.argsort(-blocks)
    index, row, blocks = index[order], row[order], blocks[order]
    position = before[row][:, None] + index
    tiles = q.at[index].get(mode="clip").reshape(*index.shape, kv_heads, -1, head_dim)
    tiles = jnp.moveaxis(tiles, 1, 3)  # [tiles, kv_heads, group, tile, head_dim]
    table = jnp.pad(rows.block_table, ((0, 0), (0, -rows.max_blocks % width)))[row]

    def visit(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        highest, total, out = carry
        n = len(out)
        pages = jax.lax.dynamic_slice_in_dim(table[:n], i * width, width, axis=1)
        k, v = (x[pages].reshape(n, num_keys, kv_heads, head_dim) for x in (k_pages, v_pages))
        key = i * num_keys + jnp.arange(num_keys)
        seen = (key <= position[:n, :, None])[:, None, None]
        scores = einsum_float32("nhgqd,nkhd->nhgqk", tiles[:n], k)
        scores = jnp.where(seen, scores * head_dim**-0.5, -1e30)
        new_highest = jnp.maximum(highest, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new_highest[..., None]), 0)
        keep = jnp.exp(highest - new_highest)
        added = einsum_float32("nhgqk,nkhd->nhgqd", weights.astype(v.dtype), v)
        return new_highest, keep * total + weights.sum(-1), keep[..., None] * out + added

    empty = jnp.zeros(tiles.shape[:-1], jnp.float32)
    found: tuple[Array, ...] = (empty - 1e30, empty, jnp.zeros(tiles.shape, jnp.float32))
    for n, start, end in loops(blocks):
        first = jax.lax.fori_loop(start, end, visit, tuple(x[:n] for x in found))
        found = tuple(x.at[:n].set(y) for x, y in zip(found, first, strict=True))
    _, total, out = found
    out = out / jnp.where(total > 0, total, 1)[..., None]
    out = jnp.moveaxis(out, 3, 1).reshape(*index.shape, heads, head_dim)
    return jnp.zeros_like(q).at[index].set(out.astype(q.dtype), mode="drop")


def loops(blocks: Array) -> list[tuple[int, Array, Array]]:
    """Loops over the key blocks of tiles, whose numbers of blocks descend.

    Returns (n, start, end): the first n tiles visit the blocks from `start` up to `end`. Each loop
    has a quarter of the tiles of the one before, and begins when no others have blocks left: tiles
    visit at most four times as many blocks as they have.
    """
    found: list[tuple[int, Array, Array]] = []
    n, start = len(blocks), jnp.int32(0)
    while n > 4:
        fewer = -(-n // 4)
        found.append((n, start, blocks[fewer]))
        n, start = fewer, blocks[fewer]
    return [*found, (n, start, blocks[0])]


def _query_tiles(num_tokens: int, rows: BatchMetadata, size: int) -> tuple[Array, Array]:
    """Token indices of each tile, and the row of each tile.

    Indices are `num_tokens` in padding, which precedes the tokens of a row's first tile.
    """
    ends = jnp.cumsum(-(-rows.query_lens // size))
    tile = jnp.arange(num_tokens // size + (rows.max_num_reqs if size > 1 else 0))
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right"), rows.max_num_reqs - 1)
    first = rows.query_start_loc[row + 1] - (ends[row] - tile) * size
    index = first[:, None] + jnp.arange(size)
    valid = (index >= rows.query_start_loc[row][:, None]) & (tile < ends[-1])[:, None]
    return jnp.where(valid, index, num_tokens), row
