"""Accepted token counts that reach the host one step later."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv._src.recurrent.align import _counts, _fitting
from jaxkv._src.runtime.errors import StaleCountsError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeferredCounts:
    """Accepted counts on their way to pinned host memory, with what they belong to.

    A step starts the copy and returns it with its other results; the host reads it while the next
    step runs. The step's number and the rows' requests travel in the same array as the counts, so
    counts of another step, or of rows that changed places, cannot be taken for those wanted.

    Attributes:
      packed: int32[1 + 2B] in pinned host memory: the step, the requests, the counts.
    """

    packed: Any

    @classmethod
    def start(cls, num_accepted: Any, *, step: Any, request_ids: Any) -> DeferredCounts:
        """Traces the copy, within the jitted step.

        Args:
          num_accepted: int32[B].
          step: int32[], the step's number.
          request_ids: int32[B], the caller's number of each row's request.

        Raises:
          ValueError: operands of another shape or type, or that do not fit int32.
        """
        rows = jnp.shape(num_accepted)[0]
        parts = [
            _counts("step", jnp.reshape(_fitting("step", step), 1), 1),
            _counts("request_ids", request_ids, rows),
            _counts("num_accepted", num_accepted, rows),
        ]
        return cls(jax.device_put(jnp.concatenate(parts), jax.memory.Space.Host))

    def is_ready(self) -> bool:
        """Whether `read` would return without a wait.

        Raises:
          RuntimeError: the counts were donated or deleted.
        """
        if self.packed.is_deleted():  # JAX would read freed memory
            raise RuntimeError("these counts were donated or deleted")
        return self.packed.is_ready()

    def read(self, *, step: int, request_ids: Any) -> np.ndarray:
        """int32[B], the counts; waits only if the step that made them still runs.

        Args:
          step: the number of the step whose counts are wanted.
          request_ids: int[n], the requests whose counts are wanted, for the first n rows.

        Raises:
          RuntimeError: the counts were donated or deleted.
          StaleCountsError: the counts are of another step, or of other requests.
          ValueError: the counts were moved out of host memory.
        """
        if not self.is_ready():
            self.packed.block_until_ready()
        words = _host_words(self.packed)
        ids, counts = np.split(words[1:], 2)
        wanted = np.asarray(request_ids)
        if words[0] != step:
            raise StaleCountsError(
                f"counts of step {step} were wanted, these are of step {words[0]}"
            )
        if len(wanted) > len(ids):
            raise StaleCountsError(f"{len(wanted)} rows were wanted, step {step} had {len(ids)}")
        for row in np.flatnonzero(wanted != ids[: len(wanted)]):
            raise StaleCountsError(
                f"row {row} of step {step} is of request {ids[row]}, not of {wanted[row]}"
            )
        return counts[: len(wanted)]


def _host_words(ready: jax.Array) -> np.ndarray:
    """A copy of an int32[n] in host memory, which NumPy's own way would fetch through a stream."""
    shard = ready.addressable_data(0)
    platforms, kind = {device.platform for device in shard.devices()}, shard.sharding.memory_kind
    if kind == "device" and platforms != {"cpu"}:
        raise ValueError(
            f"these counts lie in memory of kind {kind!r}, which the host cannot read: leave them "
            "in pinned host memory, where DeferredCounts.start put them"
        )
    words = (ctypes.c_int32 * shard.size).from_address(shard.unsafe_buffer_pointer())
    return np.array(words, np.int32)
