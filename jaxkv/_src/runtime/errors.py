"""Exception classes; `check_errors` and `ErrorScope` for errors counted on devices."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TypeAlias, TypeVar

import jax
import numpy as np

from jaxkv._src.runtime import native

# The entered ErrorScope. Part of jit's cache key, since a traced call contains its scope.
_scope = jax.make_user_context(default_value=None)


class JaxkvError(Exception):
    """An error in the data of an operation, detected on the host or on a device.

    Attributes:
      operation: name of the public function, or None if unknown.
      argument: name of its argument, or None if unknown.
      device: device ordinal (`jax.Device.local_hardware_id`); None for several devices, or if the
        host detected the error.
      count: number of errors of this kind in the operation or on the device; None if unknown.
      scope: name of the `ErrorScope` in which the error was raised; None outside any.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        argument: str | None = None,
        device: int | None = None,
        count: int | None = None,
    ) -> None:
        self.operation = operation
        self.argument = argument
        self.device = device
        self.count = count
        self.scope = _scope.value and _scope.value.name
        super().__init__(message)


class PageIndexError(JaxkvError, IndexError):
    """A page id is out of range, or a destination is a duplicate; the entry was not copied.

    In `jaxkv.sparse`: a token position is out of range, repeated or without a page. In
    `jaxkv.recurrent`: a block id or a column of the block table is out of range.
    """


class TransferError(JaxkvError, RuntimeError):
    """A wait for an asynchronous copy failed; its arrays lack the pages that were in flight."""


class BoundError(JaxkvError, ValueError):
    """A batch exceeds a static bound of its metadata, or a step those of `recurrent.advance`."""


class PeerTimeoutError(JaxkvError, RuntimeError):
    """A wait for a peer timed out, or the peer entered another call.

    The results of that call and of later ones are NaN. The message names the last call of both
    ranks, except in phase "aborted".

    Attributes:
      rank: the waiting rank.
      peer: the rank that did not arrive. `rank` may have waited for another rank, which waits for
        this one. If all ranks wait for each other, the one that timed out first.
      phase: "low_latency", "barrier", "scatter", "gather", "call" (the peer did not announce its
        call), "aborted" (another rank timed out first), or "mismatch" (the peer entered another
        call).
      expected, seen: in phase "barrier" the epoch of the pending barrier and the peer's last epoch;
        in phase "call" the mark (signature and number) of the call, and the peer's mark in its
        place, 0 for none; otherwise the number of words of the message (of a rank's part of it in
        "scatter" and "gather") and the index of the missing word. In phases "aborted" and
        "mismatch" those of the wait that was pending.
    """

    def __init__(
        self, rank: int, peer: int, phase: str, expected: int, seen: int, description: str
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.expected = expected
        self.seen = seen
        super().__init__(description, operation="all_reduce")

    def __reduce__(self) -> tuple[object, ...]:  # pickle passes `args` to `__init__` otherwise
        arguments = self.rank, self.peer, self.phase, self.expected, self.seen, str(self)
        return type(self), arguments, self.__dict__


class StaleCountsError(RuntimeError):
    """The counts belong to another step, or to other requests, than the reader specified."""


class HostMemoryError(MemoryError):
    """The requested host memory exceeds the available host memory.

    Attributes:
      needed_bytes: requested bytes.
      available_bytes: bytes available under the tightest limit.
      limit: name of that limit.
    """

    def __init__(self, needed_bytes: int, available_bytes: int, limit: str) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.limit = limit
        super().__init__(
            f"pinned host memory of {needed_bytes} bytes exceeds the available host memory, "
            f"{available_bytes} bytes by {limit}: reduce num_pages or the shape"
        )

    def __reduce__(self) -> tuple[object, ...]:
        arguments = self.needed_bytes, self.available_bytes, self.limit
        return type(self), arguments, self.__dict__


def check_errors(*outputs: object) -> None:
    """Raises the errors that devices counted since the last check.

    Within an `ErrorScope`, these are the errors of calls traced in that scope; elsewhere those of
    calls traced outside any scope.

    A CUDA kernel cannot raise: it skips an entry whose id is out of range or whose destination is a
    duplicate, and increments a counter, as it does for exceeded bounds and failed waits. Reading
    the counters does not synchronize, so a step loop may call this in every step; errors of work in
    flight are raised by a later call.

    On the CPU backend a page copy or a metadata builder fails the jitted call itself instead.
    `jaxkv.sparse` and the align functions of `jaxkv.recurrent` count their errors on every
    platform, so call this there too.

        jaxkv.check_errors(pool)  # waits for pool, then raises

    Args:
      *outputs: arrays or pytrees to block on first, so that the errors of the work that produces
        them are included.

    Raises:
      PageIndexError: entries were rejected; the message has their number and some of them.
      TransferError: a wait for an asynchronous copy timed out, or XLA had copied its array before.
      BoundError: a batch exceeded a bound; the message has the bound and the value.
      ExceptionGroup: one error of each kind, if errors of several kinds are pending.
    """
    jax.block_until_ready(outputs)
    taken = native.extension().device_errors(scope_number())  # sorted by kind
    errors = [_error_of(*group) for group in itertools.groupby(taken, operator.itemgetter(0))]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("jaxkv.check_errors", errors)


@dataclasses.dataclass(frozen=True)
class ErrorScope:
    """Separate errors for an engine, if several share a process.

    An error that a device counts belongs to the scope in which the call was traced: an operation
    on pages or recurrent states, a wait, a metadata builder. Programs are compiled for each scope
    in which they are called. A scope applies to the current thread, also during an `await`: of the
    scopes that all tasks of the thread have entered, the innermost one applies. Tasks may leave
    their scopes in any order.

        scope = jaxkv.ErrorScope("engine-a")
        with scope:
            out = step(pool, cache)
        scope.check_errors(out)

    Args:
      name: name in messages and in `JaxkvError.scope`. Equal names denote one scope; a process can
        have 255 different ones.

    Raises:
      TypeError: `name` is not a string.
      ValueError: `name` is empty, exceeds the 255 names of a process, or has the hash of another.
      RuntimeError: the scope is left in another thread than the one that entered it.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"ErrorScope: name must be a string, got {self.name!r}")
        if not self.name:
            raise ValueError("ErrorScope: name must not be empty")
        self._register()

    def __enter__(self) -> ErrorScope:
        context = _scope(self)
        context.__enter__()
        _entered.scopes.append((self, context))
        return self

    def __exit__(self, *exception: object) -> None:
        entered = _entered.scopes
        places = [place for place, (scope, _) in enumerate(entered) if scope is self]
        if not places:
            raise RuntimeError(
                f"ErrorScope: {self.name!r} must be exited in the thread that entered it"
            )
        # Other tasks of the thread may have entered later ones, which remain.
        left = entered[places[-1] :]
        del entered[places[-1] :]
        for _, context in reversed(left):
            context.__exit__(None, None, None)
        for scope, _ in left[1:]:
            scope.__enter__()

    def check_errors(self, *outputs: object) -> None:
        """Raises the errors of this scope; see `jaxkv.check_errors`.

        Args:
          *outputs: arrays or pytrees to block on first.
        """
        with self:
            check_errors(*outputs)

    def _register(self) -> int:
        try:
            return native.extension().register_scope(self.name)
        except ValueError as error:
            raise ValueError(f"ErrorScope: {error}") from None


class _Entered(threading.local):
    def __init__(self) -> None:
        self.scopes: list[tuple[ErrorScope, AbstractContextManager[None]]] = []


_entered = _Entered()


def scope_number() -> int:
    """Number of the entered scope, for the native extension; 0 outside any."""
    scope: ErrorScope | None = _scope.value
    return scope._register() if scope else 0


def scope_attribute() -> dict[str, np.int64]:
    """The FFI attribute `scope`, for calls without another attribute that encodes the scope."""
    number = scope_number()
    return {"scope": np.int64(number)} if number else {}


_KINDS: dict[str, tuple[type[JaxkvError], str, str]] = {
    "page_index": (PageIndexError, "entry was not copied", "entries were not copied"),
    "transfer": (TransferError, "wait failed", "waits failed"),
    "bound": (BoundError, "bound was exceeded", "bounds were exceeded"),
}
_MAX_TEXTS = 4  # per message


_Entry: TypeAlias = tuple[str, str, str]  # operation, argument, description


def _error_of(kind: str, taken: Iterable[tuple[str, int | None, int, list[_Entry]]]) -> JaxkvError:
    """One error for the counts of one kind on all devices."""
    _, devices, counts, entries = zip(*taken, strict=True)
    error, of_one, of_several = _KINDS[kind]
    count = sum(counts)
    recent = list(itertools.chain(*entries))
    operations, arguments, texts = zip(*recent, strict=True) if recent else ((), (), ())
    counted = of_one if count == 1 else of_several
    distinct = list(dict.fromkeys(texts))[:_MAX_TEXTS]
    message = f"{count} {counted}: {'; '.join(distinct)}"
    known = [str(device) for device in devices if device is not None]
    origin = [f"device {', '.join(known)}"] if known else []
    if scope := _scope.value:
        origin.append(f"scope {scope.name}")
    if origin:
        message += f" ({', '.join(origin)})"
    return error(
        message,
        operation=_only(operations) or None,
        argument=_only(arguments) or None,
        device=_only(devices),
        count=count,
    )


_Value = TypeVar("_Value")


def _only(values: Sequence[_Value]) -> _Value | None:
    """The value that all have, or None if they differ."""
    return values[0] if len(set(values)) == 1 else None
