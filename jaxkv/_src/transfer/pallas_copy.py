"""Block copies between pinned host memory and HBM as one Pallas kernel.

The kernel (Mosaic GPU, sm_90 and newer) moves each block with two bulk copies of the TMA unit,
global -> shared -> global memory, so that a handful of SMs keeps the host link busy. One launch
serves all arrays of a call, whatever the sizes of their blocks, if the blocks are one run on both
sides; the CUDA kernel serves the others. Among those are bool and complex types: XLA has no bitcast
between them and words, and any other view of them as words is a copy of the whole array. Types of
less than a byte no implementation serves: view their packed bytes as uint8.

How host memory gets into a Mosaic kernel. An argument in host memory is refused while tracing:
its Ref has memory space Host, and the copies want global memory. The hardware makes no difference,
as a pinned address is a global address. Nor does XLA: in StableHLO a memory space is no part of a
value's type, and in XLA the layout of a host parameter, memory space included, follows the value
through bitcasts and aliases into any custom call. Only JAX's type is in the way, and `_relabel`
changes just that: a primitive whose result has another type and that lowers to its own operand.
  - Data dependencies hold, because the call's operand is the array itself and no view of it.
  - Donation holds, because the written arrays are references that the call's results alias: a
    donated array is written where it lies, and its result has the memory space it came with.
    Without donation XLA copies what is written first, and only that, as for any update.
  - Nothing else is copied: on row-major arrays reshapes and bitcasts to words cost nothing. The
    optimised program is parameters, bitcasts and the call, also in loops and under `shard_map`.
The other ways fail here. A custom call that aliases its operand and calls the result device memory
makes XLA copy the whole pool first, unless the jit donates the pool and returns it, and a load does
neither. An alias made outside jit through DLPack is a second array over the same bytes, whose reads
and writes nothing orders. A table of addresses would hide the arrays from XLA altogether.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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
    from jaxkv._src.transfer.block_copy import BlockCopy
from jaxkv._src.transfer.pallas_mosaic import _WORD, _run_mosaic
from jaxkv._src.transfer.pallas_triton import _run_triton


def copy_blocks_pallas(
    copies: Sequence[BlockCopy],
    pairs: jax.Array,
    results: Sequence[Sequence[Any]],
    *,
    num_sms: int | None = None,
    ring: Ring | None = None,
) -> list[list[Any]]:
    """Traces the copies, all buffers in one kernel; only inside jit.

    On platform cpu Pallas interprets the same kernel: slow, for tests, device memory only.

    Args:
      copies: what to copy for each pair, all in one direction; `unsupported_reason` refuses none
      of them.
      pairs: int32[2 + 2n] of `plan_pairs`: how many blocks to copy, a word unused, then source and
        destination of each. All are in range, and no block is a destination twice.
      results: types of the written arrays of each copy.
      num_sms: SMs to run on, by default enough for the host link.
      ring: the slots, by default what suits the sizes of the blocks.

    Returns:
      The written arrays of each copy, `copy.written` with the blocks in them.

    Raises:
      NotImplementedError: the chunks of all copies are too many to count.
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
        raise NotImplementedError(f"{chunks} chunks in one launch, the limit is {MAX_CHUNKS}")
    sources, destinations = (
        [
            _as_blocks(array, copy.geometry.block_bytes // WORD_BYTES)
            for copy in copies
            for array in sides_of(copy)[side]
        ]
        for side in (0, 1)
    )
    run = _run_mosaic if _has_tma() else _run_triton
    written = iter(run(job, _relabel(pairs), sources, destinations))
    return [[_from_blocks(next(written), like) for like in likes] for likes in results]


def _has_tma() -> bool:
    device = jax.devices()[0]
    return device.platform == "cpu" or float(device.compute_capability) >= 9.0


# ---------------------------------------------------------------------------------------------
# Arrays as blocks of words in global memory, and back


def _as_blocks(array: Any, block_words: int) -> Any:
    """An array of any type as int32[blocks, block_words] in device memory."""
    array = _relabel(array)
    itemsize = array.dtype.itemsize
    if itemsize < WORD_BYTES:
        array = array.reshape(-1, block_words, WORD_BYTES // itemsize)
    return lax.bitcast_convert_type(array, _WORD).reshape(-1, block_words)


def _from_blocks(blocks: Any, like: Any) -> Any:
    """The array of type `like` that `_as_blocks` made blocks of."""
    itemsize = like.dtype.itemsize
    if itemsize > WORD_BYTES:
        blocks = blocks.reshape(-1, itemsize // WORD_BYTES)
    return _relabel(lax.bitcast_convert_type(blocks, like.dtype).reshape(like.shape), like)


def _relabel(array: Any, like: Any = None) -> Any:
    """The same array with type `like`; by default in device memory and not varying over a mesh."""
    if like is None:
        like = jax.typeof(array).update(
            memory_space=jax.memory.Space.Device,
            manual_axis_type=jax.typeof(0).manual_axis_type,
        )
    return _relabel_p.bind(array, to=like)


_relabel_p = Primitive("jaxkv_relabel")
_relabel_p.def_abstract_eval(lambda array, *, to: to)
mlir.register_lowering(_relabel_p, lambda context, array, *, to: [array])
