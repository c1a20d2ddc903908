"""Results of steps: whether a step has ended, and whether it has failed."""

from __future__ import annotations

from typing import Protocol, cast

import jax

from jaxkv._src.runtime.sync_guard import allow_host_sync


class StepResult(Protocol):
    """Methods of `jax.Array`, whose type lacks `is_ready`."""

    def is_ready(self) -> bool: ...
    def block_until_ready(self) -> object: ...


def step_result(operation: str, result: jax.Array) -> StepResult:
    """Raises TypeError unless it is an array of JAX."""
    if not hasattr(result, "is_ready"):
        raise TypeError(
            f"{operation}: result is of type {type(result).__name__}; pass a jax.Array of the step"
        )
    return cast(StepResult, result)


def is_over(result: StepResult) -> bool:
    """`is_ready` of a deleted array is undefined."""
    if isinstance(result, jax.Array) and result.is_deleted():
        raise RuntimeError(
            "poll: the result of a step was donated or deleted before its copies ended; pass issue "
            "an array that lives until poll has returned them"
        )
    return result.is_ready()


def has_failed(result: StepResult) -> bool:
    """Whether the step of a ready result has failed; its user gets the exception."""
    try:
        with allow_host_sync("a result that is ready: whether it is an error"):
            result.block_until_ready()
    except Exception:  # of any type: an XLA error, or that of a handler
        return True
    return False
