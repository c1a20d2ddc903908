"""KV-cache data plane for LLM serving code written in JAX."""

from jaxkv import metadata as metadata
from jaxkv.device_cache import DeviceCache as DeviceCache
from jaxkv.errors import BoundError as BoundError
from jaxkv.errors import HostMemoryError as HostMemoryError
from jaxkv.errors import PageIndexError as PageIndexError
from jaxkv.errors import PeerTimeoutError as PeerTimeoutError
from jaxkv.errors import StaleCountsError as StaleCountsError
from jaxkv.errors import TransferError as TransferError
from jaxkv.errors import check_errors as check_errors
from jaxkv.host_ids import HostIds as HostIds
from jaxkv.host_pool import HostPool as HostPool
from jaxkv.layout import KVCacheSpec as KVCacheSpec
from jaxkv.overlap import Loading as Loading
from jaxkv.overlap import Storing as Storing
from jaxkv.overlap import start_load as start_load
from jaxkv.overlap import start_store as start_store
from jaxkv.recurrent import DeferredCounts as DeferredCounts
from jaxkv.recurrent import StateKind as StateKind
from jaxkv.recurrent import advance as advance
from jaxkv.recurrent import align_postprocess as align_postprocess
from jaxkv.recurrent import align_preprocess as align_preprocess
from jaxkv.recurrent import can_skip_align_postprocess as can_skip_align_postprocess
from jaxkv.symmetric_memory import SymmetricMemory as SymmetricMemory
from jaxkv.sync_guard import HostSyncError as HostSyncError
from jaxkv.sync_guard import allow_host_sync as allow_host_sync
from jaxkv.sync_guard import forbid_host_sync as forbid_host_sync
from jaxkv.transfer import explain as explain
from jaxkv.transfer import load_pages as load_pages
from jaxkv.transfer import store_pages as store_pages
from jaxkv.transfer import swap_blocks as swap_blocks

__version__ = "0.1.0"
