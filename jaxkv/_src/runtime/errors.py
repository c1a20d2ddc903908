"""Errors that are not plain ValueErrors, and the ones that a device counts."""

from __future__ import annotations

from typing import Any

import jax

from jaxkv._src.runtime import native


class PageIndexError(IndexError):
    """A page id outside its array, or a destination named twice; the entry was not copied."""


class TransferError(RuntimeError):
    """A wait for a started copy failed: the arrays that it handed out lack what had not arrived."""


class BoundError(ValueError):
    """A batch needed more than a static bound of its metadata allows."""


class PeerTimeoutError(RuntimeError):
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
        super().__init__(description)


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

    A CUDA kernel can't raise: it skips an entry whose id is out of range or whose destination is
    named twice, and counts it, as it counts what exceeds a bound. Reading the count neither
    synchronises nor waits, so a step loop may call this every step; entries of work that still runs
    show up in a later call.

    Args:
      *outputs: arrays or pytrees to wait for first, to be sure of the work that made them.

    Raises:
      PageIndexError: names the first refused entries and how many there were.
      TransferError: a wait for a started copy gave up, or got a copy that XLA had made before.
      BoundError: names the bound that a batch exceeded, and by what.
    """
    jax.block_until_ready(outputs)
    count, details = native.extension().device_errors()
    texts = "; ".join(text for _, text in details[:4])
    kinds = {kind for kind, _ in details}
    if "transfer" in kinds:
        raise TransferError(f"{count} faults: {texts}")
    if "bound" in kinds:
        raise BoundError(f"{count} faults: {texts}")
    if count:
        raise PageIndexError(f"{count} entries were not copied: {texts}")
