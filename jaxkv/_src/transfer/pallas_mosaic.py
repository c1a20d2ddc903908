"""Block copy as a Mosaic GPU kernel, for compute capabilities 9 to 11."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxkv._src.transfer.pallas_chunks import Job

_WORD = jnp.int32
_Ref: TypeAlias = Any  # a reference of Pallas, or a part of one
_Int32: TypeAlias = jax.Array | np.int32  # traced scalar, or a constant
_UseChunk: TypeAlias = "Callable[[_Ref, slice | pl.Slice], None]"


def _interpreter() -> Any:
    """Parameters of the Pallas GPU interpreter on platform cpu, otherwise False."""
    if jax.default_backend() != "cpu":
        return False
    if hasattr(plgpu, "InterpretGPUParams"):  # since jax 0.11
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()


def _run_mosaic(
    job: Job, pairs: jax.Array, sources: list[jax.Array], destinations: list[jax.Array]
) -> list[jax.Array]:
    ring = job.ring
    slots = ring.threads * ring.depth

    def jaxkv_copy_blocks(pairs: _Ref, parts: _Ref, *arrays: _Ref) -> None:
        sides = arrays[: len(sources)], arrays[len(sources) :]
        pl.run_scoped(
            lambda shared, loaded: _Warpgroup(job, pairs, parts, sides, shared, loaded).copy(),
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
            # Safe: only bulk copies access shared memory, no thread does.
            unsafe_no_auto_barriers=True,
        ),
    )(pairs, jnp.array(job.parts()), *sources, *written)
    return [jax.freeze(blocks) for blocks in written]


class _BatchPosition(NamedTuple):
    """Position of one side of a batch: words from `start` in the blocks of an array.

    The first block is `block`, of pair `pair`; id i is block `first + i * stride`.
    """

    array: jax.Array
    start: jax.Array
    first: _Int32
    stride: _Int32
    pair: jax.Array
    block: jax.Array


_Positions: TypeAlias = tuple[_BatchPosition, _BatchPosition]  # of the load, of the store


class _Warpgroup:
    """The kernel of one warpgroup, which copies every `workers`-th batch of chunks.

    A batch is one part of `ring.batch` pairs. In iteration t a warpgroup stores batch
    t - ahead, then starts the load of batch t into the slot of batch t - depth. Stores of the `lag`
    batches after t - depth may still be in flight.

    Args:
      job: static parameters of the launch.
      pairs, parts: int32 references: as for `copy_blocks_pallas`, and `job.parts()`.
      sides: sources and destinations, int32[blocks, block_words] references to global memory.
      shared: int32[slots, batch * chunk_words] reference to shared memory.
      loaded: one barrier per slot, completed when its batch is loaded.
    """

    def __init__(
        self,
        job: Job,
        pairs: _Ref,
        parts: _Ref,
        sides: tuple[Sequence[_Ref], Sequence[_Ref]],
        shared: _Ref,
        loaded: _Ref,
    ) -> None:
        self.job, self.ring, self.table = job, job.ring, job.parts()
        self.pairs, self.parts, self.sides = pairs, parts, sides
        self.shared, self.loaded = shared, loaded
        self.ahead = self.ring.depth - self.ring.lag
        self.workers = job.num_sms * self.ring.threads
        self.thread = lax.axis_index("thread")
        self.worker = lax.axis_index("sm") * self.ring.threads + self.thread
        self.last_pair = jnp.maximum(pairs[0] - 1, 0)
        batch = self.ring.batch
        self.batches = _divide(pairs[0] + (batch - 1), batch)[0] * len(self.table)

    def copy(self) -> None:
        """The main loop: all iterations."""
        iterations, _ = _divide(self.batches - self.worker + (self.workers - 1), self.workers)
        positions = self._locate(jnp.int32(0), 0), self._locate(jnp.int32(-self.ahead), 1)
        iterate = functools.partial(self._iterate, iterations)
        lax.fori_loop(jnp.int32(0), iterations + self.ahead, iterate, positions)
        plgpu.wait_smem_to_gmem(0)

    def _iterate(
        self, iterations: jax.Array, iteration: jax.Array, positions: _Positions
    ) -> _Positions:
        depth = self.ring.depth
        # One iteration ahead: a global memory read takes as long as an iteration.
        next_positions = self._locate(iteration + 1, 0), self._locate(iteration + 1 - self.ahead, 1)

        @pl.when(iteration >= self.ahead)
        def _() -> None:
            self._store(
                self.thread * depth + _divide(iteration - self.ahead, depth)[1], positions[1]
            )

        @pl.when(iteration < iterations)
        def _() -> None:
            plgpu.wait_smem_to_gmem(self.ring.lag * self.ring.batch, wait_read_only=True)
            self._load(self.thread * depth + _divide(iteration, depth)[1], positions[0])

        return next_positions

    def _locate(self, iteration: jax.Array, side: int) -> _BatchPosition:
        """The batch of an iteration, on side 0 (sources) or 1 (destinations)."""
        # Clipped: also evaluated for iterations before the first and after the last batch.
        index = iteration * self.workers + self.worker
        index = jnp.clip(index, 0, jnp.maximum(self.batches - 1, 0))
        group, part = _divide(index, len(self.table))
        first: _Int32 = np.int32(0)
        stride: _Int32 = np.int32(1)
        if side == self.job.strided_side:
            first, stride = self._field(part, 3), self._field(part, 4)
        pair = group * self.ring.batch
        block = self._block_of(side, pair, first, stride)
        return _BatchPosition(
            self._field(part, side), self._field(part, 2), first, stride, pair, block
        )

    def _field(self, part: jax.Array, column: int) -> jax.Array:
        """A column of a part; a constant if it is equal in all parts."""
        values = self.table[:, column]
        return values[0] if (values == values[0]).all() else self.parts[part, column]

    def _block_of(self, side: int, pair: jax.Array, first: _Int32, stride: _Int32) -> jax.Array:
        # The last batch may repeat the last pair: the same bytes to the same destination.
        return first + stride * self.pairs[2 + side + 2 * jnp.minimum(pair, self.last_pair)]

    def _load(self, slot: jax.Array, position: _BatchPosition) -> None:
        def copy(chunk: _Ref, words: slice | pl.Slice) -> None:
            plgpu.copy_gmem_to_smem(
                chunk,
                self.shared.at[slot, words],
                self.loaded.at[slot],
                # Otherwise Mosaic uses a tensor map per array, with TMA boxes of 256 words.
                oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS,
            )

        self._each_chunk(0, position, copy)

    def _store(self, slot: jax.Array, position: _BatchPosition) -> None:
        def copy(chunk: _Ref, words: slice | pl.Slice) -> None:
            plgpu.copy_smem_to_gmem(self.shared.at[slot, words], chunk)

        plgpu.barrier_wait(self.loaded.at[slot])
        self._each_chunk(1, position, copy)

    def _each_chunk(self, side: int, position: _BatchPosition, use: _UseChunk) -> None:
        """Calls `use` with each chunk of a batch in global memory and its slice of the slot."""
        use_array = functools.partial(self._each_chunk_of_array, side, position, use)
        _with_ref(position.array, self.sides[side], self.job.chunk_words(side), use_array)

    def _each_chunk_of_array(
        self,
        side: int,
        position: _BatchPosition,
        use: _UseChunk,
        array: _Ref,
        words: int,
    ) -> None:
        def use_chunk(i: jax.Array | int, block: jax.Array) -> None:
            use(array.at[block, pl.ds(position.start, words)], pl.ds(i * words, words))

        def step(i: jax.Array, block: jax.Array) -> jax.Array:
            # Read one chunk ahead, as in `_iterate`.
            following = self._block_of(side, position.pair + i + 1, position.first, position.stride)
            use_chunk(i, block)
            return following

        if self.ring.batch == 1:
            use_chunk(0, position.block)
        else:
            lax.fori_loop(np.int32(0), np.int32(self.ring.batch), step, position.block)


def _divide(number: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of a non-negative int32, without Python's rounding."""
    return lax.div(number, np.int32(divisor)), lax.rem(number, np.int32(divisor))


def _with_ref(
    index: jax.Array,
    refs: Sequence[_Ref],
    words: Sequence[int],
    use: Callable[[_Ref, int], None],
) -> None:
    """Calls `use` with one of the references and its chunk size in words."""
    branches = [functools.partial(use, ref, size) for ref, size in zip(refs, words, strict=True)]
    if len(refs) == 1:
        branches[0]()
    else:
        lax.switch(index, branches)
