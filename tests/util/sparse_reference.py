"""Rows of sparse attention one id at a time in plain Python, from the text of the documentation."""

from __future__ import annotations

from typing import Any

import numpy as np


class Reference:
    """One layer: for each request its slots, by least recent use, and the rows of its tokens.

    A slot is `(position, time of its last use, row)`, or None if it is free.
    """

    def __init__(self, batch: int, slots: int, max_length: int, page_size: int, pool: np.ndarray):
        self.slots: list[list[Any]] = [[None] * slots for _ in range(batch)]
        self.slot_of: list[dict[int, int]] = [{} for _ in range(batch)]
        self.time = [0] * batch
        self.max_length, self.page_size = max_length, page_size
        self.pool = pool  # [pages, page_size, width]
        self.errors = 0
        self.misses = 0

    def place_of(self, table, position: int):
        """Page and token of a position, None after an error."""
        column = position // self.page_size
        if column >= len(table) or not 0 <= table[column] < len(self.pool):
            self.errors += 1
            return None
        return table[column], position % self.page_size

    def replace(self, request: int, new: list[tuple[int, np.ndarray]]) -> None:
        """Puts rows into the slots that are free or were used least recently."""
        slots, now = self.slots[request], self.time[request]
        by_use = sorted(range(len(slots)), key=lambda s: (slots[s][1] if slots[s] else -1, s))
        victims = sorted(by_use[: len(new)])
        for slot, (position, row) in zip(victims, new, strict=True):
            assert slots[slot] is None or slots[slot][1] < now, "a row of this call is replaced"
            if slots[slot] is not None:
                del self.slot_of[request][slots[slot][0]]
            slots[slot] = (position, now, row.copy())
            self.slot_of[request][position] = slot

    def touch(self, request: int, slot: int) -> None:
        position, _, row = self.slots[request][slot]
        self.slots[request][slot] = (position, self.time[request], row)

    def fetch(self, ids: np.ndarray, lengths, table) -> np.ndarray:
        """Slot of each id, -1 for none."""
        found = np.full(ids.shape, -1)
        for request, wanted in enumerate(ids):
            self.time[request] += 1
            limit = min(max(int(lengths[request]), 0), self.max_length)
            missing: dict[int, np.ndarray] = {}
            rejected = set()
            for position in map(int, wanted):
                if position == -1:
                    continue
                if not 0 <= position < limit:
                    self.errors += 1
                    continue
                slot = self.slot_of[request].get(position)
                if slot is not None:
                    self.touch(request, slot)
                elif position not in missing and position not in rejected:
                    place = self.place_of(table[request], position)
                    if place is None:
                        rejected.add(position)
                    else:
                        missing[position] = self.pool[place]
            self.replace(request, list(missing.items()))
            self.misses += len(missing)
            for i, position in enumerate(map(int, wanted)):
                within = 0 <= position < limit
                slot = self.slot_of[request].get(position) if within else None
                found[request, i] = -1 if slot is None else slot
        return found

    def append(self, rows: np.ndarray, positions: np.ndarray, table) -> None:
        for request, written in enumerate(positions):
            self.time[request] += 1
            seen, missing = set(), []
            for position, row in zip(map(int, written), rows[request], strict=True):
                if position == -1:
                    continue
                if not 0 <= position < self.max_length or position in seen:
                    self.errors += 1
                    continue
                seen.add(position)
                place = self.place_of(table[request], position)
                if place is None:
                    continue
                self.pool[place] = row
                slot = self.slot_of[request].get(position)
                if slot is None:
                    missing.append((position, row))
                else:
                    self.slots[request][slot] = (position, self.time[request], row.copy())
            self.replace(request, missing)

    def release(self, ended) -> None:
        for request, ends in enumerate(ended):
            if ends:
                self.slots[request] = [None] * len(self.slots[request])
                self.slot_of[request] = {}
