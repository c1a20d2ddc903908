"""Validation of integers, for modules that import no other part of jaxkv."""

from __future__ import annotations

import math
import operator
from typing import Any


def checked_integer(
    name: str, value: Any, expected: str, least: int, most: float = math.inf
) -> int:
    """`value` as Python's integer; raises a ValueError unless it is one in [least, most]."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is of type {type(value).__name__}; pass {expected}") from None
    if isinstance(value, bool) or not least <= number <= most:
        raise ValueError(f"{name}={value}; pass {expected}")
    return number


def checked_window(operation: str, window: Any) -> int | None:
    """As `checked_integer`, for the window of a lookup or a group."""
    if window is None:
        return None
    expected = "an integer, at least 1 block, or None for all"
    return checked_integer(f"{operation}: window", window, expected, 1)
