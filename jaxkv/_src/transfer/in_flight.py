"""Lifetime of the arrays of in-flight copies between programs.

The arrays are kept alive until the copy is complete, even if the handle is dropped. Within a
program `buffer_lifetime` ensures this.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from jaxkv._src.runtime import native


class _Buffer(Protocol):
    """Methods of `jax.Array`, whose type lacks `is_ready`."""

    def is_deleted(self) -> bool: ...
    def is_ready(self) -> bool: ...


@dataclasses.dataclass(eq=False)
class _InFlightCopy:
    """Arrays of a copy returned from its jit; not freed before the copy is complete."""

    ticket: object
    arrays: list[_Buffer]
    started: list[int] | None = None  # copies to check for completion; known once the start has run

    def ended(self) -> bool:
        # The program that receives a donated array ensures its lifetime.
        self.arrays = [array for array in self.arrays if not array.is_deleted()]
        if not self.arrays or not native.extension().CUDA:
            return all(array.is_ready() for array in self.arrays)
        if self.started is None:
            if not all(array.is_ready() for array in self.arrays):
                return False
            self.started = native.extension().started_copies()
        return native.extension().copies_ended(self.started)


class Completion:
    """Queries whether the copy of a handle is complete; keeps no array alive."""

    def __init__(self) -> None:
        self._started: list[int] | None = None

    def is_complete(self, ticket: Any, arrays: list[Any]) -> bool:
        """Whether the copy is complete; never blocks, and may run in any thread.

        Args:
          ticket: the ticket of the handle, None if it has nothing to wait for.
          arrays: all arrays of the handle.

        Raises:
          RuntimeError: the handle is traced, or an array of it was donated or deleted.
        """
        if any(isinstance(array, jax.core.Tracer) for array in arrays):
            raise RuntimeError("done: the handle is traced; query it outside of jit")
        if not all(hasattr(array, "is_deleted") for array in arrays):
            raise RuntimeError(
                "done: the arrays of the handle were replaced by values that are not JAX arrays, "
                "as by jax.device_get; query the handle of the start"
            )
        try:
            if any(array.is_deleted() for array in arrays):
                raise RuntimeError
            arrays = _buffers(arrays)
            copy = _InFlightCopy(ticket, arrays, self._started)
            if ticket is None:
                return all(array.is_ready() for array in arrays)
            ended = copy.ended()
        except RuntimeError as error:  # also if another thread donates an array now
            raise RuntimeError(
                "done: an array of the handle was donated to a program, or closed or deleted; the "
                "copy is complete when the results of the program that waits for it are ready"
            ) from error
        self._started = copy.started
        return ended


# Threads remove and requeue entries one at a time, so that none is lost. No lock: releasing an
# array may run arbitrary code, including this module.
_in_flight: collections.deque[_InFlightCopy] = collections.deque()


def keep_alive(leaves: Sequence[Any] | None, *, instead_of: jax.Array | None = None) -> None:
    """Keeps the arrays of a handle alive, the ticket (or None) first; ignores tracers.

    Releases copies that are complete, and those kept with the ticket `instead_of`.
    """
    arrays = jax.tree.leaves(leaves)
    if not all(isinstance(array, jax.Array) for array in arrays):
        return
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return
    _release_finished(instead_of)
    arrays = _buffers(arrays)
    if leaves and arrays and leaves[0] is not None:
        _in_flight.append(_InFlightCopy(leaves[0], arrays))


def _buffers(arrays: Sequence[Any]) -> list[Any]:
    """The arrays; for PRNG keys, which have no `is_ready`, the arrays of their bits."""
    return [array if hasattr(array, "is_ready") else _bits(array) for array in arrays]


def _bits(keys: jax.Array) -> jax.Array:
    with jax.ensure_compile_time_eval():  # also if a program is being traced
        return jax.random.key_data(keys)


def _release_finished(ticket: jax.Array | None) -> None:
    for _ in range(len(_in_flight)):
        try:
            entry = _in_flight.popleft()
        except IndexError:  # another thread holds the entry
            return
        if ticket is None or entry.ticket is not ticket:
            _requeue_unless_finished(entry)


def _requeue_unless_finished(entry: _InFlightCopy) -> None:
    ended = False
    try:
        ended = entry.ended()
    except RuntimeError:  # another thread donated an array after the check
        pass
    finally:
        if not ended:
            _in_flight.append(entry)


def donation_error() -> RuntimeError:
    """The error for a handle that leaves its program under `jax_debug_nans`."""
    return RuntimeError(
        "jax_debug_nans disables donation, so that XLA would copy the arrays of a handle while "
        "their copy is in flight: wait in the program that starts the copy, or unset "
        "jax_debug_nans"
    )


def check_same_trace(before: jax.Array, after: jax.Array) -> None:
    """Raises a RuntimeError if `after`, a new leaf of a handle, has another trace than `before`."""
    if isinstance(after, jax.core.Tracer) and _trace_of(before) is not _trace_of(after):
        raise RuntimeError(
            "wait: the copy was started in another trace, outside the jit, checkpoint or loop that "
            "contains the wait: make its handle an argument and a result of a jit or checkpoint; "
            "wait before a loop, or stack the layers, put the handle into the loop's carry and "
            "wait for the traced layer"
        )


def _trace_of(array: jax.Array) -> object:
    return array._trace if isinstance(array, jax.core.Tracer) else None
