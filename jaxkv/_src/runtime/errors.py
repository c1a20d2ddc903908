"""Errors that are not plain ValueErrors, and the ones that a device counts."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import jax

from jaxkv._src.runtime import native


class JaxkvError(Exception):
    """An error of an operation's data, found on the host or on a device.

    Attributes:
      operation: name of the public function, or None if unknown.
      argument: name of its argument, or None if unknown.
      device: its ordinal (`jax.Device.local_hardware_id`); None if several, or the host found it.
      count: how many errors of this kind the operation, or the device, had; None if unknown.
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
        super().__init__(message)


class PageIndexError(JaxkvError, IndexError):
    """A page id outside its array, or a duplicate destination; the entry was not copied."""


class TransferError(JaxkvError, RuntimeError):
    """A wait for a started copy failed: its arrays lack the pages that were still in flight."""


class BoundError(JaxkvError, ValueError):
    """A batch needed more than a static bound of its metadata allows."""


class PeerTimeoutError(JaxkvError, RuntimeError):
    """A device waited in vain for a peer, or came to another call than its peer.

    The results of that call and of later ones are NaN. The text says which calls both made last.

    Attributes:
      rank: that waited.
      peer: the rank that did not come, or in phase "aborted" the one that gave up first.
      phase: "low_latency", "barrier", "scatter", "gather", "call" (the peer did not say which call
        it makes), "aborted", or "mismatch", where the peer came to another call.
      expected, seen: in phase "barrier" the number of the one that was waited for, and of the
        peer's last one; otherwise the words of the message (or of a rank's part of a chunk), and
        which of them was missing. In phase "mismatch" what was waited for meanwhile.
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


class StaleCountsError(RuntimeError):
    """Counts that are not those of the step, or of the requests, that the reader named."""


class HostMemoryError(MemoryError):
    """Host memory that was asked for is more than the machine allows.

    Attributes:
      needed_bytes: what was asked for.
      available_bytes: what the tightest limit leaves.
      limit: the name of that limit.
    """

    def __init__(self, needed_bytes: int, available_bytes: int, limit: str) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.limit = limit
        super().__init__(
            f"host pool needs {needed_bytes} bytes, but {limit} leaves {available_bytes} bytes"
        )


def check_errors(*outputs: Any) -> None:
    """Raises if a copy refused an entry, or a wait failed, since the last check.

    A CUDA kernel can't raise: it skips an entry whose id is out of range or whose destination is a
    duplicate, and counts it, as it counts what exceeds a bound. Reading the counts neither
    synchronises nor waits, so a step loop may call this every step; errors of work that still runs
    show up in a later call.

    Args:
      *outputs: arrays or pytrees to wait for first, to be sure of the work that made them.

    Raises:
      PageIndexError: the last of the refused entries, and how many there were.
      TransferError: a wait for a started copy timed out, or got a copy that XLA had made before.
      BoundError: the bound that a batch exceeded, and by what.
      ExceptionGroup: one error of each kind, if errors of several kinds are pending.
    """
    jax.block_until_ready(outputs)
    taken = native.extension().device_errors()  # in the order of the kinds
    errors = [_error_of(*group) for group in itertools.groupby(taken, operator.itemgetter(0))]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup("jaxkv.check_errors", errors)


_KINDS: dict[str, tuple[type[JaxkvError], str]] = {
    "page_index": (PageIndexError, "entries were not copied"),
    "transfer": (TransferError, "waits failed"),
    "bound": (BoundError, "bounds were exceeded"),
}
_MAX_TEXTS = 4  # in a message


def _error_of(kind: str, taken: Iterable[tuple[str, int | None, int, list[str]]]) -> JaxkvError:
    """One error for what all devices counted of a kind."""
    _, devices, counts, texts = zip(*taken, strict=True)
    error, counted = _KINDS[kind]
    first = itertools.islice(itertools.chain(*texts), _MAX_TEXTS)
    message = f"{sum(counts)} {counted}: {'; '.join(first)}"
    if known := [str(device) for device in devices if device is not None]:
        message += f" (device {', '.join(known)})"
    return error(message, device=devices[0] if len(devices) == 1 else None, count=sum(counts))
