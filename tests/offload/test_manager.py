"""The manager: stores without room, write policies, determinism, messages, isolation from JAX."""

import os
import pickle
import re
import subprocess
import sys
from collections import deque
from typing import Any, cast

import pytest

from jaxkv.offload import (
    BlockNotReadyError,
    BlockRemoved,
    BlockState,
    BlockStored,
    OffloadManager,
    StaleSpecError,
)

pytestmark = pytest.mark.host_only


def keys(names):
    return [name.encode() for name in names]


def end(manager, spec):
    manager.start(spec)
    manager.complete(spec)
    return spec


def test_blocks_are_found_once_their_store_is_complete():
    manager = OffloadManager(4)
    spec = manager.prepare_store(keys("ab"))
    assert manager.lookup(keys("ab")) == (0, 2)
    assert manager.state(b"a") is BlockState.RESERVED
    with pytest.raises(BlockNotReadyError, match=r"keys\[0\]=61 is reserved"):
        manager.prepare_load(keys("ab"))
    with pytest.raises(StaleSpecError, match="complete: spec 1 has not been started"):
        manager.complete(spec)
    manager.start(spec)
    assert manager.state(b"a") is BlockState.WRITING
    assert manager.lookup(keys("ab")) == (0, 2)
    with pytest.raises(BlockNotReadyError, match=r"keys\[0\]=61 is writing"):
        manager.prepare_load(keys("ab"))
    manager.complete(spec)
    assert manager.lookup(keys("abc")) == manager.lookup(deque(keys("abc"))) == (2, 0)
    assert manager.prepare_load(keys("ab")).pages == spec.pages == (0, 1)
    with pytest.raises(BlockNotReadyError, match=r"keys\[1\]=63 is not in the host tier"):
        manager.prepare_load(keys("ac"))


def test_stores_take_what_room_there_is():
    manager = OffloadManager(3)
    end(manager, manager.prepare_store(keys("abc")))
    load = manager.prepare_load(keys("ab"))
    store = manager.prepare_store(keys("xyz"))
    assert (store.keys, store.indices, store.evicted) == ((b"x",), (0,), (b"c",))
    assert (store.pages, store.num_refused) == ((2,), 2)
    nothing = manager.prepare_store(keys("yz"))
    assert (nothing.keys, nothing.evicted, nothing.num_refused) == ((), (), 2)
    end(manager, nothing)
    end(manager, store)
    end(manager, load)
    assert manager.prepare_store(keys("xyz")).indices == (1, 2)


def test_a_request_longer_than_the_tier_keeps_its_head():
    manager = OffloadManager(3)
    end(manager, manager.prepare_store(keys("abcdef")))
    assert manager.lookup(keys("abcdef")).num_blocks == 3


def test_pins_are_counted():
    manager = OffloadManager(1)
    end(manager, manager.prepare_store(keys("a")))
    loads = [manager.prepare_load(keys("a")) for _ in range(2)]
    for load in loads:
        assert manager.prepare_store(keys("b")).num_refused == 1
        end(manager, load)
    assert manager.prepare_store(keys("b")).evicted == (b"a",)


def test_load_of_a_page_that_was_reused_is_an_error():
    """The load was aborted although its copy was in flight."""
    manager = OffloadManager(1)
    end(manager, manager.prepare_store(keys("a")))
    load = manager.prepare_load(keys("a"))
    manager.start(load)
    manager.abort(load)
    end(manager, manager.prepare_store(keys("b")))
    assert manager.generation(0) == load.generations[0] + 1
    with pytest.raises(StaleSpecError, match="complete: spec 2 is not in flight"):
        manager.complete(load)


def test_load_of_a_discarded_block_cannot_be_completed():
    manager = OffloadManager(2)
    end(manager, manager.prepare_store(keys("a")))
    load = manager.prepare_load(keys("a"))
    manager.start(load)
    manager.discard()
    store = end(manager, manager.prepare_store(keys("a")))
    assert store.pages == (1,)
    with pytest.raises(StaleSpecError, match=r"generation 0 of page 0, which is at 1: .*discarded"):
        manager.complete(load)
    manager.abort(load)
    assert manager.prepare_store(keys("b")).pages == (0,)


def test_load_of_a_discarded_block_cannot_be_started():
    manager = OffloadManager(2)
    end(manager, manager.prepare_store(keys("a")))
    load = manager.prepare_load(keys("a"))
    manager.discard(keys("a"))
    with pytest.raises(StaleSpecError, match="start: spec 2 loads generation 0 of page 0"):
        manager.start(load)


def test_specs_of_another_manager_and_forged_specs_are_errors():
    first, second = OffloadManager(2), OffloadManager(2)
    spec = first.prepare_store(keys("a"))
    second.prepare_store(keys("b"))
    for call in (second.start, second.complete, second.abort):
        with pytest.raises(StaleSpecError, match="another manager"):
            call(spec)
    end(first, pickle.loads(pickle.dumps(spec)))  # returned by another process


def test_write_back_stores_what_the_device_cache_evicts():
    manager = OffloadManager(4, write="back")
    assert manager.prepare_store(keys("ab")).keys == ()
    assert manager.prepare_store(keys("b"), evicted=True).keys == (b"b",)
    assert manager.metrics()["kv_offload_stores_skipped"] == 0  # not for lack of a second use
    through = OffloadManager(4)
    assert through.prepare_store(keys("b"), evicted=True).keys == ()


def test_second_use_stores_what_two_requests_use():
    manager = OffloadManager(4, write="second_use")
    manager.touch(keys("abc"))
    for _ in range(2):  # chunks of one request are one use
        assert manager.prepare_store(keys("abc")).keys == ()
    manager.touch(keys("abx"))
    assert manager.prepare_store(keys("abx")).keys == (b"a", b"b")
    assert manager.prepare_store(keys("c"), evicted=True).keys == ()
    assert manager.metrics()["kv_offload_stores_skipped"] == 3 + 3 + 1  # of computed blocks


def test_second_use_remembers_a_bounded_number_of_blocks(monkeypatch):
    monkeypatch.setattr("jaxkv._src.offload.writes._MIN_REMEMBERED", 3)
    manager = OffloadManager(1, write="second_use")
    manager.touch(keys("abcd"))  # d, the tail, is forgotten
    manager.touch(keys("a"))
    manager.touch(keys("d"))
    assert manager.prepare_store(keys("d")).keys == ()
    assert manager.prepare_store(keys("a")).keys == (b"a",)
    assert len(manager._write._used_again) == 3
    for request in ("b", "c", "b", "d", "x"):  # of these and a, c is the least recently used
        manager.touch(keys(request))
    assert manager.prepare_store(keys("c")).keys == ()
    assert [*manager._write._used_again.items()] == [(b"b", True), (b"d", True), (b"x", False)]


def test_events():
    manager = OffloadManager(2, events=True)
    end(manager, manager.prepare_store(keys("ab")))
    manager.abort(manager.prepare_store(keys("c")))
    manager.discard(keys("ax"))
    assert manager.take_events() == [
        BlockStored((b"a", b"b")),
        BlockRemoved((b"b",)),
        BlockRemoved((b"a",)),
    ]
    assert manager.take_events() == []
    with pytest.raises(ValueError, match="events=True"):
        OffloadManager(2).take_events()


@pytest.mark.parametrize("operation", ["touch", "prepare_store"])
def test_duplicate_keys_are_an_error(operation):
    """They would count as a second use, or take two pages."""
    manager = OffloadManager(4, write="second_use")
    with pytest.raises(ValueError, match=f"{operation}: keys has duplicates"):
        getattr(manager, operation)(keys("aba"))
    assert manager.prepare_store(keys("a")).keys == ()


def test_metrics():
    manager = OffloadManager(4)
    end(manager, manager.prepare_store(keys("abc")))
    manager.lookup(keys("abcd"))
    end(manager, manager.prepare_load(keys("ab")))
    manager.prepare_load(keys("a"))
    manager.prepare_store(keys("de"))
    manager.abort(manager.prepare_store(keys("xyz")))
    manager.discard(keys("ad"))  # d is pending
    assert manager.metrics() == {
        "kv_offload_block_queries": 4,
        "kv_offload_block_hits": 3,
        "kv_offload_loaded_blocks": 2,
        "kv_offload_stored_blocks": 3,
        "kv_offload_promoted_blocks": 0,
        "kv_offload_cascaded_blocks": 0,
        "kv_offload_evicted_blocks": 2,
        "kv_offload_aborted_blocks": 1,
        "kv_offload_discarded_blocks": 2,
        "kv_offload_refused_blocks": 2,
        "kv_offload_stores_skipped": 0,
        "kv_offload_cpu_cache_usage_perc": 0.75,  # d and e, and a, which is discarded and pinned
        "kv_offload_used_blocks": 3,
        "kv_offload_ready_blocks": 0,
        "kv_offload_pending_blocks": 1,
        "kv_offload_pinned_blocks": 0,
        "kv_offload_num_blocks": 4,
        "kv_offload_num_copies": 2,
    }


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"num_pages": -1}, "num_pages=-1; pass an integer, at least 0 pages"),
        ({"num_pages": 4.5}, "num_pages is of type float; pass an integer, at least 0 pages"),
        ({"num_pages": True}, "num_pages=True"),
        ({"num_pages": 1, "policy": "fifo"}, r"policy='fifo' is not one of \['lru', 'arc'\]"),
        ({"num_pages": 1, "write": "around"}, "write='around' is not one of"),
    ],
)
def test_wrong_arguments_raise(wrong, message):
    with pytest.raises(ValueError, match=message):
        OffloadManager(**wrong)


HISTORY = """
import random, zlib
from jaxkv.offload import BlockHasher, OffloadManager, StaleSpecError
draw, log = random.Random(0), []
hasher = BlockHasher(2, model="m")
for policy in ("lru", "arc"):
    for write in ("through", "second_use"):
        manager, running = OffloadManager(40, policy=policy, write=write), []
        for _ in range(300):
            keys = hasher.hashes([draw.randrange(3) for _ in range(draw.randrange(16))])
            found = manager.lookup(keys)
            manager.touch(keys)
            running += [manager.prepare_load(keys[:found.num_blocks]), manager.prepare_store(keys)]
            log.append(repr(running[-2:]))
            while len(running) > 4:
                spec = running.pop(draw.randrange(len(running)))
                try:
                    manager.start(spec)
                    manager.complete(spec)
                except StaleSpecError:
                    manager.abort(spec)
            if draw.random() < 0.02:
                manager.discard({*keys})
        log.append(repr(manager.metrics()))
counts = manager.metrics()
assert counts["kv_offload_evicted_blocks"] and counts["kv_offload_aborted_blocks"]
print(zlib.crc32("".join(log).encode()))
"""


def test_ranks_with_the_same_calls_decide_alike():
    """Whatever the hash seed of the process: no decision depends on the order of a set."""
    printed = {
        subprocess.run(
            [sys.executable, "-c", HISTORY],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1


ALONE = """
import importlib, pathlib, sys, types
import jaxkv._src.offload as package
folder = pathlib.Path(package.__path__[0])
for name in [*sys.modules]:
    if name.split(".")[0] in ("jax", "jaxlib", "jaxkv"):
        del sys.modules[name]
for name in ("jax", "jaxlib", "prometheus_client"):
    sys.modules[name] = None                  # an import raises
for name, path in (("jaxkv", folder.parents[1]), ("jaxkv._src", folder.parent)):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [str(path)]
from jaxkv import offload
print(offload.OffloadManager(1).lookup([]))
"""


def test_blocks_that_were_not_copied():
    manager = OffloadManager(4)
    names = [b"0", b"1", b"2"]
    store = manager.prepare_store(names)
    manager.start(store)
    for wrong in ([b"3"], [b"0", b"3"]):
        with pytest.raises(ValueError, match="complete: 33 of failed is not in spec 1"):
            manager.complete(store, failed=wrong)
    with pytest.raises(TypeError, match="complete: failed has to be a sequence of bytes"):
        manager.complete(store, failed=cast(Any, [0]))
    manager.complete(store, failed={b"1", b"0"})
    assert [manager.state(key) for key in names] == [None, None, BlockState.READY]
    load = manager.prepare_load([b"2"], tier=True)
    manager.start(load)
    manager.complete(load, failed=[b"2"])
    counts = manager.metrics()
    assert counts["kv_offload_cascaded_blocks"] == 0 and counts["kv_offload_aborted_blocks"] == 3
    assert counts["kv_offload_pinned_blocks"] == 0


def test_keys_are_a_sequence_of_bytes():
    manager: Any = OffloadManager(4)
    calls = manager.touch, manager.prepare_load, manager.prepare_store, manager.discard
    for call in (*calls, manager.lookup):
        for wrong, got in ((b"01", "b'01'"), (5, "5"), ([1, b"0"], "1")):
            with pytest.raises(TypeError, match=f"bytes objects, one for each block, got {got}"):
                call(wrong)
    for call in calls:
        with pytest.raises(TypeError, match="got 'a'"):
            call([b"0", "a"])
    for call in (*calls[:3], manager.lookup):  # the order of blocks matters
        for unordered in ({b"0"}, {b"0": 1}):
            with pytest.raises(TypeError, match=re.escape(f"got {unordered!r}")):
                call(unordered)
    assert manager.lookup([b"0", "a"]) == (0, 0)  # only the first item is checked
    with pytest.raises(ValueError, match="page=-1; the pool has num_pages=4"):
        manager.generation(-1)


def test_package_imports_no_framework():
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert run.stdout == "Lookup(num_blocks=0, num_pending=0)\n", run.stderr
