"""The host tier and the tiers below it: which block is where. Uses no JAX arrays."""

from jaxkv._src.offload.errors import BlockNotReadyError, OffloadError, StaleSpecError
from jaxkv._src.offload.keys import BlockGroup, BlockHasher
from jaxkv._src.offload.lookup import lookup_groups
from jaxkv._src.offload.manager import OffloadManager
from jaxkv._src.offload.prometheus import register_prometheus
from jaxkv._src.offload.specs import (
    BlockRemoved,
    BlockState,
    BlockStored,
    LoadSpec,
    Lookup,
    LookupStatus,
    StoreSpec,
)
from jaxkv._src.offload.tiers.files import FileTier
from jaxkv._src.offload.tiers.mooncake import MooncakeTier
from jaxkv._src.offload.tiers.store import TieredStore
from jaxkv._src.offload.tiers.tier import Tier
from jaxkv._src.public_names import set_module as _set_module

__all__ = [
    "BlockGroup",
    "BlockHasher",
    "BlockNotReadyError",
    "BlockRemoved",
    "BlockState",
    "BlockStored",
    "FileTier",
    "LoadSpec",
    "Lookup",
    "LookupStatus",
    "MooncakeTier",
    "OffloadError",
    "OffloadManager",
    "StaleSpecError",
    "StoreSpec",
    "Tier",
    "TieredStore",
    "lookup_groups",
    "register_prometheus",
]

_set_module(globals())
