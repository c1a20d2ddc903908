"""Removals from a tier that fails, hangs or is closed: no discarded block is read again."""

import time

import pytest

from jaxkv._src.offload import tier_removals
from jaxkv._src.offload.tier_copies import TierCopies
from jaxkv._src.offload.tier_removals import TierRemovals
from tests.util.tier_blocks import TIMEOUT_S
from tests.util.tier_life_cycle import REQUESTS, Later, LifeCycle, end_all

pytestmark = pytest.mark.host_only


@pytest.fixture
def machine():
    return LifeCycle()


def discarded(machine, request):
    """Stores blocks, and discards them from the pool and the tier."""
    machine.store(request)
    end_all(machine)
    machine.discard(request)


def read_back(machine, request):
    """The number of blocks that a prefetch brings to the pool."""
    machine.copies.prefetch(request, None)
    end_all(machine)
    return machine.manager.lookup(request).num_blocks


def test_blocks_whose_removal_failed_are_not_read_and_removed_later(machine, caplog):
    copies, tier = machine.copies, machine.tier
    request = REQUESTS[0]
    discarded(machine, request[1:2])
    machine.later.run(fails=True)
    copies.poll()
    assert not copies.drain(0.0) and "injected" in caplog.text
    assert copies.metrics()["kv_offload_unremoved_blocks"] == 1
    assert not machine.later.calls  # not repeated at once
    in_tier = [*tier.blocks]
    assert read_back(machine, request[1:2]) == 0 and [*tier.blocks] == in_tier
    machine.now += tier_removals._RETRY_AFTER_S
    copies.poll()
    end_all(machine)
    assert copies.drain(0.0) and not [key for key in tier.blocks if key.startswith(request[1])]
    assert copies.metrics()["kv_offload_unremoved_blocks"] == 0


def test_a_block_stored_again_is_read_once_the_old_one_is_removed(machine):
    """The tier keeps what it has: the write of the new block has no effect before the removal."""
    request = REQUESTS[0][:1]
    discarded(machine, request)
    machine.later.run(fails=True)
    machine.serve(request, progress=3, fails=False)
    machine.manager.discard()
    assert read_back(machine, request) == 0
    machine.now += tier_removals._RETRY_AFTER_S
    machine.copies.poll()
    end_all(machine)
    machine.serve(request, progress=3, fails=False)
    machine.manager.discard()
    assert read_back(machine, request) == 1
    machine.ready_pages_hold_their_blocks()


def test_drain_repeats_failed_removals(machine, monkeypatch):
    monkeypatch.setattr(tier_removals, "_RETRY_AFTER_S", 0.01)
    errors = [OSError("injected"), OSError("injected")]

    def remove(names):
        if errors:
            raise errors.pop()

    machine.tier.remove = remove
    copies = TierCopies(machine.manager, machine.tier, machine.pages, TIMEOUT_S)
    copies.discard([b"x"])
    assert copies.drain(TIMEOUT_S) and not errors


@pytest.fixture
def removals(monkeypatch):
    """At most 8 blocks, 2 in one call; the time is 0."""
    for name, value in (("_MAX_BLOCKS", 8), ("_MAX_BATCH", 2), ("_MAX_CALLS", 2)):
        monkeypatch.setattr(tier_removals, name, value)
    return TierRemovals(lambda keys: None, Later(), lambda: 0.0)


def keys(*numbers):
    return [bytes([number]) for number in numbers]


def end_calls(removals, error=None):
    """Ends the calls in flight; the keys of each."""
    ended = removals._executor.calls
    removals._executor.calls = []
    for _, _, call in ended:
        call.set_exception(error) if error else call.set_result(None)
    return [arguments[0] for _, arguments, _ in ended]


def test_calls_of_a_tier_that_hangs_are_bounded(removals):
    """Also those of blocks that are discarded again and again."""
    removals.add(keys(0, 1, 2, 3, 4))
    for _ in range(10):
        removals.add(keys(0, 1, 4))
    assert len(removals) == 5 and len(removals._executor.calls) == 2
    assert end_calls(removals) == [keys(0, 1), keys(2, 3)]
    removals.poll()
    assert removals.remaining(keys(*range(8))) == {*keys(0, 1, 4)}
    for repeated in (keys(4, 0), keys(1)):
        assert end_calls(removals) == [repeated]
        removals.poll()
    assert removals.is_over()


def test_one_failed_removal_is_repeated_at_a_time(removals, monkeypatch):
    monkeypatch.setattr(tier_removals, "_RETRY_AFTER_S", 0.0)
    removals.add(keys(0, 1, 2, 3))
    end_calls(removals, OSError("injected"))
    for repeated in (keys(0, 1), keys(2, 3), keys(0, 1)):
        removals.poll()
        removals.poll()
        assert end_calls(removals, OSError("injected")) == [repeated]
    assert len(removals) == 4 and not removals.is_over()


def test_a_later_removal_of_the_same_block_decides(removals):
    removals.add(keys(0))
    removals.add(keys(0))
    first, second = removals._executor.calls
    first[-1].set_exception(OSError("injected"))
    removals.poll()
    assert len(removals) == 1
    second[-1].set_result(None)
    removals.poll()
    assert removals.is_over()


def test_beyond_the_limit_no_block_counts_as_removed(removals, caplog):
    removals.add(keys(*range(8)))
    assert not removals.remaining(keys(9))
    for _ in range(2):
        removals.add(keys(8))
    assert removals.remaining(keys(8, 9)) == {*keys(8, 9)} and len(removals) == 8
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    for _ in range(4):
        end_calls(removals)
        removals.poll()
    assert len(removals) == 0 and removals.remaining(keys(9)) and not removals.is_over()


def test_a_closed_tier_is_not_asked_again(removals, caplog):
    """It finds no block either."""
    removals.add(keys(0))
    end_calls(removals, ValueError("the tier is closed"))
    removals.poll()
    assert removals.is_over() and "the tier is closed" in caplog.text


def test_the_wait_has_a_limit(removals, monkeypatch):
    monkeypatch.setattr(removals, "_clock", time.monotonic)
    removals.add(keys(0))
    removals.wait(time.monotonic() + 0.01)
    end_calls(removals, OSError("injected"))
    removals.poll()
    removals.wait(time.monotonic() + 0.01)
    assert len(removals) == 1
