"""The offload engine: queues the copies of a host tier for the steps of a serving engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import jax

from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.offload.copies import CopyBatch, OffloadCopy, checked_sizes, padded_batch, paddings
from jaxkv._src.offload.device_pages import QueuedPages
from jaxkv._src.offload.errors import StaleSpecError
from jaxkv._src.offload.keys import checked_keys
from jaxkv._src.offload.manager import OffloadManager
from jaxkv._src.offload.page_memory import PoolMemory, num_pages_of
from jaxkv._src.offload.specs import Event, Lookup
from jaxkv._src.offload.step_result import StepsInFlight, step_result
from jaxkv._src.offload.store_check import store_check
from jaxkv._src.offload.tier_copies import OffloadPrefetch, TierCopies, checked_prefetch
from jaxkv._src.offload.tiers.store import one_tier
from jaxkv._src.offload.tiers.tier import Tier
from jaxkv._src.runtime.timeouts import checked_timeout_s


class OffloadEngine:
    """An `OffloadManager` with the queues of its copies, for steps with static shapes.

    Each step of a serving engine copies one batch of pages, of a static size, while it computes:
    loads before stores, each in the order in which they were queued. Several batches may be in
    flight. Only `drain` blocks. The pool, the cache and the program that copies are the caller's.

        host_tier = jaxkv.OffloadEngine(pool, batch_sizes=(16, 64), tiers=[files])
        prefetch = host_tier.prefetch(keys)                   # with tiers: when a request arrives
        ...                                                   # steps, until prefetch.done
        host_tier.touch(keys)                                 # once for each request
        found = host_tier.lookup(keys)
        load = host_tier.load(keys[:found.num_blocks], device_pages)

        batch = host_tier.next_batch()                        # for each step
        tokens, *state = step(batch, *state)                  # a jax.jit, with batch.start in it
        host_tier.issue(batch, tokens)
        ended = host_tier.poll()                              # copies that have ended

    Steps must run on the device in the order of their batches, as the programs of one JAX client
    do: then pages may be used after the waits for their batch, before its step has ended.

    Blocks whose store is complete are written to the tiers, and read back into host pages by
    `prefetch`, in threads of the tiers. A tier that fails or is slow costs hits, never a step.
    Donate the pool to every step that returns it, and keep no other reference to it: `poll` raises
    if steps store into a copy, or if there is no array left in the memory that tiers use.

    Not thread-safe, except `metrics`. Follows vLLM's offloading connector, which builds its
    transfers in the scheduler in the same way; tiers are those of its tiering manager.

    Args:
      pool: the host pool, whose memory tiers keep allocated; or, if there are no tiers, its number
        of pages: stores are then not checked. With 0, nothing is stored.
      batch_sizes: numbers of pages of a step, each a static shape. The largest limits a step.
      num_device_pages: pages of the device cache; larger ids are errors. None: ids are not checked.
      policy, write, events: see `OffloadManager`.
      tiers: in the order in which they are read; see `TieredStore`. Their `block_bytes` is
        `OffloadEngine.tier_block_bytes(pool)`. They remain the caller's, to be closed.
      tier_timeout_s: seconds, at least 0, after which a `prefetch` is done with what has arrived.

    Attributes:
      manager: the manager, for `state` and `generation`.

    Raises:
      TypeError: `tiers` is not a sequence of tiers.
      ValueError: `pool` is neither a pool nor a number of pages, or has page shards; a number is
        out of range, or there is no batch size; tiers without a pool, of other `block_bytes`, or
        with shards in other processes; as for `OffloadManager`.
    """

    def __init__(
        self,
        pool: HostPool | int,
        *,
        batch_sizes: Sequence[int] = (64,),
        num_device_pages: int | None = None,
        policy: str = "lru",
        write: str = "through",
        events: bool = False,
        tiers: Sequence[Tier] = (),
        tier_timeout_s: float = 2.0,
    ) -> None:
        self.manager = OffloadManager(num_pages_of(pool), policy=policy, write=write, events=events)
        self._sizes = checked_sizes(batch_sizes)
        self._loads: deque[OffloadCopy] = deque()
        self._stores: deque[OffloadCopy] = deque()
        self._queued_pages = QueuedPages(num_device_pages)
        self._taken: CopyBatch | None = None
        self._stored_last = False  # by the previous batch
        self._ended: list[OffloadCopy] = []  # to be returned by `poll`
        self._check = store_check(pool)
        self._in_flight = StepsInFlight(pool, self._check)
        self._tiers: TierCopies | None = None
        if tiers:
            memory, tier = PoolMemory(pool), one_tier("OffloadEngine", tiers)
            self._tiers = TierCopies(self.manager, tier, memory, tier_timeout_s)

    @staticmethod
    def tier_block_bytes(pool: HostPool) -> int:
        """`block_bytes` of the tiers of a pool: bytes of a contiguous part of a page.

        A page has several parts, such as K and V of each shard; fewest in layouts that begin with
        the page. ValueError for page shards, or shards in other processes.
        """
        return PoolMemory(pool).block_bytes

    def lookup(self, keys: Sequence[bytes], window: int | None = None) -> Lookup:
        """The longest prefix that can be loaded: see `OffloadManager.lookup`."""
        return self.manager.lookup(keys, window)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Records that a request uses these blocks: see `OffloadManager.touch`."""
        self.manager.touch(keys)

    def prefetch(self, keys: Sequence[bytes], window: int | None = None) -> OffloadPrefetch:
        """Begins to read from the tiers what `lookup(keys, window)` lacks; `poll` continues.

        Args:
          keys: all blocks of a request, from its head.
          window: as for `lookup`.

        Returns:
          An `OffloadPrefetch`. Once `done`, call `lookup`: what was not read in time is missing.

        Raises:
          TypeError, ValueError: as for `OffloadManager.touch`; a key is too long for the tiers;
            `window` is not a positive integer.
        """
        keys = checked_prefetch(keys, window)
        if self._tiers is None:
            return OffloadPrefetch(keys, done=True)
        return self._tiers.prefetch(keys, window)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Removes blocks whose bytes are not trusted from the host pool and from the tiers.

        Tiers remove them in a thread, also blocks in flight. Errors: as `OffloadManager.discard`.
        """
        keys = checked_keys("discard", keys, ordered=False)
        self.manager.discard(keys)
        if self._tiers:
            self._tiers.discard(keys)

    def load(self, keys: Sequence[bytes], device_pages: Sequence[int]) -> OffloadCopy:
        """Queues a load of ready blocks as an `OffloadCopy`; pins their host pages from now on.

        Args:
          keys: blocks found by `lookup` in the same step.
          device_pages: for each block the page id in the device cache, of a page not in use.

        Raises:
          BlockNotReadyError: a block is not stored, or its store is not complete.
          TypeError: `keys` is not a sequence of bytes objects, or a page is not an integer.
          ValueError: the numbers of keys and pages differ, or a page is out of the range of the
            device cache or of int32, or that of another block to copy.
        """
        keys = checked_keys("OffloadEngine.load", keys)
        pages = self._queued_pages.check("load", keys, device_pages, range(len(keys)))
        spec = self.manager.prepare_load(keys)
        return self._queue(self._loads, OffloadCopy("load", spec.keys, spec.pages, pages, spec))

    def store(
        self, keys: Sequence[bytes], device_pages: Sequence[int], *, evicted: bool = False
    ) -> OffloadCopy:
        """Queues a store of those blocks that are to be stored.

        Args:
          keys: computed blocks of one request from its head, as for
            `OffloadManager.prepare_store`.
          device_pages: the page of each in the device cache. Those of the copy, its `device_pages`,
            must not be reused before it is issued.
          evicted: whether the device cache evicts these blocks, for `write="back"`.

        Returns:
          The copy of the blocks that the host tier lacks, has room for, and accepts by its write
          policy; without blocks, it is done.

        Raises:
          TypeError, ValueError: as for `load`, of blocks that the host tier lacks; or a key occurs
            twice, or is too long for the tiers.
        """
        keys = checked_keys("OffloadEngine.store", keys)
        if self._tiers:
            self._tiers.check_keys("store", keys)
        absent = (i for i, key in enumerate(keys) if self.manager.state(key) is None)
        pages = self._queued_pages.check("store", keys, device_pages, absent)
        spec = self.manager.prepare_store(keys, evicted=evicted)
        pages = tuple(pages[index] for index in spec.indices)
        return self._queue(self._stores, OffloadCopy("store", spec.keys, spec.pages, pages, spec))

    def _queue(self, queue: deque[OffloadCopy], copy: OffloadCopy) -> OffloadCopy:
        if copy.keys:
            queue.append(copy)
            self._queued_pages.add(copy)
        else:
            self.manager.abort(copy._spec)
            copy.issued = copy.done = True
        return copy

    def next_batch(self, *, stores_first: bool = False) -> CopyBatch:
        """The pages to copy during the next step: loads if any are queued, otherwise stores.

        Its size is the smallest of the batch sizes that holds them; its kind is "none" if there are
        none. A load that fits into one batch is not split over two.

        Args:
          stores_first: stores before loads, alternating with them. For a full device cache: pages
            of stores can be reused once they are issued.

        Raises:
          RuntimeError: the previous batch has been neither issued nor abandoned.
        """
        if self._taken is not None:
            raise RuntimeError(
                "next_batch: the previous batch has not been issued; call issue, or abandon if its "
                "step was not dispatched"
            )
        order = self._loads, self._stores
        pages: list[tuple[int, int]] = []
        copies: list[OffloadCopy] = []
        for queue in order[::-1] if stores_first and not self._stored_last else order:
            if not copies:  # the loads may all have been discarded
                copies, pages = self._take(queue)
        kind = copies[0].kind if copies else "none"
        self._stored_last = kind == "store"
        batch = padded_batch(kind, pages, self._sizes, copies)
        if self._check:
            self._check.mark(batch)
        self._taken = batch if copies else None
        return batch

    def _take(self, queue: deque[OffloadCopy]) -> tuple[list[OffloadCopy], list[tuple[int, int]]]:
        """Copies for one batch, and their pages in the host pool and in the device cache."""
        limit, copies, pages = self._sizes[-1], list[OffloadCopy](), list[tuple[int, int]]()
        while queue and len(pages) < limit:
            copy = queue[0]
            room = limit - len(pages)
            if copies and copy.kind == "load" and room < len(copy.keys) <= limit:
                break  # a part of it would only delay the requests before it
            if not copy._num_taken and not self._start(copy):
                self._queued_pages.remove(queue.popleft())
                continue
            first, last = copy._num_taken, copy._num_taken + room
            pages += zip(copy.host_pages[first:last], copy.device_pages[first:last], strict=True)
            copy._num_taken = min(last, len(copy.keys))
            copy._num_in_flight += 1  # from now on: a `poll` may come before `issue`
            copies.append(copy)
            if copy._num_taken == len(copy.keys):
                copy.issued = True
                self._queued_pages.remove(queue.popleft())
        return copies, pages

    def padding_batches(self) -> list[CopyBatch]:
        """A batch without pages of each kind and size, to compile the programs beforehand."""
        return paddings(self._sizes, has_host_tier=self.manager.num_pages > 0)

    def _start(self, copy: OffloadCopy) -> bool:
        """False, and the copy has ended, if a block to load has been discarded."""
        try:
            self.manager.start(copy._spec)
        except StaleSpecError:
            self.manager.abort(copy._spec)
            copy.issued = copy.done = copy.failed = True
            self._ended.append(copy)
        return not copy.done

    def issue(self, batch: CopyBatch, result: jax.Array) -> None:
        """Records that the step with a batch has been dispatched.

        Args:
          batch: the result of `next_batch`, or of its `by`; one without pages is ignored.
          result: a `jax.Array` that the step returns, ready once its copies are complete. Do not
            donate or delete it before `poll` has returned them.

        Raises:
          TypeError: `result` is not a `jax.Array`.
          ValueError: `batch` is not that of the last call of `next_batch`.
        """
        over = step_result("issue", result) if batch.copies else None
        if (taken := self._give_back(batch, "issue")) and over is not None:
            self._in_flight.append(taken, over)

    def abandon(self, batch: CopyBatch) -> None:
        """Records that the step with a batch was not dispatched, e.g. after an exception.

        Its copies fail: blocks to be stored are not found, and pages to be loaded must not be used.
        `poll` returns them once all their pages have been in a batch.

        Args:
          batch: as for `issue`, which must not be called for it.

        Raises:
          ValueError: as for `issue`.
        """
        if taken := self._give_back(batch, "abandon"):
            self._end_step(taken, failed=True)

    def _give_back(self, batch: CopyBatch, operation: str) -> CopyBatch | None:
        """The batch of `next_batch` that `batch` is, or is made of; None if without pages."""
        taken = self._taken
        if batch.copies if taken is None else batch.copies is not taken.copies:
            raise ValueError(
                f"{operation}: pass the last batch of next_batch, or its by; not twice, and not "
                "an object rebuilt by JAX, such as by device_put"
            )
        self._taken = None
        return taken

    def poll(self) -> list[OffloadCopy]:
        """Completes the copies of steps that have ended, and those of tiers; never blocks.

        Returns:
          The copies that are done since the last call, failed ones included.

        Raises:
          RuntimeError: the result of a step was donated or deleted before its copies ended; or a
            step stored into a copy of the pool, or returned one: its blocks are then not found.
        """
        self._end_steps()
        if self._tiers:
            self._tiers.poll()
        ended, self._ended = self._ended, []
        return ended

    def _end_steps(self) -> None:
        for batch, failed, error in self._in_flight.pop_ended():
            self._end_step(batch, failed=failed)
            if error:
                raise error

    def _end_step(self, batch: CopyBatch, *, failed: bool) -> None:
        for copy in batch.copies:
            copy._num_in_flight -= 1
            copy.failed |= failed
            if copy.issued and not copy._num_in_flight:
                self._end(copy)
                self._ended.append(copy)

    def _end(self, copy: OffloadCopy) -> None:
        copy.done = True
        if not copy.failed:
            try:
                self.manager.complete(copy._spec)
            except StaleSpecError:  # a loaded block has been discarded meanwhile
                copy.failed = True
        if copy.failed:
            self.manager.abort(copy._spec)
        elif self._tiers and copy.kind == "store":
            self._tiers.cascade(copy.keys)

    def drain(self, timeout_s: float = 30.0) -> bool:
        """Waits until the tiers have the stored blocks and have removed the discarded ones.

        Blocks; call it before a process ends, after the steps with its stores: queued ones are not
        covered. The next `poll` returns the ended copies.

        Args:
          timeout_s: limit of the wait, in seconds up to 1e9.

        Returns:
          Whether all writes and removals have ended in time.

        Raises:
          ValueError: `timeout_s` is not positive, or more than 1e9.
          RuntimeError: a step with copies is in flight; or, after the wait, as for `poll`.
        """
        timeout_s = checked_timeout_s(timeout_s)
        self._end_steps()
        if self._taken or self._in_flight:
            raise RuntimeError(
                "drain: a step with copies is in flight; call block_until_ready on its result first"
            )
        return self._tiers is None or self._tiers.drain(timeout_s)

    def take_events(self) -> list[Event]:
        """Blocks stored and removed since the last call: see `OffloadManager.take_events`."""
        return self.manager.take_events()

    def metrics(self) -> dict[str, float]:
        """Metrics of the manager and of the tiers, and of the copies between host memory and HBM.

        As vLLM's: `kv_offload_load_bytes`, of all shards, if the engine has the pool, and
        `kv_offload_load_time`, seconds from `issue` to the `poll` that finds the end, an upper
        bound. The same of stores. Failed copies are not counted.
        """
        blocks = self.manager.metrics()
        queues = [*self._loads], [*self._stores]
        loads, stores = (sum(len(c.keys) - c._num_taken for c in queue) for queue in queues)
        return {
            **blocks,
            **(self._tiers.metrics() if self._tiers else {}),
            **self._in_flight.metrics(blocks),
            "kv_offload_queued_load_blocks": loads,
            "kv_offload_queued_store_blocks": stores,
        }
