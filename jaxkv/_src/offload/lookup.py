"""Lookups: the longest prefix of one group, and of several."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from jaxkv._src.offload.keys import BlockGroup
from jaxkv._src.offload.specs import Lookup

if TYPE_CHECKING:
    from jaxkv._src.offload.manager import OffloadManager


def longest_prefix(
    present: Container[bytes], keys: Sequence[bytes], limit: int, window: int | None
) -> int:
    """Largest n <= `limit` for which `keys[n - window : n]`, or `keys[:n]`, are present."""
    if window is None:
        for n in range(limit):
            if keys[n] not in present:
                return n
        return limit
    run = 0
    for n in range(limit - 1, -1, -1):
        run = run + 1 if keys[n] in present else 0
        if run == window:
            return n + window
    return run


def lookup_groups(
    groups: Sequence[tuple[OffloadManager, BlockGroup]], chain: Sequence[bytes]
) -> Lookup:
    """The longest prefix that all groups of a hybrid cache can serve. Changes nothing but metrics.

    A prefix of n blocks is served if each group has those of its blocks that `BlockGroup.needed(n)`
    lists. Groups with pools of their own have a manager each; groups that share a pool share a
    manager. Like vLLM's hybrid KV cache coordinator, it shortens the prefix until all groups agree.

        found = jaxkv.offload.lookup_groups([(manager, full), (manager, window)], chain)
        keys = window.keys(chain)
        load = manager.prepare_load([keys[i] for i in window.needed(found.num_blocks)])

    Args:
      groups: manager and group, for each group.
      chain: hashes of the sequence, from its beginning: those of a `BlockHasher`, not keys.

    Returns:
      The number of blocks, and how many more once the stores in flight are complete.

    Raises:
      ValueError: no groups, or several of one manager with the same id.
    """
    if not groups:
        raise ValueError("lookup_groups: groups is empty")
    if len({(manager, group.id) for manager, group in groups}) < len(groups):
        ids = [group.id for _, group in groups]
        raise ValueError(
            f"lookup_groups: groups of one manager have the same id, among {ids}: they would have "
            "the same keys; give each BlockGroup an id of its own"
        )
    parts = [(manager, group.keys(chain), group.window) for manager, group in groups]
    now = _common([(m._blocks.ready, keys, window) for m, keys, window in parts])
    later = _common([(m._blocks, keys, window) for m, keys, window in parts])
    for manager, keys, _ in parts:
        manager._count_lookup(len(keys), now)
    return Lookup(now, later - now)


def _common(
    parts: Sequence[tuple[Container[bytes], Sequence[bytes], int | None]],
) -> int:
    """Largest n that every part serves: each part shortens it until none does."""
    limit = min(len(keys) for _, keys, _ in parts)
    agreed = 0
    while agreed < len(parts):
        for present, keys, window in parts:
            n = longest_prefix(present, keys, limit, window)
            agreed = agreed + 1 if n == limit else 1
            limit = n
    return limit
