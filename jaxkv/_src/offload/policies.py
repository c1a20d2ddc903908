"""Eviction policies: LRU and ARC.

A policy orders the resident blocks. Evictions are planned without any change, then applied, so
that a failure while planning leaves everything as it was.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

Order = OrderedDict[bytes, None]  # least recently used first


class Plan(Protocol):
    """An insertion and its evictions, not yet applied.

    Attributes:
      victims: blocks to evict, in order.
    """

    victims: list[bytes]


class Policy(Protocol):
    """Order of the resident blocks, and hence which ones to evict."""

    def touch(self, keys: Iterable[bytes]) -> None:
        """Notes a use of resident blocks, the most recent one last. Ignores other keys."""

    def refresh(self, keys: Iterable[bytes]) -> None:
        """As `touch`, as part of a use that has been noted."""

    def plan(self, keys: Sequence[bytes], num_free: int, evictable: Callable[[bytes], bool]) -> Any:
        """A `Plan` for the insertion of new blocks, the most recent one last.

        Args:
          keys: blocks that are not resident.
          num_free: free pages.
          evictable: whether a resident block may be evicted. At least `len(keys) - num_free` may.
        """

    def apply(self, plan: Any) -> None:
        """Applies the plan just made."""

    def remove(self, key: bytes) -> None:
        """Removes a resident block that is not evicted but aborted or discarded."""


class LruPlan:
    """Victims and new blocks of `Lru`."""

    def __init__(self, keys: Sequence[bytes], victims: list[bytes]) -> None:
        self.keys = keys
        self.victims = victims


class Lru:
    """Evicts the least recently used block."""

    def __init__(self, num_pages: int) -> None:
        del num_pages
        self._order: Order = OrderedDict()

    def touch(self, keys: Iterable[bytes]) -> None:
        move = self._order.move_to_end
        for key in keys:
            if key in self._order:
                move(key)

    refresh = touch

    def plan(
        self, keys: Sequence[bytes], num_free: int, evictable: Callable[[bytes], bool]
    ) -> LruPlan:
        oldest = filter(evictable, self._order)
        return LruPlan(keys, list(itertools.islice(oldest, max(0, len(keys) - num_free))))

    def apply(self, plan: LruPlan) -> None:
        for key in plan.victims:
            del self._order[key]
        self._order.update(dict.fromkeys(plan.keys))

    def remove(self, key: bytes) -> None:
        del self._order[key]


class Arc:
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003), for several blocks at a time.

    `t1` has blocks used once, `t2` those used again; `b1` and `b2` remember keys evicted from them.
    A use of a remembered block moves `target`, the desired length of `t1`. Deviations from the
    paper: blocks in use are passed over, and nothing is evicted while a page is free.
    """

    def __init__(self, num_pages: int) -> None:
        self.capacity = num_pages
        self.target = 0.0
        self.t1: Order = OrderedDict()
        self.t2: Order = OrderedDict()
        self.b1: Order = OrderedDict()
        self.b2: Order = OrderedDict()

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self.t1:
                del self.t1[key]
                self.t2[key] = None
            elif key in self.t2:
                self.t2.move_to_end(key)

    def refresh(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for order in (self.t1, self.t2):
                if key in order:
                    order.move_to_end(key)

    def plan(
        self, keys: Sequence[bytes], num_free: int, evictable: Callable[[bytes], bool]
    ) -> ArcPlan:
        plan = ArcPlan(self, num_free, evictable)
        for key in keys:
            plan.insert(key)
        return plan

    def apply(self, plan: ArcPlan) -> None:
        self.target = plan.target
        for key, source, destination in plan.moves:
            if source is not None:
                del source[key]
            if destination is not None:
                destination[key] = None

    def remove(self, key: bytes) -> None:
        (self.t1 if key in self.t1 else self.t2).pop(key)


class ArcPlan:
    """Insertions into `Arc`, as moves between its lists."""

    def __init__(self, arc: Arc, num_free: int, evictable: Callable[[bytes], bool]) -> None:
        self.victims: list[bytes] = []
        self.moves: list[tuple[bytes, Order | None, Order | None]] = []
        self.target = arc.target
        self._arc = arc
        self._num_free = num_free
        self._len_t1, self._len_t2 = len(arc.t1), len(arc.t2)
        self._len_b1, self._len_b2 = len(arc.b1), len(arc.b2)
        self._oldest_t1 = filter(evictable, arc.t1)
        self._oldest_t2 = filter(evictable, arc.t2)
        self._gone: set[bytes] = set()  # keys that are no longer ghosts
        self._new_b1: list[bytes] = []
        self._new_b2: list[bytes] = []
        self._oldest_b1 = self._ghosts(arc.b1, self._new_b1)
        self._oldest_b2 = self._ghosts(arc.b2, self._new_b2)

    def insert(self, key: bytes) -> None:
        """Cases II, III and IV of the paper: a key that is not resident."""
        arc = self._arc
        if key in arc.b1 and key not in self._gone:
            step = max(1.0, self._len_b2 / self._len_b1)
            self.target = min(float(arc.capacity), self.target + step)
            self._replace(in_b2=False)
            self._gone.add(key)
            self._len_b1 -= 1
            self._len_t2 += 1
            self.moves.append((key, arc.b1, arc.t2))
        elif key in arc.b2 and key not in self._gone:
            step = max(1.0, self._len_b1 / self._len_b2)
            self.target = max(0.0, self.target - step)
            self._replace(in_b2=True)
            self._gone.add(key)
            self._len_b2 -= 1
            self._len_t2 += 1
            self.moves.append((key, arc.b2, arc.t2))
        else:
            self._make_room_for_new()
            self._len_t1 += 1
            self.moves.append((key, None, arc.t1))

    def _make_room_for_new(self) -> None:
        arc = self._arc
        if self._len_t1 + self._len_b1 == arc.capacity:
            if not self._len_b1:
                self._evict_from_t1(remember=False)
                return
            self._forget(self._oldest_b1, arc.b1)
            self._len_b1 -= 1
        elif self._len_t1 + self._len_t2 + self._len_b1 + self._len_b2 == 2 * arc.capacity:
            self._forget(self._oldest_b2, arc.b2)
            self._len_b2 -= 1
        self._replace(in_b2=False)

    def _replace(self, *, in_b2: bool) -> None:
        """REPLACE of the paper; takes the other list if no block of the chosen one is evictable."""
        if self._num_free:
            self._num_free -= 1
        elif not (
            self._len_t1 > self.target or (in_b2 and self._len_t1 and self._len_t1 == self.target)
        ):
            if not self._evict_from_t2():
                self._evict_from_t1(remember=True)
        elif not self._evict_from_t1(remember=True):
            self._evict_from_t2()

    def _evict_from_t1(self, *, remember: bool) -> bool:
        key = next(self._oldest_t1, None)
        if key is None:
            return False
        self._len_t1 -= 1
        self.victims.append(key)
        self.moves.append((key, self._arc.t1, self._arc.b1 if remember else None))
        if remember:
            self._len_b1 += 1
            self._new_b1.append(key)
        return True

    def _evict_from_t2(self) -> bool:
        key = next(self._oldest_t2, None)
        if key is None:
            return False
        self._len_t2 -= 1
        self._len_b2 += 1
        self.victims.append(key)
        self.moves.append((key, self._arc.t2, self._arc.b2))
        self._new_b2.append(key)
        return True

    def _forget(self, oldest: Iterator[bytes], ghosts: Order) -> None:
        key = next(oldest)
        self._gone.add(key)
        self.moves.append((key, ghosts, None))

    def _ghosts(self, ghosts: Order, added: list[bytes]) -> Iterator[bytes]:
        """Oldest first, including those that the plan adds meanwhile."""
        for key in itertools.chain(ghosts, added):
            if key not in self._gone:
                yield key


POLICIES: dict[str, Callable[[int], Policy]] = {"lru": Lru, "arc": Arc}
