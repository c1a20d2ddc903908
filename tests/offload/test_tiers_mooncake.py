"""`MooncakeTier` against a real master on loopback, which is killed and started again.

What no real master does at a given moment, a store in this process does.
"""

import os
import threading
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from jaxkv._src.offload.tiers import block_file, mooncake
from jaxkv.offload import MooncakeTier
from tests.util.mooncake_master import start_master
from tests.util.tier_blocks import TIMEOUT_S, all_there, content, key, read, write

pytestmark = pytest.mark.host_only

BLOCK_BYTES = 5000


@pytest.fixture(autouse=True)
def patient():
    """A busy machine may answer late, which counts as no answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mooncake, "_CONTAINS_WITHIN_S", TIMEOUT_S)
        yield


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    with start_master(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


@pytest.fixture(scope="module")
def tiers(master):
    """One lends memory; the other reads from it, as a client of another machine would."""
    made = [master.tier(BLOCK_BYTES), master.tier(BLOCK_BYTES, segment_bytes=0, num_threads=1)]
    yield made
    for tier in made:
        tier.close()


@pytest.fixture(scope="module")
def tier(tiers):
    return tiers[0]


def test_blocks_are_shared_by_clients(tiers):
    keys = [key(i) for i in range(20)]
    blocks = [content(one, BLOCK_BYTES) for one in keys]
    pages = np.zeros((20, BLOCK_BYTES), np.uint8)
    before = [tier.metrics() for tier in tiers]
    assert tiers[1].contains(keys) == [False] * 20
    written = [
        tiers[0].write(one, memoryview(block)) for one, block in zip(keys, blocks, strict=True)
    ]
    assert all(future.result(TIMEOUT_S) for future in written)
    assert tiers[1].contains([*keys, key(99)]) == [True] * 20 + [False]
    found = [tiers[1].read(one, page.data) for one, page in zip(keys, pages, strict=True)]
    assert all(future.result(TIMEOUT_S) for future in found)
    assert [page.tobytes() for page in pages] == blocks
    after = [tier.metrics() for tier in tiers]
    grown = [{name: b[name] - a[name] for name in a} for a, b in zip(before, after, strict=True)]
    assert grown[0]["kv_offload_tiering_write_bytes"] == 20 * BLOCK_BYTES
    assert grown[1]["kv_offload_tier_read_blocks"] == grown[1]["kv_offload_tier_block_hits"] == 20
    assert after[1]["kv_offload_tier_errors"] == 0


def test_misses_and_removed_blocks(tier):
    assert write(tier, key(30)) and write(tier, key(30)) and read(tier, key(30))
    tier.remove([key(30), key(31)])
    assert tier.contains([key(30)]) == [False] and not read(tier, key(30))
    assert write(tier, key(30)) and read(tier, key(30))
    assert tier.metrics()["kv_offload_tier_errors"] == 0


def test_a_closed_tier_removes_nothing(master, tier):
    assert write(tier, key(32))
    closed = master.tier(BLOCK_BYTES, segment_bytes=0)
    closed.close()
    with pytest.raises(ValueError, match=r"MooncakeTier\.remove: the tier is closed"):
        closed.remove([key(32)])
    assert tier.contains([key(32)]) == [True]


def put(tier, one, content):
    """An object in the place of a block, as another client could write it."""
    memory = np.frombuffer(content, np.uint8).copy()
    address = memory.ctypes.data
    assert tier._store.register_buffer(address, memory.nbytes) == 0
    assert tier._store.put_from(tier._object_name(one), address, memory.nbytes) == 0
    assert tier._store.unregister_buffer(address) == 0


@pytest.mark.parametrize("place", [0, 40, block_file.ALIGNMENT, -1])
def test_changed_blocks_are_misses_and_removed(tier, caplog, place):
    one = key(40 + place)
    block = content(one, BLOCK_BYTES)
    changed = bytearray(block_file.header(one, memoryview(block)) + block)
    changed[place] ^= 1
    put(tier, one, changed)
    before = tier.metrics()["kv_offload_tier_corrupt_blocks"]
    assert tier.contains([one]) == [True] and not read(tier, one)
    assert tier.metrics()["kv_offload_tier_corrupt_blocks"] == before + 1
    assert tier.contains([one]) == [False] and write(tier, one) and read(tier, one)


def test_blocks_of_another_size_are_misses(tier):
    for one, size in ((key(50), 100), (key(51), 100_000)):
        put(tier, one, bytes(size))
        assert tier.contains([one]) == [True] and not read(tier, one)


def test_errors(master, monkeypatch):
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"block_bytes": 0}, "block_bytes=0"),
        ({"block_bytes": 1, "segment_bytes": 0.5}, "segment_bytes is of type float"),
        ({"block_bytes": 1, "segment_bytes": -1}, "segment_bytes=-1"),
        ({"block_bytes": 1, "num_threads": 0}, "num_threads=0"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            master.tier(**options)

    for metadata, words in (
        ("10.0.0.1:2379", "'http://10.0.0.1:2379/metadata' .* 'etcd://10.0.0.1:2379'"),
        ("htpp://10.0.0.1/metadata", "'etcd://HOST:PORT' for etcd, or 'P2PHANDSHAKE' for none"),
        ("", "'http://HOST:PORT/metadata'"),
    ):
        with pytest.raises(ValueError, match=f"metadata='{metadata}' is not a URL.* {words}"):
            MooncakeTier(1, host="10.0.0.7", master="10.0.0.1:50051", metadata=metadata)

    class Refused:  # Mooncake itself tries for 90 s
        setup = staticmethod(lambda *arguments: -1)

    monkeypatch.setattr("mooncake.store.MooncakeDistributedStore", Refused)
    with pytest.raises(ConnectionError, match=r"error -1 .* is the master running"):
        master.tier(1)


def test_a_master_that_does_not_answer_is_asked_seldom(tier, monkeypatch, caplog):
    """A lookup that hangs ends in time; until the next attempt, nothing is asked."""
    assert write(tier, key(60))
    asked, started, ends = [], threading.Event(), threading.Event()

    def hang(*arguments):
        asked.append(arguments)
        started.set()
        ends.wait(TIMEOUT_S)
        return [1]

    class Hanging:
        health_check = staticmethod(lambda: 0)
        batch_is_exist = batch_get_into = batch_put_from = staticmethod(hang)

    monkeypatch.setattr(mooncake, "_CONTAINS_WITHIN_S", 0.02)
    monkeypatch.setattr(mooncake, "_RETRY_AFTER_S", 3600.0)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "_store", Hanging())
        assert tier.contains([key(60)]) == [False] and started.wait(TIMEOUT_S)
        assert tier.contains([key(60)]) == [False] and not read(tier, key(60))
        assert not write(tier, key(60))
        assert len(asked) == 1
    ends.set()
    assert "error -901" in caplog.text
    tier._retry_at = 0.0
    monkeypatch.undo()
    assert all_there(tier, [key(60)])


class Store:
    """A store in this process: it has all blocks, and answers `num_answers` questions."""

    def __init__(self, num_answers=0, refusals=()):
        self.num_answers, self.asked, self.go = num_answers, [], threading.Event()
        self.refusals, self.registered, self.sources = [*refusals], [], []
        self.removed, self.removal = [], 0

    def health_check(self):
        return 0

    def batch_is_exist(self, names):
        self.asked.append(len(names))
        if len(self.asked) > self.num_answers:
            self.go.wait(TIMEOUT_S)
        return [1] * len(names)

    def register_buffer(self, address, num_bytes):
        if self.refusals:
            return self.refusals.pop()
        self.registered.append(address)
        return 0

    def batch_put_from(self, names, addresses, sizes):
        self.sources += addresses
        return [0] * len(names)

    def batch_remove(self, names, force):
        self.removed.append([*names])
        return [self.removal] * len(names)

    def close(self):
        self.go.set()


def tier_on(store, monkeypatch):
    monkeypatch.setattr(mooncake, "_client", lambda *arguments: store)
    return MooncakeTier(BLOCK_BYTES, host="", master="", metadata="P2PHANDSHAKE", num_threads=1)


def test_what_the_master_has_not_answered_in_time_is_a_miss(monkeypatch):
    """A long question does not turn off a tier whose master answers parts of it."""
    monkeypatch.setattr(mooncake, "_CONTAINS_WITHIN_S", 0.5)
    monkeypatch.setattr(mooncake, "_MAX_NAMES", 4)
    store = Store(num_answers=2)
    with closing(tier_on(store, monkeypatch)) as tier:
        assert tier.contains([key(i) for i in range(10)]) == [True] * 8 + [False] * 2
        assert store.asked == [4, 4, 2] and tier.metrics()["kv_offload_tier_errors"] == 0
        assert write(tier, key(0))
        assert tier.contains([key(0)]) == [False]  # no answer at all: now it is off
        assert tier.metrics()["kv_offload_tier_errors"] == 1 and not write(tier, key(1))


def test_no_question_is_asked_after_its_time(monkeypatch):
    monkeypatch.setattr(mooncake, "_MAX_NAMES", 4)
    store, answers = Store(num_answers=9), list[int]()
    with closing(tier_on(store, monkeypatch)) as tier:
        tier._ask([key(i) for i in range(10)], time.monotonic(), answers)
    assert not store.asked and not answers


def test_a_removal_after_a_lookup_without_an_answer_is_not_lost(monkeypatch):
    """The master is slow for a moment, which turns off copies."""
    monkeypatch.setattr(mooncake, "_CONTAINS_WITHIN_S", 0.02)
    store = Store()
    with closing(tier_on(store, monkeypatch)) as tier:
        assert tier.contains([key(0)]) == [False] and not write(tier, key(0))
        tier.remove([key(0)])
        assert store.removed == [[tier._object_name(key(0))]]


def test_removals_that_fail_raise(monkeypatch):
    """Without an answer, the next one does so immediately."""
    store = Store()
    with closing(tier_on(store, monkeypatch)) as tier:
        store.removal = -600
        for _ in range(2):
            with pytest.raises(OSError, match="error -600"):
                tier.remove([key(0)])
        store.removal = -704  # not there
        tier.remove([key(0)])
        store.removal = -901
        with pytest.raises(OSError, match="error -901"):
            tier.remove([key(0)])
        with pytest.raises(ConnectionError, match="does not answer"):
            tier.remove([key(0)])
        assert len(store.removed) == 4 and tier.metrics()["kv_offload_tier_errors"] == 4
        tier._remove_at = 0.0
        monkeypatch.setattr(store, "health_check", lambda: 1)
        with pytest.raises(ConnectionError, match="does not answer"):
            tier.remove([key(0)])


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, which the child does not use
def test_the_child_of_a_fork_does_not_use_the_connection(monkeypatch):
    """Not even to close it: the master would give up the memory that the parent lends."""
    store = Store(num_answers=9)
    with closing(tier_on(store, monkeypatch)) as tier:
        if not (child := os.fork()):
            try:
                found = tier.contains([key(0)])
                with pytest.raises(ValueError, match="child of a fork"):
                    tier.remove([key(0)])
                tier.close()
                os._exit(any(found) or bool(store.asked or store.removed) or store.go.is_set())
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert tier.contains([key(0)]) == [True]


def test_memory_that_mooncake_refuses_is_not_used(monkeypatch, caplog):
    store = Store(refusals=[-1])
    with closing(tier_on(store, monkeypatch)) as tier:
        assert not write(tier, key(0)) and "refused" in caplog.text and not store.sources
        assert write(tier, key(0)) and store.sources == store.registered


def test_serving_goes_on_without_the_master(master, tier, monkeypatch, caplog):
    monkeypatch.setattr(mooncake, "_RETRY_AFTER_S", 0.1)
    assert write(tier, key(70))
    master.kill()
    assert not read(tier, key(70)) and not write(tier, key(71))
    assert tier.contains([key(70)]) == [False]
    # The client may have noticed the end before it was asked.
    assert "error -900" in caplog.text or tier._store.health_check()
    assert tier.metrics()["kv_offload_tier_errors"] > 0
    master.start()
    deadline = time.monotonic() + TIMEOUT_S
    while not write(tier, key(72)):  # the client connects, and lends its memory again
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert all_there(tier, [key(72)])
    assert not read(tier, key(70))  # the master has forgotten it
