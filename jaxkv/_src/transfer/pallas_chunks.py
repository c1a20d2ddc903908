"""Work partition of the Pallas kernels, and the copies that they support.

Blocks are split into chunks, which are staged in slots of shared memory (`pallas_copy`). Does not
import Pallas, which takes half a second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxkv._src.transfer.block_copy import BlockCopy

WORD_BYTES = 4
_UNIT_BYTES = 128  # granularity of Mosaic's copies
_CHUNK_BYTES = 16 * 1024  # larger blocks are split: hiding PCIe latency takes many slots
_SLOT_BYTES = 8 * 1024  # small chunks share a slot, again to hide PCIe latency
_MAX_BATCH = 8
_SHARED_BYTES = 192 * 1024  # of 227 KiB per thread block in compute capabilities 9 to 11
_MAX_SLOTS = 32  # Mosaic's limit on barriers per array, with one barrier per slot
MAX_CHUNKS = 2**30
MAX_BLOCKS = 2**31 - 1  # of an array: the kernels compute block numbers in int32


@dataclasses.dataclass(frozen=True)
class Ring:
    """The ring of slots in shared memory that stages chunks of blocks.

    Attributes:
      chunk_words: words of the largest chunk; larger blocks are split.
      batch: chunks per slot and barrier: the same words of `batch` blocks.
      threads: warpgroups, which issue copies in turn, each with its own slots.
      depth: slots per warpgroup.
    """

    chunk_words: int
    batch: int
    threads: int
    depth: int

    @classmethod
    def of(cls, *block_bytes: int) -> Ring:
        """The ring for the given block sizes, multiples of 128 bytes."""
        splits = [
            split_block(size // WORD_BYTES, _CHUNK_BYTES // WORD_BYTES) for size in block_bytes
        ]
        chunk_words = max(words for words, _ in splits)
        chunk_bytes = chunk_words * WORD_BYTES
        batch = 1 if chunk_bytes > 2048 else min(_MAX_BATCH, _SLOT_BYTES // chunk_bytes)
        slots = min(_MAX_SLOTS, _SHARED_BYTES // (batch * chunk_bytes))
        threads = 2 if slots < 16 else 4
        return cls(chunk_words, batch, threads, depth=slots // threads)

    @property
    def lag(self) -> int:
        """Slots of a warpgroup with stores in flight, while the others are loaded."""
        return self.depth // 2


def split_block(block_words: int, max_words: int) -> tuple[int, list[int]]:
    """Size and start positions, in words, of a block's chunks; the last two may overlap."""
    unit = _UNIT_BYTES // WORD_BYTES
    chunks = _ceil_div(block_words, max_words)
    words = _ceil_div(block_words // unit, chunks) * unit
    return words, [min(chunk * words, block_words - words) for chunk in range(chunks)]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One of the blocks copied for each pair of ids.

    Attributes:
      arrays: index of its array among the sources and among the destinations.
      block_words: words of a block.
      first, stride: on the strided side, id i is block `first + i * stride` of the array.
    """

    arrays: tuple[int, int]
    block_words: int
    first: int
    stride: int


@dataclasses.dataclass(frozen=True)
class Job:
    """Static parameters of a launch.

    Attributes:
      ring: the slots.
      num_sms: number of thread blocks, one per SM.
      strided_side: 0 if the sources are the strided arrays, 1 if the destinations are.
      buffers: the blocks of a pair.
    """

    ring: Ring
    num_sms: int
    strided_side: int
    buffers: list[Buffer]

    def parts(self) -> np.ndarray:
        """int32[parts, 5]: the chunks of a pair as source, destination, start, first, stride."""
        rows = [
            (*buffer.arrays, start, buffer.first, buffer.stride)
            for buffer in self.buffers
            for start in split_block(buffer.block_words, self.ring.chunk_words)[1]
        ]
        return np.array(rows, np.int32)

    def chunk_words(self, side: int) -> list[int]:
        """Chunk size in words of each array on a side: 0 for sources, 1 for destinations."""
        words = {
            buffer.arrays[side]: split_block(buffer.block_words, self.ring.chunk_words)[0]
            for buffer in self.buffers
        }
        return [words[array] for array in range(len(words))]


def unsupported_reason(copy: BlockCopy, num_ids: int) -> str | None:
    """Why Pallas does not support a copy of up to `num_ids` pairs, or None if it does."""
    geometry = copy.geometry
    block_bytes = geometry.block_bytes
    if geometry.run_bytes != block_bytes:
        return (
            f"blocks are split into runs of {geometry.run_bytes} bytes in the host layout; "
            "only contiguous blocks are supported"
        )
    if block_bytes % _UNIT_BYTES:
        return f"the block size, {block_bytes} bytes, is not a multiple of {_UNIT_BYTES} bytes"
    if geometry.dense_stride_bytes != block_bytes or any(copy.dense_offsets):
        return "blocks of the device are parts of larger blocks or of stacked arrays"
    if any(at % block_bytes for at in (geometry.page_stride_bytes, *copy.strided_offsets)):
        return f"block offsets are not multiples of the block size, {block_bytes} bytes"
    for array in (*copy.strided, *copy.dense):
        if not _has_words(array.dtype):
            return f"dtype {array.dtype} has no bitcast to 32-bit words"
        array_bytes = math.prod(array.shape) * array.dtype.itemsize
        if array_bytes // block_bytes > MAX_BLOCKS:
            return (
                f"{array.dtype}{list(array.shape)} has {array_bytes // block_bytes} blocks of "
                f"{block_bytes} bytes, the limit of int32 block numbers is {MAX_BLOCKS}"
            )
        if array_bytes % block_bytes:
            return (
                f"the size of {array.dtype}{list(array.shape)} is not a multiple of the block "
                f"size, {block_bytes} bytes"
            )
    chunks = num_ids * copy.num_buffers * _ceil_div(block_bytes, _CHUNK_BYTES)
    if chunks >= MAX_CHUNKS:
        return f"{chunks} chunks, the limit is {MAX_CHUNKS - 1}"
    return None


def _has_words(dtype: np.dtype) -> bool:
    """Whether XLA supports a bitcast between the dtype and words."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits >= 8


def sides_of(copy: BlockCopy) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sources and destinations."""
    return (copy.strided, copy.dense) if copy.to_dense else (copy.dense, copy.strided)


def buffers_of(copies: Sequence[BlockCopy]) -> list[Buffer]:
    buffers = []
    arrays_before = [0, 0]
    for copy in copies:
        block_bytes = copy.geometry.block_bytes
        lengths = [len(arrays) for arrays in sides_of(copy)]
        for index, offset in enumerate(copy.strided_offsets):
            source, destination = (
                before + min(index, length - 1)
                for before, length in zip(arrays_before, lengths, strict=True)
            )
            buffers.append(
                Buffer(
                    arrays=(source, destination),
                    block_words=block_bytes // WORD_BYTES,
                    first=offset // block_bytes,
                    stride=copy.geometry.page_stride_bytes // block_bytes,
                )
            )
        arrays_before = [a + b for a, b in zip(arrays_before, lengths, strict=True)]
    return buffers


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)
