"""Streams of top-k ids with a given reuse, without end.

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


class Trace:
    """Ids for `calls` consecutive steps at a time.

    Attributes:
      fresh: ids of a step that the previous one did not have.
    """

    def __init__(self, *, batch: int, context: int, k: int, reuse: float, calls: int):
        self.fresh = round(k * (1 - reuse))
        rng = np.random.default_rng(0)
        orders = np.argsort(rng.random((min(batch, 16), context), np.float32), axis=1)
        self._orders = jnp.asarray(np.resize(orders.astype(np.int32), (batch, context)))
        self._mixed = jnp.asarray(rng.permutation(k).astype(np.int32))
        self._start = jnp.int32(0)
        self._ids = [jnp.zeros((batch, k), jnp.int32) for _ in range(calls)]

    def next(self) -> list[jax.Array]:
        """The ids of the next steps, each int32[batch, k], in place of the previous ones.

        At the same addresses, so that XLA replays a command buffer without an update.
        """
        self._ids, self._start = _windows(
            self._ids, self._orders, self._mixed, self._start, fresh=self.fresh
        )
        return self._ids


@functools.partial(jax.jit, static_argnames="fresh", donate_argnames="previous", keep_unused=True)
def _windows(
    previous: list[jax.Array], orders: jax.Array, mixed: jax.Array, start: jax.Array, *, fresh: int
) -> tuple[list[jax.Array], jax.Array]:
    context, calls = orders.shape[1], len(previous)
    ids = [orders[:, (start + call * fresh + mixed) % context] for call in range(calls)]
    return ids, (start + calls * fresh) % context
