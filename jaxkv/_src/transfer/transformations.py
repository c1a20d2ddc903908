"""Errors for JAX transformations that an operation does not support: vmap and derivatives."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_Tree = TypeVar("_Tree")


def reject_transformations(operation: str, arguments: _Tree) -> _Tree:
    """The arguments of an operation; raises an error if vmap or grad transforms a traced array."""
    leaves, structure = jax.tree.flatten(arguments)
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]
    passed = _untransformed_p.bind(*(leaves[i] for i in traced), operation=operation)
    for i, leaf in zip(traced, passed, strict=True):
        leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def _reject_vmap(*_: Any, operation: str) -> NoReturn:
    raise NotImplementedError(
        f"{operation}: jax.vmap is not supported: pass the whole batch in one call, or "
        "loop over the batch with jax.lax.scan"
    )


def _reject_derivative(*_: Any, operation: str) -> NoReturn:
    raise NotImplementedError(
        f"{operation}: jax.grad and jax.jvp are not supported, it has no derivative: apply "
        "jax.lax.stop_gradient to its arrays first"
    )


_untransformed_p = Primitive("jaxkv_untransformed")
_untransformed_p.multiple_results = True
_untransformed_p.def_impl(lambda *leaves, operation: list(leaves))
_untransformed_p.def_abstract_eval(lambda *leaves, operation: list(leaves))
mlir.register_lowering(_untransformed_p, lambda context, *leaves, operation: list(leaves))
batching.primitive_batchers[_untransformed_p] = _reject_vmap
ad.primitive_jvps[_untransformed_p] = _reject_derivative
