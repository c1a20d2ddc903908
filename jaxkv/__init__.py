"""KV-cache data plane for LLM serving code written in JAX."""

from jaxkv import metadata as metadata
from jaxkv.device_cache import DeviceCache as DeviceCache
from jaxkv.errors import BoundError as BoundError
from jaxkv.errors import HostMemoryError as HostMemoryError
from jaxkv.errors import PageIndexError as PageIndexError
from jaxkv.errors import PeerTimeoutError as PeerTimeoutError
from jaxkv.errors import TransferError as TransferError
from jaxkv.errors import check_errors as check_errors
from jaxkv.host_ids import HostIds as HostIds
from jaxkv.host_pool import HostPool as HostPool
from jaxkv.layout import KVCacheSpec as KVCacheSpec
from jaxkv.overlap import Loading as Loading
from jaxkv.overlap import Storing as Storing
from jaxkv.overlap import start_load as start_load
from jaxkv.overlap import start_store as start_store
from jaxkv.symmetric_memory import SymmetricMemory as SymmetricMemory
from jaxkv.transfer import explain as explain
from jaxkv.transfer import load_pages as load_pages
from jaxkv.transfer import store_pages as store_pages
from jaxkv.transfer import swap_blocks as swap_blocks

__version__ = "0.1.0"
