"""The offload manager: which block is in which page of the host pool, and in which state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from jaxkv._src.offload.blocks import Block, BlockTable
from jaxkv._src.offload.errors import BlockNotReadyError, StaleSpecError
from jaxkv._src.offload.integers import checked_integer, checked_window
from jaxkv._src.offload.keys import checked_keys, distinct_keys
from jaxkv._src.offload.lookup import longest_prefix
from jaxkv._src.offload.policies import POLICIES
from jaxkv._src.offload.specs import (
    COUNTERS,
    BlockRemoved,
    BlockState,
    BlockStored,
    Event,
    LoadSpec,
    Lookup,
    StoreSpec,
)
from jaxkv._src.offload.writes import WRITE_POLICIES


class _Copy:
    """A spec that is neither complete nor aborted."""

    __slots__ = ("blocks", "counter", "spec", "started")

    def __init__(self, spec: LoadSpec | StoreSpec, blocks: list[Block], counter: str) -> None:
        self.spec = spec
        self.blocks = blocks
        self.counter = counter  # of completed blocks
        self.started = False


class OffloadManager:
    """Decides which blocks the pages of a host pool hold. Makes no copies and holds no bytes.

    Per request: `lookup`, `touch`, `prepare_load`; for computed blocks: `prepare_store`. A spec is
    prepared, started when its copy is issued, and completed when the copy is complete:

        prepare_store          start              complete
            reserved   ->     writing     ->       ready        and found by `lookup`

    `abort` ends a spec instead: before `start`, or once the copy has ended. The page stays in
    use until then, so no copy in flight reads or writes a page of another block.

    Decisions depend only on the calls and their order, not on time, hashes or addresses: ranks
    that make the same calls make the same decisions. Methods are not thread-safe, except `metrics`.

        manager = jaxkv.offload.OffloadManager(pool.num_pages)
        found = manager.lookup(keys)
        manager.touch(keys)                                   # once for each request
        load = manager.prepare_load(keys[:found.num_blocks])  # load.pages: ids in the pool
        manager.start(load)                                   # with jaxkv.start_load
        manager.complete(load)                                # once the copy is complete

    The interface follows vLLM's `OffloadingManager`.

    Args:
      num_pages: pages of the host pool; 0: nothing is stored.
      policy: "lru", or "arc" (adaptive replacement cache).
      write: "through": blocks are stored when computed; "second_use": when computed, if an earlier
        request has used them too; "back": when the device cache evicts them.
      events: whether to collect events for `take_events`; they accumulate until it is called.

    Raises:
      ValueError: `num_pages` is negative or not an integer, or a policy is unknown.
    """

    def __init__(
        self, num_pages: int, *, policy: str = "lru", write: str = "through", events: bool = False
    ) -> None:
        expected = "an integer, at least 0 pages"
        num_pages = checked_integer("OffloadManager: num_pages", num_pages, expected, 0)
        self.num_pages = num_pages
        self._policy = _chosen("policy", policy, POLICIES)(num_pages)
        self._write = _chosen("write", write, WRITE_POLICIES)(num_pages)
        self._needs_second_use = write == "second_use"
        self._blocks = BlockTable(num_pages)
        self._copies: dict[int, _Copy] = {}
        self._next_job_id = 0
        self._events: list[Event] | None = [] if events else None
        self._counts = dict.fromkeys(COUNTERS, 0)

    def lookup(self, keys: Sequence[bytes], window: int | None = None) -> Lookup:
        """Length of the longest prefix that can be loaded. Changes nothing but metrics.

        Args:
          keys: keys of a request's blocks, from its head: from `BlockGroup.keys`, not the hashes of
            a `BlockHasher`. For speed, only the first item of a list or tuple is checked: a later
            one of another type, or a key of another length, is a miss.
          window: for sliding windows: a prefix of n blocks needs only the last `window` of them;
            None: it needs all.

        Returns:
          The number of blocks, and how many more once the stores in flight are complete.

        Raises:
          TypeError: `keys` is not a sequence, or its first item is not a bytes object.
          ValueError: `window` is not a positive integer.
        """
        if window is not None and (type(window) is not int or window < 1):
            window = checked_window("OffloadManager.lookup", window)
        if type(keys) not in (list, tuple) or (keys and type(keys[0]) is not bytes):
            keys = checked_keys("lookup", keys)
        blocks = self._blocks
        n = now = longest_prefix(blocks.ready, keys, len(keys), window)
        if blocks.pending and now < len(keys):
            n = longest_prefix(blocks, keys, len(keys), window)
        self._count_lookup(len(keys), now)
        return Lookup(now, n - now)

    def state(self, key: bytes) -> BlockState | None:
        """State of a block; None if it is not in the host tier."""
        block = self._blocks.get(key)
        return None if block is None else block.state

    def generation(self, page: int) -> int:
        """Number of times that the contents of a page became invalid.

        A reader without a pin, such as a network server, compares it before and after its read.

        Raises:
          ValueError: the pool has no such page.
        """
        if not 0 <= page < self.num_pages:
            raise ValueError(f"generation: page={page}; the pool has num_pages={self.num_pages}")
        return self._blocks.generations[page]

    def touch(self, keys: Sequence[bytes]) -> None:
        """Records that a request uses these blocks: once for each request, before its copies.

        Pass all blocks of the request from its head, in the host tier or not: eviction takes the
        tail of a request before its head, and `write="second_use"` counts uses here.

        Raises:
          TypeError: `keys` is not a sequence of bytes objects.
          ValueError: a key occurs twice.
        """
        recent_last = distinct_keys("touch", keys)[::-1]
        self._write.touch(recent_last)
        self._policy.touch(recent_last)

    def prepare_load(self, keys: Sequence[bytes], *, tier: bool = False) -> LoadSpec:
        """Pins ready blocks and returns their pages; they cannot be evicted until the spec ends.

        Args:
          keys: blocks found by `lookup`, without those that the device cache has.
          tier: whether they are copied to a tier below, instead of the device cache.

        Raises:
          TypeError: `keys` is not a sequence of bytes objects.
          BlockNotReadyError: a block is not stored, or its store is not complete.
        """
        keys = checked_keys("prepare_load", keys)
        found = [self._blocks.ready.get(key) for key in keys]
        blocks = [block for block in found if block is not None]
        if len(blocks) != len(keys):
            missing = found.index(None)
            state = self.state(keys[missing])
            raise BlockNotReadyError(
                f"prepare_load: keys[{missing}]={keys[missing].hex()} is "
                f"{state.value if state else 'not in the host tier'}; load the blocks that lookup "
                "has found, in the same step"
            )
        self._blocks.pin(blocks)
        spec = LoadSpec(self._new_job_id(), keys, *self._pages_of(blocks))
        counter = "kv_offload_cascaded_blocks" if tier else "kv_offload_loaded_blocks"
        self._copies[spec.job_id] = _Copy(spec, blocks, counter)
        return spec

    def prepare_store(
        self, keys: Sequence[bytes], *, evicted: bool = False, tier: bool = False
    ) -> StoreSpec:
        """Reserves pages for the blocks to store, and evicts others if necessary.

        If there is no room for all, since the other pages are in use, the first blocks are stored;
        none is not an error. A call that raises has changed nothing.

        Args:
          keys: computed blocks of one request from its head. Those in the host tier are skipped;
            they are not evicted in favour of the others, and remain more recent than its tail.
          evicted: whether the device cache evicts these blocks, for `write="back"`; otherwise they
            have just been computed.
          tier: whether they are copied from a tier below, instead of the device cache. All of them
            are wanted then, by any write policy.

        Raises:
          TypeError: `keys` is not a sequence of bytes objects.
          ValueError: a key occurs twice.
        """
        keys = distinct_keys("prepare_store", keys)
        protected = set(keys)
        table = self._blocks
        missing = [i for i, key in enumerate(keys) if key not in table]
        wanted = missing
        if not tier:
            wanted = [i for i in missing if self._write.wants(keys[i], evicted=evicted)]
        indices = tuple(wanted[: table.room(protected)])
        stored = tuple(keys[i] for i in indices)

        def evictable(key: bytes) -> bool:
            block = table.ready.get(key)
            return block is not None and not block.pins and key not in protected

        plan = self._policy.plan(stored, table.num_free, evictable)
        # From here on nothing can fail.
        self._policy.apply(plan)
        self._policy.refresh(reversed(keys))  # the head is the most recent
        table.evict(plan.victims)
        self._emit(BlockRemoved, plan.victims)
        blocks = table.reserve(stored)
        refused = len(wanted) - len(indices)
        self._counts["kv_offload_evicted_blocks"] += len(plan.victims)
        self._counts["kv_offload_refused_blocks"] += refused
        if self._needs_second_use and not evicted:
            self._counts["kv_offload_stores_skipped"] += len(missing) - len(wanted)
        pages, generations = self._pages_of(blocks)
        spec = StoreSpec(
            self._new_job_id(), stored, pages, generations, indices, tuple(plan.victims), refused
        )
        counter = "kv_offload_promoted_blocks" if tier else "kv_offload_stored_blocks"
        self._copies[spec.job_id] = _Copy(spec, blocks, counter)
        return spec

    def start(self, spec: LoadSpec | StoreSpec) -> None:
        """Records that the copy of a spec has been issued.

        Raises:
          StaleSpecError: the spec has ended or started, or is not of this manager; or a block
            to load has been discarded: abort the spec.
        """
        copy = self._copy_of(spec, "start")
        if copy.started:
            raise StaleSpecError(f"start: spec {spec.job_id} has been started already")
        self._check_pages(copy, "start")
        copy.started = True
        if isinstance(spec, StoreSpec):
            for block in copy.blocks:
                block.state = BlockState.WRITING

    def complete(self, spec: LoadSpec | StoreSpec, *, failed: Iterable[bytes] = ()) -> None:
        """Ends a spec whose copy is complete: stored blocks become ready, loaded ones unpinned.

        Blocks discarded during their store do not become ready.

        Args:
          spec: the spec.
          failed: its blocks that were not copied: those of a store are forgotten as by `abort`.

        Raises:
          TypeError: `failed` is not an iterable of bytes objects.
          ValueError: a block of `failed` is not one of the spec.
          StaleSpecError: the spec has ended, has not been started, or is not of this manager; or a
            loaded block has been discarded: abort the spec, do not use the loaded blocks.
        """
        copy = self._copy_of(spec, "complete")
        failed = checked_keys("complete", failed, "failed", ordered=False)
        not_copied = frozenset(failed)
        if not not_copied.issubset(spec.keys):
            wrong = next(key for key in failed if key not in spec.keys)
            raise ValueError(f"complete: {wrong.hex()} of failed is not in spec {spec.job_id}")
        if not copy.started:
            raise StaleSpecError(f"complete: spec {spec.job_id} has not been started; call start")
        self._check_pages(copy, "complete")
        del self._copies[spec.job_id]
        if isinstance(spec, LoadSpec):
            self._blocks.unpin(copy.blocks)
            self._counts[copy.counter] += len(copy.blocks) - len(not_copied)
            self._counts["kv_offload_aborted_blocks"] += len(not_copied)
            return
        self._forget([block for block in copy.blocks if block.key in not_copied])
        stored = self._blocks.publish(b for b in copy.blocks if b.key not in not_copied)
        self._emit(BlockStored, stored)
        self._counts[copy.counter] += len(stored)

    def abort(self, spec: LoadSpec | StoreSpec) -> None:
        """Ends a spec without its copy: blocks to store are forgotten, blocks to load unpinned.

        The pages can be reused immediately: call it only if the copy was not issued or has ended,
        successfully or not; wait for a copy in flight first.

        Raises:
          StaleSpecError: the spec has ended, or is not of this manager.
        """
        copy = self._copy_of(spec, "abort")
        del self._copies[spec.job_id]
        if isinstance(spec, StoreSpec):
            self._forget(copy.blocks)
            return
        self._blocks.unpin(copy.blocks)
        self._counts["kv_offload_aborted_blocks"] += len(copy.blocks)

    def _forget(self, blocks: list[Block]) -> None:
        self._counts["kv_offload_aborted_blocks"] += len(blocks)
        for key in self._blocks.forget(blocks):
            self._policy.remove(key)

    def discard(self, keys: Iterable[bytes] | None = None) -> None:
        """Removes blocks, such as those whose load failed a checksum; all of them by default.

        Discarded blocks are no longer found. The pages of those in flight are reused once their
        specs have ended; loads of them cannot be completed, only aborted. Ignores unknown keys.

        Args:
          keys: the blocks; None: all, for example after an update of the weights.

        Raises:
          TypeError: `keys` is not an iterable of bytes objects.
        """
        table = self._blocks
        keys = (*table.ready, *table.pending) if keys is None else keys
        keys = checked_keys("discard", keys, ordered=False)
        found = [(key, table.discard(key)) for key in keys]
        removed = {key: block.state for key, block in found if block is not None}
        for key in removed:
            self._policy.remove(key)
        ready = [key for key, state in removed.items() if state is BlockState.READY]
        self._emit(BlockRemoved, ready)
        self._counts["kv_offload_discarded_blocks"] += len(removed)

    def take_events(self) -> list[Event]:
        """Events since the last call, in order; requires `events=True`.

        Raises:
          ValueError: the manager was created without events.
        """
        if self._events is None:
            raise ValueError("take_events: create the manager with events=True")
        taken, self._events = self._events, []
        return taken

    def metrics(self) -> dict[str, float]:
        """Counters since creation, and gauges.

        Counters of blocks: looked up (`kv_offload_block_queries`) and found
        (`kv_offload_block_hits`; with a window, all blocks of the prefix) in every call of
        `lookup`; `kv_offload_*_blocks` loaded, stored, promoted from a tier below, cascaded to one,
        evicted, aborted, discarded, and refused for lack of room; `kv_offload_stores_skipped`:
        computed blocks not stored before their second use, as vLLM's. Gauges:
        `kv_offload_cpu_cache_usage_perc`: share of the pages that copies in flight use, 0 to 1, as
        vLLM's; used (by any block), ready, pending, pinned and total blocks, copies in flight.
        """
        copies = {"kv_offload_num_copies": len(self._copies)}
        return {**self._counts, **self._blocks.gauges(), **copies}

    def _count_lookup(self, num_blocks: int, num_found: int) -> None:
        self._counts["kv_offload_block_queries"] += num_blocks
        self._counts["kv_offload_block_hits"] += num_found

    def _new_job_id(self) -> int:
        self._next_job_id += 1
        return self._next_job_id

    def _pages_of(self, blocks: Sequence[Block]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Page of each block, and its generation."""
        pages = tuple(block.page for block in blocks)
        return pages, tuple(map(self._blocks.generations.__getitem__, pages))

    def _copy_of(self, spec: LoadSpec | StoreSpec, operation: str) -> _Copy:
        """The copy of a spec, which is compared by value: it may return from another process."""
        copy = self._copies.get(spec.job_id)
        if copy is None or (copy.spec is not spec and copy.spec != spec):
            raise StaleSpecError(
                f"{operation}: spec {spec.job_id} is not in flight; it has been completed or "
                "aborted, or belongs to another manager"
            )
        return copy

    def _check_pages(self, copy: _Copy, operation: str) -> None:
        """A load must read the generation that it was prepared for."""
        spec = copy.spec
        if isinstance(spec, StoreSpec):
            return
        for page, generation in zip(spec.pages, spec.generations, strict=True):
            now = self._blocks.generations[page]
            if now != generation:
                raise StaleSpecError(
                    f"{operation}: spec {spec.job_id} loads generation {generation} of page "
                    f"{page}, which is at {now}: its block has been discarded; abort the spec"
                )

    def _emit(self, event: Callable[[tuple[bytes, ...]], Event], keys: Sequence[bytes]) -> None:
        if self._events is not None and keys:
            self._events.append(event(tuple(keys)))


def _chosen(argument: str, name: str, choices: dict[str, Callable]) -> Callable:
    if name not in choices:
        raise ValueError(f"OffloadManager: {argument}={name!r} is not one of {[*choices]}")
    return choices[name]
