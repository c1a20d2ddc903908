"""Range check of operands that become int32."""

from __future__ import annotations

import jax
import numpy as np
from jax.typing import ArrayLike


def check_fits_int32(name: str, values: ArrayLike) -> None:
    """Raises a ValueError for integers on the host outside int32, which JAX truncates in arrays.

    Values on the device are not read.
    """
    bounds: list[int] = []
    for leaf in jax.tree.leaves(values):
        if isinstance(leaf, int):
            bounds.append(leaf)
        elif not isinstance(leaf, jax.Array):
            array = np.asarray(leaf)
            if array.size and array.dtype.kind in "iu" and not np.can_cast(array.dtype, np.int32):
                bounds += int(array.min()), int(array.max())
    limits = np.iinfo(np.int32)
    if bounds and not limits.min <= min(bounds) <= max(bounds) <= limits.max:
        raise ValueError(f"{name} must fit int32, got {min(bounds)} .. {max(bounds)}")
