"""Optimization barriers around operands and results of in-place calls."""

from __future__ import annotations

from typing import TypeVar

import jax

_Tree = TypeVar("_Tree")


def fusion_barrier(arrays: _Tree) -> _Tree:
    """A pytree of arrays that XLA does not fuse with slices or updates.

    Required before and after every call that writes in place. XLA:GPU fuses a slice, a custom call
    and an update (by default since jax 0.11) and drops the aliasing of operand and result, so that
    bytes which the call does not write would be lost. The barriers have no run-time cost.
    """
    # One barrier per array: a joint one would make each array depend on all producers.
    return jax.tree.map(jax.lax.optimization_barrier, arrays)
