"""KV-cache data plane for LLM serving code written in JAX."""

from jaxkv import metadata, offload, recurrent, sparse
from jaxkv._src.cache.array_spec import ArrayCacheSpec
from jaxkv._src.cache.device_cache import DeviceCache
from jaxkv._src.cache.host_layout import HostLayout
from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.cache.pinned_memory import pinned_zeros
from jaxkv._src.cache.spec import KVCacheSpec
from jaxkv._src.collectives.all_reduce import all_reduce
from jaxkv._src.collectives.symmetric_memory import SymmetricMemory
from jaxkv._src.explain import explain
from jaxkv._src.offload.copies import CopyBatch, OffloadCopy
from jaxkv._src.offload.engine import OffloadEngine
from jaxkv._src.offload.tier_copies import OffloadPrefetch
from jaxkv._src.public_names import set_module as _set_module
from jaxkv._src.runtime.errors import (
    BoundError,
    ErrorScope,
    HostMemoryError,
    JaxkvError,
    PageIndexError,
    PeerTimeoutError,
    StaleCountsError,
    TransferError,
    check_errors,
)
from jaxkv._src.runtime.sync_guard import (
    HostSyncError,
    HostSyncReport,
    HostSyncWarning,
    allow_host_sync,
    forbid_host_sync,
)
from jaxkv._src.transfer.api import load_pages, store_pages, swap_blocks
from jaxkv._src.transfer.async_copy import start_load, start_store, start_swap
from jaxkv._src.transfer.async_handles import LoadHandle, StoreHandle
from jaxkv._src.transfer.ids import HostIdPair, HostIds
from jaxkv._src.transfer.swap_handle import SwapHandle
from jaxkv._src.version import __version__ as __version__

__all__ = [
    "ArrayCacheSpec",
    "BoundError",
    "CopyBatch",
    "DeviceCache",
    "ErrorScope",
    "HostIdPair",
    "HostIds",
    "HostLayout",
    "HostMemoryError",
    "HostPool",
    "HostSyncError",
    "HostSyncReport",
    "HostSyncWarning",
    "JaxkvError",
    "KVCacheSpec",
    "LoadHandle",
    "OffloadCopy",
    "OffloadEngine",
    "OffloadPrefetch",
    "PageIndexError",
    "PeerTimeoutError",
    "StaleCountsError",
    "StoreHandle",
    "SwapHandle",
    "SymmetricMemory",
    "TransferError",
    "all_reduce",
    "allow_host_sync",
    "check_errors",
    "explain",
    "forbid_host_sync",
    "load_pages",
    "metadata",
    "offload",
    "pinned_zeros",
    "recurrent",
    "sparse",
    "start_load",
    "start_store",
    "start_swap",
    "store_pages",
    "swap_blocks",
]

_set_module(globals())
