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
