"""The interface of a tier below host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Protocol


class Tier(Protocol):
    """The interface of a store of blocks below host memory, such as local files.

    A block is `block_bytes` opaque bytes, found by its key (see `BlockGroup.keys`). A tier is a
    cache: it may lose a block at any time, but never returns bytes other than those written for
    the key. Failures of disks, networks and servers are misses, counted in `metrics` and logged
    as warnings of the logger "jaxkv.offload". Only wrong arguments, reads and writes after `close`,
    and a `remove` that fails raise.

        written = tier.write(key, page)                       # returns immediately
        assert written.result()                               # True: stored
        assert tier.contains([key]) == [True]
        assert tier.read(key, other_page).result()            # True: other_page has the block

    The counterpart of the secondary tiers of vLLM's offloading and of the storage backends of
    SGLang's HiCache and of LMCache.

    Methods may be called from any thread. `read` and `write` only submit: they do no I/O in the
    caller's thread. The buffer belongs to the tier until the future is done: do not reuse or free
    it before, even if the result is no longer wanted. Futures always end with a bool, never with an
    exception; they cannot be cancelled. Callbacks run in a thread of the tier and must be short.
    """

    @property
    def block_bytes(self) -> int:
        """Size of every block in bytes."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each block is probably there: `read` can still miss.

        Takes microseconds per key for tiers with an index in memory, at most a stated time for
        others; after that time, and after `close`, all keys are misses.

        Raises:
          ValueError: a key is not bytes, is empty, or is longer than the tier allows; 120 bytes for
            the tiers of jaxkv.
        """

    def read(self, key: bytes, into: memoryview) -> Future[bool]:
        """Reads a block.

        Args:
          key: the block.
          into: a memoryview, contiguous and writable, `block_bytes` long. Undefined after a miss.

        Returns:
          True once `into` has the block; False for a miss.

        Raises:
          ValueError: `into` is not such a memoryview, the tier is closed, or as for `contains`.
        """

    def write(self, key: bytes, block: memoryview) -> Future[bool]:
        """Writes a block; one that is there already is not written again.

        Args:
          key: the block.
          block: a memoryview, contiguous, `block_bytes` long; not modified until the future is
            done.

        Returns:
          True once the block can be read; False if it was not stored.

        Raises:
          ValueError: `block` is not such a memoryview, the tier is closed, or as for `contains`.
        """

    def remove(self, keys: Iterable[bytes]) -> None:
        """Removes blocks, for example of weights no longer served. Ignores unknown keys.

        From now on `contains` and `read` miss them, unless a write of them is in flight or another
        process writes them again.

        Raises:
          ValueError: the tier is closed and cannot remove blocks any more (a `FileTier` can), or as
            for `contains`.
          OSError: a block cannot be removed, and is still found.
        """

    def metrics(self) -> dict[str, float]:
        """Counters since creation, and gauges; see `TIER_COUNTERS` and docs/tiers.md."""

    def close(self) -> None:
        """Ends the tier: copies in flight end, queued ones become misses. Stored blocks remain."""


# `kv_offload_tiering_*` are vLLM's: bytes, and seconds. The others count blocks of the tier.
TIER_COUNTERS = (
    "kv_offload_tiering_read_bytes",
    "kv_offload_tiering_read_time",
    "kv_offload_tiering_write_bytes",
    "kv_offload_tiering_write_time",
    "kv_offload_tier_block_queries",
    "kv_offload_tier_block_hits",
    "kv_offload_tier_read_blocks",
    "kv_offload_tier_read_misses",
    "kv_offload_tier_written_blocks",
    "kv_offload_tier_write_failures",
    "kv_offload_tier_evicted_blocks",
    "kv_offload_tier_corrupt_blocks",
    "kv_offload_tier_refused_copies",
    "kv_offload_tier_errors",
)
