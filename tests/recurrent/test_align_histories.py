"""Requests over many steps, with states determined by request and token."""

import itertools

import ml_dtypes
import numpy as np

import jaxkv
from tests.util import recurrent_reference as reference
from tests.util.recurrent_cases import (
    DS,
    SD,
    TEMPORAL,
    batch_of,
    post,
    pre,
    random_accepted,
    random_states,
    same_bits,
)
from tests.util.recurrent_reference import Rows


class Histories:
    """Requests over many steps. The state after token t of a request is known: a temporal state
    contains `mark(request, t)`, a row of a window the mark of its token."""

    BLOCK, WINDOW, DRAFTS, TOKENS = 4, 3, 3, 24
    KINDS = (SD, DS, TEMPORAL, TEMPORAL)
    SHAPES = ((WINDOW + DRAFTS, 4), (2, WINDOW + DRAFTS), (3,), (16,))
    TYPES = (np.float16, np.int8, np.float32, ml_dtypes.bfloat16)

    def __init__(self, rng, num_rows: int):
        self.rng, self.num_rows = rng, num_rows
        self.columns = self.TOKENS // self.BLOCK + 1 + self.DRAFTS
        size = num_rows * self.columns
        self.table = 1 + rng.permutation(size).reshape(num_rows, self.columns)
        self.states = random_states(rng, self.KINDS, self.SHAPES, self.TYPES, size + 1)
        self.ids = rng.integers(0, 1 << 20, num_rows)
        self.prompt = rng.integers(1, self.TOKENS, num_rows)
        self.computed = np.zeros(num_rows, np.int64)
        self.accepted = np.ones(num_rows, np.int32)
        self.state_idx = np.full(num_rows, -1, np.int32)
        self.saved: list[set[int]] = [set() for _ in range(num_rows)]

    def mark(self, row, token):
        return (self.ids[row] * 13 + token * 7) % 120 - 60

    def disturb(self) -> None:
        """Preempts some requests; they resume from a boundary with a saved state, or at 0."""
        for row in np.flatnonzero(self.rng.random(self.num_rows) < 0.12):
            self.computed[row] = self.rng.choice([0, *sorted(self.saved[row])])
            kept = self.computed[row] // self.BLOCK
            self.saved[row] = {t for t in self.saved[row] if t <= self.computed[row]}
            self.table[row, kept:] = self.rng.permutation(self.table[row, kept:])
            self.accepted[row], self.state_idx[row] = 1, -1

    def schedule(self) -> Rows:
        left = self.TOKENS - self.computed
        chunk = np.minimum(self.rng.integers(1, 2 * self.BLOCK + 1, self.num_rows), left)
        to_boundary = -(self.computed + chunk) % self.BLOCK
        chunk = np.where(self.rng.random(self.num_rows) < 0.5, chunk + to_boundary, chunk)
        prefill = self.computed < self.prompt
        drafts = np.where(prefill, 0, self.rng.integers(0, self.DRAFTS + 1, self.num_rows))
        scheduled = np.where(prefill, np.minimum(chunk, self.prompt - self.computed), 1 + drafts)
        rests = (self.rng.random(self.num_rows) < 0.1) | (scheduled > left)
        return Rows(
            self.table,
            self.computed,
            np.where(rests, 0, scheduled),
            np.where(rests, 0, drafts),
            self.num_rows,
            self.BLOCK,
        )

    def forward(self, rows: Rows) -> None:
        """Checks the initial state of every row, and writes those after its last tokens."""
        sd, ds, *temporal = self.states
        for row in range(self.num_rows):
            if not rows.active(row):
                continue
            end, ahead = rows.end(row), self.accepted[row] - 1
            column = (end - 1) // self.BLOCK
            block = self.table[row, column]
            if start := self.computed[row]:
                window = self.mark(row, np.arange(start - self.WINDOW, start))
                seen = slice(ahead, ahead + self.WINDOW)
                assert (sd[block, seen] == window[:, None]).all()
                assert (ds[block, :, seen] == window).all()
                for state in temporal:
                    assert (state[self.table[row, column + ahead]] == self.mark(row, start)).all()
            certain = end - rows.drafts[row]
            tokens = self.mark(row, np.arange(certain - self.WINDOW, end))
            sd[block, : len(tokens)] = tokens[:, None]
            ds[block, :, : len(tokens)] = tokens
            for ahead, state in itertools.product(range(rows.drafts[row] + 1), temporal):
                state[self.table[row, column + ahead]] = self.mark(row, certain + ahead)

    def check_saved(self, rows: Rows, sampled) -> None:
        """The state of every boundary reached so far is in its block."""
        for row in range(self.num_rows):
            if rows.active(row):
                certain = rows.end(row) - rows.drafts[row]
                boundary = (certain + sampled[row] - 1) // self.BLOCK * self.BLOCK
                if boundary >= certain:
                    self.saved[row].add(int(boundary))
            for boundary in self.saved[row]:
                block = self.table[row, boundary // self.BLOCK - 1]
                window = self.mark(row, np.arange(boundary - self.WINDOW, boundary))
                assert (self.states[0][block, : self.WINDOW] == window[:, None]).all()
                assert (self.states[2][block] == self.mark(row, boundary)).all()

    def step(self) -> int:
        """One step of all rows; returns the number of rows that copied a state."""
        self.disturb()
        rows = self.schedule()
        batch = batch_of(rows)
        got = pre(self.states, batch, self.accepted, self.state_idx, self.KINDS)
        want = reference.preprocess(self.states, self.KINDS, rows, self.accepted, self.state_idx)
        self.compare(got, want)
        self.accepted, self.state_idx = want
        self.forward(rows)
        sampled = np.where(rows.scheduled > 0, random_accepted(self.rng, rows), self.accepted)
        sampled = sampled.astype(np.int32)
        skipped = jaxkv.recurrent.can_skip_align_postprocess(
            rows.computed, rows.scheduled, rows.drafts, self.BLOCK
        )
        before = [state.copy() for state in self.states]
        got = post(self.states, batch, sampled, rows.drafts.astype(np.int32), self.KINDS)
        want_counts = reference.postprocess(self.states, self.KINDS, rows, sampled)
        self.compare(got, (want_counts,))
        copied = not all(map(same_bits, before, self.states))
        assert not (skipped and (copied or (want_counts != sampled).any()))
        self.accepted = want_counts
        self.check_saved(rows, sampled)
        valid = rows.computed + rows.scheduled - rows.drafts + sampled - 1
        self.computed = np.where(rows.scheduled > 0, valid, self.computed)
        return copied

    def compare(self, got, want) -> None:
        states, *numbers = got
        assert all(map(same_bits, states, self.states))
        for actual, expected in zip(numbers, want, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_histories():
    """5,120 requests, with prompts in chunks, drafts, preemption, resumption and remainders."""
    copies = 0
    for seed in range(80):
        histories = Histories(np.random.default_rng(seed), 64)
        copies += sum(histories.step() for _ in range(12))
        assert any(histories.saved)
    assert copies > 80 * 6
