"""Lookups of hybrid caches, compared with brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxkv.offload import (
    BlockGroup,
    BlockHasher,
    Lookup,
    LookupStatus,
    OffloadManager,
    lookup_groups,
)

pytestmark = pytest.mark.host_only

CHAIN = BlockHasher(1, model="m").hashes(range(7))
GROUP = st.tuples(st.one_of(st.none(), st.integers(1, 3)), st.integers(0, 2))


def store(manager, keys, *, complete=True):
    spec = manager.prepare_store(keys)
    manager.start(spec)
    if complete:
        manager.complete(spec)


@given(st.lists(GROUP, min_size=1, max_size=3), st.booleans(), st.data())
def test_longest_common_prefix_of_groups(shapes, shared, data):
    groups = [BlockGroup(i, window, lookahead) for i, (window, lookahead) in enumerate(shapes)]
    managers = [OffloadManager(64) for _ in groups]
    if shared:
        managers = managers[:1] * len(groups)
    ready: set[bytes] = set()
    later: set[bytes] = set()
    for manager, group in zip(managers, groups, strict=True):
        for key in group.keys(CHAIN):
            state = data.draw(st.sampled_from(["ready", "ready", "ready", "pending", "absent"]))
            if state != "absent":
                store(manager, [key], complete=state == "ready")
                (ready if state == "ready" else later).add(key)
    later |= ready

    def longest(present):
        return max(
            n
            for n in range(len(CHAIN) + 1)
            if all(
                n <= len(group.keys(CHAIN))
                and {group.keys(CHAIN)[i] for i in group.needed(n)} <= present
                for group in groups
            )
        )

    found = lookup_groups([*zip(managers, groups, strict=True)], CHAIN)
    assert found == Lookup(longest(ready), longest(later) - longest(ready))


@pytest.fixture
def manager():
    return OffloadManager(64)


def test_prefix_that_ends_in_a_sliding_window_block_hits(manager):
    """Only the window of the last blocks is stored, as an engine keeps no other."""
    full, window = BlockGroup(0), BlockGroup(1, window=2)
    store(manager, full.keys(CHAIN))
    store(manager, window.keys(CHAIN)[3:5])
    assert lookup_groups([(manager, full), (manager, window)], CHAIN) == (5, 0)
    assert lookup_groups([(manager, full), (manager, window)], CHAIN[:4]) == (0, 0)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_prefix_that_ends_in_a_draft_block_hits(manager, window, chunk):
    """Chunked prefill: no hole between chunks, and reader and writer count the same blocks."""
    full, draft = BlockGroup(0), BlockGroup(1, window, lookahead=1)
    for end in range(chunk, len(CHAIN) + 1, chunk):
        for group in (full, draft):
            store(manager, group.keys(CHAIN[:end]))
    stored = len(CHAIN) // chunk * chunk
    groups = [(manager, full), (manager, draft)]
    assert lookup_groups(groups, CHAIN) == (stored - 1, 0)
    # The same prefix with another continuation: the draft block before it is another one.
    other = BlockHasher(1, model="m").hashes([*range(stored - 1), 99])
    assert lookup_groups(groups, other) == (stored - 2, 0)


def test_state_group_hits_where_its_state_was_saved(manager):
    full, state = BlockGroup(0), BlockGroup(1, window=1)
    store(manager, full.keys(CHAIN))
    store(manager, state.keys(CHAIN)[3:4])
    assert lookup_groups([(manager, full), (manager, state)], CHAIN).num_blocks == 4


def test_status_and_metrics(manager):
    group = BlockGroup()
    store(manager, group.keys(CHAIN)[:3])
    store(manager, group.keys(CHAIN)[3:5], complete=False)
    found = lookup_groups([(manager, group)], CHAIN)
    assert found == manager.lookup(group.keys(CHAIN)) == (3, 2)
    assert found.status is LookupStatus.PENDING
    metrics = manager.metrics()
    assert metrics["kv_offload_block_queries"] == 2 * len(CHAIN)
    assert metrics["kv_offload_block_hits"] == 6


def test_wrong_arguments_raise(manager):
    with pytest.raises(ValueError, match="groups is empty"):
        lookup_groups([], CHAIN)
    groups = BlockGroup(), BlockGroup(window=2)
    with pytest.raises(ValueError, match=r"the same id, among \[0, 0\].*an id of its own"):
        lookup_groups([(manager, group) for group in groups], CHAIN)
    assert lookup_groups([(manager, groups[0]), (OffloadManager(4), groups[1])], CHAIN) == (0, 0)
    for window, message in ((0, "window=0; pass an integer"), (1.5, "window is of type float")):
        with pytest.raises(ValueError, match=message):
            manager.lookup([], window=window)
