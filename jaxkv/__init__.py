"""KV-cache data plane for LLM serving code written in JAX."""

from jaxkv import metadata as metadata
from jaxkv import recurrent as recurrent
from jaxkv._src.cache.device_cache import DeviceCache as DeviceCache
from jaxkv._src.cache.host_pool import HostPool as HostPool
from jaxkv._src.cache.spec import KVCacheSpec as KVCacheSpec
from jaxkv._src.collectives.symmetric_memory import SymmetricMemory as SymmetricMemory
from jaxkv._src.explain import explain as explain
from jaxkv._src.recurrent.advance import advance as advance
from jaxkv._src.recurrent.align import StateKind as StateKind
from jaxkv._src.recurrent.align import align_postprocess as align_postprocess
from jaxkv._src.recurrent.align import align_preprocess as align_preprocess
from jaxkv._src.recurrent.align import can_skip_align_postprocess as can_skip_align_postprocess
from jaxkv._src.recurrent.deferred_counts import DeferredCounts as DeferredCounts
from jaxkv._src.runtime.errors import BoundError as BoundError
from jaxkv._src.runtime.errors import HostMemoryError as HostMemoryError
from jaxkv._src.runtime.errors import PageIndexError as PageIndexError
from jaxkv._src.runtime.errors import PeerTimeoutError as PeerTimeoutError
from jaxkv._src.runtime.errors import StaleCountsError as StaleCountsError
from jaxkv._src.runtime.errors import TransferError as TransferError
from jaxkv._src.runtime.errors import check_errors as check_errors
from jaxkv._src.runtime.sync_guard import HostSyncError as HostSyncError
from jaxkv._src.runtime.sync_guard import allow_host_sync as allow_host_sync
from jaxkv._src.runtime.sync_guard import forbid_host_sync as forbid_host_sync
from jaxkv._src.transfer.api import load_pages as load_pages
from jaxkv._src.transfer.api import store_pages as store_pages
from jaxkv._src.transfer.api import swap_blocks as swap_blocks
from jaxkv._src.transfer.async_copy import start_load as start_load
from jaxkv._src.transfer.async_copy import start_store as start_store
from jaxkv._src.transfer.async_handles import LoadHandle as LoadHandle
from jaxkv._src.transfer.async_handles import StoreHandle as StoreHandle
from jaxkv._src.transfer.ids import HostIds as HostIds

__version__ = "0.1.0"
