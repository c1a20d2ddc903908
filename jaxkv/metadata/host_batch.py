"""Block tables of a scheduler, and checks of its lists, for `BatchMetadata.from_host`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxkv.metadata.checks import integers

NULL_BLOCK = 0  # block id of padding; never allocated by the scheduler


def blocks_of(block_table: Sequence[Sequence[int]] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of blocks of each request; and the ids of all, as a table if given as one."""
    if isinstance(block_table, np.ndarray) and block_table.dtype != object:
        if block_table.ndim != 2 or (block_table.size and block_table.dtype.kind not in "iu"):
            raise ValueError(
                "block_table must be integers in two dimensions, got "
                f"{block_table.dtype}{[*block_table.shape]}"
            )
        return np.full(len(block_table), block_table.shape[1], np.int64), block_table
    lists: list[Any] = [*block_table]
    try:
        joined = np.concatenate([row for row in lists if len(row)] or [np.empty(0, np.int64)])
    except (TypeError, ValueError):
        joined = None
    if joined is None or joined.ndim != 1 or joined.dtype.kind not in "iu":
        # One by one, slower: names the row, and int64 and uint64 together would become float64.
        lists = [integers(f"row {i} of block_table", row) for i, row in enumerate(lists)]
        joined = np.concatenate(lists)
    return np.array([len(row) for row in lists], np.int64), joined


def padded_table(
    blocks: np.ndarray, block_ids: np.ndarray, max_num_reqs: int, max_blocks: int
) -> np.ndarray:
    """int32[max_num_reqs, max_blocks]; padding is written once, because pages are fresh."""
    table = np.empty((max_num_reqs, max_blocks), np.int32)
    num_reqs = len(blocks)
    table[num_reqs:] = NULL_BLOCK
    if block_ids.ndim == 2:
        columns = block_ids.shape[1]
        table[:num_reqs, :columns] = block_ids
        table[:num_reqs, columns:] = NULL_BLOCK
        return table
    ends = np.cumsum(blocks).tolist()
    for row, end, count in zip(table, ends, blocks.tolist(), strict=False):
        row[:count] = block_ids[end - count : end]
        row[count:] = NULL_BLOCK
    return table


def check_requests(
    query: np.ndarray, context: np.ndarray, blocks: np.ndarray, max_blocks: int, capacity: int
) -> None:
    if not len(query) == len(context) == len(blocks):
        raise ValueError(
            "query_lens, seq_lens and block_table must have equal lengths, got "
            f"{len(query)}, {len(context)} and {len(blocks)} requests"
        )
    rules = {
        "0 <= query tokens <= context": (query >= 0) & (query <= context),
        f"blocks <= max_blocks={max_blocks}": blocks <= max_blocks,
        f"context <= blocks of {capacity} tokens": context <= blocks * capacity,
        "context < 2**31 tokens": context < 2**31,
    }
    for rule, satisfied in rules.items():
        if not satisfied.all():
            i = int(satisfied.argmin())
            raise ValueError(
                f"request {i} with {query[i]} query tokens, a context of {context[i]} tokens and "
                f"{blocks[i]} blocks violates {rule}"
            )


def check_last_blocks(
    table: np.ndarray, query: np.ndarray, context: np.ndarray, capacity: int
) -> None:
    """Columns of padding are no blocks. Earlier ones may be NULL_BLOCK: passed windows, states."""
    (rows,) = np.nonzero(query)
    columns = (context[rows] - 1) // capacity
    for i in np.flatnonzero(table[rows, columns] == NULL_BLOCK):
        raise ValueError(
            f"request {rows[i]} with {query[rows[i]]} query tokens and a context of "
            f"{context[rows[i]]} tokens has no block for the last of them: column {columns[i]} of "
            f"block_table is {NULL_BLOCK} (NULL_BLOCK), allocate a block before the step"
        )


def check_sizes(num_reqs: int, max_num_reqs: int, num_tokens: int, max_num_tokens: int) -> None:
    if num_reqs > max_num_reqs:
        raise ValueError(f"{num_reqs} requests exceed max_num_reqs={max_num_reqs}")
    if num_tokens > max_num_tokens:
        raise ValueError(f"{num_tokens} query tokens exceed max_num_tokens={max_num_tokens}")
    if num_tokens >= 2**31:
        raise ValueError(f"{num_tokens} query tokens exceed the 2**31 - 1 that int32 can count")


def check_block_ids(block_ids: np.ndarray, block_size: int) -> None:
    max_id = 2**31 // block_size - 1
    if not block_ids.size:
        return
    low, high = int(block_ids.min()), int(block_ids.max())
    if low < 0 or high > max_id:
        remedy = f"; pad rows of block_table with {NULL_BLOCK} (NULL_BLOCK)" if low < 0 else ""
        raise ValueError(
            f"block ids must be in [0, {max_id}] for int32 slots of blocks of {block_size} tokens, "
            f"got {low} to {high}{remedy}"
        )
