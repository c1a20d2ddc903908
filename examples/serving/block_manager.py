"""Which page holds which tokens, in HBM and in the host pool. Host integers only: no JAX here.

A full page is named by a hash of all tokens up to its end, so pages of one name hold the same keys
and values. In HBM a page is in exactly one of three states:

    free    holds nothing worth keeping
    in use  by one or more running turns, as counted in `_references`
    cached  used by nobody, but known by name; the least recently used one makes room for others

A cached page that makes room is stored to the host pool, unless it is there already, and loaded
from there when its name is asked for again. The host pool is a second, larger cache with a recency
of its own.
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
    """The pages of a turn, and the copies that come before their use: stores, then loads."""

    pages: list[int] = dataclasses.field(default_factory=list)
    found_in_hbm: int = 0
    stores: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (host, HBM) page
    loads: list[tuple[int, int]] = dataclasses.field(default_factory=list)  # (host, HBM) page


class BlockManager:
    """Gives out HBM pages and decides what is stored, loaded and forgotten."""

    def __init__(self, num_hbm_pages: int, num_host_pages: int):
        self._free = list(range(num_hbm_pages))
        self._references = [0] * num_hbm_pages
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of: dict[Name, int] = {}
        self._name_of: dict[int, Name] = {}
        self._host_free = list(range(num_host_pages))
        self._host_page_of: OrderedDict[Name, int] = OrderedDict()

    def place(self, names: Sequence[Name], num_pages: int) -> Placement:
        """Gives a turn `num_pages` pages; the first hold the longest known prefix of `names`.

        The caller issues the copies of the result before anything reads or writes these pages.

        Raises:
          MemoryError: the pages in use leave no room for this turn; nothing has changed then.
        """
        prefix = self._known_prefix(names)
        resident = [self._page_of[name] for name in prefix if name in self._page_of]
        room = len(self._free) + len(self._cached.keys() - set(resident))
        if num_pages - len(resident) > room:
            raise MemoryError(f"{num_pages - len(resident)} HBM pages asked for, {room} to be had")
        placement = Placement(found_in_hbm=len(resident))
        for page in resident:
            self._take(page)
        busy = set()  # host pages that this placement reads or writes, and so must not give away
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
        """Lets others find full pages; of two with one name the second stays private."""
        for page, name in zip(pages, names, strict=False):
            if name not in self._page_of:
                self._page_of[name], self._name_of[page] = page, name

    def release(self, pages: Sequence[int]) -> None:
        """Ends a turn's use of its pages; the last of them are to be forgotten first."""
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
        """Takes the page unused for longest; stores it if the host has room and no copy yet."""
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
