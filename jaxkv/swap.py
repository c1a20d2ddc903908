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

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxkv.chunks import MAX_CHUNKS, WORD_BYTES, Buffer, Job, Ring, buffers_of, sides_of

if TYPE_CHECKING:
    from jaxkv.block_copy import BlockCopy

_WORD = jnp.int32
_TRITON_TILE_WORDS = 8192
_TRITON_TILE_COLUMNS = 1024


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
      copies: what to copy for each pair, all in one direction; `refusal` refuses none of them.
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


def _run_mosaic(job: Job, pairs: Any, sources: list[Any], destinations: list[Any]) -> list[Any]:
    ring = job.ring
    slots = ring.threads * ring.depth

    def jaxkv_copy_blocks(pairs: Any, parts: Any, *arrays: Any) -> None:
        pl.run_scoped(
            functools.partial(
                _copy_chunks, job, pairs, parts, arrays[: len(sources)], arrays[len(sources) :]
            ),
            plgpu.SMEM((slots, ring.batch * ring.chunk_words), _WORD),
            plgpu.Barrier(num_arrivals=ring.batch, num_barriers=slots),
            collective_axes="thread",
        )

    written = [jax.new_ref(blocks, memory_space=plgpu.GMEM) for blocks in destinations]
    # Not plgpu.kernel, which can't write to references in jax 0.10.2.
    pl.kernel(
        jaxkv_copy_blocks,
        mesh=plgpu.Mesh(
            grid=(job.num_sms,),
            grid_names=("sm",),
            num_threads=ring.threads,
            thread_name="thread",
        ),
        interpret=_interpreter(),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # Safe, as threads neither read nor write shared memory: only copies do.
            unsafe_no_auto_barriers=True,
        ),
    )(pairs, jnp.array(job.parts()), *sources, *written)
    return [jax.freeze(blocks) for blocks in written]


class _Place(NamedTuple):
    """Where one side of a batch lies: in an array from `start` on, beginning with block `block`.

    That is the block of pair `pair`; the block of id i is `first + i * stride`.
    """

    array: Any
    start: Any
    first: Any
    stride: Any
    pair: Any
    block: Any


def _copy_chunks(
    job: Job,
    pairs: Any,
    parts: Any,
    sources: Sequence[Any],
    destinations: Sequence[Any],
    shared: Any,
    loaded: Any,
) -> None:
    """The kernel: of all batches of chunks, each warpgroup passes every `workers`-th through.

    A batch is one part of `ring.batch` pairs. In turn t a warpgroup stores batch t - ahead, then
    starts to load batch t into the slot of batch t - depth. The `lag` batches that were stored
    after that one may still be leaving their slots.

    Args:
      job: what is known while tracing.
      pairs, parts: int32 references: as for `copy_blocks_pallas`, and `job.parts()`.
      sources, destinations: int32[blocks, block_words] references in global memory.
      shared: int32[slots, batch * chunk_words] reference to shared memory.
      loaded: a barrier for each slot, which completes when its batch is there.
    """
    ring, table = job.ring, job.parts()
    depth, batch = ring.depth, ring.batch
    ahead = depth - ring.lag
    workers = job.num_sms * ring.threads
    thread = lax.axis_index("thread")
    worker = lax.axis_index("sm") * ring.threads + thread
    last_pair = jnp.maximum(pairs[0] - 1, 0)
    batches = _divide(pairs[0] + (batch - 1), batch)[0] * len(table)
    turns, _ = _divide(batches - worker + (workers - 1), workers)

    def block_of(side: int, pair: Any, first: Any, stride: Any) -> Any:
        # The last batch may take the last pair again: the same bytes to the same place.
        return first + stride * pairs[2 + side + 2 * jnp.minimum(pair, last_pair)]

    def locate(turn: Any, side: int) -> _Place:
        """The batch of a turn on side 0, the source, or 1."""
        # Clipped, because places are found for turns that never come.
        place = jnp.clip(turn * workers + worker, 0, jnp.maximum(batches - 1, 0))
        group, part = _divide(place, len(table))

        def field(column: int) -> Any:
            values = table[:, column]
            return values[0] if (values == values[0]).all() else parts[part, column]

        first, stride = np.int32(0), np.int32(1)
        if side == job.strided_side:
            first, stride = field(3), field(4)
        pair = group * batch
        block = block_of(side, pair, first, stride)
        return _Place(field(side), field(2), first, stride, pair, block)

    def each_chunk(side: int, place: _Place, use: Callable[[Any, Any], None]) -> None:
        """Calls `use` with the chunks of a batch in global memory and their slices of the slot."""

        def in_array(array: Any, words: int) -> None:
            def use_chunk(i: Any, block: Any) -> None:
                use(array.at[block, pl.ds(place.start, words)], pl.ds(i * words, words))

            def step(i: Any, block: Any) -> Any:
                # Read one chunk early, as in `take_turn`.
                following = block_of(side, place.pair + i + 1, place.first, place.stride)
                use_chunk(i, block)
                return following

            if batch == 1:
                use_chunk(0, place.block)
            else:
                lax.fori_loop(np.int32(0), np.int32(batch), step, place.block)

        _with_ref(place.array, (sources, destinations)[side], job.chunk_words(side), in_array)

    def load(slot: Any, place: _Place) -> None:
        def copy(chunk: Any, piece: Any) -> None:
            plgpu.copy_gmem_to_smem(
                chunk,
                shared.at[slot, piece],
                loaded.at[slot],
                # Else Mosaic takes a tensor map for each array, and boxes of 256 words.
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        each_chunk(0, place, copy)

    def store(slot: Any, place: _Place) -> None:
        def copy(chunk: Any, piece: Any) -> None:
            plgpu.copy_smem_to_gmem(shared.at[slot, piece], chunk)

        plgpu.barrier_wait(loaded.at[slot])
        each_chunk(1, place, copy)

    def take_turn(turn: Any, places: Any) -> Any:
        # One turn early: a read of global memory takes as long as a turn.
        next_places = locate(turn + 1, 0), locate(turn + 1 - ahead, 1)

        @pl.when(turn >= ahead)
        def _() -> None:
            store(thread * depth + _divide(turn - ahead, depth)[1], places[1])

        @pl.when(turn < turns)
        def _() -> None:
            plgpu.wait_smem_to_gmem(ring.lag * batch, wait_read_only=True)
            load(thread * depth + _divide(turn, depth)[1], places[0])

        return next_places

    places = locate(jnp.int32(0), 0), locate(jnp.int32(-ahead), 1)
    lax.fori_loop(jnp.int32(0), turns + ahead, take_turn, places)
    plgpu.wait_smem_to_gmem(0)


def _divide(number: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and remainder of an int32 that is not negative, without Python's rounding."""
    return lax.div(number, np.int32(divisor)), lax.rem(number, np.int32(divisor))


def _with_ref(
    index: Any, refs: Sequence[Any], words: Sequence[int], use: Callable[[Any, int], None]
) -> None:
    """Calls `use` with one of the references and the words of its chunks."""
    branches = [functools.partial(use, ref, size) for ref, size in zip(refs, words, strict=True)]
    if len(refs) == 1:
        branches[0]()
    else:
        lax.switch(index, branches)


# ---------------------------------------------------------------------------------------------
# Pallas-Triton, deprecated since jax 0.11: before sm_90


def _run_triton(job: Job, pairs: Any, sources: list[Any], destinations: list[Any]) -> list[Any]:
    """A launch for each buffer; a program moves a tile of words of several blocks at a time."""
    from jax.experimental.pallas import triton

    written = list(destinations)
    for buffer in job.buffers:
        source, to = buffer.arrays
        written[to] = pl.pallas_call(
            functools.partial(_copy_tiles, job, buffer),
            name="jaxkv_copy_blocks",
            out_shape=jax.ShapeDtypeStruct(written[to].shape, _WORD),
            grid=(job.num_sms,),
            input_output_aliases={2: 0},
            compiler_params=triton.CompilerParams(num_warps=16, num_stages=1),
            interpret=bool(_interpreter()),
        )(pairs, sources[source], written[to])
    return written


def _copy_tiles(
    job: Job, buffer: Buffer, pairs: Any, source: Any, _: Any, destination: Any
) -> None:
    """The kernel for a buffer; references as for `_copy_chunks`."""
    from jax.experimental.pallas import triton

    words = buffer.block_words
    columns = min(_TRITON_TILE_COLUMNS, pl.next_power_of_2(words))
    rows = _TRITON_TILE_WORDS // columns
    tiles_per_row = pl.cdiv(words, columns)
    count = pairs[0]
    tiles = _divide(count + (rows - 1), rows)[0] * tiles_per_row
    program = pl.program_id(0)

    def move(turn: Any, _: None) -> None:
        row, column = _divide(program + turn * job.num_sms, tiles_per_row)
        # No masks: what lies behind the last pair or word copies that one again.
        pair = jnp.minimum(row * rows + jnp.arange(rows, dtype=_WORD), count - 1)
        word = jnp.minimum(column * columns + jnp.arange(columns, dtype=_WORD), words - 1)
        blocks = [triton.load(pairs.at[2 + side + 2 * pair]) for side in (0, 1)]
        blocks[job.strided_side] = buffer.first + blocks[job.strided_side] * buffer.stride
        moved = triton.load(source.at[blocks[0][:, None], word[None, :]])
        triton.store(destination.at[blocks[1][:, None], word[None, :]], moved)

    turns, _ = _divide(tiles - program + (job.num_sms - 1), job.num_sms)
    lax.fori_loop(jnp.int32(0), turns, move, None)


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
