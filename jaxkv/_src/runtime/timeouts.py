"""Validation of timeouts."""

from __future__ import annotations

import numbers

import jax

MAX_TIMEOUT_S = 1e9  # a clock value plus the timeout in nanoseconds fits in 64 bits


def checked_timeout_s(timeout_s: object, name: str = "timeout_s") -> float:
    """`timeout_s` as a float; `name` begins the error messages.

    Raises:
      TypeError: it is traced.
      ValueError: it is not a number with 0 < timeout_s <= MAX_TIMEOUT_S.
    """
    if not isinstance(timeout_s, bool) and isinstance(timeout_s, numbers.Real):
        seconds = float(timeout_s)
        if 0 < seconds <= MAX_TIMEOUT_S:
            return seconds
    if isinstance(timeout_s, jax.core.Tracer):
        raise TypeError(
            f"{name} must be a Python number, got a traced value: bind it with "
            "functools.partial, or mark the argument with static_argnames"
        )
    raise ValueError(
        f"{name} must be more than 0 and at most {MAX_TIMEOUT_S:g} seconds, got {timeout_s!r}"
    )
