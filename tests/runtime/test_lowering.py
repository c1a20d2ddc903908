"""Callbacks on complete modules."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxkv._src.runtime.lowering import when_lowered


def requesting(*callbacks: Callable[[Any], None]) -> Callable[[jax.Array], jax.Array]:
    """The identity, whose lowering requests these callbacks."""
    primitive = Primitive("requesting")
    primitive.def_abstract_eval(lambda x: x)

    def lower(context, x):
        for callback in callbacks:
            when_lowered(context.module_context.module, callback)
        return [x]

    mlir.register_lowering(primitive, lower, cacheable=False)
    return primitive.bind


def test_other_callbacks_of_a_rejected_module_are_dropped():
    """They must not run, or raise, in the next lowering of the thread."""
    ran = []

    def rejects(module: Any) -> None:
        ran.append("rejects")
        raise ValueError("rejected")

    def rejects_too(module: Any) -> None:
        ran.append("rejects too")
        raise ValueError("rejected by the other")

    with pytest.raises(ValueError, match="rejected"):
        jax.jit(requesting(rejects, rejects_too)).lower(jnp.zeros(3))
    jax.jit(lambda x: x + 1).lower(jnp.zeros(3))
    assert ran == ["rejects"]


def test_every_callback_of_a_module_runs_once():
    ran = []
    callbacks = [lambda module, name=name: ran.append(name) for name in "ab"]
    jax.jit(requesting(*callbacks, callbacks[0])).lower(jnp.zeros(3))
    jax.jit(lambda x: x + 2).lower(jnp.zeros(3))
    assert ran == ["a", "b"]
