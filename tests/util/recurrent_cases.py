"""Batches with recurrent states for the tests, and the compiled calls under test."""

import functools
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jaxkv
from jaxkv.metadata import BatchMetadata
from jaxkv.recurrent import StateKind
from tests.util.recurrent_reference import Rows

SD, DS, TEMPORAL = StateKind.CONV_SD, StateKind.CONV_DS, StateKind.TEMPORAL
DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "int8": np.int8,
}


def random_states(rng, kinds, shapes, dtypes, num_blocks):
    """Random bits, including NaNs."""
    arrays = []
    for _, shape, dtype in zip(kinds, shapes, dtypes, strict=True):
        itemsize = np.dtype(dtype).itemsize
        bits = rng.integers(0, 256, (num_blocks, int(np.prod(shape)) * itemsize), np.uint8)
        arrays.append(bits.view(dtype).reshape(num_blocks, *shape))
    return arrays


def batch_of(rows: Rows) -> BatchMetadata:
    starts = np.concatenate([[0], np.cumsum(rows.scheduled)]).astype(np.int32)
    arrays: dict[str, Any] = {
        "query_start_loc": starts,
        "seq_lens": (rows.computed + rows.scheduled).astype(np.int32),
        "block_table": rows.table.astype(np.int32),
        "num_reqs": np.int32(rows.num_reqs),
        "num_tokens": starts[-1],
    }
    return BatchMetadata(**arrays, max_num_tokens=1 << 20, block_size=rows.block_size)


@functools.partial(jax.jit, static_argnames="kinds")
def post(states, batch, accepted, drafts, kinds):
    return jaxkv.recurrent.align_postprocess(
        states, batch, accepted, kinds=[*kinds], num_drafts=drafts
    )


@functools.partial(jax.jit, static_argnames="kinds")
def pre(states, batch, accepted, state_idx, kinds):
    return jaxkv.recurrent.align_preprocess(
        states, batch, accepted, kinds=[*kinds], state_idx=state_idx
    )


def same_bits(got, want) -> bool:
    got, want = np.asarray(got), np.asarray(want)
    return got.shape == want.shape and got.tobytes() == want.tobytes()


def random_rows(rng, num_rows, *, block_size=5, columns=9, max_drafts=3, nulls=0.1) -> Rows:
    """Rows at random positions, mostly near boundaries; no block is shared by rows."""
    drafts = rng.integers(0, max_drafts + 1, num_rows)
    scheduled = np.where(rng.random(num_rows) < 0.1, 0, 1 + drafts + rng.integers(0, 4, num_rows))
    last = (columns - max_drafts) * block_size
    computed = rng.integers(0, last - scheduled + 1)
    blocks = 1 + rng.permutation(num_rows * columns)
    table = np.where(rng.random(blocks.shape) < nulls, 0, blocks).reshape(num_rows, columns)
    num_reqs = int(rng.integers(num_rows // 2, num_rows + 1))
    return Rows(table, computed, scheduled, np.where(scheduled, drafts, 0), num_reqs, block_size)


def random_accepted(rng, rows: Rows):
    return rng.integers(1, rows.drafts + 2).astype(np.int32)
