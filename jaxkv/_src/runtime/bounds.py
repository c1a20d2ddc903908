"""Checks of device values against static bounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxkv._src.runtime import native
from jaxkv._src.runtime.errors import scope_number


def check_bounds(operation: str, carry: jax.Array, **bounds: tuple[ArrayLike, int]) -> jax.Array:
    """Checks values against their bounds; returns `carry` unchanged.

    A value above its bound is counted on the device and raised by `jaxkv.check_errors()`; on
    platform cpu the step fails immediately. Use the returned `carry`, so that XLA does not
    eliminate the check.

    Args:
      operation: name of the public function, for the error.
      carry: an array.
      **bounds: by name, an int32 scalar and its maximum.

    Returns:
      `carry`, in place.
    """
    values = jnp.stack([jnp.asarray(value, jnp.int32) for value, _ in bounds.values()])
    code = native.extension().bound_code
    scope = scope_number() << 32
    check = jax.ffi.ffi_call(
        "jaxkv_check_bounds",
        jax.typeof(carry),
        input_output_aliases={1: 0},
        vmap_method="sequential",
    )
    return check(
        values,
        carry,
        codes=np.array([scope | code(operation, name) for name in bounds], np.int64),
        limits=np.array([limit for _, limit in bounds.values()], np.int64),
    )
