"""Values that only the device knows, held against bounds that were fixed while tracing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.runtime import native


def check_bounds(carry: Any, **bounds: tuple[Any, int]) -> Any:
    """`carry`, once every value was held against its bound.

    A value above its bound is counted on the device and raised by `jaxkv.check_errors()`; on
    platform cpu the step fails at once. The caller goes on with what `carry` the function returns,
    so that XLA keeps the check.

    Args:
      carry: an array; comes back as it is.
      **bounds: by name, an int32 scalar and the largest value that it may have.
    """
    values = jnp.stack([jnp.asarray(value, jnp.int32) for value, _ in bounds.values()])
    code = native.extension().bound_code
    check = jax.ffi.ffi_call(
        "jaxkv_check_bounds",
        jax.typeof(carry),
        input_output_aliases={1: 0},
        vmap_method="sequential",
    )
    return check(
        values,
        carry,
        codes=np.array([code(name) for name in bounds], np.int64),
        limits=np.array([limit for _, limit in bounds.values()], np.int64),
    )
