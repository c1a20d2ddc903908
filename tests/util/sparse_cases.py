"""A hot buffer beside its reference, driven by the same calls."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import jaxkv
from jaxkv import sparse
from tests.util.sparse_reference import Reference

STATIC = ("layer", "num_sms")
fetch = jax.jit(sparse.fetch, static_argnames=STATIC, donate_argnames="state")
append = jax.jit(sparse.append, static_argnames=STATIC, donate_argnames=("state", "pool"))
release = jax.jit(sparse.release, donate_argnames="state")


def random_rows(rng, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape, np.uint8)


class Pair:
    """State and pool of a cache of bytes, and a reference of one layer of it.

    Every call compares the rows, the slots of all tokens and the contents of the buffer.
    """

    def __init__(
        self, *, batch=3, slots=8, max_length=24, page_size=4, width=32, layers=2, layer=1,
        layout="page_first_direct", seed=0, of_arrays=False,
    ):  # fmt: skip
        self.rng = np.random.default_rng(seed)
        self.layer, self.layers = layer, layers
        self.shape = batch, slots
        columns = -(-max_length // page_size)
        num_pages = batch * columns + 2
        self.spec: Any = jaxkv.KVCacheSpec(layers, page_size, 1, width, np.uint8, kind="mla")
        self.width = width
        if of_arrays:
            array = jax.ShapeDtypeStruct((1, page_size, 2, width // 2), np.uint8)
            self.spec = jaxkv.ArrayCacheSpec.from_arrays([array] * layers, page_size=page_size)
        pool = jaxkv.HostPool.create(self.spec, num_pages=num_pages, layout=layout)
        contents = random_rows(self.rng, layers, num_pages, page_size, width)
        axes = {"layer_first": (0, 1, 2, 3), "page_first": (1, 2, 0, 3)}.get(layout, (1, 0, 2, 3))
        data = contents.transpose(axes).reshape(pool.data.shape)
        self.pool = jaxkv.HostPool(
            jax.device_put(data, pool.data.sharding), pool.spec, pool.layout, pool.head_groups
        )
        self.contents, self.axes = contents, axes
        self.state = sparse.SparseState.create(
            self.spec, batch=batch, slots=slots, max_length=max_length
        )
        self.table = self.rng.permutation(num_pages)[: batch * columns].astype(np.int32)
        self.table = self.table.reshape(batch, columns)
        self.reference = Reference(batch, slots, max_length, page_size, contents[layer].copy())

    def fetch(self, ids, lengths=None) -> np.ndarray:
        ids = np.asarray(ids, np.int32)
        if lengths is None:
            lengths = np.full(len(ids), self.reference.max_length)
        lengths = np.asarray(lengths, np.int32)
        want = self.reference.fetch(ids.reshape(len(ids), -1), lengths, self.table)
        rows, self.state = fetch(
            self.state, self.pool, ids, layer=self.layer, lengths=lengths, block_table=self.table
        )
        self.check_rows(rows, want.reshape(ids.shape))
        return want

    def append(self, positions, rows=None) -> None:
        positions = np.asarray(positions, np.int32)
        if rows is None:
            rows = random_rows(self.rng, *positions.shape, self.width)
        self.reference.append(rows, positions, self.table)
        self.state, self.pool = append(
            self.state, self.pool, rows, positions, layer=self.layer, block_table=self.table
        )
        self.check_buffer()
        self.check_pool()

    def release(self, ended) -> None:
        self.reference.release(ended)
        self.state = release(self.state, np.asarray(ended, bool))
        self.check_buffer()

    def check_rows(self, rows, want: np.ndarray) -> None:
        batch, slots = self.shape
        request = np.arange(batch).reshape(-1, *[1] * (want.ndim - 1))
        first = (self.layer * batch + request) * slots
        np.testing.assert_array_equal(rows, np.where(want < 0, -1, first + want))
        self.check_buffer()

    def check_buffer(self) -> None:
        """Every slot has the token of the reference, with its row; other layers are unchanged."""
        hot, positions = np.asarray(self.state.hot), np.asarray(self.state.positions)
        for request, held in enumerate(self.reference.slots):
            want = [-1 if slot is None else slot[0] for slot in held]
            np.testing.assert_array_equal(positions[self.layer, request], want)
            resident = [slot for slot, entry in enumerate(held) if entry is not None]
            if resident:
                rows = np.stack([held[slot][2] for slot in resident])
                np.testing.assert_array_equal(hot[self.layer, request, resident], rows)
        others = np.arange(self.layers) != self.layer
        assert (positions[others] == -1).all() and not hot[others].any()

    def check_pool(self) -> None:
        want = self.contents.copy()
        want[self.layer] = self.reference.pool
        data = np.asarray(self.pool.data)
        np.testing.assert_array_equal(data, want.transpose(self.axes).reshape(data.shape))

    def check_errors(self) -> int:
        """Compares the number of errors with the reference's, and clears both."""
        count, self.reference.errors = self.reference.errors, 0
        try:
            jaxkv.check_errors(self.state)
        except jaxkv.PageIndexError as error:
            assert error.count == count
            return count
        assert count == 0
        return 0


def steps(pair: Pair, number: int, *, k: int, spread: int, errors: float = 0.0) -> None:
    """Random calls of every kind: ids around a position that moves on, with repetitions."""
    rng = pair.rng
    batch, _ = pair.shape
    most = pair.reference.max_length
    centre = rng.integers(0, most, batch)
    for _ in range(number):
        centre = (centre + rng.integers(0, 3, batch)) % most
        ids = (centre[:, None] + rng.integers(0, spread, (batch, k))) % most
        ids[rng.random(ids.shape) < 0.2] = -1
        wrong = rng.random(ids.shape) < errors
        ids[wrong] = rng.choice([-2, most, most + 7, 2**31 - 1, -(2**31)], wrong.sum())
        kind = rng.integers(0, 6)
        if kind == 0:
            pair.append(ids[:, : rng.choice([1, 2])])
        elif kind == 1:
            pair.release(rng.random(batch) < 0.5)
        else:
            lengths = np.where(rng.random(batch) < errors, rng.integers(-1, most, batch), most)
            pair.fetch(ids, lengths)
        pair.check_errors()
