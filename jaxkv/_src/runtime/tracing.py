"""Whether the caller is inside a traced function, also if it has only concrete arrays."""

from __future__ import annotations

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


def check_not_deleted(operation: str, arguments: object) -> None:
    """Raises a ValueError for arrays without memory, for which XLA's error names no argument."""
    for leaf in jax.tree.leaves(arguments):
        concrete = not isinstance(leaf, jax.core.Tracer) and hasattr(leaf, "is_deleted")
        if concrete and leaf.is_deleted():
            raise ValueError(f"{operation}: an argument array was closed, deleted or donated")
