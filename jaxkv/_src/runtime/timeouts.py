"""Validation of timeouts."""

from __future__ import annotations

import numbers

MAX_TIMEOUT_S = 1e9  # a clock value plus the timeout in nanoseconds fits in 64 bits


def checked_timeout_s(timeout_s: object) -> float:
    """`timeout_s` as a float; raises a ValueError unless 0 < timeout_s <= MAX_TIMEOUT_S."""
    seconds = float(timeout_s) if isinstance(timeout_s, numbers.Real) else 0.0
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ValueError(
            f"timeout_s must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds, "
            f"got {timeout_s!r}"
        )
    return seconds
