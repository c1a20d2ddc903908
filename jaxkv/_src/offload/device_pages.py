"""The device pages of queued copies."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from jaxkv._src.offload.copies import Kind, OffloadCopy
from jaxkv._src.offload.integers import checked_integer

_NUM_IDS = 2**31  # of int32


class QueuedPages:
    """Which block has which device page, for copies that are not issued.

    Until then a page cannot be that of another block: its store would save the wrong bytes, and its
    load would overwrite the other one's.

    Args:
      num_pages: of the device cache; None: not known.

    Raises:
      ValueError: `num_pages` is not an integer in [0, 2^31].
    """

    def __init__(self, num_pages: int | None) -> None:
        name = "OffloadEngine: num_device_pages"
        expected = "the number of pages of the device cache, at most 2^31"
        num_ids = _NUM_IDS if num_pages is None else num_pages
        self._end = checked_integer(name, num_ids, expected, 0, _NUM_IDS)
        self._blocks: dict[int, tuple[OffloadCopy, bytes]] = {}

    def check(
        self, kind: Kind, keys: Sequence[bytes], device_pages: Sequence[int], copied: Iterable[int]
    ) -> tuple[int, ...]:
        """The device pages as integers.

        Args:
          kind: of the copy.
          keys, device_pages: its arguments.
          copied: indices of the blocks to copy; pages of others are not used.

        Raises:
          TypeError: a page is not an integer.
          ValueError: the numbers of keys and pages differ; a page to copy is negative or too large,
            or occurs twice, or is that of a queued copy of another block.
        """
        where = f"OffloadEngine.{kind}"
        if len(keys) != len(device_pages):
            raise ValueError(
                f"{where}: len(keys)={len(keys)}, but len(device_pages)={len(device_pages)}; pass "
                "one page for each block"
            )
        pages = tuple(_integer(where, i, page) for i, page in enumerate(device_pages))
        seen: set[int] = set()
        for i in copied:
            page = pages[i]
            if not 0 <= page < self._end:
                raise ValueError(
                    f"{where}: device_pages[{i}]={page}; page ids are from 0 to {self._end - 1}"
                )
            copy, key = self._blocks.get(page, (None, b""))
            again = copy and copy.kind == kind == "store" and key == keys[i]  # discarded meanwhile
            if page in seen or (copy and not again):
                raise ValueError(
                    f"{where}: device_pages[{i}]={page} is that of another block to copy; pass a "
                    "page once, and reuse that of a queued copy when it is issued"
                )
            seen.add(page)
        return pages

    def add(self, copy: OffloadCopy) -> None:
        for page, key in zip(copy.device_pages, copy.keys, strict=True):
            self._blocks[page] = copy, key

    def remove(self, copy: OffloadCopy) -> None:
        for page in copy.device_pages:
            if self._blocks.get(page, (None,))[0] is copy:  # not that of a later store
                del self._blocks[page]


def _integer(where: str, index: int, page: int) -> int:
    try:
        return operator.index(page)
    except TypeError:
        raise TypeError(
            f"{where}: device_pages[{index}]={page!r} is not an integer; pass page ids"
        ) from None
