"""The offload engine against a simulation with contents, and its errors."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from tests.util.transfer_cases import assert_rejected

NUM_HOST, NUM_DEVICE = 7, 40
REQUESTS = [
    [name.encode() for name in text.split()]
    for text in ("a0 a1 a2 a3 a4", "a0 a1 b2 b3", "c0 c1 c2 c3 c4 c5")
]


def step_result(over=True, failed=False) -> Any:
    return _Step(over, failed)


class _Step:
    """The result of a step; the test decides when it is over, and whether it has failed."""

    def __init__(self, over, failed):
        self.over, self.failed = over, failed

    def is_ready(self):
        return self.over

    def block_until_ready(self):
        assert self.over
        if self.failed:
            raise RuntimeError("the step has failed")


class Simulation:
    """An engine whose pages hold keys; device pages are never reused."""

    def __init__(self, sizes, write):
        self.tier = jaxkv.OffloadEngine(NUM_HOST, batch_sizes=sizes, write=write)
        self.sizes = sizes
        self.host, self.device = [b""] * NUM_HOST, [b""] * 10_000
        self.num_used = 0
        self.copies, self.steps, self.ended = [], [], []

    def pages(self, contents):
        pages = [*range(self.num_used, self.num_used + len(contents))]
        self.num_used += len(contents)
        self.device[pages[0] : pages[-1] + 1] = contents
        return pages

    def request(self, keys):
        """Loads the prefix that is there, and stores everything."""
        self.tier.touch(keys)
        found = self.tier.lookup(keys).num_blocks
        if found:
            pages = self.pages([b"loading"] * found)
            self.copies.append(self.tier.load(keys[:found], pages))
        self.copies.append(self.tier.store(keys, self.pages(keys)))

    def step(self, failed, num_over=0, stores_first=False):
        """Moves the pages at once, except those of a failed step; earlier steps end meanwhile."""
        batch = self.tier.next_batch(stores_first=stores_first)
        self.finish(num_over)
        assert len(batch.host_pages) == len(batch.device_pages) in self.sizes
        pairs = [*zip(batch.host_pages.tolist(), batch.device_pages.tolist(), strict=True)]
        moved = [pair for pair in pairs if pair != (-1, -1)]
        assert pairs[: len(moved)] == moved and bool(moved) == bool(batch.copies)
        smaller = [size for size in self.sizes if size < len(pairs)]
        assert len(moved) > max(smaller, default=-1)
        for host_page, page in moved:
            if batch.kind == "store":
                self.host[host_page] = b"bad" if failed else self.device[page]
            else:
                self.device[page] = b"bad" if failed else self.host[host_page]
        step = step_result(over=False, failed=failed)
        self.tier.issue(batch, step)
        self.steps.append(step)

    def finish(self, count):
        for step in self.steps[:count]:
            step.over = True
        del self.steps[:count]
        ended = self.tier.poll()
        assert len({*map(id, ended)}) == len(ended) and all(copy.done for copy in ended)
        self.ended += ended
        for copy in ended:
            if copy.kind == "load" and not copy.failed:
                assert [self.device[page] for page in copy.device_pages] == [*copy.keys]

    def check(self):
        for key, block in self.tier.manager._blocks.ready.items():
            assert self.host[block.page] == key
        queued = sum(len(c.keys) for c in self.copies if not c.issued)
        metrics = self.tier.metrics()
        names = "kv_offload_queued_load_blocks", "kv_offload_queued_store_blocks"
        assert sum(metrics[name] for name in names) <= queued
        assert all(copy.issued for copy in self.copies if copy.done)


@given(st.data())
def test_found_blocks_hold_their_contents(data):
    sizes = data.draw(st.sampled_from([(1,), (3,), (2, 5), (4, 64)]), "batch_sizes")
    simulation = Simulation(sizes, data.draw(st.sampled_from(["through", "second_use"])))
    for _ in range(data.draw(st.integers(1, 30), "actions")):
        action = data.draw(st.sampled_from(["request", "step", "step", "finish", "discard"]))
        if action == "request":
            simulation.request(data.draw(st.sampled_from(REQUESTS)))
        elif action == "step":
            failed, num_over = data.draw(st.integers(0, 7)) == 0, data.draw(st.integers(0, 3))
            simulation.step(failed, num_over, data.draw(st.booleans()))
        elif action == "finish":
            simulation.finish(data.draw(st.integers(0, 3)))
        else:
            simulation.tier.manager.discard([data.draw(st.sampled_from(REQUESTS[0]))])
        simulation.check()
    while any(not copy.issued for copy in simulation.copies):
        simulation.step(failed=False)
    simulation.finish(len(simulation.steps))
    simulation.check()
    expected = {id(copy) for copy in simulation.copies if copy.keys}
    assert {id(copy) for copy in simulation.ended} == expected
    metrics = simulation.tier.metrics()
    assert metrics["kv_offload_pinned_blocks"] == metrics["kv_offload_num_copies"] == 0


def stored(tier, keys):
    tier.store(keys, [*range(len(keys))])
    copied(tier)


def copied(tier, failed=False):
    batch = tier.next_batch()
    tier.issue(batch, step_result(failed=failed))
    return batch, tier.poll()


@pytest.mark.parametrize("stores_first", [False, True])
def test_loads_go_before_stores_or_in_turns_with_them(stores_first):
    tier = jaxkv.OffloadEngine(16, batch_sizes=[2])
    stored(tier, [b"0", b"1"])
    assert copied(tier)[0].kind == "none"
    tier.store([b"2", b"3", b"4", b"5"], [2, 3, 4, 5])
    tier.load([b"0", b"1"], [6, 7])
    found = []
    for _ in range(4):
        batch = tier.next_batch(stores_first=stores_first)
        assert batch.host_pages.dtype == np.int32
        tier.issue(batch, step_result())
        found.append((batch.kind, batch.device_pages.tolist()))
    load, first, second = ("load", [6, 7]), ("store", [2, 3]), ("store", [4, 5])
    expected = [first, load, second] if stores_first else [load, first, second]
    assert found == [*expected, ("none", [-1, -1])]


@pytest.mark.parametrize("stores_first", [False, True])  # True: after a store it is a load's turn
def test_discarded_loads_leave_the_batch_to_stores(stores_first):
    tier = jaxkv.OffloadEngine(16, batch_sizes=[2])
    stored(tier, [b"0"])
    load, store = tier.load([b"0"], [1]), tier.store([b"1"], [2])
    tier.discard([b"0"])
    assert tier.next_batch(stores_first=stores_first).copies == (store,) and load.failed


@pytest.mark.parametrize(
    ("kind", "counts", "expected"),
    [
        ("load", [2, 3], [[0, 1], [2, 3, 4]]),
        ("load", [2, 2, 1], [[0, 1, 2, 3], [4]]),
        ("load", [6, 3], [[0, 1, 2, 3], [4, 5], [6, 7, 8]]),
        ("load", [2, 5], [[0, 1, 2, 3], [4, 5, 6]]),  # in two batches anyway
        ("load", [4, 4], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("store", [2, 3], [[0, 1, 2, 3], [4]]),
    ],
)
def test_a_load_is_split_only_if_it_is_larger_than_a_batch(kind, counts, expected):
    tier = jaxkv.OffloadEngine(16, batch_sizes=[4])
    ends = np.cumsum(counts)
    keys = [bytes([i]) for i in range(ends[-1])]
    if kind == "load":
        tier.store(keys, [*range(100, 100 + len(keys))])
        while copied(tier)[0].copies:
            pass
    for end, count in zip(ends, counts, strict=True):
        getattr(tier, kind)(keys[end - count : end], [*range(end - count, end)])
    batches = [copied(tier)[0] for _ in expected]
    assert [[page for page in b.device_pages.tolist() if page >= 0] for b in batches] == expected
    assert copied(tier)[0].kind == "none"


def test_stored_blocks_are_found_once_all_their_steps_are_over():
    tier = jaxkv.OffloadEngine(16, batch_sizes=[2])
    keys = [bytes([i]) for i in range(5)]
    store = tier.store(keys, [*range(5)])
    steps = [step_result(over=False) for _ in range(3)]
    for step in steps:
        assert [store.issued] == [False]
        tier.issue(tier.next_batch(), step)
    assert [store.issued, store.done] == [True, False]
    for step in steps:
        assert tier.poll() == [] and tier.lookup(keys).num_pending == 5
        step.over = True
    assert tier.poll() == [store]
    assert [store.done, store.failed] == [True, False]
    assert tier.lookup(keys) == (5, 0)


def test_a_copy_is_not_over_before_its_last_batch_is_issued():
    tier = jaxkv.OffloadEngine(16, batch_sizes=[2])
    keys = [b"0", b"1", b"2"]
    store = tier.store(keys, [0, 1, 2])
    tier.issue(tier.next_batch(), step_result())
    batch = tier.next_batch()
    assert tier.poll() == [] and [store.issued, store.done] == [True, False]
    assert tier.lookup(keys).num_pending == 3
    tier.issue(batch, step_result())
    assert tier.poll() == [store] and tier.lookup(keys) == (3, 0)


def test_blocks_of_a_failed_step_are_not_found():
    tier = jaxkv.OffloadEngine(16, batch_sizes=[2])
    store = tier.store([b"0", b"1", b"2"], [0, 1, 2])
    copied(tier, failed=True)
    _, ended = copied(tier)
    assert ended == [store] and store.failed
    assert tier.lookup([b"0", b"1", b"2"]) == (0, 0)


def test_copies_of_an_abandoned_step_fail():
    tier = jaxkv.OffloadEngine(16, batch_sizes=[2])
    stored(tier, [b"0", b"1"])
    load = tier.load([b"0", b"1"], [2, 3])
    store = tier.store([b"2", b"3", b"4"], [4, 5, 6])
    tier.abandon(tier.next_batch())
    assert tier.poll() == [load] and load.failed and tier.lookup([b"0", b"1"]) == (2, 0)
    tier.abandon(tier.next_batch())
    assert tier.poll() == [] and not store.issued
    assert copied(tier)[1] == [store] and store.failed
    assert tier.lookup([b"2"]) == (0, 0) and tier.metrics()["kv_offload_num_copies"] == 0
    tier.abandon(tier.next_batch())  # without pages


def test_a_poll_that_raises_loses_no_copy():
    tier = jaxkv.OffloadEngine(16, batch_sizes=[1])
    first, second = tier.store([b"0"], [0]), tier.store([b"1"], [1])
    tier.issue(tier.next_batch(), step_result())
    donated = jnp.zeros(4).block_until_ready()
    tier.issue(tier.next_batch(), donated)
    donated.delete()
    assert_rejected(tier.poll, RuntimeError, "donated or deleted")
    assert first.done and not second.done
    assert_rejected(tier.poll, RuntimeError, "donated or deleted")
    tier._in_flight.steps[0] = tier._in_flight.steps[0]._replace(result=step_result())
    assert tier.poll() == [first, second]


def test_queued_loads_of_discarded_blocks_fail():
    tier = jaxkv.OffloadEngine(16)
    stored(tier, [b"0", b"1"])
    load = tier.load([b"0", b"1"], [2, 3])
    tier.manager.discard([b"1"])
    batch, ended = copied(tier)
    assert batch.kind == "none" and ended == [load] and load.failed and load.issued


def test_stores_without_blocks_are_done():
    tier = jaxkv.OffloadEngine(16, events=True)
    stored(tier, [b"0"])
    again = tier.store([b"0"], [3])
    assert again.done and again.issued and not again.keys and not again.failed
    assert tier.next_batch().kind == "none"
    assert [event.keys for event in tier.take_events()] == [(b"0",)]


def test_errors():
    tier = jaxkv.OffloadEngine(4)
    assert_rejected(
        lambda: tier.store([b"0"], [1, 2]), ValueError, "len(keys)=1", "len(device_pages)=2"
    )
    assert_rejected(lambda: tier.load([b"0"], [1]), jaxkv.offload.BlockNotReadyError, "keys[0]")
    tier.store([b"0"], [1])
    batch = tier.next_batch()
    assert_rejected(tier.next_batch, RuntimeError, "not been issued")
    tier.issue(batch, step_result())
    assert_rejected(lambda: tier.issue(batch, step_result()), ValueError, "issue: ", "twice")
    assert_rejected(lambda: tier.abandon(batch), ValueError, "abandon: ", "twice")
    assert len(tier.poll()) == 1 and tier.poll() == []


@pytest.mark.parametrize("operation", ["issue", "abandon"])
def test_a_batch_rebuilt_by_jax_is_refused(operation):
    """It has no copies, as a batch without pages."""
    tier = jaxkv.OffloadEngine(4)
    store = tier.store([b"0"], [1])
    batch = tier.next_batch()
    arguments = [step_result()] if operation == "issue" else []
    give_back = getattr(tier, operation)
    rebuilt = jax.device_put(batch)
    assert_rejected(lambda: give_back(rebuilt, *arguments), ValueError, operation, "device_put")
    give_back(batch, *arguments)
    assert tier.poll() == [store]
    for empty in (tier.next_batch(), rebuilt, *tier.padding_batches()):
        give_back(empty, *arguments)


def test_errors_of_device_pages():
    tier = jaxkv.OffloadEngine(4, batch_sizes=(2,))
    for page in (-1, 2**31):
        assert_rejected(lambda p=page: tier.store([b"0"], [p]), ValueError, "device_pages[0]", page)
    create: Any = jaxkv.OffloadEngine
    with_cache = partial(create, 4, num_device_pages=np.int64(6))
    assert with_cache().store([b"0"], [5]).keys
    assert_rejected(lambda: with_cache().store([b"0"], [6]), ValueError, "[0]=6", "from 0 to 5")
    for number in (-1, 2**31 + 1, 6.0):
        words = "OffloadEngine: num_device_pages", "pass the number of pages of"
        assert_rejected(lambda n=number: with_cache(num_device_pages=n), ValueError, *words)
    for wrong in (2.9, "3", None):
        assert_rejected(lambda p=wrong: tier.store([b"0"], [p]), TypeError, "device_pages[0]")
    assert_rejected(lambda: tier.store([b"0", b"1"], [3, 3]), ValueError, "device_pages[1]=3")
    assert tier.metrics()["kv_offload_num_copies"] == 0 and tier.next_batch().kind == "none"
    stored(tier, [b"0", b"1"])
    assert_rejected(lambda: tier.load([b"0"], [-1]), ValueError, "device_pages[0]=-1")
    assert_rejected(lambda: tier.load([b"0", b"1"], [5, 5]), ValueError, "device_pages[1]=5")
    tier.store([b"0", b"1"], [-1, -1])  # already stored: their pages are not used
    assert tier.metrics()["kv_offload_num_copies"] == 0


def test_pages_of_queued_copies_are_not_reused():
    tier: Any = jaxkv.OffloadEngine(8, batch_sizes=(2,))
    stored(tier, [b"0", b"1", b"2"])
    copied(tier)  # the third one
    tier.store([b"3"], [np.int32(5)])
    assert_rejected(lambda: tier.load([b"0"], [5]), ValueError, "load", "device_pages[0]=5")
    assert_rejected(lambda: tier.store([b"4"], [5]), ValueError, "store", "device_pages[0]=5")
    tier.discard([b"3"])
    tier.store([b"3"], [5])  # the same block: its page is the same
    load = tier.load([b"0", b"1", b"2"], [7, 8, 9])
    assert_rejected(lambda: tier.load([b"0"], [9]), ValueError, "device_pages[0]=9")
    assert_rejected(lambda: tier.store([b"4"], [9]), ValueError, "device_pages[0]=9")
    for _ in range(2):
        assert not load.issued
        tier.issue(tier.next_batch(), step_result())
    tier.store([b"4"], [9])


def test_the_page_of_a_store_that_is_repeated_is_not_reused_after_the_first():
    tier = jaxkv.OffloadEngine(8, batch_sizes=(1,))
    first = tier.store([b"0"], [5])
    tier.discard([b"0"])
    second = tier.store([b"0"], [5])
    copied(tier)
    assert first.done and not second.issued
    assert_rejected(lambda: tier.store([b"1"], [5]), ValueError, "device_pages[0]=5")
    copied(tier)
    assert tier.store([b"1"], [5]).keys


def test_errors_of_arguments():
    create: Any = jaxkv.OffloadEngine
    tier = create(np.int64(4), batch_sizes=(np.int64(2),))
    for call in (tier.touch, tier.discard, tier.prefetch, lambda keys: tier.store(keys, [1])):
        assert_rejected(lambda c=call: c(b"0"), TypeError, "sequence of bytes", "b'0'")
        assert_rejected(lambda c=call: c(["0"]), TypeError, "sequence of bytes", "'0'")
    for call in (tier.store, tier.load):  # each block has its page
        assert_rejected(lambda c=call: c({b"0"}, [1]), TypeError, "sequence of bytes", "{b'0'}")
    for sizes in (16, ()):
        words = f"batch_sizes={sizes}", "such as (16,)"
        assert_rejected(lambda s=sizes: create(4, batch_sizes=s), ValueError, *words)
    for size in (0, 2.5, 2**31):
        words = "OffloadEngine: batch_sizes[1]", f"got {size}"
        assert_rejected(lambda s=size: create(4, batch_sizes=(4, s)), ValueError, *words)
    assert_rejected(lambda: create(4.5), ValueError, "pool is of type float", "HostPool")
    assert_rejected(lambda: tier.prefetch([b"0", b"0"]), ValueError, "duplicates")
    assert_rejected(lambda: tier.prefetch([b"0"], 0), ValueError, "window=0")
    tier.store([b"0"], [1])
    batch = tier.next_batch()
    assert_rejected(lambda: tier.issue(batch, np.zeros(3)), TypeError, "ndarray", "jax.Array")
    assert_rejected(tier.drain, RuntimeError, "in flight")
    for timeout_s in (-1, 0, "1", float("nan")):
        assert_rejected(lambda t=timeout_s: tier.drain(t), ValueError, "timeout_s", "seconds")
    tier.issue(batch, step_result())
    assert tier.drain() and len(tier.poll()) == 1


def test_results_of_jax_are_polled_while_syncs_are_forbidden():
    tier = jaxkv.OffloadEngine(4)
    tier.store([b"0"], [1])
    tier.issue(tier.next_batch(), jnp.zeros(3).block_until_ready())
    with jaxkv.forbid_host_sync():
        assert len(tier.poll()) == 1
    assert tier.lookup([b"0"]).num_blocks == 1
