"""Removals of discarded blocks from a tier, repeated until they succeed. No JAX."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from itertools import islice

from jaxkv._src.offload.tiers.queued import LOGGER

_MAX_BLOCKS = 1 << 18  # about 50 MB of keys
_MAX_BATCH = 1024  # blocks of one call
_MAX_CALLS = _MAX_BLOCKS // _MAX_BATCH
_RETRY_AFTER_S = 5.0


class TierRemovals:
    """Blocks that a tier has to remove, each until it has done so.

    A removal is submitted at once, and repeated if it fails: after 5 s, one call of at most 1,024
    blocks at a time, so that a poll has little to do. The keys of up to 262,144 blocks are kept
    meanwhile. Those of more are not: the tier then counts as one that has no block at all.

    Not thread-safe, except `len`.

    Args:
      remove: removes the blocks with these keys; runs in `executor`.
      executor: runs the calls in order.
      clock: returns the time in seconds.
    """

    def __init__(
        self,
        remove: Callable[[Sequence[bytes]], None],
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._remove, self._executor, self._clock = remove, executor, clock
        self._calls: deque[tuple[Future[None], Sequence[bytes]]] = deque()
        self._num_calls: dict[bytes, int] = {}  # for each block that may still be there
        self._waiting: dict[bytes, None] = {}  # for a call, the oldest first
        self._repeated: Future[None] | None = None
        self._retry_at = 0.0
        self._is_full = False

    def __len__(self) -> int:
        """The number of blocks that may still be there."""
        return len(self._num_calls)

    def is_over(self) -> bool:
        """Whether no discarded block may still be there."""
        return not self._num_calls and not self._is_full

    def remaining(self, keys: Iterable[bytes]) -> set[bytes]:
        """Those of the blocks that may still be there, and must not be read."""
        return {key for key in keys if self._is_full or key in self._num_calls}

    def add(self, keys: Sequence[bytes]) -> None:
        """Removes blocks, also if they have been written since an earlier removal."""
        num_new = sum(key not in self._num_calls for key in keys)
        if len(self._num_calls) + num_new > _MAX_BLOCKS:
            if not self._is_full:
                LOGGER.error("OffloadEngine: a tier is not read any more: %s", _TOO_MANY)
            self._is_full = True
            return
        for first in range(0, len(keys), _MAX_BATCH):
            batch = keys[first : first + _MAX_BATCH]
            if len(self._calls) < _MAX_CALLS:
                self._submit(batch)
            else:  # of a tier that hangs
                self._num_calls.update((key, self._num_calls.get(key, 0)) for key in batch)
                self._waiting.update(dict.fromkeys(batch))

    def poll(self) -> None:
        """Ends the calls that are over, and begins one of those that wait."""
        while self._calls and self._calls[0][0].done():
            self._end(*self._calls.popleft())
        is_idle = self._repeated is None or self._repeated.done()
        if self._waiting and is_idle and self._clock() >= self._retry_at:
            self._repeated = self._submit([*islice(self._waiting, _MAX_BATCH)])

    def wait(self, expires_at: float) -> None:
        """Waits until no discarded block may be there, or until this time of the clock."""
        while self._num_calls and (left := expires_at - self._clock()) > 0:
            if self._calls:
                wait([self._calls[-1][0]], left)
            else:
                time.sleep(min(left, max(0.0, self._retry_at - self._clock())))
            self.poll()

    def _submit(self, keys: Sequence[bytes]) -> Future[None]:
        for key in keys:
            self._num_calls[key] = self._num_calls.get(key, 0) + 1
            self._waiting.pop(key, None)
        call = self._executor.submit(self._remove, keys)
        self._calls.append((call, keys))
        return call

    def _end(self, call: Future[None], keys: Sequence[bytes]) -> None:
        error = call.exception()
        if error and not self._waiting:
            LOGGER.warning("OffloadEngine: discarded blocks may remain in a tier: %s", error)
        # A closed tier, which raises a ValueError, finds nothing, and never removes anything.
        has_failed = error is not None and not isinstance(error, ValueError)
        if has_failed:
            self._retry_at = self._clock() + _RETRY_AFTER_S
        for key in keys:
            self._num_calls[key] -= 1
            if self._num_calls[key]:
                continue  # the last call decides
            if has_failed:
                self._waiting[key] = None
            elif key not in self._waiting:
                del self._num_calls[key]


_TOO_MANY = f"more than {_MAX_BLOCKS} blocks were discarded and may still be in it"
