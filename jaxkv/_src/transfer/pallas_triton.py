"""Block copy as a Pallas-Triton kernel, for GPUs without the Mosaic kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxkv._src.transfer.pallas_chunks import Buffer, Job
from jaxkv._src.transfer.pallas_mosaic import _WORD, _divide, _interpreter, _Ref

_TRITON_TILE_WORDS = 8192
_TRITON_TILE_COLUMNS = 1024


# ---------------------------------------------------------------------------------------------
# Pallas-Triton is deprecated since jax 0.11; only for GPUs without the Mosaic kernel


def _run_triton(
    job: Job, pairs: jax.Array, sources: list[jax.Array], destinations: list[jax.Array]
) -> list[jax.Array]:
    """One launch per buffer; a program copies tiles of words of several blocks."""
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
    job: Job, buffer: Buffer, pairs: _Ref, source: _Ref, _: _Ref, destination: _Ref
) -> None:
    """The kernel of a buffer; references as for `_Warpgroup`."""
    from jax.experimental.pallas import triton

    words = buffer.block_words
    columns = min(_TRITON_TILE_COLUMNS, pl.next_power_of_2(words))
    rows = _TRITON_TILE_WORDS // columns
    tiles_per_row = pl.cdiv(words, columns)
    count = pairs[0]
    tiles = _divide(count + (rows - 1), rows)[0] * tiles_per_row
    program = pl.program_id(0)

    def copy_tile(iteration: jax.Array, _: None) -> None:
        row, column = _divide(program + iteration * job.num_sms, tiles_per_row)
        # No masks: indices are clamped, so that the last pair or word is copied repeatedly.
        pair = jnp.minimum(row * rows + jnp.arange(rows, dtype=_WORD), count - 1)
        word = jnp.minimum(column * columns + jnp.arange(columns, dtype=_WORD), words - 1)
        blocks = [triton.load(pairs.at[2 + side + 2 * pair]) for side in (0, 1)]
        blocks[job.strided_side] = buffer.first + blocks[job.strided_side] * buffer.stride
        tile = triton.load(source.at[blocks[0][:, None], word[None, :]])
        triton.store(destination.at[blocks[1][:, None], word[None, :]], tile)

    iterations, _ = _divide(tiles - program + (job.num_sms - 1), job.num_sms)
    lax.fori_loop(jnp.int32(0), iterations, copy_tile, None)
