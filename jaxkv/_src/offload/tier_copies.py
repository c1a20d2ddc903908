"""Copies between the pages of a host pool and the tiers below it. No JAX."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from itertools import accumulate
from typing import Protocol

from jaxkv._src.offload.daemon_executor import DaemonExecutor
from jaxkv._src.offload.errors import StaleSpecError
from jaxkv._src.offload.integers import checked_window
from jaxkv._src.offload.keys import distinct_keys
from jaxkv._src.offload.lookup import longest_prefix
from jaxkv._src.offload.manager import OffloadManager
from jaxkv._src.offload.specs import BlockState, LoadSpec, StoreSpec
from jaxkv._src.offload.tier_removals import TierRemovals
from jaxkv._src.offload.tiers.queued import LOGGER, MAX_KEY_BYTES, MAX_QUEUED
from jaxkv._src.offload.tiers.tier import Tier


class PageMemory(Protocol):
    """The bytes of host pages, as blocks of a tier: one page is several of them."""

    block_bytes: int

    def keys(self, key: bytes) -> list[bytes]:
        """Keys in the tier of the parts of a page."""

    def parts(self, page: int) -> list[memoryview]:
        """The parts of a page, each `block_bytes` long."""

    def is_in_use(self) -> bool:
        """Whether steps use these pages: not if one of them has returned a copy of the pool."""


@dataclasses.dataclass(eq=False)
class OffloadPrefetch:
    """Blocks of a request on their way from a tier to the host pool.

        prefetch = host_tier.prefetch(keys)                   # of an `OffloadEngine`
        ...                                                   # steps and polls, until prefetch.done
        found = host_tier.lookup(keys)

    The counterpart of the prefetch of SGLang's HiCache from its storage backends.

    Attributes:
      keys: the requested blocks.
      done: whether there is nothing left to wait for, since all reads have ended or
        `tier_timeout_s` has passed: `lookup` finds what has arrived.
    """

    keys: tuple[bytes, ...]
    done: bool = False
    _window: int | None = dataclasses.field(default=None, repr=False)
    _answer: Future[list[bytes]] | None = dataclasses.field(default=None, repr=False)
    _discarded: set[bytes] = dataclasses.field(default_factory=set, repr=False)
    _expires_at: float = dataclasses.field(default=0.0, repr=False)


@dataclasses.dataclass(eq=False)
class _TierCopy:
    """A read or write in flight; its pages are reserved or pinned by the spec."""

    spec: LoadSpec | StoreSpec
    futures: dict[bytes, list[Future[bool]]]

    def is_over(self) -> bool:
        return all(future.done() for parts in self.futures.values() for future in parts)

    def failed(self) -> set[bytes]:
        return {
            key
            for key, parts in self.futures.items()
            if not all(future.result() for future in parts)
        }


class TierCopies:
    """Promotions from a tier to host pages, and cascades of stored blocks to it.

    A promotion reserves host pages as a store does, so that states, pins and generations protect
    them, and the blocks become ready once they are read. A block is cascaded when its store is
    complete, pinned until the tier has it: eviction then never waits for a tier, and a process that
    is killed loses at most what is in flight. Reads and writes occupy at most half of the pages
    each, so that a slow tier does not take the host pool; further blocks are left out.

    Nothing here blocks: the tier is asked in a thread, and its futures are polled. Not thread-safe,
    except `metrics`.

    Args:
      manager: of the host pool.
      tier: the tier, or several as a `TieredStore`.
      memory: the bytes of the host pages.
      timeout_s: after this time a prefetch is done, even if its reads are not over.
      executor: runs `contains` of the tier, in order.
      remover: runs `remove` of the tier, in order; one that hangs must not delay lookups.
      clock: returns the time in seconds.

    Raises:
      ValueError: the tier has blocks of another size, or `timeout_s` is negative.
    """

    def __init__(
        self,
        manager: OffloadManager,
        tier: Tier,
        memory: PageMemory,
        timeout_s: float,
        executor: Executor | None = None,
        remover: Executor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if tier.block_bytes != memory.block_bytes:
            raise ValueError(
                f"OffloadEngine: tiers have block_bytes={tier.block_bytes}, and the pool needs "
                f"{memory.block_bytes}; pass block_bytes=OffloadEngine.tier_block_bytes(pool)"
            )
        if not timeout_s >= 0:
            raise ValueError(f"OffloadEngine: tier_timeout_s={timeout_s}; at least 0 s")
        self._manager, self._tier, self._memory = manager, tier, memory
        parts = memory.keys(b"")
        self._max_key_bytes = MAX_KEY_BYTES - len(parts[0])
        # Beyond this a tier refuses parts, for whose blocks others would have been evicted.
        self._max_blocks = min(manager.num_pages // 2, MAX_QUEUED // len(parts))
        self._timeout_s, self._clock = timeout_s, clock
        self._executor = executor or DaemonExecutor("jaxkv-tier")
        self._prefetches: list[OffloadPrefetch] = []
        self._reads: list[_TierCopy] = []
        self._writes: list[_TierCopy] = []
        self._removals = TierRemovals(
            self._remove, remover or DaemonExecutor("jaxkv-tier-remove"), clock
        )
        self._reading: set[bytes] = set()
        self._num_writing = 0  # blocks
        self._num_dropped = 0  # blocks
        self._pool_is_stale = False  # to be raised by `poll`

    def prefetch(self, keys: Sequence[bytes], window: int | None) -> OffloadPrefetch:
        """Asks the tier for the blocks that the host pool lacks, and reads those of the prefix."""
        self.check_keys("prefetch", keys)
        removed = self._removals.remaining(keys)  # not yet
        prefetch = OffloadPrefetch(tuple(keys), _window=window, _discarded=removed)
        if len(self._prefetches) >= MAX_QUEUED:  # the tier does not answer
            prefetch.done = True
            return prefetch
        prefetch._expires_at = self._clock() + self._timeout_s
        absent = [key for key in prefetch.keys if self._manager.state(key) is None]
        if absent:
            prefetch._answer = self._executor.submit(self._ask, absent)
        self._prefetches.append(prefetch)
        self._advance(prefetch)
        return prefetch

    def check_keys(self, operation: str, keys: Sequence[bytes]) -> None:
        """Raises ValueError if a key is too long for the tier."""
        longest = max(map(len, keys), default=0)
        if longest > self._max_key_bytes:
            raise ValueError(
                f"OffloadEngine.{operation}: a key of {longest} bytes; at most "
                f"{self._max_key_bytes} with tiers"
            )

    def _ask(self, keys: Sequence[bytes]) -> list[bytes]:
        """The blocks all parts of which are in the tier; runs in the executor."""
        parts = [self._memory.keys(key) for key in keys]
        found = iter(self._tier.contains([part for names in parts for part in names]))
        there = [all([next(found) for _ in names]) for names in parts]
        return [key for key, is_there in zip(keys, there, strict=True) if is_there]

    def cascade(self, keys: Sequence[bytes]) -> None:
        """Writes blocks to the tier whose store is complete."""
        ready = [key for key in keys if self._manager.state(key) is BlockState.READY]
        room = max(0, self._max_blocks - self._num_writing)
        self._num_dropped += len(ready[room:])
        if not ready[:room]:
            return
        spec = self._manager.prepare_load(ready[:room], tier=True)
        self._manager.start(spec)
        self._num_writing += len(spec.keys)
        self._writes.append(_TierCopy(spec, self._submit(self._tier.write, spec)))

    def discard(self, keys: Iterable[bytes]) -> None:
        """Removes blocks from the tier, as `TierRemovals`; until they are, no prefetch reads them.

        Those being read do not become ready.
        """
        keys = tuple(keys)
        for prefetch in self._prefetches:
            prefetch._discarded.update(keys)
        # Longer ones are not there.
        self._removals.add([key for key in keys if len(key) <= self._max_key_bytes])

    def _remove(self, keys: Sequence[bytes]) -> None:
        """Runs in the executor of removals."""
        self._tier.remove([part for key in keys for part in self._memory.keys(key)])

    def poll(self) -> None:
        """Completes copies that have ended, and begins the reads of answered lookups.

        Raises:
          RuntimeError: blocks were to be read into a pool that no step uses any more.
        """
        self._advance_all()
        self._check_pool()

    def _advance_all(self) -> None:
        for copy in [copy for copy in self._reads if copy.is_over()]:
            self._reads.remove(copy)
            is_in_use = self._is_in_use()
            self._manager.complete(copy.spec, failed=copy.failed() if is_in_use else copy.spec.keys)
        self._reading = {key for copy in self._reads for key in copy.spec.keys}
        for copy in [copy for copy in self._writes if copy.is_over()]:
            self._writes.remove(copy)
            self._end_write(copy)
        self._removals.poll()
        for prefetch in [*self._prefetches]:
            self._advance(prefetch)

    def _check_pool(self) -> None:
        if self._pool_is_stale:
            self._pool_is_stale = False
            raise RuntimeError(
                "poll: the pool of the constructor is no longer in use, and blocks of tiers cannot "
                "be read into it: it was closed, or a step to which it was not donated returned a "
                "copy of it; donate the pool to every step that returns it, loads included"
            )

    def drain(self, timeout_s: float) -> bool:
        """Waits for the writes and the removals; False if some of them are not over by then.

        Raises:
          RuntimeError: as for `poll`, but after the wait.
        """
        expires_at = self._clock() + timeout_s
        parts = [p for copy in self._writes for parts in copy.futures.values() for p in parts]
        wait(parts, timeout_s)
        self._advance_all()  # removes what was discarded during its write
        self._removals.wait(expires_at)
        self.poll()
        return not self._writes and self._removals.is_over()

    def _advance(self, prefetch: OffloadPrefetch) -> None:
        answer = prefetch._answer
        if answer and answer.done():
            prefetch._answer = None
            if error := answer.exception():
                LOGGER.warning("OffloadEngine: contains of a tier failed, as a miss: %r", error)
            elif not prefetch.done:
                self._promote(prefetch, {*answer.result()} - prefetch._discarded)
        if not prefetch._answer and self._reading.isdisjoint(prefetch.keys):
            self._prefetches.remove(prefetch)
            prefetch.done = True
        elif self._clock() >= prefetch._expires_at:
            prefetch.done = True

    def _promote(self, prefetch: OffloadPrefetch, there: set[bytes]) -> None:
        """Reads what the longest prefix in host pages and the tier needs, as far as there is room.

        A block that is being written, and is not in a host page, has been discarded.
        """
        keys, state = prefetch.keys, self._manager.state
        there = there.difference(*(copy.spec.keys for copy in self._writes))
        absent = {key for key in keys if state(key) is None}
        both = {key for key in keys if key in there or key not in absent}
        wanted = self._fitting(keys, both, absent, prefetch._window)
        if not absent.isdisjoint(wanted) and not self._is_in_use():
            return
        spec = self._manager.prepare_store(wanted, tier=True)
        if not spec.keys:
            self._manager.abort(spec)
            return
        self._manager.start(spec)
        self._reads.append(_TierCopy(spec, self._submit(self._tier.read, spec)))
        self._reading.update(spec.keys)

    def _is_in_use(self) -> bool:
        """Whether loads find what is read into the pool; otherwise the next `poll` raises."""
        is_in_use = self._memory.is_in_use()
        self._pool_is_stale |= not is_in_use
        return is_in_use

    def _fitting(
        self, keys: tuple[bytes, ...], both: set[bytes], absent: set[bytes], window: int | None
    ) -> tuple[bytes, ...]:
        """The blocks that the longest prefix with room for them needs.

        Without a window, the head of a prefix is of use. A part of a window is not: a shorter
        prefix then needs another one.
        """
        limit = max(0, self._max_blocks - len(self._reading))
        if window is None:
            wanted = keys[: longest_prefix(both, keys, len(keys), None)]
            missing = [key for key in wanted if key in absent]
            return wanted[: wanted.index(missing[limit])] if len(missing) > limit else wanted
        table = self._manager._blocks
        room = table.room(())
        # Sums over the blocks before each place: of the window at its end in one pass.
        there = [*accumulate((key in both for key in keys), initial=0)]
        to_read = [*accumulate((key in absent for key in keys), initial=0)]
        idle = [*accumulate(map(table.is_idle, keys), initial=0)]
        for end in range(len(keys), 0, -1):
            start = max(0, end - window)
            reads = to_read[end] - to_read[start]
            fits = not reads or reads <= min(limit, room - (idle[end] - idle[start]))
            if fits and there[end] - there[start] == end - start:
                return keys[start:end]
        return ()

    def _submit(
        self, call: Callable[[bytes, memoryview], Future[bool]], spec: LoadSpec | StoreSpec
    ) -> dict[bytes, list[Future[bool]]]:
        memory = self._memory
        return {
            key: [
                _submitted(call, name, part)
                for name, part in zip(memory.keys(key), memory.parts(page), strict=True)
            ]
            for key, page in zip(spec.keys, spec.pages, strict=True)
        }

    def _end_write(self, copy: _TierCopy) -> None:
        self._num_writing -= len(copy.spec.keys)
        try:
            self._manager.complete(copy.spec, failed=copy.failed())
        except StaleSpecError:  # a block was discarded during its write
            spec = copy.spec
            pages = zip(spec.keys, spec.pages, spec.generations, strict=True)
            gone = [key for key, page, now in pages if self._manager.generation(page) != now]
            self._manager.abort(spec)
            self.discard(gone)

    def metrics(self) -> dict[str, float]:
        """Metrics of the tier, and numbers of blocks in flight, left out and not yet removed."""
        return {
            **self._tier.metrics(),
            "kv_offload_promoting_blocks": len(self._reading),
            "kv_offload_cascading_blocks": self._num_writing,
            "kv_offload_uncascaded_blocks": self._num_dropped,
            "kv_offload_unremoved_blocks": len(self._removals),
        }


def _submitted(
    call: Callable[[bytes, memoryview], Future[bool]], key: bytes, part: memoryview
) -> Future[bool]:
    """A miss if the tier has been closed, or fails: serving goes on, and no page stays pinned."""
    try:
        return call(key, part)
    except Exception as error:
        if not isinstance(error, ValueError):
            LOGGER.warning("OffloadEngine: a tier refused a copy, as a miss: %r", error)
        missed: Future[bool] = Future()
        missed.set_result(False)
        return missed


def checked_prefetch(keys: Sequence[bytes], window: int | None) -> tuple[bytes, ...]:
    """The arguments of a prefetch, with tiers or without."""
    checked_window("prefetch", window)
    return distinct_keys("prefetch", keys)
