"""The host tier of sglang-jax's HiCache on jaxkv.

sgl-project/sglang-jax, python/sgl_jax/srt/mem_cache/host_kv_pool.py, commit cddbf6f1. A mixin has
the transfers of `LRUHostKVPool`; its free list, locks and epochs stay as they are:

    class HostPool(JaxkvTransfers, LRUHostKVPool):
        pass

There each page is a separate array, copied by a separate `device_put`; here all pages are one
pool, and a batch of pages is one asynchronous copy of all layers. `stage_backup` starts the store,
which overlaps the next step; `stage_load` starts the load, which overlaps the steps until
`flush_load` waits for it on the device. The host never blocks.
"""

from typing import Any

import jaxkv
from examples.adapters.staged_copies import StagedCopies, padded


class JaxkvTransfers:
    """Mixin of `LRUHostKVPool`: device and host pages are addressed by id."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._copies = StagedCopies(
            self._device_pool.kv_buffer[0], self._layer_num, self._pool_size
        )

    def stage_backup(self: Any, device_indices: list[int], host_buffer_ids: list[int]) -> None:
        """Gathers device pages, which may then be overwritten, and starts their store."""
        epochs = self._checked_epochs(host_buffer_ids, device_indices)
        if not epochs:
            return
        pages, sharding = padded(device_indices, 0), self._copies.sharding
        cache = self._device_pool.kv_buffer
        staged = [self._jit_gather_one_layer(layer, pages, sharding) for layer in cache]
        self._copies.store(staged, padded(host_buffer_ids))
        self._publish(self._pending_gather, epochs, dict.fromkeys(epochs))

    def flush_backup(self: Any, host_buffer_ids: list[int]) -> None:
        """Admits the pages to `stage_load`: the device orders loads after stores."""
        jaxkv.check_errors()
        self._publish(self._slots, *self._pop(self._pending_gather, host_buffer_ids))

    def stage_load(self: Any, host_buffer_ids: list[int]) -> None:
        """Starts a load into staging arrays."""
        epochs = self._checked_epochs(host_buffer_ids)
        if empty := [slot for slot in epochs if self._slots[slot] is None]:
            raise RuntimeError(f"stage_load: host pages {empty} have no data")
        if epochs:
            wait = self._copies.load(padded(host_buffer_ids))
            rows = {slot: (wait, row) for row, slot in enumerate(host_buffer_ids)}
            self._publish(self._pending_load, epochs, rows)

    def flush_load(self: Any, host_buffer_ids: list[int], device_indices: list[int]) -> None:
        """Scatters loaded pages into the cache, except those freed since `stage_load`."""
        self._checked_epochs(host_buffer_ids, device_indices)
        epochs, rows = self._pop(self._pending_load, host_buffer_ids)
        batches: dict[Any, list[tuple[int, int]]] = {}
        for slot, page in zip(host_buffer_ids, device_indices, strict=True):
            if self._is_current(slot, epochs[slot]):
                wait, row = rows[slot]
                batches.setdefault(wait, []).append((row, page))
        cache = self._device_pool.kv_buffer
        for wait, pairs in batches.items():
            rows_of_batch, pages = map(padded, zip(*pairs, strict=True))
            cache[:] = self._copies.scatter(wait(), cache, rows_of_batch, pages)
        jaxkv.check_errors()

    def _checked_epochs(self: Any, slots: Any, device_pages: Any = None) -> dict[int, int]:
        if device_pages is not None and len(slots) != len(device_pages):
            raise ValueError(f"{len(slots)} host pages, but {len(device_pages)} device pages")
        self._require_device_pages(device_pages or ())
        with self._lock:
            for slot in slots:
                self._require_allocated(slot)
            return {slot: self._generation[slot] for slot in slots}

    def _is_current(self: Any, slot: int, epoch: int) -> bool:
        return self._allocated[slot] and self._generation[slot] == epoch

    def _publish(self: Any, entries: Any, epochs: dict[int, int], values: dict[int, Any]) -> None:
        with self._lock:
            for slot, epoch in epochs.items():
                if self._is_current(slot, epoch):
                    entries[slot] = epoch, values[slot]

    def _pop(self: Any, entries: Any, slots: list[int]) -> tuple[dict[int, int], dict[int, Any]]:
        with self._lock:
            if missing := [slot for slot in slots if slot not in entries]:
                raise RuntimeError(f"host pages {missing} have not been staged")
            popped = {slot: entries.pop(slot) for slot in slots}
        return {s: entry[0] for s, entry in popped.items()}, {s: e[1] for s, e in popped.items()}
