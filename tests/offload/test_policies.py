"""Eviction policies: order of LRU, and ARC compared with a transcription of the paper."""

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxkv._src.offload.policies import Arc, Lru
from jaxkv.offload import OffloadManager
from tests.util.arc_reference import ReferenceArc

pytestmark = pytest.mark.host_only


def keys(*names):
    return [str(name).encode() for name in names]


def store(manager, wanted):
    spec = manager.prepare_store(wanted)
    manager.start(spec)
    manager.complete(spec)
    return [*spec.evicted]


def assert_equal(arc, reference):
    for name in ("t1", "t2", "b1", "b2"):
        assert [*getattr(arc, name)] == keys(*getattr(reference, name)), name
    assert arc.target == reference.p


def run_arc(capacity, requests):
    manager, reference = OffloadManager(capacity, policy="arc"), ReferenceArc(capacity)
    for name in requests:
        hit = manager.lookup(keys(name)).num_blocks
        manager.touch(keys(name))
        store(manager, keys(name))
        assert bool(hit) == reference.request(name)
        assert_equal(manager._policy, reference)


@example(3, [7, 3, 4, 1, 3, 2, 1, 7, 4, 0, 2, 4, 5, 7])  # a target beyond the capacity
@given(st.integers(1, 5), st.lists(st.integers(0, 12), max_size=80))
def test_arc_is_that_of_the_paper(capacity, requests):
    run_arc(capacity, requests)


@pytest.mark.parametrize("capacity", [7, 50])
def test_arc_is_that_of_the_paper_for_scans_and_loops(capacity):
    draw = random.Random(capacity)
    requests: list[int] = []
    for _ in range(60):
        first = draw.randrange(8 * capacity)
        requests += (
            range(first, first + draw.randrange(2 * capacity)) if draw.random() < 0.3 else []
        )
        requests += [draw.randrange(capacity) for _ in range(capacity)]
    run_arc(capacity, requests)


@given(st.integers(1, 6), st.lists(st.lists(st.integers(0, 15), unique=True, max_size=6)))
def test_arc_inserts_several_blocks_as_one_after_the_other(capacity, requests):
    """With nothing in use: blocks of the call that are resident are not passed."""
    arc, single = Arc(capacity), Arc(capacity)
    for request in requests:
        resident = {*arc.t1, *arc.t2}
        new = [key for key in keys(*request) if key not in resident][:capacity]
        for policy in (arc, single):
            policy.touch([key for key in keys(*request) if key in resident])
        arc.apply(arc.plan(new, capacity - len(resident), lambda _: True))
        for key in new:
            free = capacity - len(single.t1) - len(single.t2)
            single.apply(
                single.plan([key], free, {*single.t1, *single.t2}.difference(new).__contains__)
            )
        for name in ("t1", "t2", "b1", "b2"):
            assert [*getattr(arc, name)] == [*getattr(single, name)], name
        assert arc.target == single.target


@pytest.mark.parametrize("policy", [Lru, Arc])
def test_planning_changes_nothing(policy):
    made = policy(5)
    made.apply(made.plan(keys(*"abcd"), 5, lambda _: True))
    before = {name: [*v] if hasattr(v, "__iter__") else v for name, v in vars(made).items()}
    assert made.plan(keys(*"xyz"), 1, lambda _: True).victims == keys("a", "b")
    after = {name: [*v] if hasattr(v, "__iter__") else v for name, v in vars(made).items()}
    assert after == before


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_tail_of_a_request_is_evicted_before_its_head(policy):
    manager = OffloadManager(4, policy=policy)
    store(manager, keys(*"abcd"))
    assert store(manager, keys("x")) == keys("d")
    manager.touch(keys(*"abc"))
    assert store(manager, keys("y")) == keys("x")
    assert store(manager, keys("z")) == keys("y" if policy == "arc" else "c")


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_tail_is_evicted_before_the_head_after_chunked_prefill(policy):
    """Each chunk passes the request from its head: the head is refreshed, not evicted."""
    manager = OffloadManager(4, policy=policy)
    for end in (2, 4):
        store(manager, keys(*"abcdef"[:end]))
    last = manager.prepare_store(keys(*"abcdef"))
    assert (last.evicted, last.num_refused) == ((), 2)
    assert store(manager, keys("x")) == keys("d")


def test_touch_keeps_the_more_recently_used_request():
    manager = OffloadManager(4)
    store(manager, keys(*"ab"))
    store(manager, keys(*"cd"))
    manager.touch(keys(*"ab"))
    assert store(manager, keys(*"xy")) == keys("d", "c")


def test_arc_keeps_blocks_used_twice_during_a_scan():
    manager = OffloadManager(4, policy="arc")
    store(manager, keys(*"ab"))
    manager.touch(keys(*"ab"))
    for name in range(20):
        store(manager, keys(name))
    assert manager.lookup(keys(*"ab")).num_blocks == 2
