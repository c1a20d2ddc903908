"""Callbacks on complete modules."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

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


def test_callbacks_run_after_event_listeners_were_cleared():
    ran = []
    for name in "ab":
        jax.monitoring.clear_event_listeners()
        callbacks = [lambda module, name=name: ran.append(name)]
        jax.jit(requesting(*callbacks)).lower(jnp.zeros(3))
    assert ran == ["a", "b"]


def test_listener_is_registered_once():
    jax.monitoring.clear_event_listeners()
    register = jax.monitoring.register_event_duration_secs_listener
    with mock.patch.object(
        jax.monitoring, "register_event_duration_secs_listener", side_effect=register
    ) as registering:
        for _ in range(3):
            jax.jit(requesting(lambda module: None)).lower(jnp.zeros(3))
    assert registering.call_count == 1


def test_threads_lower_while_event_listeners_are_cleared():
    """Each thread has its own requests; a listener that two of them register runs them once."""
    ran = []

    def lower(i: int) -> None:
        jax.jit(requesting(lambda module: ran.append(i))).lower(jnp.zeros(3 + i))

    jax.monitoring.clear_event_listeners()
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lower, range(32)))
    assert sorted(ran) == list(range(32))


def test_nested_lowering_after_event_listeners_were_cleared():
    ran = []
    primitive = Primitive("nesting")
    primitive.def_abstract_eval(lambda x: x)

    def lower(context, x):
        jax.monitoring.clear_event_listeners()
        jax.jit(requesting(lambda module: ran.append("inner"))).lower(jnp.zeros(4))
        when_lowered(context.module_context.module, lambda module: ran.append("outer"))
        return [x]

    mlir.register_lowering(primitive, lower, cacheable=False)
    jax.jit(primitive.bind).lower(jnp.zeros(3))
    assert ran == ["inner", "outer"]
