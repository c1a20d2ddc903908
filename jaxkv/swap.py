"""Block copies between pinned host memory and HBM as one Pallas kernel.

The kernel (Mosaic GPU, sm_90 and newer) moves each block with two bulk copies of the TMA unit,
global -> shared -> global memory, so that a handful of SMs keeps the host link busy. It serves
copies whose blocks are one run on both sides; the CUDA kernel serves the others.

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

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

if TYPE_CHECKING:
    from jaxkv.block_copy import BlockCopy

_WORD = jnp.int32
_WORD_BYTES = 4
_UNIT_BYTES = 128  # Mosaic's copies move multiples of it
_CHUNK_BYTES = 16 * 1024  # larger blocks are cut, as the ring needs many slots to hide PCIe latency
_SHARED_BYTES = 192 * 1024  # of the 227 KiB that a thread block may have
_MAX_SLOTS = 32  # Mosaic's limit on the barriers of an array: one for each slot
_TRITON_TILE_WORDS = 8192
_TRITON_TILE_COLUMNS = 1024


@dataclasses.dataclass(frozen=True)
class Ring:
    """How blocks are cut up, and the slots in shared memory that the chunks pass through.

    Attributes:
      block_words: words of a block.
      chunk_words: words of a chunk; the last chunk of a block may overlap the one before.
      chunks: chunks of a block.
      threads: warpgroups, which take turns at issuing copies, each with slots of its own.
      depth: slots of a warpgroup.
    """

    block_words: int
    chunk_words: int
    chunks: int
    threads: int
    depth: int

    @classmethod
    def of(cls, block_bytes: int) -> Ring:
        """The ring for blocks of a multiple of 128 bytes."""
        chunks = pl.cdiv(block_bytes, _CHUNK_BYTES)
        chunk_bytes = pl.cdiv(block_bytes // _UNIT_BYTES, chunks) * _UNIT_BYTES
        slots = min(_MAX_SLOTS, _SHARED_BYTES // chunk_bytes)
        threads = 2 if slots < 16 else 4 if chunk_bytes > 2048 else 8
        return cls(
            block_words=block_bytes // _WORD_BYTES,
            chunk_words=chunk_bytes // _WORD_BYTES,
            chunks=chunks,
            threads=threads,
            depth=slots // threads,
        )

    def start(self, chunk: Any) -> Any:
        """First word of a chunk of a block."""
        return jnp.minimum(chunk * self.chunk_words, self.block_words - self.chunk_words)

    @property
    def lag(self) -> int:
        """Slots of a warpgroup that are being stored while the others are being loaded."""
        return self.depth // 2


@dataclasses.dataclass(frozen=True)
class _Job:
    """What is known of a copy while tracing.

    Attributes:
      ring: how to cut the blocks up.
      num_sms: thread blocks, one for each SM.
      strided_side: 0 if the sources are the strided arrays, 1 if the destinations are.
      num_buffers: block copies for each pair of ids.
      page_stride: blocks between the pages of a buffer on the strided side.
    """

    ring: Ring
    num_sms: int
    strided_side: int
    num_buffers: int
    page_stride: int


def refusal(copy: BlockCopy, num_ids: int) -> str | None:
    """Why Pallas does not serve a copy of up to `num_ids` pairs, or None if it does."""
    geometry = copy.geometry
    block_bytes = geometry.block_bytes
    if geometry.run_bytes != block_bytes:
        return f"blocks lie in runs of {geometry.run_bytes} bytes on the host, it copies whole ones"
    if block_bytes % _UNIT_BYTES:
        return f"blocks of {block_bytes} bytes are no multiple of {_UNIT_BYTES}"
    if any(at % block_bytes for at in (geometry.page_stride_bytes, *copy.strided_offsets)):
        return f"blocks do not start at multiples of their size, {block_bytes} bytes"
    for array in (*copy.strided, *copy.dense):
        if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.complexfloating):
            return f"{array.dtype} has no view as words"
        if array.size * array.dtype.itemsize % block_bytes:
            return f"an array of shape {tuple(array.shape)} is no whole number of blocks"
    chunks = num_ids * len(copy.dense) * Ring.of(block_bytes).chunks
    if chunks >= 2**30:
        return f"{chunks} chunks are too many to count in 32 bits"
    return None


def copy_blocks_pallas(
    copy: BlockCopy,
    pairs: jax.Array,
    results: Sequence[Any],
    *,
    num_sms: int | None = None,
    ring: Ring | None = None,
) -> list[Any]:
    """Traces the copy, all buffers in one kernel; only inside jit.

    On platform cpu Pallas interprets the same kernel: slow, for tests, device memory only.

    Args:
      copy: a copy that `refusal` does not refuse.
      pairs: int32[2 + 2n] of `plan_pairs`: how many blocks to copy, a word unused, then source and
        destination of each. All are in range, and no block is a destination twice.
      results: types of the written arrays.
      num_sms: SMs to run on, by default enough for the host link.
      ring: how to cut the blocks up, by default by their size.

    Returns:
      The written arrays, `copy.written` with the blocks in them.
    """
    block_bytes = copy.geometry.block_bytes
    ring = ring or Ring.of(block_bytes)
    job = _Job(
        ring=ring,
        num_sms=num_sms or (4 if ring.chunk_words * _WORD_BYTES >= 8192 else 12),
        strided_side=0 if copy.to_dense else 1,
        num_buffers=len(copy.dense),
        page_stride=copy.geometry.page_stride_bytes // block_bytes,
    )
    starts = jnp.array([offset // block_bytes for offset in copy.strided_offsets], _WORD)
    dense, strided = (
        [_as_blocks(array, ring.block_words) for array in side]
        for side in (copy.dense, copy.strided)
    )
    sources, destinations = (strided, dense) if copy.to_dense else (dense, strided)
    run = _run_mosaic if _has_tma() else _run_triton
    written = run(job, _relabel(pairs), starts, sources, destinations)
    return [_from_blocks(blocks, like) for blocks, like in zip(written, results, strict=True)]


def _has_tma() -> bool:
    device = jax.devices()[0]
    return device.platform == "cpu" or float(device.compute_capability) >= 9.0


def _interpreter() -> Any:
    """Parameters of Pallas' GPU interpreter on platform cpu, else False."""
    if jax.default_backend() != "cpu":
        return False
    if hasattr(plgpu, "InterpretGPUParams"):  # since jax 0.11
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


# ---------------------------------------------------------------------------------------------
# Mosaic GPU: sm_90 and newer


def _run_mosaic(
    job: _Job, pairs: Any, starts: Any, sources: list[Any], destinations: list[Any]
) -> list[Any]:
    slots = job.ring.threads * job.ring.depth

    def jaxkv_copy_blocks(pairs: Any, starts: Any, *arrays: Any) -> None:
        pl.run_scoped(
            functools.partial(
                _copy_chunks, job, pairs, starts, arrays[: len(sources)], arrays[len(sources) :]
            ),
            plgpu.SMEM((slots, job.ring.chunk_words), _WORD),
            plgpu.Barrier(num_barriers=slots),
            collective_axes="thread",
        )

    written = [jax.new_ref(blocks, memory_space=plgpu.GMEM) for blocks in destinations]
    # Not plgpu.kernel, which can't write to references in jax 0.10.2.
    pl.kernel(
        jaxkv_copy_blocks,
        mesh=plgpu.Mesh(
            grid=(job.num_sms,),
            grid_names=("sm",),
            num_threads=job.ring.threads,
            thread_name="thread",
        ),
        interpret=_interpreter(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe, as threads neither read nor write shared memory: only copies do.
            unsafe_no_auto_barriers=True,
        ),
    )(pairs, starts, *sources, *written)
    return [jax.freeze(blocks) for blocks in written]


def _copy_chunks(
    job: _Job,
    pairs: Any,
    starts: Any,
    sources: Sequence[Any],
    destinations: Sequence[Any],
    shared: Any,
    loaded: Any,
) -> None:
    """The kernel: of all chunks, each warpgroup passes every `workers`-th through its slots.

    In turn t it stores chunk t - ahead, then starts to load chunk t into the slot of chunk
    t - depth. The `lag` stores that came after that one's may still be reading their slots.

    Args:
      job: what is known while tracing.
      pairs, starts: int32 references: as for `copy_blocks_pallas`; first block of each buffer on
        the strided side.
      sources, destinations: int32[blocks, block_words] references in global memory.
      shared: int32[slots, chunk_words] reference to shared memory.
      loaded: a barrier for each slot, which completes when its load has.
    """
    ring = job.ring
    words, depth = ring.chunk_words, ring.depth
    ahead = depth - ring.lag
    workers = job.num_sms * ring.threads
    thread = lax.axis_index("thread")
    worker = lax.axis_index("sm") * ring.threads + thread
    chunks = pairs[0] * (job.num_buffers * ring.chunks)
    turns, _ = _divide(chunks - worker + (workers - 1), workers)

    def locate(turn: Any, side: int) -> tuple[Any, Any, Any]:
        """Buffer, block and first word of the chunk of a turn; side 0 is the source."""
        # Clipped, because places are found for turns that never come.
        chunk = jnp.clip(turn * workers + worker, 0, jnp.maximum(chunks - 1, 0))
        place, part = _divide(chunk, ring.chunks)
        pair, buffer = _divide(place, job.num_buffers)
        block = pairs[2 + side + 2 * pair]
        if side == job.strided_side:
            block = starts[buffer] + block * job.page_stride
        return buffer, block, ring.start(part)

    def load(slot: Any, buffer: Any, block: Any, start: Any) -> None:
        def copy(source: Any) -> None:
            plgpu.copy_gmem_to_smem(
                source.at[block, pl.ds(start, words)],
                shared.at[slot],
                loaded.at[slot],
                # Else Mosaic takes a tensor map for each array, and boxes of 256 words.
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        _with_ref(sources, buffer, copy)

    def store(slot: Any, buffer: Any, block: Any, start: Any) -> None:
        def copy(destination: Any) -> None:
            plgpu.copy_smem_to_gmem(shared.at[slot], destination.at[block, pl.ds(start, words)])

        plgpu.barrier_wait(loaded.at[slot])
        _with_ref(destinations, buffer, copy)

    def take_turn(turn: Any, places: Any) -> Any:
        # One turn early: a read of global memory takes as long as a turn.
        next_places = locate(turn + 1, 0), locate(turn + 1 - ahead, 1)

        @pl.when(turn >= ahead)
        def _() -> None:
            store(thread * depth + _divide(turn - ahead, depth)[1], *places[1])

        @pl.when(turn < turns)
        def _() -> None:
            plgpu.wait_smem_to_gmem(ring.lag, wait_read_only=True)
            load(thread * depth + _divide(turn, depth)[1], *places[0])

        return next_places

    places = locate(jnp.int32(0), 0), locate(jnp.int32(-ahead), 1)
    lax.fori_loop(jnp.int32(0), turns + ahead, take_turn, places)
    plgpu.wait_smem_to_gmem(0)


def _divide(number: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and remainder of an int32 that is not negative, without Python's rounding."""
    return lax.div(number, np.int32(divisor)), lax.rem(number, np.int32(divisor))


def _with_ref(refs: Sequence[Any], index: Any, use: Callable[[Any], None]) -> None:
    """Calls `use` with one of the references."""
    if len(refs) == 1:
        use(refs[0])
    else:
        lax.switch(index, [functools.partial(use, ref) for ref in refs])


# ---------------------------------------------------------------------------------------------
# Pallas-Triton, deprecated since jax 0.11: before sm_90


def _run_triton(
    job: _Job, pairs: Any, starts: Any, sources: list[Any], destinations: list[Any]
) -> list[Any]:
    """A launch for each buffer; a program moves a tile of words of several blocks at a time."""
    from jax.experimental.pallas import triton

    words = job.ring.block_words
    columns = min(_TRITON_TILE_COLUMNS, pl.next_power_of_2(words))
    rows = _TRITON_TILE_WORDS // columns
    tiles_per_row = pl.cdiv(words, columns)

    def jaxkv_copy_blocks(pairs: Any, start: Any, source: Any, _: Any, destination: Any) -> None:
        count = pairs[0]
        tiles = _divide(count + (rows - 1), rows)[0] * tiles_per_row
        program = pl.program_id(0)

        def move(turn: Any, _: None) -> None:
            tile = program + turn * job.num_sms
            row, column = _divide(tile, tiles_per_row)
            # No masks: what lies behind the last pair or word copies that one again.
            pair = jnp.minimum(row * rows + jnp.arange(rows, dtype=_WORD), count - 1)
            word = jnp.minimum(column * columns + jnp.arange(columns, dtype=_WORD), words - 1)
            blocks = [triton.load(pairs.at[2 + side + 2 * pair]) for side in (0, 1)]
            blocks[job.strided_side] = start[0] + blocks[job.strided_side] * job.page_stride
            moved = triton.load(source.at[blocks[0][:, None], word[None, :]])
            triton.store(destination.at[blocks[1][:, None], word[None, :]], moved)

        turns, _ = _divide(tiles - program + (job.num_sms - 1), job.num_sms)
        lax.fori_loop(jnp.int32(0), turns, move, None)

    written = list(destinations)
    for buffer in range(job.num_buffers):
        source, to = (buffer if len(side) > 1 else 0 for side in (sources, written))
        written[to] = pl.pallas_call(
            jaxkv_copy_blocks,
            out_shape=jax.ShapeDtypeStruct(written[to].shape, _WORD),
            grid=(job.num_sms,),
            input_output_aliases={3: 0},
            compiler_params=triton.CompilerParams(num_warps=16, num_stages=1),
            interpret=bool(_interpreter()),
        )(pairs, starts[buffer : buffer + 1], sources[source], written[to])
    return written


# ---------------------------------------------------------------------------------------------
# Arrays as blocks of words in global memory, and back


def _as_blocks(array: Any, block_words: int) -> Any:
    """An array of any type as int32[blocks, block_words] in device memory."""
    array = _relabel(array)
    itemsize = array.dtype.itemsize
    if itemsize < _WORD_BYTES:
        array = array.reshape(-1, block_words, _WORD_BYTES // itemsize)
    return lax.bitcast_convert_type(array, _WORD).reshape(-1, block_words)


def _from_blocks(blocks: Any, like: Any) -> Any:
    """The array of type `like` that `_as_blocks` made blocks of."""
    itemsize = like.dtype.itemsize
    if itemsize > _WORD_BYTES:
        blocks = blocks.reshape(-1, itemsize // _WORD_BYTES)
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
