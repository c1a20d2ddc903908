"""One manager per rank, with different blocks: agreement on the minimum, as in docs/offload.md."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv.offload import OffloadManager
from tests.offload.test_engine import step_result

pytestmark = pytest.mark.host_only

KEYS = [bytes([i]) for i in range(6)]
REQUESTS = [KEYS[:5], [*KEYS[:2], *(bytes([i]) for i in (12, 13))], [bytes([i]) for i in (21, 22)]]


def agreed(ranks, keys, window=None):
    """The recipe; between processes the minimum is that of an all-reduce."""
    n = len(keys)
    while (found := min(rank.lookup(keys[:n], window).num_blocks for rank in ranks)) < n:
        n = found
    return n


def copied(engine):
    engine.issue(engine.next_batch(), step_result())
    return engine.poll()


def test_engines_load_the_prefix_that_both_have_and_are_alike_again():
    ranks, keys = [jaxkv.OffloadEngine(16, batch_sizes=(8,)) for _ in range(2)], KEYS[:5]
    for rank in ranks:
        rank.store(keys, [*range(5)])
        copied(rank)
    ranks[1].discard([keys[2]])
    assert [rank.lookup(keys).num_blocks for rank in ranks] == [5, 2]

    n = agreed(ranks, keys)
    for rank in ranks:
        rank.touch(keys)
        load = rank.load(keys[:n], [*range(10, 10 + n)])
        assert copied(rank) == [load] and load.keys == (*keys[:2],) and not load.failed
        rank.store(keys, [*range(10, 15)])  # of the computed blocks, each stores those it lacks
        copied(rank)
    assert agreed(ranks, keys) == 5 == ranks[1].lookup(keys).num_blocks
    assert [*ranks[0].manager._policy._order] == [*ranks[1].manager._policy._order]


def test_windows_are_agreed_upon_in_several_rounds():
    """The shorter prefix needs another window, of which the other rank lacks a block."""
    ranks = OffloadManager(16), OffloadManager(16)
    for rank, lost in zip(ranks, (KEYS[3], KEYS[4]), strict=True):
        run(rank, rank.prepare_store(KEYS))
        rank.discard([lost])
    assert [rank.lookup(KEYS, 2).num_blocks for rank in ranks] == [6, 4]
    assert agreed(ranks, KEYS, 2) == 3
    for rank in ranks:
        run(rank, rank.prepare_load(KEYS[1:3]))


def run(rank, spec):
    rank.start(spec)
    rank.complete(spec)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 24), st.sampled_from(REQUESTS))),
    st.sampled_from(["lru", "arc"]),
    st.sampled_from(["through", "second_use"]),
)
def test_ranks_that_lose_blocks_load_the_same_ones(history, policy, write):
    ranks = [OffloadManager(7, policy=policy, write=write) for _ in range(2)]
    for place, lost, keys in history:
        ranks[place].discard([bytes([lost])])
        n = agreed(ranks, keys)
        assert n == min(rank.lookup(keys).num_blocks for rank in ranks)
        for rank in ranks:
            rank.touch(keys)
            run(rank, rank.prepare_load(keys[:n]))
            run(rank, rank.prepare_store(keys))
        assert len({rank.lookup(keys) for rank in ranks}) == 1
    if policy == "lru" and write == "through":
        for rank in ranks:  # as many new blocks as pages: the differences are evicted
            run(rank, rank.prepare_store([bytes([i]) for i in range(30, 37)]))
        assert [*ranks[0]._policy._order] == [*ranks[1]._policy._order]
