"""Accepted token counts, read by the host one step later."""

from __future__ import annotations

import ctypes
import dataclasses
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike

from jaxkv._src.recurrent.align import _counts
from jaxkv._src.runtime.errors import StaleCountsError
from jaxkv._src.runtime.held_arrays import hold
from jaxkv.metadata.checks import integers
from jaxkv.metadata.segments import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class DeferredCounts:
    """In-flight copy of accepted counts to pinned host memory, tagged with step and requests.

    A step starts the copy and returns this object with its other results; the host reads it while
    the next step runs. Step number, request ids and counts share one array, so counts of another
    step or of reordered rows are detected. (vLLM copies its counts in the same way, without such
    tags, and waits for an event.)

        counts = jaxkv.recurrent.DeferredCounts.start(sampled, step=step, request_ids=ids)  # in jit
        accepted = counts.read(step=7, request_ids=ids)  # on the host, during the next step

    Counts that `jax.lax.scan` or `jax.vmap` stacked are read one step at a time:

        of_step = jax.tree.map(lambda x: x[i], jax.device_get(counts))

    Attributes:
      packed: int32[1 + 2B] in pinned host memory: step number, request ids, counts; or a NumPy
        array, after `jax.device_get`.
    """

    packed: jax.Array

    def __post_init__(self) -> None:
        packed = self.packed
        if isinstance(packed, jax.Array) and not isinstance(packed, jax.core.Tracer):
            hold(packed)

    @classmethod
    def start(cls, num_accepted: Array, *, step: ArrayLike, request_ids: Array) -> DeferredCounts:
        """Traces the copy to the host, inside the jitted step.

        Args:
          num_accepted: int32[B], accepted tokens of each row.
          step: an int, int32[] or int32[1], step number.
          request_ids: int32[B], request id of each row, chosen by the caller.

        Raises:
          ValueError: operands of the wrong shape, on the host not integers or outside int32, or on
            the device not int32.
        """
        operation = "DeferredCounts.start"
        if np.ndim(num_accepted) != 1:
            raise ValueError(
                f"{operation}: num_accepted must be int32[B], got {np.ndim(num_accepted)} axes"
            )
        rows = np.shape(num_accepted)[0]
        step_shape = np.shape(step) if np.size(step) == 1 else ()
        parts = [
            _counts(operation, "step", step, *step_shape).reshape(1),
            _counts(operation, "request_ids", request_ids, rows),
            _counts(operation, "num_accepted", num_accepted, rows),
        ]
        return cls(jax.device_put(jnp.concatenate(parts), jax.memory.Space.Host))

    def is_ready(self) -> bool:
        """Whether `read` would return without blocking.

        Raises:
          RuntimeError: the counts were donated or deleted.
        """
        packed: Any = self.packed
        self._check_not_deleted()
        return isinstance(packed, np.ndarray) or packed.is_ready()

    def _check_not_deleted(self) -> None:
        packed: Any = self.packed
        if isinstance(packed, np.ndarray):
            return
        if packed.is_deleted():  # JAX would read freed memory
            raise RuntimeError("DeferredCounts: the counts were donated or deleted")

    def read(self, *, step: int, request_ids: npt.ArrayLike) -> np.ndarray:
        """The counts, int32[n]; blocks only while the step that produced them is running.

        Counts as a host sync under `forbid_host_sync`, even if the counts are ready.

        Args:
          step: expected step number.
          request_ids: int[n], expected request ids of the first n rows.

        Raises:
          TypeError: `step` is not an integer.
          RuntimeError: the counts were donated or deleted.
          jax.errors.JaxRuntimeError: the step that produced the counts failed, or one before it;
            errors that a GPU counts are those of `jaxkv.check_errors`.
          StaleCountsError: the counts belong to another step or to other requests.
          ValueError: `request_ids` are not integers in one dimension, or the counts are stacked,
            were converted to another dtype or moved out of host memory.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(f"DeferredCounts.read: step must be an integer, got {step!r}") from None
        wanted = integers("DeferredCounts.read: request_ids", request_ids)
        packed: Any = self.packed
        _check_is_one_step(packed)
        self._check_not_deleted()
        if not isinstance(packed, np.ndarray):
            # Even if ready: only this raises the error of a failed step, which writes no counts.
            packed.block_until_ready()
        words = _host_words(packed)
        ids, counts = np.split(words[1:], 2)
        if words[0] != step:
            raise StaleCountsError(
                f"DeferredCounts.read: expected counts of step {step}, got step {words[0]}"
            )
        if len(wanted) > len(ids):
            raise StaleCountsError(
                f"DeferredCounts.read: request_ids has {len(wanted)} rows, but step {step} has "
                f"{len(ids)}"
            )
        for row in np.flatnonzero(wanted != ids[: len(wanted)]):
            raise StaleCountsError(
                f"DeferredCounts.read: expected request {wanted[row]} in row {row} of step {step}, "
                f"got request {ids[row]}"
            )
        return counts[: len(wanted)]


def _check_is_one_step(packed: Array) -> None:
    """Without the check, stacked counts would be read as one step with their first number."""
    if packed.ndim != 1 or packed.size % 2 != 1 or packed.dtype != np.int32:
        raise ValueError(
            "DeferredCounts.read: packed must be int32[1 + 2B], the counts of one step, got "
            f"{packed.dtype}{[*packed.shape]}: index stacked counts, as in "
            "jax.tree.map(lambda x: x[i], jax.device_get(counts))"
        )


def _host_words(ready: Array) -> np.ndarray:
    """Copy of an int32[n] in host memory; `np.asarray` would enqueue a device-to-host copy."""
    if isinstance(ready, np.ndarray):
        return ready.copy()
    shard = ready.addressable_data(0)
    platforms, kind = {device.platform for device in shard.devices()}, shard.sharding.memory_kind
    if kind == "device" and platforms != {"cpu"}:
        raise ValueError(
            f"DeferredCounts.read: the host cannot read counts in memory of kind {kind!r}; keep "
            "them in the pinned host memory to which DeferredCounts.start copied them"
        )
    words = (ctypes.c_int32 * shard.size).from_address(shard.unsafe_buffer_pointer())
    return np.array(words, np.int32)
