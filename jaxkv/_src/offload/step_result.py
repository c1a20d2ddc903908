"""The steps in flight: whether a step has ended, whether it has failed, and how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from time import monotonic
from typing import NamedTuple, Protocol, cast

import jax

from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.offload.copies import CopyBatch
from jaxkv._src.offload.store_check import StoreCheck
from jaxkv._src.runtime.sync_guard import allow_host_sync


class StepResult(Protocol):
    """Methods of `jax.Array`, whose type lacks `is_ready`."""

    def is_ready(self) -> bool: ...
    def block_until_ready(self) -> object: ...


class _Step(NamedTuple):
    batch: CopyBatch
    result: StepResult
    issued_at: float  # seconds


class StepsInFlight:
    """The steps whose end has not been found, in the order in which they were issued.

    Args:
      pool: the pool, or its number of pages.
      check: of the stores of the pool, if they are checked.

    Attributes:
      steps: the steps.
    """

    def __init__(self, pool: HostPool | int, check: StoreCheck | None) -> None:
        self.steps: deque[_Step] = deque()
        self._page_bytes = pool.spec.page_bytes if isinstance(pool, HostPool) else None
        self._check = check
        self._seconds = {"load": 0.0, "store": 0.0}  # from the issue until the end was found

    def __len__(self) -> int:
        return len(self.steps)

    def append(self, batch: CopyBatch, result: StepResult) -> None:
        self.steps.append(_Step(batch, result, monotonic()))

    def pop_ended(self) -> Iterator[tuple[CopyBatch, bool, RuntimeError | None]]:
        """Steps that have ended: batch, whether the step has failed, and the error to raise.

        Raises:
          RuntimeError: the result of a step was donated or deleted.
        """
        while self.steps and is_over(self.steps[0].result):
            batch, result, issued_at = self.steps[0]
            failed = has_failed(result)
            error = None if failed or not self._check else self._check.error(batch)
            self.steps.popleft()
            if not failed and not error:
                self._seconds[batch.kind] += monotonic() - issued_at
            yield batch, failed or error is not None, error

    def metrics(self, blocks: Mapping[str, float]) -> dict[str, float]:
        """Bytes of the copied `blocks`, counted by the manager, and seconds of their steps."""
        found = {f"kv_offload_{kind}_time": seconds for kind, seconds in self._seconds.items()}
        if self._page_bytes is not None:
            for kind, copied in (("load", "loaded"), ("store", "stored")):
                num_blocks = blocks[f"kv_offload_{copied}_blocks"]
                found[f"kv_offload_{kind}_bytes"] = num_blocks * self._page_bytes
        return found


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
