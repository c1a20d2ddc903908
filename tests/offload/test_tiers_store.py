"""`TieredStore`, and the queue that tiers share."""

import threading
from typing import Any

import numpy as np
import pytest

from jaxkv._src.offload.tiers import queued
from jaxkv.offload import FileTier, Tier, TieredStore
from tests.util.tier_blocks import TIMEOUT_S, all_there, key, read, write

pytestmark = pytest.mark.host_only


class SlowTier(queued.QueuedTier):
    """One thread, which waits for `go`; reads of `key(1)` fail."""

    def __init__(self):
        super().__init__("SlowTier", 4, 1)
        self.go, self.done = threading.Event(), []
        self._start()

    def _contains(self, keys):
        return [False] * len(keys)

    def remove(self, keys):
        pass

    def _read(self, copies):
        return self._run_copies("read", copies)

    def _write(self, copies):
        return self._run_copies("write", copies)

    def _run_copies(self, name, copies):
        assert self.go.wait(TIMEOUT_S)
        self.done.append(name)
        if name == "read" and copies[0].key == key(1):
            raise RuntimeError("injected")
        return [True]


def test_reads_run_before_writes_and_failures_are_misses(monkeypatch, caplog):
    monkeypatch.setattr(queued, "MAX_QUEUED", 2)
    tier, buffer = SlowTier(), memoryview(bytearray(4))
    futures = [tier.write(key(0), buffer)]
    while tier.metrics()["kv_offload_tier_queued_writes"]:
        pass  # taken by the thread
    futures += [tier.write(key(i), buffer) for i in range(2)]
    futures += [tier.read(key(i), buffer) for i in range(2)]
    refused = tier.write(key(3), buffer)
    assert refused.done() and not refused.result()
    assert not any(future.done() or future.cancel() for future in futures)
    tier.go.set()
    results = [future.result(TIMEOUT_S) for future in futures]
    assert results == [True, True, True, True, False]
    assert tier.done == ["write", "read", "read", "write", "write"]
    assert "injected" in caplog.text and "2 writes are waiting" in caplog.text
    metrics = tier.metrics()
    assert metrics["kv_offload_tier_refused_copies"] == metrics["kv_offload_tier_errors"] == 1
    assert metrics["kv_offload_tiering_write_bytes"] == 12
    tier.close()


def test_missing_results_are_misses(monkeypatch, caplog):
    """A thread that ended would leave the copies of others queued."""
    tier, buffer = SlowTier(), memoryview(bytearray(4))
    monkeypatch.setattr(tier, "_write", lambda copies: [])
    assert not tier.write(key(0), buffer).result(TIMEOUT_S) and "0 results" in caplog.text
    tier.go.set()
    assert tier.read(key(0), buffer).result(TIMEOUT_S)
    tier.close()


def test_a_store_whose_second_tier_fails_is_a_miss(monkeypatch, caplog):
    first, second = SlowTier(), SlowTier()

    def fail(*_):
        raise OSError("injected")

    monkeypatch.setattr(second, "read", fail)
    read_of_both = TieredStore([first, second]).read(key(1), memoryview(bytearray(4)))
    first.go.set()
    assert not read_of_both.result(TIMEOUT_S) and "injected" in caplog.text
    for tier in (first, second):
        tier.close()


def test_close_ends_queued_copies_as_misses():
    tier, buffer = SlowTier(), memoryview(bytearray(4))
    futures = [tier.read(key(0), buffer) for _ in range(3)]
    while tier.metrics()["kv_offload_tier_queued_reads"] == 3:
        pass
    futures.append(tier.write(key(0), buffer))
    closing = threading.Thread(target=tier.close)
    closing.start()
    assert [future.result(TIMEOUT_S) for future in futures[1:]] == [False] * 3
    tier.go.set()
    closing.join(TIMEOUT_S)
    assert futures[0].result(TIMEOUT_S)
    metrics = tier.metrics()
    assert metrics["kv_offload_tier_read_misses"] == 2
    assert metrics["kv_offload_tier_write_failures"] == 1
    with pytest.raises(ValueError, match="closed"):
        tier.read(key(0), buffer)


def test_a_callback_may_close_the_tier():
    """It runs in the thread of the tier, which cannot wait for itself."""
    tier, closed = SlowTier(), threading.Event()

    def close(_):
        tier.close()
        closed.set()

    tier.read(key(0), memoryview(bytearray(4))).add_done_callback(close)
    tier.go.set()
    assert closed.wait(TIMEOUT_S)


def test_buffers_are_validated():
    tier = SlowTier()
    with pytest.raises(ValueError, match="has 5 bytes; blocks have 4"):
        tier.write(key(0), memoryview(bytes(5)))
    with pytest.raises(ValueError, match="read-only"):
        tier.read(key(0), memoryview(bytes(4)))
    with pytest.raises(ValueError, match="not contiguous"):
        tier.write(key(0), memoryview(bytes(8))[::2])
    wrong: Any
    for wrong in (bytearray(4), np.zeros(4, np.uint8), 4):
        for call in (tier.read, tier.write):
            with pytest.raises(ValueError, match=f"type {type(wrong).__name__}; pass a memoryview"):
                call(key(0), wrong)
    tier.close()


def test_a_store_reads_from_the_first_tier_that_has_the_block(tmp_path):
    tiers = [FileTier(tmp_path / str(i), 100, 1 << 20) for i in range(2)]
    store: Tier = TieredStore(tiers)
    assert write(store, key(0)) and write(tiers[1], key(1))
    assert store.contains([key(0), key(1), key(2)]) == [True, True, False]
    assert all_there(store, [key(0), key(1)]) and not read(store, key(2))
    metrics = store.metrics()
    assert metrics["kv_offload_tier_read_blocks_0"] == 1
    assert metrics["kv_offload_tier_read_blocks_1"] == 1
    store.remove([key(0)])
    assert not any(tier.contains([key(0)])[0] for tier in tiers)
    store.close()


def test_a_store_writes_to_the_tiers_that_are_open():
    tiers, buffer = [SlowTier() for _ in range(3)], memoryview(bytearray(4))
    store = TieredStore(tiers)
    for closed in (0, 2):
        tiers[closed].close()
    written = store.write(key(0), buffer)
    assert not written.done()  # the buffer still belongs to the one in the middle
    tiers[1].go.set()
    assert written.result(TIMEOUT_S)
    tiers[1].close()
    with pytest.raises(ValueError, match="closed"):
        store.write(key(0), buffer)


def test_a_store_reads_from_the_tiers_that_are_open(tmp_path):
    tiers = [FileTier(tmp_path / str(i), 100, 1 << 20) for i in range(3)]
    store = TieredStore(tiers)
    assert write(store, key(0)) and write(tiers[2], key(1))
    tiers[0].close()
    tiers[1].close()
    assert tiers[0].contains([key(0)]) == [False]
    assert all_there(store, [key(0), key(1)]) and not read(store, key(2))
    tiers[2].close()
    assert store.contains([key(0)]) == [False]
    with pytest.raises(ValueError, match="closed"):
        read(store, key(0))


def test_a_store_removes_from_all_tiers(tmp_path, monkeypatch, caplog):
    tiers = [FileTier(tmp_path / str(i), 100, 1 << 20) for i in range(2)]
    store = TieredStore(tiers)
    assert write(store, key(0))

    def fail(keys):
        raise OSError("injected")

    monkeypatch.setattr(tiers[0], "remove", fail)
    with pytest.raises(OSError, match="injected"):
        store.remove([key(0)])
    assert tiers[1].contains([key(0)]) == [False] and "injected" in caplog.text

    def closed(keys):
        raise ValueError("closed")

    monkeypatch.setattr(tiers[1], "remove", closed)
    for _ in range(2):  # a failure may end, unlike a closed tier
        with pytest.raises(OSError, match="injected"):
            store.remove([key(0)])
        store._tiers = store._tiers[::-1]
    store.close()


def test_tiers_of_a_store_have_blocks_of_one_size(tmp_path):
    tiers = [FileTier(tmp_path, size, 1 << 20) for size in (100, 200)]
    for wrong in (tiers, []):
        with pytest.raises(ValueError, match="TieredStore"):
            TieredStore(wrong)
    one: Any = tiers[0]
    with pytest.raises(TypeError, match=r"TieredStore: tiers=.* sequence of tiers"):
        TieredStore(one)
    for tier in tiers:
        tier.close()
