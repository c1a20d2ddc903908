"""Recurrent states at block boundaries, one row at a time in NumPy, from the text of the spec."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxkv.recurrent import StateKind

NULL_BLOCK = 0


@dataclasses.dataclass
class Rows:
    """A batch as the scheduler sees it; one entry per row, the first `num_reqs` are requests."""

    table: np.ndarray
    computed: np.ndarray
    scheduled: np.ndarray
    drafts: np.ndarray
    num_reqs: int
    block_size: int

    def active(self, row: int) -> bool:
        return row < self.num_reqs and self.scheduled[row] > 0

    def end(self, row: int) -> int:
        """Tokens of a row's context after the step."""
        return int(self.computed[row]) + int(self.scheduled[row])


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def move(states, kinds, table_row, source: int, destination: int, bias: int) -> bool:
    """Copies all states of a row between columns of its table; False if one is invalid."""
    needed = [source, destination]
    if StateKind.TEMPORAL in kinds:
        needed.append(source + bias)
    if any(not 0 <= column < len(table_row) for column in needed):
        return False
    blocks = [table_row[column] for column in needed]
    if any(not 0 <= block < len(states[0]) or block == NULL_BLOCK for block in blocks):
        return False
    if source == destination and bias == 0:
        return True
    for state, kind in zip(states, kinds, strict=True):
        to = state[table_row[destination]]
        if kind is StateKind.TEMPORAL:
            to[...] = state[table_row[source + bias]].copy()
            continue
        window = state[table_row[source]].copy()
        if kind is StateKind.CONV_DS:
            window, to = np.moveaxis(window, -1, 0), np.moveaxis(to, -1, 0)
        kept = max(len(window) - bias, 0)
        to[:kept] = window[len(window) - kept :]
    return True


def postprocess(states, kinds, rows: Rows, accepted: np.ndarray) -> np.ndarray:
    """Writes `states`; returns the counts."""
    counts = accepted.copy()
    for row in range(len(accepted)):
        certain = rows.end(row) - int(rows.drafts[row])
        aligned = (certain + int(accepted[row]) - 1) // rows.block_size * rows.block_size
        if not rows.active(row) or aligned < certain:
            continue
        source = ceil_div(rows.end(row), rows.block_size) - 1
        destination = aligned // rows.block_size - 1
        bias = aligned - certain
        served = move(states, kinds, rows.table[row], source, destination, bias)
        if served and source == destination:
            counts[row] = 1
    return counts


def preprocess(states, kinds, rows: Rows, accepted: np.ndarray, state_idx: np.ndarray):
    """Writes `states`; returns the counts and the columns of the running states."""
    counts, columns = accepted.copy(), state_idx.copy()
    for row in range(len(accepted)):
        if not rows.active(row):
            continue
        columns[row] = ceil_div(rows.end(row), rows.block_size) - 1
        running = int(state_idx[row])
        if running == -1:
            running = (int(rows.computed[row]) - 1) // rows.block_size
        if running in (-1, columns[row]):
            continue
        bias = int(accepted[row]) - 1
        if move(states, kinds, rows.table[row], running, int(columns[row]), bias):
            counts[row] = 1
    return counts, columns


def changes(computed: int, scheduled: int, drafts: int, accepted: int, block_size: int) -> bool:
    """Whether postprocess would change any bytes."""
    if scheduled == 0:
        return False
    certain = computed + scheduled - drafts
    aligned = (certain + accepted - 1) // block_size * block_size
    if aligned < certain:
        return False
    source, destination = ceil_div(computed + scheduled, block_size) - 1, aligned // block_size - 1
    return source != destination or aligned > certain or accepted != 1
