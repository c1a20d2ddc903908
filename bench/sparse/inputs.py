"""Rows in host memory, and streams of top-k ids with a given reuse, without end.

The ids of step t are a window of a random order of all positions, which moves on by the same number
of positions in each step: the others are those of the previous step. A position that has left the
window returns only after all others, so that a hot buffer that is smaller than the context has lost
it: the share of hits equals the reuse.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv._src.autotune import pools
from jaxkv._src.cache import pinned_memory
from jaxkv._src.cache.host_layout import HostLayout, Layout

PAGE_SIZE = 64
LAYOUT: Layout = "page_first_direct"
# Small rows of a pool of a few GiB load at twice the rate, or more, of those of one like a user's.
GIB_OPTION = {"--gib": {"type": int, "default": 32, "help": "of the host pool, on a GPU"}}


class Cache:
    """A host pool of one layer, in which the first four bytes of a row are its number.

    Attributes:
      rows: uint8[number of rows, row_bytes], the same memory as the pool.
    """

    def __init__(self, row_bytes: int, nbytes: int):
        self.row_bytes = row_bytes
        self.num_pages = nbytes // (PAGE_SIZE * row_bytes)
        view = pinned_memory.views(nbytes, jax.local_devices()[0])
        self.spec = jaxkv.KVCacheSpec(1, PAGE_SIZE, 1, row_bytes, np.uint8, kind="mla")
        shape = HostLayout(self.spec, LAYOUT, self.num_pages).shape
        self.pool = jaxkv.HostPool(view(shape, np.uint8), self.spec, LAYOUT, 1)
        numbers = np.arange(self.num_pages * PAGE_SIZE, dtype=np.int32)
        self.rows = view((len(numbers), row_bytes), np.uint8)
        words = view((len(numbers) * row_bytes // 4,), np.int32)
        pools.write(words, np.arange(len(numbers)) * (row_bytes // 4), numbers)

    def table(self, batch: int, context: int) -> np.ndarray:
        """Random pages of all; requests may share some, as with a common prefix."""
        shape = batch, context // PAGE_SIZE
        return np.random.default_rng(1).integers(0, self.num_pages, shape).astype(np.int32)


class Trace:
    """Ids for `calls` consecutive steps at a time."""

    def __init__(self, *, batch: int, context: int, k: int, reuse: float, calls: int):
        self._fresh = round(k * (1 - reuse))
        rng = np.random.default_rng(0)
        orders = np.argsort(rng.random((min(batch, 16), context), np.float32), axis=1)
        self._orders = jnp.asarray(np.resize(orders.astype(np.int32), (batch, context)))
        self._mixed = jnp.asarray(rng.permutation(k).astype(np.int32))
        self._start = jnp.int32(0)
        self._ids = [jnp.zeros((batch, k), jnp.int32) for _ in range(calls)]

    def next(self) -> list[jax.Array]:
        """The ids of the next steps, each int32[batch, k], replacing the previous ones.

        At the same addresses, so that XLA replays a command buffer without an update.
        """
        self._ids, self._start = _windows(
            self._ids, self._orders, self._mixed, self._start, fresh=self._fresh
        )
        return self._ids


@functools.partial(jax.jit, static_argnames="fresh", donate_argnames="previous", keep_unused=True)
def _windows(
    previous: list[jax.Array], orders: jax.Array, mixed: jax.Array, start: jax.Array, *, fresh: int
) -> tuple[list[jax.Array], jax.Array]:
    context, calls = orders.shape[1], len(previous)
    ids = [orders[:, (start + call * fresh + mixed) % context] for call in range(calls)]
    return ids, (start + calls * fresh) % context
