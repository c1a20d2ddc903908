"""Whether the caller is inside a traced function, also if it has only concrete arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive

_probe_p = Primitive("jaxkv_probe")
_probe_p.def_impl(lambda: None)
_probe_p.def_abstract_eval(lambda: jax.typeof(np.int32(0)))


def is_traced() -> bool:
    """Whether operations on concrete arrays are now staged for a later program, as inside jit.

    If True, the program under trace has an equation that cannot be lowered: raise an error.
    """
    return isinstance(_probe_p.bind(), jax.core.Tracer)


def check_not_closed_over(operation: str, name: str, argument: object) -> None:
    """Rejects concrete arrays of an argument inside a trace, which stores them as constants."""
    concrete = any(
        isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
        for leaf in jax.tree.leaves(argument)
    )
    if concrete and is_traced():
        raise ValueError(
            f"{operation}: {name} is closed over by a traced function, whose program would keep a "
            f"copy of its present contents and never see a later donated update: pass {name} as an "
            "argument of the jitted function"
        )


def check_not_deleted(operation: str, **arguments: object) -> None:
    """Raises a ValueError for arrays without memory, for which XLA's error names no argument."""
    if not any(map(_is_deleted, jax.tree.leaves(arguments))):
        return
    paths = jax.tree_util.tree_leaves_with_path(arguments)
    first, *path = next(path for path, leaf in paths if _is_deleted(leaf))
    name = f"{first.key}{jax.tree_util.keystr(tuple(path))}"
    raise ValueError(f"{operation}: the array {name} was closed, deleted or donated")


def _is_deleted(leaf: Any) -> bool:
    traced = isinstance(leaf, jax.core.Tracer)
    return not traced and hasattr(leaf, "is_deleted") and leaf.is_deleted()
