"""metadata.local_attention against queries split token by token."""

import functools
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.metadata import local_attention
from jaxkv.metadata.common import NULL_BLOCK, BatchMetadata
from jaxkv.metadata.local_attention import max_pieces
from tests.util.batches import FEW, ONE, Bounds, Case, assert_same, cases, every_batch


class Piece(NamedTuple):
    request: int
    chunk: int
    query_len: int
    seq_len: int


def pieces_by_hand(case: Case, chunk_size: int) -> list[Piece]:
    """Token by token: a new piece starts with each query and each chunk."""
    pieces: list[Piece] = []
    for request, (query, seq) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
        for position in range(seq - query, seq):
            chunk, offset = divmod(position, chunk_size)
            if position == seq - query or offset == 0:
                pieces.append(Piece(request, chunk, 0, 0))
            pieces[-1] = Piece(request, chunk, pieces[-1].query_len + 1, offset + 1)
    return pieces


def blocks_by_hand(pieces: list[Piece], table: np.ndarray, rows: int, width: int) -> np.ndarray:
    blocks = np.full((rows, width), NULL_BLOCK, np.int32)
    for row, piece in enumerate(pieces):
        for i in range(width):
            blocks[row, i] = table[piece.request, min(piece.chunk * width + i, table.shape[1] - 1)]
    return blocks


@functools.cache
def compiled(chunk_blocks: int):
    def build(batch: BatchMetadata, other):
        local = local_attention.build(batch, chunk_blocks * batch.block_size)
        return local, local.gather(other)

    return jax.jit(build)


def check(case: Case, chunk_blocks: int) -> None:
    batch, b = case.batch(), case.bounds
    other = 1000 + np.arange(b.max_num_reqs * b.max_blocks, dtype=np.int32).reshape(
        b.max_num_reqs, b.max_blocks
    )
    local, gathered = compiled(chunk_blocks)(batch, other)

    pieces = pieces_by_hand(case, chunk_blocks * b.block_size)
    rows = max_pieces(b.max_num_reqs, b.max_num_tokens, chunk_blocks * b.block_size)
    assert len(pieces) <= rows
    behind = rows - len(pieces)
    ends = np.cumsum([0] + [piece.query_len for piece in pieces]).tolist()
    assert_same(local.batch.query_start_loc, ends + [case.num_tokens] * behind)
    assert_same(local.batch.seq_lens, [piece.seq_len for piece in pieces] + [0] * behind)
    assert_same(local.request, [piece.request for piece in pieces] + [0] * behind)
    assert_same(local.chunk, [piece.chunk for piece in pieces] + [0] * behind)
    assert_same(local.batch.num_reqs, len(pieces))
    assert_same(local.batch.num_tokens, case.num_tokens)
    assert local.batch.max_num_tokens == b.max_num_tokens
    assert local.batch.block_size == b.block_size
    table = np.asarray(batch.block_table)
    assert_same(local.batch.block_table, blocks_by_hand(pieces, table, rows, chunk_blocks))
    assert_same(gathered, blocks_by_hand(pieces, other, rows, chunk_blocks))


@every_batch
@given(cases(), st.sampled_from([1, 2, 4, 7]))
def test_local_attention(case: Case, chunk_blocks: int):
    check(case, chunk_blocks)


# Blocks are numbered along the rows of the table.
WORKED = [
    (
        [4, 10, 5], [6, 17, 9], 4, 2, 10,
        [2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1],
        [[0, 1], [2, 3], [12, 13], [14, 15], [16, 17], [18, 19], [22, 23], [24, 25]],
    ),
    (  # one column fewer: the sixth row's last block is clamped
        [4, 10, 5], [6, 17, 9], 4, 2, 9,
        [2, 2, 1, 4, 4, 1, 4, 1], [4, 2, 4, 4, 4, 1, 4, 1],
        [[0, 1], [2, 3], [11, 12], [13, 14], [15, 16], [17, 17], [20, 21], [22, 23]],
    ),
    ([8], [12], 4, 2, 6, [4, 4], [4, 4], [[2, 3], [4, 5]]),
    ([7], [10], 4, 2, 5, [1, 4, 2], [4, 4, 2], [[0, 1], [2, 3], [4, 4]]),
    ([4], [6], 10, 2, 5, [4], [6], [[0, 1, 2, 3, 4]]),
    ([6, 6], [8, 8], 4, 4, 2, [2, 4, 2, 4], [4, 4, 4, 4], [[0], [1], [2], [3]]),
    ([1], [5], 4, 2, 3, [1], [1], [[2, 2]]),
    ([0, 1, 0], [0, 5, 9], 4, 2, 5, [1], [1], [[7, 8]]),
]  # fmt: skip


@pytest.mark.parametrize(("query", "seq", "chunk", "block", "width", "q", "k", "table"), WORKED)
def test_examples(query, seq, chunk, block, width, q, k, table):
    blocks = np.arange(len(query) * width).reshape(len(query), width)
    batch = BatchMetadata.from_host(
        query, seq, blocks,
        max_num_reqs=len(query), max_num_tokens=sum(query), max_blocks=width, block_size=block,
    )  # fmt: skip
    local = local_attention.build(batch, chunk).batch
    assert local.num_reqs == len(q)
    assert_same(local.query_lens[: len(q)], q)
    assert_same(local.seq_lens[: len(q)], k)
    assert_same(local.block_table[: len(q)], table)


@given(st.integers(1, 6), st.integers(1, 40), st.integers(1, 9))
def test_the_bound_is_reached(rows, tokens, chunk):
    """By queries of two tokens across a chunk boundary, one of which takes the remaining tokens."""
    query = [min(2, max(0, tokens - 2 * row)) for row in range(rows)]
    query[0] += tokens - sum(query)
    case = Case(
        query,
        [max(chunk - 1 + length, 1) for length in query],
        [list(range(1, 52))] * rows,
        Bounds(rows, tokens, 51, 1),
    )
    assert len(pieces_by_hand(case, chunk)) == max_pieces(rows, tokens, chunk)


def test_full_batch_of_decodes():
    b = Bounds(1024, 1024, 4, 16)
    check(Case([1] * 1024, [64] * 1024, [[1, 2, 3, 4]] * 1024, b), 2)


@pytest.mark.parametrize("shape", [(2, 6), (6, 6), (5,)])
def test_gather_rejects_different_number_of_rows(shape):
    local = local_attention.build(Case([1], [1], [[1]], FEW).batch(), FEW.block_size)
    local.gather(np.zeros((5, 9), np.int32))
    with pytest.raises(ValueError, match=r"block_table must be \[5 rows, blocks\], got \("):
        jax.jit(local.gather)(np.zeros(shape, np.int32))
    with pytest.raises(ValueError, match="block_table must be int32, got float32"):
        local.gather(np.zeros((5, 9), np.float32))


@pytest.mark.parametrize("bounds", [ONE, FEW])
def test_chunk_size_not_multiple_of_block_size_raises(bounds):
    batch = Case([1], [1], [[1]], bounds).batch()
    for chunk_size in (0, -bounds.block_size, bounds.block_size + 1):
        with pytest.raises(ValueError, match=f"chunk_size={chunk_size} tokens must be a positive"):
            local_attention.build(batch, chunk_size)


def test_bound_of_chunks_without_tokens_raises():
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        max_pieces(2, 4, 0)
    size: Any = 4.5
    with pytest.raises(TypeError, match="chunk_size must be an integer, got float"):
        max_pieces(2, 4, size)
