"""Page copies that run beside the step: start now, wait where the pages are needed.

`start_load` and `start_store` put a copy on a stream of their own; layer after layer arrives while
the step computes. What they return owns the arrays that the copy touches, so that nothing can read
or overwrite them too early: `wait` hands out those of a layer once they are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxkv._src.cache.device_cache import DeviceCache
from jaxkv._src.cache.host_pool import HostPool
from jaxkv._src.transfer import resolve
from jaxkv._src.transfer.async_handles import LoadHandle, StoreHandle


def start_load(
    pool: HostPool,
    cache: DeviceCache,
    host_pages: resolve.Ids,
    device_pages: resolve.Ids,
    *,
    layers: int | Sequence[int] | None = None,
    implementation: str | None = None,
    timeout_s: float = 30.0,
) -> LoadHandle:
    """Starts to copy pages from host memory into the device cache, and returns at once.

    As `load_pages`, but on a stream of its own, in the order of `layers`: layer l is waited for
    where layer l is needed, while the layers before it compute. (SGLang's HiCache overlaps layers
    in this way, with an event for each.)

        loading = jaxkv.start_load(pool, cache, host_pages, device_pages)
        for l in range(spec.num_layers):
            k, v = loading.wait(l, after=h)
            ...
        return h, loading.cache

    Copies of one direction arrive in the order in which they were started. The transfer may leave
    the jit that started it: pass it, donated, to the one that waits; do not overwrite the pool
    until then. Inside one jit XLA sees to that.

    Args:
      pool, cache, host_pages, device_pages, layers: as for `load_pages`; donate the cache.
      implementation: "kernel", "dma", "host", or None for the best that serves the call.
      timeout_s: seconds, at most 1e9, after which a wait for this copy gives up; `check_errors`
        then raises TransferError.

    Returns:
      What waits for the layers.

    Raises:
      As `load_pages`. A layer without a wait is no error, but then the whole copy runs before
      anything that follows: XLA could otherwise reuse the layer's memory while it is written.
    """
    return LoadHandle._begin(
        "start_load", pool, cache, (host_pages, device_pages), layers, implementation, timeout_s
    )


def start_store(
    pool: HostPool,
    cache: DeviceCache,
    host_pages: resolve.Ids,
    device_pages: resolve.Ids,
    *,
    layers: int | Sequence[int] | None = None,
    implementation: str | None = None,
    timeout_s: float = 30.0,
) -> StoreHandle:
    """Starts to copy pages from the device cache into host memory, and returns at once.

    As `store_pages`, but on a stream of its own. Take a layer's arrays from `wait` before they are
    overwritten (XLA copies an array that is overwritten otherwise), and the pool from `.pool`.

    Args:
      pool, cache, host_pages, device_pages, layers: as for `store_pages`; donate both, so that
        neither is copied.
      implementation, timeout_s: as for `start_load`.

    Returns:
      What waits for the layers and for the pool.

    Raises:
      As `start_load`.
    """
    return StoreHandle._begin(
        "start_store", pool, cache, (device_pages, host_pages), layers, implementation, timeout_s
    )
