"""Metadata for Triton's unified attention.

Follows the Triton builder of vLLM 0.33. Instead of scratch tensors, the metadata has the shapes of
scratch outputs of the kernel call, which XLA allocates. Cascade attention is in `cascade.py`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from .checks import at_least_1, check_has_rows, check_rows
from .common import BatchMetadata, check_batch, slot_mapping, token_positions
from .segments import Array, int32_on_device

_PROGRAMS_2D = 128  # with fewer programs, the kernel without segments leaves SMs idle


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TritonMetadata:
    """See `build`.

    Attributes:
      num_actual_tokens: int32[], query tokens of the batch.
      max_query_len: int32[], longest query in tokens.
      query_start_loc: int32[B + 1], as in the batch.
      max_seq_len: int32[], longest context in tokens.
      seq_lens: int32[B], as in the batch.
      block_table: int32[B, W], as in the batch.
      slot_mapping: int32[T], slot of each token; PAD_SLOT (-1) for padding.
      mm_prefix_range: int32[B, R, 2], first and last position of ranges with bidirectional
        attention; no effect unless first < last. None for no ranges.
      seq_threshold_3D: maximum number of rows for which decodes use the kernel with segments.
      num_par_softmax_segments: segments per context in that kernel.
      softmax_segm_output: float32[rows, query heads, segments, head size up to a power of two].
      softmax_segm_max: float32[rows, query heads, segments].
      softmax_segm_expsum: float32[rows, query heads, segments].
    """

    num_actual_tokens: jax.Array
    max_query_len: jax.Array
    query_start_loc: jax.Array
    max_seq_len: jax.Array
    seq_lens: jax.Array
    block_table: jax.Array
    slot_mapping: jax.Array
    mm_prefix_range: Array | None
    seq_threshold_3D: int = dataclasses.field(metadata={"static": True})
    num_par_softmax_segments: int = dataclasses.field(metadata={"static": True})
    softmax_segm_output: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})
    softmax_segm_max: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})
    softmax_segm_expsum: jax.ShapeDtypeStruct = dataclasses.field(metadata={"static": True})


def build(
    batch: BatchMetadata,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_softmax_segments: int = 16,
    mm_prefix_range: Array | None = None,
) -> TritonMetadata:
    """Metadata of a batch for Triton's unified attention.

    Args:
      batch: the batch.
      num_q_heads: query heads on this device.
      num_kv_heads: KV heads on this device.
      head_dim: elements per head.
      num_softmax_segments: segments per context; vLLM uses 64 on consumer Blackwell (sm_120).
      mm_prefix_range: int32[B, R, 2], see `TritonMetadata`.

    Raises:
      TypeError: a size that is not an integer.
      ValueError: a size below 1, ranges of the wrong shape or not integers, or a batch without
        rows.

    Example: `triton.build(batch, num_q_heads=32, num_kv_heads=8, head_dim=128)`.
    """
    check_batch("triton.build", batch)
    num_q_heads, num_kv_heads, head_dim, num_softmax_segments = at_least_1(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_softmax_segments=num_softmax_segments,
    )
    if mm_prefix_range is not None:
        check_rows("mm_prefix_range", mm_prefix_range, batch.max_num_reqs, "ranges", 2)
        mm_prefix_range = int32_on_device("mm_prefix_range", mm_prefix_range)
    check_has_rows(batch.max_num_reqs)
    threshold = _PROGRAMS_2D // num_kv_heads
    scratch = (threshold, num_q_heads, num_softmax_segments)
    padded_head = 1 << (head_dim - 1).bit_length()
    return TritonMetadata(
        num_actual_tokens=batch.num_tokens,
        max_query_len=jnp.max(batch.query_lens),
        query_start_loc=batch.query_start_loc,
        max_seq_len=jnp.max(batch.seq_lens),
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=slot_mapping(batch, token_positions(batch)),
        mm_prefix_range=mm_prefix_range,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=num_softmax_segments,
        softmax_segm_output=jax.ShapeDtypeStruct((*scratch, padded_head), jnp.float32),
        softmax_segm_max=jax.ShapeDtypeStruct(scratch, jnp.float32),
        softmax_segm_expsum=jax.ShapeDtypeStruct(scratch, jnp.float32),
    )
