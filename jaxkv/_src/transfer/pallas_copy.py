"""Block copies between pinned host memory and HBM as one Pallas kernel.

The kernel (Mosaic GPU, compute capabilities 9 to 11) copies each block with two TMA bulk copies,
global -> shared -> global memory, so that a few SMs saturate the host link. One launch supports all
arrays of a call, with any block sizes, if each block is one run on both sides; other calls use the
CUDA kernel. So do calls with bool and complex types: XLA has no bitcast between them and words, and
any other view as words is a copy of the entire array. No implementation supports sub-byte types:
view their packed bytes as uint8. GPUs without TMA or, from 12 on, with less shared memory have a
Triton kernel instead.

Host memory in a Mosaic kernel: while tracing, Mosaic rejects an argument in host memory, since its
Ref has memory space Host and the copies require global memory. The hardware does not distinguish
the two: a pinned address is a global address. XLA does not either: StableHLO types have no memory
space, and in XLA the layout of a host parameter, including its memory space, propagates through
bitcasts and aliases into any custom call. Only the JAX type has to change. `_relabel` is a
primitive that changes the type and lowers to its operand.
  - Data dependencies are preserved: the operand of the call is the array itself, not a view.
  - Donation is preserved: the written arrays are references aliased by the results. A donated array
    is written in place, and the result keeps its memory space. Without donation XLA copies only
    the written arrays first, as for any update.
  - There is no other copy: for row-major arrays reshapes and bitcasts to words are free. The
    optimized program has only parameters, bitcasts and the call, also in loops and `shard_map`.
Alternatives that do not work: With a custom call that aliases its operand and declares the result
device memory, XLA copies the entire pool first, unless the jit donates and returns the pool, and a
load does neither. An alias created outside jit through DLPack is a second array over the same
bytes, without ordering of reads and writes. A table of addresses would hide the arrays from XLA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxkv._src.transfer.pallas_chunks import (
    MAX_CHUNKS,
    WORD_BYTES,
    Job,
    Ring,
    buffers_of,
    sides_of,
)

if TYPE_CHECKING:
    from jax.core import ShapedArray

    from jaxkv._src.transfer.block_copy import BlockCopy
from jaxkv._src.transfer.pallas_mosaic import _WORD, _run_mosaic
from jaxkv._src.transfer.pallas_triton import _run_triton


def copy_blocks_pallas(
    copies: Sequence[BlockCopy],
    pairs: jax.Array,
    results: Sequence[Sequence[ShapedArray]],
    *,
    num_sms: int | None = None,
    ring: Ring | None = None,
) -> list[list[jax.Array]]:
    """Traces the copies, all buffers in one kernel; only inside jit.

    On platform cpu the kernel runs in the Pallas interpreter: slow, for tests, device memory only.

    Args:
      copies: copies of one direction; `unsupported_reason` is None for each.
      pairs: int32[2 + 2n] of `plan_pairs`: the number of pairs, an unused word, then source and
        destination of each pair. All ids are in range, and destinations are unique.
      results: types of the written arrays of each copy.
      num_sms: number of SMs; by default enough for the bandwidth of the host link.
      ring: the slots; by default derived from the block sizes.

    Returns:
      `copy.written` of each copy, with the copied blocks.

    Raises:
      NotImplementedError: the number of chunks is `MAX_CHUNKS` or more.
    """
    ring = ring or Ring.of(*(copy.geometry.block_bytes for copy in copies))
    job = Job(
        ring=ring,
        num_sms=num_sms or (4 if ring.chunk_words * WORD_BYTES >= 8192 else 12),
        strided_side=0 if copies[0].to_dense else 1,
        buffers=buffers_of(copies),
    )
    chunks = pairs.size // 2 * len(job.parts())
    if chunks >= MAX_CHUNKS:
        raise NotImplementedError(
            f"pallas: {chunks} chunks in one launch, the limit is {MAX_CHUNKS - 1}: split the call"
        )
    sources, destinations = (
        [
            _as_blocks(array, copy.geometry.block_bytes // WORD_BYTES)
            for copy in copies
            for array in sides_of(copy)[side]
        ]
        for side in (0, 1)
    )
    run = _run_mosaic if _has_mosaic_kernel(jax.devices()[0]) else _run_triton
    written = iter(run(job, _relabel(pairs), sources, destinations))
    return [[_from_blocks(next(written), like) for like in likes] for likes in results]


def _has_mosaic_kernel(device: jax.Device) -> bool:
    """Whether a device has TMA and shared memory for the ring: 99 KiB in compute capability 12."""
    if device.platform == "cpu":
        return True
    return 9 <= int(str(device.compute_capability).split(".")[0]) <= 11


# ---------------------------------------------------------------------------------------------
# Arrays as blocks of words in global memory, and back


def _as_blocks(array: jax.Array, block_words: int) -> jax.Array:
    """An array of any dtype as int32[blocks, block_words], typed as device memory."""
    array = _relabel(array)
    itemsize = array.dtype.itemsize
    if itemsize < WORD_BYTES:
        array = array.reshape(-1, block_words, WORD_BYTES // itemsize)
    return lax.bitcast_convert_type(array, _WORD).reshape(-1, block_words)


def _from_blocks(blocks: jax.Array, like: ShapedArray) -> jax.Array:
    """Inverse of `_as_blocks`: the array of type `like`."""
    itemsize = like.dtype.itemsize
    if itemsize > WORD_BYTES:
        blocks = blocks.reshape(-1, itemsize // WORD_BYTES)
    return _relabel(lax.bitcast_convert_type(blocks, like.dtype).reshape(like.shape), like)


def _relabel(array: jax.Array, like: ShapedArray | None = None) -> jax.Array:
    """The same array with type `like`; by default device memory without varying mesh axes."""
    if like is None:
        like = jax.typeof(array).update(
            memory_space=jax.memory.Space.Device,
            manual_axis_type=jax.typeof(0).manual_axis_type,
        )
    return _relabel_p.bind(array, to=like)


def _reject_outside_jit(array: jax.Array, *, to: ShapedArray) -> jax.Array:
    """For operations that JAX runs one at a time, as in a `jax.checkpoint` outside jit."""
    raise NotImplementedError(
        "pallas: JAX runs this call outside of jit, and a Pallas kernel takes references to memory "
        "only in a compiled program: wrap the surrounding function, such as a jax.checkpoint, in "
        "jax.jit, or pass another implementation"
    )


_relabel_p = Primitive("jaxkv_relabel")
_relabel_p.def_impl(_reject_outside_jit)
_relabel_p.def_abstract_eval(lambda array, *, to: to)
mlir.register_lowering(_relabel_p, lambda context, array, *, to: [array])
