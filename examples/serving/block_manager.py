"""Page allocation and prefix caching, in HBM and in the host pool. Host integers only, no JAX.

A full page is identified by a hash of all tokens up to its end (its name), so pages of equal name
have equal keys and values. A page in HBM is in one of three states:

    free    without valid contents
    in use  referenced by one or more running turns, with a count in `_references`
    cached  unreferenced, but found by name; evicted in LRU order

An evicted page is stored to the host pool, unless it is there already, and reloaded on a later
request of its name. The host pool is a second, larger cache with its own LRU order.
"""

import dataclasses
import hashlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

Name = bytes


def page_names(tokens: Sequence[int], page_size: int) -> list[Name]:
    """Names of all full pages of a sequence."""
    content, names = hashlib.sha256(), []
    for end in range(page_size, len(tokens) + 1, page_size):
        content.update(np.asarray(tokens[end - page_size : end], np.int32).tobytes())
        names.append(content.digest())
    return names


@dataclasses.dataclass
class Placement:
    """The pages of a turn, and the copies required before their use: stores, then loads."""

    pages: list[int] = dataclasses.field(default_factory=list)
    found_in_hbm: int = 0
    stores: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (host, HBM) page
    loads: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (host, HBM) page


class BlockManager:
    """Allocates HBM pages and decides which pages to store, load and evict."""

    def __init__(self, num_hbm_pages: int, num_host_pages: int):
        self._free = list(range(num_hbm_pages))
        self._references = [0] * num_hbm_pages
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[Name, int] = {}
        self._name_of: dict[int, Name] = {}
        self._host_free = list(range(num_host_pages))
        self._host_page_of: OrderedDict[Name, int] = OrderedDict()

    def place(self, names: Sequence[Name], num_pages: int) -> Placement:
        """Allocates `num_pages` pages; the first ones hold the longest cached prefix of `names`.

        The caller must issue the copies of the result before any use of these pages.

        Raises:
          MemoryError: not enough pages that are not in use; the state is unchanged.
        """
        prefix = self._known_prefix(names)
        resident = [self._page_of[name] for name in prefix if name in self._page_of]
        room = len(self._free) + len(self._cached.keys() - set(resident))
        if num_pages - len(resident) > room:
            raise MemoryError(f"requested {num_pages - len(resident)} HBM pages, {room} available")
        placement = Placement(found_in_hbm=len(resident))
        for page in resident:
            self._take(page)
        busy = set()  # host pages of this placement, not to be reused
        for name in reversed(prefix):
            if name in self._host_page_of:
                self._host_page_of.move_to_end(name)
                busy.add(self._host_page_of[name])
        for name in prefix:
            if name not in self._page_of:
                page = self._new_page(placement, busy)
                placement.loads.append((self._host_page_of[name], page))
                self.publish([page], [name])
            placement.pages.append(self._page_of[name])
        while len(placement.pages) < num_pages:
            placement.pages.append(self._new_page(placement, busy))
        return placement

    def publish(self, pages: Sequence[int], names: Sequence[Name]) -> None:
        """Makes full pages available by name; the second page of a name stays private."""
        for page, name in zip(pages, names, strict=False):
            if name not in self._page_of:
                self._page_of[name], self._name_of[page] = page, name

    def release(self, pages: Sequence[int]) -> None:
        """Releases the pages of a turn; its last pages are evicted first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0 and page in self._name_of:
                self._cached[page] = None
            elif self._references[page] == 0:
                self._free.append(page)

    def _known_prefix(self, names: Sequence[Name]) -> list[Name]:
        known = self._page_of.keys() | self._host_page_of.keys()
        return list(itertools.takewhile(known.__contains__, names))

    def _take(self, page: int) -> None:
        self._cached.pop(page, None)
        self._references[page] += 1

    def _new_page(self, placement: Placement, busy: set[int]) -> int:
        page = self._free.pop() if self._free else self._evict(placement, busy)
        self._take(page)
        return page

    def _evict(self, placement: Placement, busy: set[int]) -> int:
        """Evicts the LRU page; stores it if the host pool has room and no copy of it."""
        page, _ = self._cached.popitem(last=False)
        name = self._name_of.pop(page)
        del self._page_of[name]
        if name in self._host_page_of:
            self._host_page_of.move_to_end(name)
        elif (host_page := self._host_room(busy)) is not None:
            self._host_page_of[name] = host_page
            placement.stores.append((host_page, page))
            busy.add(host_page)
        return page

    def _host_room(self, busy: set[int]) -> int | None:
        if self._host_free:
            return self._host_free.pop()
        for name, page in self._host_page_of.items():
            if page not in busy:
                del self._host_page_of[name]
                return page
        return None
