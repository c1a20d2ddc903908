"""Checks of dtypes: byte-aligned, and no silent conversion by JAX."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np


def check_byte_dtype(dtype: np.dtype, name: str) -> None:
    """Raises a ValueError for sub-byte elements, which XLA packs and NumPy counts as 1 byte."""
    bits = _element_bits(dtype)
    if 0 < bits < 8:
        raise ValueError(
            f"{name} must be byte-aligned, got {dtype} of {bits} bits: "
            "pack the elements and view them as uint8"
        )


def check_canonical_dtype(array: jax.Array | np.ndarray, name: str) -> None:
    """Raises a ValueError for a NumPy array whose elements JAX would truncate or swap bytes of."""
    if not isinstance(array, np.ndarray):
        return
    dtype = array.dtype
    if not dtype.isnative:  # jit may read it as native, with a program of such an array
        raise ValueError(
            f"{name} is {dtype.str}, not in native byte order: pass "
            "array.astype(array.dtype.newbyteorder('='))"
        )
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(
            f"{name} is {dtype} of 64 bits, the limit is 32 bits unless jax_enable_x64 is set"
        )


@functools.cache
def _element_bits(dtype: np.dtype) -> int:
    """Bits of a number, of one part of a complex number, or of a bool; otherwise 0."""
    if getattr(dtype, "kind", "") == "b":
        return 8
    for info in (jnp.iinfo, jnp.finfo):
        try:
            return info(dtype).bits
        except (TypeError, ValueError):
            continue
    return 0
