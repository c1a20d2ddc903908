"""Blocks, their states, and the pages that they occupy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jaxkv._src.offload.specs import BlockState


class Block:
    """A block with a page.

    Attributes:
      key: None once the block is discarded.
      page: page id in the host pool.
      state: state of the block.
      pins: number of loads that read the page.
    """

    __slots__ = ("key", "page", "pins", "state")

    def __init__(self, key: bytes, page: int) -> None:
        self.key: bytes | None = key
        self.page = page
        self.state = BlockState.RESERVED
        self.pins = 0


class BlockTable:
    """The blocks of a host pool by key, and its pages.

    A page is free, or that of one block. It becomes free when its block is evicted, aborted, or
    discarded and no copy in flight uses it.

    Attributes:
      ready: blocks that can be loaded.
      pending: blocks that are reserved or being written.
      generations: for each page, how many times its contents became invalid.
      num_pinned: number of pinned blocks among the ready ones.
    """

    def __init__(self, num_pages: int) -> None:
        self.ready: dict[bytes, Block] = {}
        self.pending: dict[bytes, Block] = {}
        self.generations = [0] * num_pages
        self.num_pinned = 0
        self._free = list(range(num_pages - 1, -1, -1))  # stack: lowest page first

    @property
    def num_free(self) -> int:
        return len(self._free)

    def get(self, key: bytes) -> Block | None:
        return self.ready.get(key) or self.pending.get(key)

    def __contains__(self, key: object) -> bool:
        return key in self.ready or key in self.pending

    def room(self, protected: Iterable[bytes]) -> int:
        """Pages that are free, or can be freed without evicting a block of `protected`."""
        return self.num_free + len(self.ready) - self.num_pinned - sum(map(self.is_idle, protected))

    def is_idle(self, key: bytes) -> bool:
        """Whether a block can be evicted."""
        block = self.ready.get(key)
        return block is not None and not block.pins

    def reserve(self, keys: Sequence[bytes]) -> list[Block]:
        # In order: consecutive pages are copied as rows of one copy.
        pages = sorted(self._free.pop() for _ in keys)
        blocks = [Block(key, page) for key, page in zip(keys, pages, strict=True)]
        self.pending.update(zip(keys, blocks, strict=True))
        return blocks

    def publish(self, blocks: Iterable[Block]) -> list[bytes]:
        """Makes written blocks ready, except the discarded ones; returns their keys."""
        keys = []
        for block in blocks:
            if block.key is None:
                self._free.append(block.page)
            else:
                block.state = BlockState.READY
                self.ready[block.key] = self.pending.pop(block.key)
                keys.append(block.key)
        return keys

    def forget(self, blocks: Iterable[Block]) -> list[bytes]:
        """Removes blocks that were not written; returns the keys of those not discarded before."""
        keys = []
        for block in blocks:
            if block.key is None:
                self._free.append(block.page)
            else:
                self._release(self.pending.pop(block.key))
                keys.append(block.key)
        return keys

    def evict(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._release(self.ready.pop(key))

    def discard(self, key: bytes) -> Block | None:
        """Removes a block; the page of one in use stays occupied until its copies have ended."""
        block = self.get(key)
        if block is None:
            return None
        block.key = None
        if block.state is not BlockState.READY:
            del self.pending[key]
            self.generations[block.page] += 1
        elif block.pins:
            del self.ready[key]
            self.num_pinned -= 1
            self.generations[block.page] += 1
        else:
            self._release(self.ready.pop(key))
        return block

    def pin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.num_pinned += not block.pins
            block.pins += 1

    def unpin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.pins -= 1
            if not block.pins:
                if block.key is None:
                    self._free.append(block.page)
                else:
                    self.num_pinned -= 1

    def gauges(self) -> dict[str, float]:
        """Numbers of blocks; and the share of the pages that copies in flight use, as vLLM's."""
        num_pages = len(self.generations)
        num_used = num_pages - self.num_free
        num_idle = len(self.ready) - self.num_pinned
        return {
            "kv_offload_cpu_cache_usage_perc": (num_used - num_idle) / max(1, num_pages),
            "kv_offload_used_blocks": num_used,
            "kv_offload_ready_blocks": len(self.ready),
            "kv_offload_pending_blocks": len(self.pending),
            "kv_offload_pinned_blocks": self.num_pinned,
            "kv_offload_num_blocks": num_pages,
        }

    def _release(self, block: Block) -> None:
        self.generations[block.page] += 1
        self._free.append(block.page)
