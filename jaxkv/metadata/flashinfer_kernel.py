"""`flashinfer.build` by one CUDA kernel instead of a dozen small ones of XLA."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.runtime import native
from jaxkv._src.runtime.bounds import check_bounds
from jaxkv._src.runtime.sharding import _varying_axes

from .common import BatchMetadata
from .pages import page_limit
from .splits import Split


class Part(NamedTuple):
    """Fields of `flashinfer.PagedPart`."""

    qo_indptr: jax.Array
    paged_kv_indptr: jax.Array
    paged_kv_last_page_len: jax.Array


class KernelResults(NamedTuple):
    """Fields of `flashinfer.PagedMetadata`."""

    split: Split
    slot_mapping: jax.Array
    paged_kv_indices: jax.Array
    decode: Part
    prefill: Part


def in_one_kernel(batch: BatchMetadata) -> bool:
    """Whether the kernel supports the batch, on CUDA.

    Within `shard_map`, which of the results vary over an axis is known for plain JAX only.
    """
    extension = native.extension()
    leaves = jax.tree.leaves(batch)
    return (
        extension.CUDA
        and 0 < batch.max_num_reqs <= extension.FLASHINFER_ROWS
        and batch.max_blocks > 0
        and not any(map(_varying_axes, leaves))
    )


def build_in_one_kernel(
    batch: BatchMetadata, decode_threshold: int, max_pages: int | None
) -> KernelResults:
    """Traces the kernel; arguments as for `flashinfer.build`, on one rank."""
    rows, limit = batch.max_num_reqs, page_limit(batch.block_table, max_pages)
    part = [(rows + 1,), (rows + 1,), (rows,)]
    shapes = [(batch.max_num_tokens,), (limit,), *[()] * 5, *part, *part]
    call = jax.ffi.ffi_call(
        "jaxkv_flashinfer",
        [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        vmap_method="sequential",
    )
    slots, pages, *numbers = call(
        batch.query_start_loc,
        batch.seq_lens,
        batch.block_table,
        batch.num_reqs,
        batch.num_tokens,
        block_size=np.int64(batch.block_size),
        decode_threshold=np.int64(decode_threshold),
    )
    split, total = Split(*numbers[:4]), numbers[4]
    decode, prefill = Part(*numbers[5:8]), Part(*numbers[8:])
    if limit < batch.block_table.size:
        pages = check_bounds("flashinfer.build", pages, max_pages=(total, limit))
        decode, prefill = _behind(pages, decode), _behind(pages, prefill)
    return KernelResults(split, slots, pages, decode, prefill)


def _behind(checked: jax.Array, part: Part) -> Part:
    """`part`, whose truncated field depends on `checked`; otherwise DCE could remove the check.

    Not by a check of its own, which would count an error again, nor by an optimization barrier,
    whose unused operands XLA removes.
    """
    negative = checked[0] | np.int32(np.iinfo(np.int32).min)  # XLA does not know that it is
    return part._replace(paged_kv_indptr=jnp.maximum(part.paged_kv_indptr, negative))
