"""Copies between an engine and a tier: random life cycles, and single cases."""

import subprocess
import sys
import threading
import time
from concurrent.futures import wait

import pytest
from hypothesis import settings

from jaxkv._src.offload import tier_copies
from jaxkv._src.offload.tier_copies import TierCopies
from jaxkv._src.offload.tiers.queued import MAX_KEY_BYTES, MAX_QUEUED
from jaxkv.offload import BlockState
from tests.util.tier_life_cycle import NUM_PAGES, PARTS, REQUESTS, TIMEOUT_S, LifeCycle, end_all

pytestmark = pytest.mark.host_only

TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = settings(stateful_step_count=50, deadline=None)


@pytest.fixture
def machine():
    return LifeCycle()


def in_tier_only(machine, request):
    machine.store(request)
    end_all(machine)
    machine.manager.discard(request)


def test_blocks_of_the_tier_are_found_once_they_are_read(machine):
    copies, manager = machine.copies, machine.manager
    request = REQUESTS[0][:4]
    in_tier_only(machine, request)
    prefetch = copies.prefetch(request, None)
    assert not prefetch.done and manager.lookup(request) == (0, 0)
    machine.later.run()
    copies.poll()
    assert not prefetch.done and manager.lookup(request) == (0, 4)
    end_all(machine)
    assert prefetch.done and manager.lookup(request) == (4, 0)
    assert manager.metrics()["kv_offload_promoted_blocks"] == 4
    assert manager.metrics()["kv_offload_cascaded_blocks"] == 4
    assert manager.metrics()["kv_offload_loaded_blocks"] == 0


def test_a_block_that_cannot_be_read_ends_the_prefix(machine):
    copies, manager, tier = machine.copies, machine.manager, machine.tier
    request = REQUESTS[0][:4]
    in_tier_only(machine, request)
    prefetch = copies.prefetch(request, None)
    machine.later.run()
    copies.poll()
    bad = next(i for i, call in enumerate(tier.calls) if call[1] == request[2] + b"V")
    tier.end(bad, tier.land(bad, fails=True))
    end_all(machine)
    assert prefetch.done and manager.lookup(request) == (2, 0)
    assert manager.state(request[2]) is None and manager.state(request[3]) is BlockState.READY


def test_a_block_of_which_a_part_is_lost_is_a_miss(machine):
    copies, manager, tier = machine.copies, machine.manager, machine.tier
    request = REQUESTS[0]
    in_tier_only(machine, request)
    tier.remove([request[2] + b"V"])
    copies.prefetch(request, None)
    machine.later.run()
    copies.poll()
    assert manager.lookup(request) == (0, 2)


def test_blocks_discarded_during_their_write_are_not_read(machine):
    """Their write ends after the tier has removed them, and a lookup finds them at that moment."""
    copies, manager, tier = machine.copies, machine.manager, machine.tier
    request = REQUESTS[0][:1]
    machine.store(request)
    machine.discard(request)
    machine.later.run()
    results = [tier.land(number, fails=False) for number in (0, 1)]
    assert len(tier.blocks) == 2
    early, late = copies.prefetch(request, None), copies.prefetch(request, None)
    machine.later.run()
    copies.poll()  # the future of the write is not done yet
    assert early.done and manager.state(request[0]) is None
    for result in results:
        tier.end(0, result)
    machine.later.run()  # answered before the block is removed again
    copies.poll()
    assert late.done and manager.state(request[0]) is None
    machine.later.run()
    assert not tier.blocks


def test_blocks_discarded_after_a_lookup_are_not_read(machine):
    copies, manager = machine.copies, machine.manager
    request = REQUESTS[0]
    in_tier_only(machine, request)
    copies.prefetch(request, None)
    machine.later.run()
    machine.discard(request[1:2])
    copies.poll()
    assert manager.lookup(request) == (0, 1)


def test_a_window_reads_its_last_blocks_only(machine):
    copies, manager = machine.copies, machine.manager
    request = REQUESTS[0][:4]
    in_tier_only(machine, request)
    copies.prefetch(request, 2)
    end_all(machine)
    assert [manager.state(key) for key in request] == [None, None, *[BlockState.READY] * 2]


def test_a_window_without_room_is_not_read_in_part(machine):
    """Six of the eight blocks, where half of the pages hold four: the prefix of four, or none."""
    copies, manager = machine.copies, machine.manager
    request = REQUESTS[2]
    for part in (request[:4], request[4:]):
        in_tier_only(machine, part)
    machine.tier.remove([key + part for key in request[:1] for part in (b"K", b"V")])
    copies.prefetch(request, 6)
    end_all(machine)
    assert manager.metrics()["kv_offload_promoted_blocks"] == 0
    copies.prefetch(request, 3)
    end_all(machine)
    assert manager.lookup(request, 3) == (8, 0)
    assert manager.metrics()["kv_offload_promoted_blocks"] == 3


def test_a_window_needs_pages_that_are_not_in_use(machine):
    copies, manager = machine.copies, machine.manager
    in_tier_only(machine, REQUESTS[0])
    manager.prepare_store(REQUESTS[2][:6])
    copies.prefetch(REQUESTS[0], 3)
    end_all(machine)
    assert manager.lookup(REQUESTS[0], 3) == (2, 0)


def test_drain_waits_for_removals(machine):
    copies, tier = machine.copies, machine.tier
    in_tier_only(machine, REQUESTS[0])
    machine.discard(REQUESTS[0])
    assert not copies.drain(0.0)
    end_all(machine)
    assert copies.drain(0.0) and not tier.blocks


@pytest.mark.parametrize("is_hit", [True, False])
def test_a_pool_that_is_not_in_use_is_reported_after_the_drain(machine, is_hit):
    """Writes and removals have ended by then; a lookup without a hit is not reported."""
    engine, later, tier = machine.engine, machine.later, machine.tier
    in_tier_only(machine, REQUESTS[2][:2])
    machine.store(REQUESTS[0][:1])
    prefetch = engine.prefetch(REQUESTS[2][:1] if is_hit else [b"missing"])
    later.run()
    machine.discard(REQUESTS[2][1:2])
    machine.pages.is_in_use = lambda: False

    def end():
        for _ in PARTS:
            tier.end(0, tier.land(0, fails=False))
        while machine.copies._writes:
            time.sleep(0.001)
        time.sleep(0.05)  # a drain that does not wait for the removal is over by then
        later.run()

    timer = threading.Timer(0.05, end)
    timer.start()
    if is_hit:
        with pytest.raises(RuntimeError, match="no longer in use"):
            engine.drain(TIMEOUT_S)
    else:
        assert engine.drain(TIMEOUT_S)
    assert prefetch.done and not machine.copies._writes and not tier.calls and not later.calls
    timer.join()
    assert engine.drain(TIMEOUT_S)


def test_blocks_whose_removal_is_not_over_are_not_read(machine):
    """Also if the answer comes after the removal, but is older."""
    copies, manager = machine.copies, machine.manager
    request = REQUESTS[0]
    in_tier_only(machine, request)
    machine.discard(request[1:2])
    copies.prefetch(request, None)
    machine.later.run(first="_ask")
    machine.later.run(first="_remove")
    copies.poll()
    assert manager.lookup(request) == (0, 1)


def test_a_removal_that_hangs_delays_no_lookup(machine):
    ends = threading.Event()
    machine.tier.remove = lambda names: ends.wait()
    copies = TierCopies(machine.manager, machine.tier, machine.pages, TIMEOUT_S)
    copies.discard([b"x"])
    answer = copies.prefetch(REQUESTS[0], None)._answer
    try:
        assert answer and wait([answer], 30).done and not copies.drain(0.0)
    finally:
        ends.set()
    assert copies.drain(30.0)


def test_requests_wait_for_the_reads_of_others_and_do_not_read_twice(machine):
    copies, manager, tier = machine.copies, machine.manager, machine.tier
    in_tier_only(machine, REQUESTS[0][:4])
    prefetches = [copies.prefetch(REQUESTS[i][:4], None) for i in (0, 1)]
    while machine.later.calls:
        machine.later.run()
    copies.poll()
    assert len(tier.calls) == 8 and [p.done for p in prefetches] == [False, False]
    end_all(machine)
    assert [p.done for p in prefetches] == [True, True]
    assert manager.lookup(REQUESTS[1]).num_blocks == 2


def test_late_answers_read_nothing(machine):
    copies, tier = machine.copies, machine.tier
    in_tier_only(machine, REQUESTS[0][:4])
    prefetch = copies.prefetch(REQUESTS[0][:4], None)
    machine.now += TIMEOUT_S
    copies.poll()
    assert prefetch.done
    machine.later.run()
    copies.poll()
    assert not tier.calls


def test_a_slow_tier_leaves_pages_to_stores(machine):
    copies, manager = machine.copies, machine.manager
    machine.store(REQUESTS[2])
    assert copies.metrics()["kv_offload_cascading_blocks"] == NUM_PAGES // 2
    assert copies.metrics()["kv_offload_uncascaded_blocks"] == NUM_PAGES // 2
    assert len(manager.prepare_store(REQUESTS[0]).keys) == NUM_PAGES // 2


def test_promotions_leave_pages_to_stores(machine):
    copies, manager = machine.copies, machine.manager
    request = REQUESTS[2]
    for part in (request[:4], request[4:]):
        in_tier_only(machine, part)
    copies.prefetch(request, None)
    machine.later.run()
    copies.poll()
    assert manager.lookup(request) == (0, NUM_PAGES // 2)
    assert len(manager.prepare_store(REQUESTS[0]).keys) == NUM_PAGES // 2


@pytest.fixture
def short_queues(monkeypatch):
    """A machine whose tier queues five parts of each kind: two blocks."""
    monkeypatch.setattr(tier_copies, "MAX_QUEUED", 5)
    return LifeCycle()


@pytest.mark.parametrize("window", [None, 2, 3])
def test_no_block_is_evicted_for_a_read_that_the_tier_would_refuse(short_queues, window):
    copies, manager = short_queues.copies, short_queues.manager
    for part in (REQUESTS[2][:2], REQUESTS[2][2:4]):
        in_tier_only(short_queues, part)
    others = manager.prepare_store([f"x{i}".encode() for i in range(NUM_PAGES)])
    manager.start(others)
    manager.complete(others)
    prefetches = [copies.prefetch(REQUESTS[2][:4], window) for _ in range(2)]
    while short_queues.later.calls:
        short_queues.later.run()
    copies.poll()
    # Without a window the head is of use; three blocks of a window are not to be had.
    expected = 2
    assert len(short_queues.tier.calls) == 2 * expected
    assert manager.metrics()["kv_offload_evicted_blocks"] == expected
    end_all(short_queues)
    assert all(prefetch.done for prefetch in prefetches)
    assert manager.lookup(REQUESTS[2][:4], window).num_blocks == (4 if window == 2 else 2)


def test_no_block_is_pinned_for_a_write_that_the_tier_would_refuse(short_queues):
    copies = short_queues.copies
    short_queues.store(REQUESTS[2][:3])
    short_queues.store(REQUESTS[2][3:])
    assert len(short_queues.tier.calls) == 4
    assert copies.metrics()["kv_offload_cascading_blocks"] == 2
    assert copies.metrics()["kv_offload_uncascaded_blocks"] == 6


@pytest.mark.parametrize("error", [ValueError("the tier is closed"), OSError("injected")])
def test_a_tier_that_takes_no_copies_is_a_miss(machine, error):
    copies, manager, tier = machine.copies, machine.manager, machine.tier

    def closed(*_):
        raise error

    tier.write = closed
    machine.store(REQUESTS[0])
    copies.poll()
    assert manager.metrics()["kv_offload_num_copies"] == 0


def test_errors(machine):
    copies, manager, tier = machine.copies, machine.manager, machine.tier
    limit = MAX_KEY_BYTES - len(PARTS[0])
    copies.check_keys("store", [b"0" * limit])
    with pytest.raises(ValueError, match=f"prefetch: a key of {limit + 1} bytes; at most {limit}"):
        copies.prefetch([b"0" * (limit + 1)], None)
    machine.pages.block_bytes = 32
    with pytest.raises(ValueError, match="block_bytes=16, and the pool needs 32"):
        TierCopies(manager, tier, machine.pages, 1.0)
    machine.pages.block_bytes = 16
    for seconds in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="tier_timeout_s"):
            TierCopies(manager, tier, machine.pages, seconds)


def test_only_written_blocks_count_as_cascaded(machine):
    manager, tier = machine.manager, machine.tier
    machine.store(REQUESTS[0][:2])
    for number in range(len(tier.calls)):
        tier.end(0, number > 0)
    machine.copies.poll()
    counts = manager.metrics()
    assert counts["kv_offload_cascaded_blocks"] == counts["kv_offload_aborted_blocks"] == 1
    assert counts["kv_offload_num_copies"] == 0


def test_a_lookup_that_fails_is_a_miss_and_is_logged(machine, caplog):
    prefetch = machine.copies.prefetch(REQUESTS[0], None)
    machine.later.run(fails=True)
    machine.copies.poll()
    assert prefetch.done and "injected" in caplog.text


def test_a_tier_that_does_not_answer_collects_no_prefetches(machine):
    copies = machine.copies
    prefetches = [copies.prefetch(REQUESTS[0], None) for _ in range(MAX_QUEUED + 1)]
    assert [p.done for p in prefetches[-2:]] == [False, True]
    assert len(copies._prefetches) == MAX_QUEUED


HANGS = """
import threading
from jaxkv._src.offload.daemon_executor import DaemonExecutor
executor = DaemonExecutor("test")
print(executor.submit(lambda: 1 / 0).exception(), executor.submit(max, 1, 2).result(), flush=True)
executor.submit(threading.Event().wait)
"""


def test_a_tier_that_hangs_does_not_keep_the_process():
    command = [sys.executable, "-c", HANGS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert run.stdout == "division by zero 2\n"
