"""Write policies: which computed blocks to store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Protocol

_MIN_REMEMBERED = 1 << 16


class WritePolicy(Protocol):
    """Selects the blocks to store."""

    def touch(self, keys: Iterable[bytes]) -> None:
        """Records that a request uses these blocks, resident or not."""

    def wants(self, key: bytes, *, evicted: bool) -> bool:
        """Whether to store a block.

        Args:
          key: a block that is not resident.
          evicted: whether the device cache evicts it; otherwise it has just been computed.
        """


class WriteThrough:
    """Stores every block when it is computed."""

    def __init__(self, num_pages: int) -> None:
        del num_pages

    def touch(self, keys: Iterable[bytes]) -> None:
        pass

    def wants(self, key: bytes, *, evicted: bool) -> bool:
        return not evicted


class WriteBack(WriteThrough):
    """Stores a block when the device cache evicts it."""

    def wants(self, key: bytes, *, evicted: bool) -> bool:
        return evicted


class SecondUse:
    """Stores a block when it is computed, if an earlier request has used it too.

    Remembers the most recently used keys: twice the number of pages, and at least 65,536. A block
    that has been used twice and is evicted is thus stored again.
    """

    def __init__(self, num_pages: int) -> None:
        self._num_remembered = max(_MIN_REMEMBERED, 2 * num_pages)
        self._used_again: OrderedDict[bytes, bool] = OrderedDict()

    def touch(self, keys: Iterable[bytes]) -> None:
        used_again = self._used_again
        for key in keys:
            used_again[key] = key in used_again
            used_again.move_to_end(key)
        while len(used_again) > self._num_remembered:
            used_again.popitem(last=False)

    def wants(self, key: bytes, *, evicted: bool) -> bool:
        return not evicted and self._used_again.get(key, False)


WRITE_POLICIES: dict[str, Callable[[int], WritePolicy]] = {
    "through": WriteThrough,
    "back": WriteBack,
    "second_use": SecondUse,
}
