"""Results of the offload manager: lookups, specs of copies, states, events, counters."""

from __future__ import annotations

import dataclasses
import enum
from typing import NamedTuple, TypeAlias


class LookupStatus(enum.Enum):
    """Result of a lookup.

    Attributes:
      MISS: no block can be loaded.
      HIT: blocks can be loaded.
      PENDING: more blocks can be loaded once the stores in flight are complete.
    """

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"


class Lookup(NamedTuple):
    """Length of the longest prefix in the host tier.

        found = manager.lookup(keys)
        keys[:found.num_blocks]                               # can be loaded now

    An engine need not wait for pending blocks: it can load the first `num_blocks` and compute the
    others.

    Attributes:
      num_blocks: blocks of the prefix that can be loaded now.
      num_pending: further blocks of it once the stores in flight are complete.
    """

    num_blocks: int
    num_pending: int = 0

    @property
    def status(self) -> LookupStatus:
        """`PENDING` if there are pending blocks, otherwise `HIT` or `MISS`."""
        if self.num_pending:
            return LookupStatus.PENDING
        return LookupStatus.HIT if self.num_blocks else LookupStatus.MISS


class BlockState(enum.Enum):
    """State of a block in the host tier. Only ready blocks can be loaded.

    Attributes:
      RESERVED: has a page; its store is not issued.
      WRITING: its store is in flight.
      READY: stored.
    """

    RESERVED = "reserved"
    WRITING = "writing"
    READY = "ready"


@dataclasses.dataclass(frozen=True)
class LoadSpec:
    """Blocks to load, pinned until `complete` or `abort`; made by `OffloadManager.prepare_load`.

    The counterpart of vLLM's `LoadStoreSpec`.

    Attributes:
      job_id: number of the copy, unique in its manager.
      keys: the blocks.
      pages: page id of each block in the host pool.
      generations: generation of each page.
    """

    job_id: int
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]
    generations: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StoreSpec:
    """Blocks to store, with their reserved pages; made by `OffloadManager.prepare_store`.

    The counterpart of vLLM's `PrepareStoreOutput`.

    Attributes:
      job_id: number of the copy, unique in its manager.
      keys: the blocks; those of the call that are neither in the host tier already, nor refused,
        nor left out by the write policy.
      pages: page id of each block in the host pool.
      generations: generation of each page.
      indices: position of each block in the `keys` of the call.
      evicted: blocks removed for the pages.
      num_refused: number of blocks without room, since all other pages are in use.
    """

    job_id: int
    keys: tuple[bytes, ...]
    pages: tuple[int, ...]
    generations: tuple[int, ...]
    indices: tuple[int, ...]
    evicted: tuple[bytes, ...]
    num_refused: int


class BlockStored(NamedTuple):
    """Event: blocks can be loaded from now on. Named as vLLM's KV cache event.

    Attributes:
      keys: the blocks.
    """

    keys: tuple[bytes, ...]


class BlockRemoved(NamedTuple):
    """Event: blocks were evicted or discarded. Named as vLLM's KV cache event.

    Attributes:
      keys: the blocks.
    """

    keys: tuple[bytes, ...]


Event: TypeAlias = BlockStored | BlockRemoved

# Of the manager. Those with a counterpart in vLLM have its name and unit; others name their unit.
COUNTERS = (
    "kv_offload_block_queries",
    "kv_offload_block_hits",
    "kv_offload_loaded_blocks",
    "kv_offload_stored_blocks",
    "kv_offload_promoted_blocks",
    "kv_offload_cascaded_blocks",
    "kv_offload_evicted_blocks",
    "kv_offload_aborted_blocks",
    "kv_offload_discarded_blocks",
    "kv_offload_refused_blocks",
    "kv_offload_stores_skipped",
)
# Of the copies of an engine between host memory and HBM, named as vLLM's: bytes, and seconds.
COPY_COUNTERS = (
    "kv_offload_load_bytes",
    "kv_offload_load_time",
    "kv_offload_store_bytes",
    "kv_offload_store_time",
)
