"""Reads and writes of a tier, queued for its threads."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future

from jaxkv._src.offload.integers import checked_integer
from jaxkv._src.offload.tiers.tier import TIER_COUNTERS

LOGGER = logging.getLogger("jaxkv.offload")
MAX_QUEUED = 4096
MAX_KEY_BYTES = 120  # as hexadecimal digits, the name of a file
_WARN_EVERY_S = 60.0
_CLOSE_WITHIN_S = 30.0


class Copy:
    """A read or write.

    Attributes:
      key: the block.
      buffer: its bytes, or the memory for them.
      future: the result.
    """

    __slots__ = ("buffer", "future", "key")

    def __init__(self, key: bytes, buffer: memoryview) -> None:
        self.key = key
        self.buffer = buffer
        self.future: Future[bool] = Future()
        self.future.set_running_or_notify_cancel()  # not cancellable: the buffer may be in use


class QueuedTier(ABC):
    """A tier whose copies run in its own threads, reads before writes.

    Requests wait for reads, but not for writes. Up to `MAX_QUEUED` of each may be queued; others
    are misses immediately: a store that does not keep up must not accumulate host pages.

    Args:
      name: the kind of tier, for messages.
      block_bytes: size of every block.
      num_threads: number of threads.
      max_batch: number of copies that a thread takes together.

    Raises:
      ValueError: `num_threads` is not a positive integer.
    """

    def __init__(self, name: str, block_bytes: int, num_threads: int, max_batch: int = 1) -> None:
        expected = "an integer, at least 1 thread"
        num_threads = checked_integer(f"{name}: num_threads", num_threads, expected, 1)
        self._name = name
        self._block_bytes = block_bytes
        self._max_batch = max_batch
        self._counts: dict[str, float] = dict.fromkeys(TIER_COUNTERS, 0)
        self._state = threading.Condition()  # guards everything here
        self._queues: tuple[deque[Copy], deque[Copy]] = (deque(), deque())  # reads, writes
        self._running = 0
        self._closed = False
        self._is_child = False  # of a fork
        self._warned: dict[str, float] = {}
        self._threads = [
            threading.Thread(target=self._work, name=f"jaxkv-{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        _tiers.add(self)

    @abstractmethod
    def remove(self, keys: Iterable[bytes]) -> None:
        """See `Tier`."""

    @abstractmethod
    def _contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier.contains`; the tier is open."""

    @abstractmethod
    def _read(self, copies: Sequence[Copy]) -> list[bool]:
        """Reads blocks, at most `max_batch`; in a thread of the tier."""

    @abstractmethod
    def _write(self, copies: Sequence[Copy]) -> list[bool]:
        """Writes blocks, at most `max_batch`; in a thread of the tier."""

    def _gauges(self) -> dict[str, float]:
        return {}

    def _after_fork(self) -> None:
        """In the child of a fork: it has none of the threads, but perhaps locks that they held."""
        self._is_child = True
        self._state = threading.Condition()
        self._queues, self._running, self._threads = (deque(), deque()), 0, []

    def _start(self) -> None:
        """Starts the threads, at the end of a subclass's constructor."""
        for thread in self._threads:
            thread.start()

    @property
    def block_bytes(self) -> int:
        """See `Tier`."""
        return self._block_bytes

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        self._check_keys("contains", keys)
        is_off = self._closed or self._is_child
        found = [False] * len(keys) if is_off else self._contains(keys)
        self._count("block_queries", len(found))
        self._count("block_hits", sum(found))
        return found

    def read(self, key: bytes, into: memoryview) -> Future[bool]:
        """See `Tier`."""
        self._check_buffer("read", into)
        if into.readonly:
            raise ValueError(f"{self._name}.read: the buffer is read-only; pass a writable one")
        return self._submit(self._queues[0], "read", key, into)

    def write(self, key: bytes, block: memoryview) -> Future[bool]:
        """See `Tier`."""
        self._check_buffer("write", block)
        return self._submit(self._queues[1], "write", key, block)

    def metrics(self) -> dict[str, float]:
        """See `Tier`."""
        with self._state:
            return {
                **self._counts,
                "kv_offload_tier_queued_reads": len(self._queues[0]),
                "kv_offload_tier_queued_writes": len(self._queues[1]),
                "kv_offload_tier_running_copies": self._running,
                **self._gauges(),
            }

    def close(self) -> None:
        """See `Tier`."""
        with self._state:
            self._closed = True
            queued = [copy for queue in self._queues for copy in queue]
            for queue, counter in zip(self._queues, (_MISSES, _FAILURES), strict=True):
                self._counts[counter] += len(queue)
                queue.clear()
            self._state.notify_all()
        for copy in queued:
            copy.future.set_result(False)
        deadline = time.monotonic() + _CLOSE_WITHIN_S
        for thread in self._others():
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        if self._is_stuck():
            self._warn("close", f"copies still in flight after {_CLOSE_WITHIN_S:.0f} s: given up")

    def _is_stuck(self) -> bool:
        return any(thread.is_alive() for thread in self._others())

    def _others(self) -> list[threading.Thread]:
        """All threads but the calling one, which may be in a callback of a future."""
        return [thread for thread in self._threads if thread is not threading.current_thread()]

    def _submit(
        self, queue: deque[Copy], operation: str, key: bytes, buffer: memoryview
    ) -> Future[bool]:
        self._check_keys(operation, (key,))
        copy = Copy(key, buffer.cast("B"))
        if self._is_child:
            copy.future.set_result(False)
            return copy.future
        with self._state:
            self._check_open(operation)
            if len(queue) < MAX_QUEUED:
                queue.append(copy)
                self._state.notify()
                return copy.future
            self._counts["kv_offload_tier_refused_copies"] += 1
        self._warn("refused", f"{MAX_QUEUED} {operation}s are waiting: further ones are misses")
        copy.future.set_result(False)
        return copy.future

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ValueError(f"{self._name}.{operation}: the tier is closed")

    def _check_buffer(self, operation: str, buffer: memoryview) -> None:
        if not isinstance(buffer, memoryview):
            raise ValueError(
                f"{self._name}.{operation}: the buffer is of type {type(buffer).__name__}; pass a "
                "memoryview of it"
            )
        if buffer.nbytes != self._block_bytes or not buffer.c_contiguous:
            raise ValueError(
                f"{self._name}.{operation}: the buffer has {buffer.nbytes} bytes"
                f"{'' if buffer.c_contiguous else ', not contiguous'}; blocks have "
                f"{self._block_bytes} contiguous bytes"
            )

    def _check_keys(self, operation: str, keys: Iterable[bytes]) -> None:
        for key in keys:
            if not isinstance(key, bytes) or not 0 < len(key) <= MAX_KEY_BYTES:
                raise ValueError(
                    f"{self._name}.{operation}: key {key!r} is not 1 to {MAX_KEY_BYTES} bytes"
                )

    def _work(self) -> None:
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closed or any(self._queues))
                if self._closed:
                    return
                queue = self._queues[0] or self._queues[1]
                copies = [queue.popleft() for _ in range(min(len(queue), self._max_batch))]
                self._running += len(copies)
            self._run(copies, is_read=queue is self._queues[0])

    def _run(self, copies: Sequence[Copy], *, is_read: bool) -> None:
        begun = time.monotonic()
        try:
            results = (self._read if is_read else self._write)(copies)
            if len(results) != len(copies):
                raise RuntimeError(f"{len(results)} results for {len(copies)} copies")
        except Exception as error:  # serving goes on: a future that never ends would stop it
            self._failed("read" if is_read else "write", error)
            results = [False] * len(copies)
        seconds = time.monotonic() - begun
        done = sum(results)
        counts = self._counts
        with self._state:
            self._running -= len(copies)
            kind = "read" if is_read else "write"
            counts["kv_offload_tier_read_blocks" if is_read else _WRITTEN] += done
            counts[_MISSES if is_read else _FAILURES] += len(copies) - done
            counts[f"kv_offload_tiering_{kind}_bytes"] += done * self._block_bytes
            counts[f"kv_offload_tiering_{kind}_time"] += seconds if done else 0.0
        for copy, result in zip(copies, results, strict=True):
            with contextlib.suppress(BufferError):  # of a frame that outlives a failure
                copy.buffer.release()
            copy.future.set_result(result)

    def _count(self, name: str, number: int = 1) -> None:
        with self._state:
            self._counts[f"kv_offload_tier_{name}"] += number

    def _failed(self, operation: str, error: Exception) -> None:
        self._count("errors")
        code = getattr(error, "errno", None) or type(error).__name__
        self._warn(f"{operation} {code}", f"{operation} failed, as a miss: {error}")

    def _warn(self, kind: str, text: str) -> None:
        """Logs a warning, of each kind once in `_WARN_EVERY_S`."""
        now = time.monotonic()
        with self._state:
            last = self._warned.get(kind)
            if last is not None and now - last < _WARN_EVERY_S:
                return
            self._warned[kind] = now
        LOGGER.warning("%s: %s", self._name, text)


def _after_fork() -> None:
    for tier in [*_tiers]:
        tier._after_fork()


_tiers: weakref.WeakSet[QueuedTier] = weakref.WeakSet()
os.register_at_fork(after_in_child=_after_fork)

_WRITTEN = "kv_offload_tier_written_blocks"
_MISSES = "kv_offload_tier_read_misses"
_FAILURES = "kv_offload_tier_write_failures"
