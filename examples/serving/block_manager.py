"""Pages in HBM and prefix caching. No JAX arrays.

A full page is found by its block key, a hash of all tokens up to its end. States of a page in HBM:

    free      without valid contents
    loading   reserved for a load that has not been issued; not found by others
    in use    referenced by running requests and copies to issue, with a count in `_references`
    cached    unreferenced, but found by its key; evicted in LRU order

`jaxkv.OffloadEngine` does the same for the host pool, and queues the copies. A page is
published once the program that writes it is dispatched: later programs run after it on the device.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence

import jaxkv


@dataclasses.dataclass
class Placement:
    """The pages of an admitted request; those of `load` may be used once it is issued."""

    pages: list[int]
    found_in_hbm: int
    load: jaxkv.OffloadCopy | None = None

    @property
    def loaded(self) -> int:
        return len(self.load.keys) if self.load else 0


class BlockManager:
    """Allocates HBM pages, but 0, the null block; finds prefixes in HBM and in the host tier."""

    def __init__(self, num_hbm_pages: int, host: jaxkv.OffloadEngine):
        self._free = list(range(1, num_hbm_pages + 1))
        self._references = [0] * (num_hbm_pages + 1)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._loading: dict[bytes, jaxkv.OffloadCopy] = {}
        self._loads_in_flight: list[jaxkv.OffloadCopy] = []  # which may fail
        self._queued_stores: list[jaxkv.OffloadCopy] = []
        self._stores_first = False  # a request waits for pages that only queued stores hold
        self.host = host

    def admit(self, keys: Sequence[bytes], num_pages: int) -> Placement | None:
        """Allocates `num_pages` pages; the first ones hold the longest prefix of `keys` found.

        Returns None, without a change, if there is no room, or if a page of the prefix is about to
        be loaded for another request: try again in the next step.
        """
        prefix: list[int | None] = []  # page in HBM; None: in the host tier
        on_host_until = 0
        for place, key in enumerate(keys):
            if key in self._loading:
                return None
            page = self._page_of.get(key)
            if page is None and not on_host_until:
                on_host_until = place + self.host.lookup(keys[place:]).num_blocks
            if page is None and place >= on_host_until:
                break
            prefix.append(page)
        resident = {page for page in prefix if page is not None}
        evictable = len(self._cached.keys() - resident)
        if (missing := num_pages - len(resident) - len(self._free) - evictable) > 0:
            self._prefer_stores_for(missing, resident)
            return None
        self.host.touch(keys)
        for page in resident:
            self._take(page)
        # In order: consecutive pages are copied as rows of one copy.
        new = iter(sorted(self._new_page() for _ in range(num_pages - len(resident))))
        pages = [next(new) if page is None else page for page in prefix]
        absent = [place for place, page in enumerate(prefix) if page is None]
        load = None
        if absent:
            load = self._held(self.host.load([keys[p] for p in absent], [pages[p] for p in absent]))
            self._loading.update(dict.fromkeys(load.keys, load))
        return Placement([*pages, *new], len(resident), load)

    def grow(self, placement: Placement) -> bool:
        """Adds a page for the next tokens; False if all pages are in use."""
        if room := bool(self._free or self._cached):
            placement.pages.append(self._new_page())
        else:
            self._prefer_stores_for(1, set())
        return room

    def publish(self, pages: Sequence[int], keys: Sequence[bytes], first: int) -> int:
        """Lookups find the full pages from index `first` on; returns how many are to be stored."""
        self._name(pages[first:], keys[first:])
        copy = self._held(self.host.store(keys, pages[: len(keys)]))
        self._queued_stores.append(copy)
        return len(copy.keys)

    def next_batch(self) -> jaxkv.CopyBatch:
        """The copies of the next step; their pages are used behind its waits."""
        batch = self.host.next_batch(stores_first=self._stores_first)
        self._stores_first = False
        for copy in batch.copies:
            if copy.issued:
                self._let_go(copy)
                self._loads_in_flight += [copy] if copy.kind == "load" else []
        self._queued_stores = [copy for copy in self._queued_stores if not copy.issued]
        return batch

    def has_load_in_flight(self, pages: Sequence[int]) -> bool:
        """Whether these include pages of a load that may still fail."""
        return any(not set(pages).isdisjoint(copy.device_pages) for copy in self._loads_in_flight)

    def poll(self) -> set[int]:
        """Ends copies; returns the pages of failed loads, which are not found any more."""
        failed = [copy for copy in self.host.poll() if copy.failed and copy.kind == "load"]
        for copy in failed:
            if self._loading.get(copy.keys[0]) is copy:  # a block was discarded before its start
                self._let_go(copy)
            self.forget(copy.device_pages, copy.keys)
        self._loads_in_flight = [copy for copy in self._loads_in_flight if not copy.done]
        return {page for copy in failed for page in copy.device_pages}

    def _prefer_stores_for(self, num_pages: int, kept: set[int]) -> None:
        """Stores go first if they hold the pages that are missing, in addition to those kept."""
        held = {page for copy in self._queued_stores for page in copy.device_pages} - kept
        self._stores_first |= num_pages <= sum(self._references[page] == 1 for page in held)

    def forget(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Pages are not found any more by these keys."""
        for page, key in zip(pages, keys, strict=False):
            if self._page_of.get(key) == page:
                self._take(page)
                del self._page_of[key], self._key_of[page]
                self.release([page])  # free, if no one else uses it

    def release(self, pages: Sequence[int]) -> None:
        """Releases the pages of a request; its last pages are evicted first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0 and page in self._key_of:
                self._cached[page] = None
            elif self._references[page] == 0:
                self._free.append(page)

    def _name(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        for page, key in zip(pages, keys, strict=False):
            if key not in self._page_of:  # the second page of a key stays private
                self._page_of[key], self._key_of[page] = page, key

    def _held(self, copy: jaxkv.OffloadCopy) -> jaxkv.OffloadCopy:
        """Queued copies hold their pages, even if their request ends before they are issued."""
        for page in copy.device_pages:
            self._take(page)
        return copy

    def _let_go(self, copy: jaxkv.OffloadCopy) -> None:
        """No later batch has pages of this copy."""
        for key in copy.keys if copy.kind == "load" else ():
            del self._loading[key]
        if copy.kind == "load" and not copy.failed:
            self._name(copy.device_pages, copy.keys)
        self.release(copy.device_pages)

    def _take(self, page: int) -> None:
        self._cached.pop(page, None)
        self._references[page] += 1

    def _new_page(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
        self._take(page)
        return page
