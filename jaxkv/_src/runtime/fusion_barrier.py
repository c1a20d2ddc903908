"""Optimization barriers around operands and results that are written in place."""

from __future__ import annotations

from typing import Any

import jax


def fusion_barrier(arrays: Any) -> Any:
    """A pytree of arrays, with none of which XLA fuses a slice or an update.

    Every call that writes in place needs this before and after. XLA for GPUs makes one of a slice,
    a custom call and an update (from jax 0.11 on by default), and forgets there that the result is
    to be the operand: what the call does not write would be lost. Nothing of this is left to run.
    """
    # One by one: together, each array would wait for what produces the others.
    return jax.tree.map(jax.lax.optimization_barrier, arrays)
