"""Pages of the serving example: the block manager and the host tier, against a model."""

import hypothesis
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

import jaxkv
from examples.serving.block_manager import BlockManager, Placement
from examples.serving.engine import Engine, Limits
from examples.serving.model import Config
from examples.serving.presets import init_params
from examples.serving.request import Request
from jaxkv.offload import BlockHasher

pytestmark = pytest.mark.end_to_end

HASHER = BlockHasher(2, model="test")


class Step:
    """Its result."""

    over = False

    def is_ready(self) -> bool:
        return self.over

    def block_until_ready(self) -> None:
        assert self.over


def manager(num_hbm_pages, num_host_pages, copy_pages=8):
    host = jaxkv.OffloadEngine(num_host_pages, batch_sizes=(copy_pages,))
    return BlockManager(num_hbm_pages, host)


class Memories:
    """Performs the copies queued by a BlockManager on keys instead of keys and values."""

    def __init__(self, num_hbm_pages: int, num_host_pages: int, copy_pages: int):
        self.blocks = manager(num_hbm_pages, num_host_pages, copy_pages)
        self.hbm: list[bytes] = [b""] * (1 + num_hbm_pages)  # page 0 is the null block
        self.host: list[bytes] = [b""] * num_host_pages
        self.running: list[tuple[Placement, list[bytes], int]] = []
        self.latest: Step | None = None

    def queued(self) -> list[jaxkv.OffloadCopy]:
        host = self.blocks.host
        return [*host._loads, *host._stores]

    def start(self, tokens: list[int], extra: int) -> None:
        keys = HASHER.hashes(tokens)
        in_use = {page for placement, _, _ in self.running for page in placement.pages}
        placement = self.blocks.admit(keys, len(keys) + extra)
        if placement is None:
            queued = self.queued()
            held = in_use | {page for copy in queued for page in copy.device_pages}
            loading = any(copy.kind == "load" for copy in queued)
            assert len(keys) + extra >= len(self.hbm) - len(held) or loading
            return
        pages, found = placement.pages, placement.found_in_hbm + placement.loaded
        assert len(pages) == len(set(pages)) == len(keys) + extra
        assert not in_use & set(pages[found:])
        assert placement.load or [self.hbm[page] for page in pages[:found]] == keys[:found]
        self.running.append((placement, keys, found))

    def abandon(self) -> None:
        """A step that could not be dispatched."""
        self.blocks.host.abandon(self.blocks.next_batch())
        self.poll()

    def poll(self) -> None:
        """Requests with pages of failed loads end."""
        failed = self.blocks.poll()
        for which in reversed(range(len(self.running))):
            if not failed.isdisjoint(self.running[which][0].pages):
                self.finish(which)

    def step(self) -> None:
        """Copies, then compute of all requests whose pages are there."""
        batch, before, self.latest = self.blocks.next_batch(), self.latest, Step()
        for pair in zip(batch.host_pages, batch.device_pages, strict=True):
            host_page, page = map(int, pair)
            if page >= 0 and batch.kind == "load":
                self.hbm[page] = self.host[host_page]
            elif page >= 0:
                self.host[host_page] = self.hbm[page]
        self.blocks.host.issue(batch, self.latest)
        for number, (placement, keys, done) in enumerate(self.running):
            load = placement.load
            if load is None or (load.issued and not load.failed):
                assert [self.hbm[page] for page in placement.pages[:done]] == keys[:done]
                for place, page in enumerate(placement.pages[done:], start=done):
                    self.hbm[page] = keys[place] if place < len(keys) else b"part of a page"
                self.blocks.publish(placement.pages, keys, done)
                self.running[number] = placement, keys, len(keys)
        if before:
            before.over = True
        self.poll()

    def finish(self, which: int) -> None:
        self.blocks.release(self.running.pop(which)[0].pages)

    def check(self) -> None:
        blocks = self.blocks
        queued = [page for copy in self.queued() for page in copy.device_pages]
        used = [page for placement, _, _ in self.running for page in placement.pages] + queued
        assert blocks._references == [used.count(page) for page in range(len(self.hbm))]
        queued_stores = [copy for copy in blocks._queued_stores if not copy.issued]
        assert queued_stores == [*blocks.host._stores]
        states = [*blocks._free, *blocks._cached, *set(used)]
        assert sorted(states) == list(range(1, len(self.hbm))), "each page has one state"
        assert {page: key for key, page in blocks._page_of.items()} == blocks._key_of
        assert all(self.hbm[page] == key for page, key in blocks._key_of.items())
        assert set(blocks._cached) <= set(blocks._key_of)
        for key, block in blocks.host.manager._blocks.ready.items():
            assert self.host[block.page] == key


@hypothesis.given(st.data())
def test_page_contents_match_keys(data):
    num_hbm, num_host = data.draw(st.integers(1, 9), "HBM"), data.draw(st.integers(0, 9), "host")
    memories = Memories(num_hbm, num_host, data.draw(st.integers(1, 4), "pages of a batch"))
    for _ in range(data.draw(st.integers(1, 25), "steps")):
        actions = ["start", "step", "finish", "discard", "abandon"]
        action = data.draw(st.sampled_from(actions), "action")
        if action == "step":
            memories.step()
        elif action == "abandon":
            memories.abandon()
        elif action == "discard":
            tokens = data.draw(st.lists(st.integers(0, 1), max_size=12), "tokens")
            memories.blocks.host.discard(HASHER.hashes(tokens)[-1:])
        elif action == "finish" and memories.running:
            memories.finish(data.draw(st.integers(0, len(memories.running) - 1), "which"))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), max_size=12), "tokens")
            memories.start(tokens, extra=data.draw(st.integers(0, 2), "extra"))
        memories.check()


def copied(blocks):
    """The kind of the next batch, whose step is over at once."""
    batch, step = blocks.next_batch(), Step()
    step.over = True
    blocks.host.issue(batch, step)
    blocks.host.poll()
    return batch.kind


def admitted(blocks, keys, num_pages):
    placement = blocks.admit(keys, num_pages)
    assert placement is not None
    return placement


def test_page_is_stored_once_and_reloaded():
    blocks = manager(num_hbm_pages=2, num_host_pages=4)
    first, second = HASHER.hashes([1, 1, 2, 2]), HASHER.hashes([3, 3, 4, 4])
    counts = []
    for keys in (first, second, first, second):
        placement = admitted(blocks, keys, 2)
        kind = copied(blocks)
        stored = blocks.publish(placement.pages, keys, placement.loaded)
        counts.append((placement.loaded, kind, stored))
        copied(blocks)
        blocks.release(placement.pages)
    assert counts == [(0, "none", 2), (0, "none", 2), (2, "load", 0), (2, "load", 0)]


def test_shared_page_is_released_by_last_user():
    blocks = manager(num_hbm_pages=3, num_host_pages=0)
    keys = HASHER.hashes([7, 7])
    first = admitted(blocks, keys, 1)
    blocks.publish(first.pages, keys, 0)
    second = admitted(blocks, keys, 1)
    assert (second.pages, second.found_in_hbm) == (first.pages, 1)
    blocks.release(first.pages)
    others = admitted(blocks, [], 2)
    assert not set(others.pages) & set(second.pages)
    assert blocks.admit([], 1) is None


def test_page_is_not_found_before_its_load_is_issued():
    blocks = manager(num_hbm_pages=4, num_host_pages=4)
    keys = HASHER.hashes([5, 5])
    first = admitted(blocks, keys, 1)
    blocks.publish(first.pages, keys, 0)
    copied(blocks)
    blocks.release(first.pages)
    blocks.release(admitted(blocks, [], 4).pages)  # evicts it
    loading = admitted(blocks, keys, 1)
    assert loading.loaded == 1 and blocks.admit(keys, 1) is None
    blocks.release(loading.pages)  # its request ends early, the load is still issued
    assert not set(admitted(blocks, [], 3).pages) & set(loading.pages)
    assert copied(blocks) == "load"
    assert admitted(blocks, keys, 1).found_in_hbm == 1


def queued_store_and_load(extra):
    """Of 6 HBM pages 2 are stored, 3 are loaded, and `extra` are in use by a request."""
    blocks = manager(num_hbm_pages=6, num_host_pages=16)
    old, new = HASHER.hashes([1, 1, 2, 2, 3, 3]), HASHER.hashes([5, 5, 6, 6])
    first = admitted(blocks, old, 3)
    blocks.publish(first.pages, old, 0)
    assert [copied(blocks), copied(blocks)] == ["store", "none"]
    blocks.release(first.pages)
    blocks.release(admitted(blocks, [], 6).pages)  # evicts them
    second = admitted(blocks, new, 2)
    blocks.publish(second.pages, new, 0)
    blocks.release(second.pages)
    assert admitted(blocks, old, 3).loaded == 3
    if extra:
        admitted(blocks, [], extra)
    return blocks, new


@pytest.mark.parametrize(
    ("extra", "wanted", "kinds"),
    [
        (0, 1, ["load", "store"]),  # there is room
        (0, 2, ["store", "load"]),
        (0, 3, ["store", "load"]),
        (0, 4, ["load", "store"]),  # the loaded pages would have to be free, too
        (1, 2, ["store", "load"]),
        (1, 3, ["load", "store"]),
    ],
)
def test_stores_go_first_if_they_hold_the_pages_that_a_request_needs(extra, wanted, kinds):
    blocks, _ = queued_store_and_load(extra)
    is_admitted = blocks.admit([], wanted) is not None
    assert is_admitted == (wanted + extra <= 1)
    assert [copied(blocks), copied(blocks)] == kinds
    if kinds[0] == "store":
        assert admitted(blocks, [], wanted)


def test_stores_go_first_if_a_request_cannot_grow():
    blocks, _ = queued_store_and_load(1)
    assert not blocks.grow(Placement([], 0))
    assert copied(blocks) == "store" and blocks.grow(Placement([], 0))


def test_stores_do_not_go_first_for_pages_that_requests_use():
    blocks, new = queued_store_and_load(0)
    assert admitted(blocks, new, 2).found_in_hbm == 2
    assert blocks.admit([], 2) is None and copied(blocks) == "load"


def test_stores_do_not_go_first_for_pages_that_the_request_has():
    blocks, new = queued_store_and_load(0)
    assert blocks.admit(new, 4) is None and copied(blocks) == "load"


def make_engine(batch, token_budget, copy_pages):
    """One that computes nothing."""
    config, limits = Config(256, 8, 8, 1, 1, 1, 8), Limits(4, batch, token_budget, 70, copy_pages)
    engine = Engine(config, init_params(config, 1, "float32"), limits, 190, 1000)
    nothing = jnp.zeros(batch, jnp.int32)
    engine._run = lambda inputs, sampling: nothing  # type: ignore[method-assign]
    engine.host._check = None  # nor stores
    return engine


def num_loaded(request):
    assert request.first_placement is not None
    return request.first_placement.loaded


def test_stores_do_not_wait_for_a_pause_of_loads():
    """Conversations in turns, each turn with a load: queued stores leave pages for two requests."""
    engine, prefix = make_engine(4, 36, 64), 80
    histories = [[client] * prefix for client in range(8)]
    waiting, running, loaded = [*range(8)], [], 0
    in_flight: dict[int, Request] = {}
    for _ in range(1000):
        while len(in_flight) < engine.limits.batch:
            client = waiting.pop(0)
            in_flight[client] = Request([*histories[client], 1, 2, 3], 1)
            engine.submit(in_flight[client])
        engine.step()
        if min(map(len, histories)) > prefix:
            running.append(len(engine.running))
        for client in [client for client, request in in_flight.items() if request.finished]:
            request = in_flight.pop(client)
            loaded += num_loaded(request)
            histories[client] = request.tokens
            waiting.append(client)
        if max(map(len, histories)) >= 200:
            break
    assert max(map(len, histories)) >= 200 and loaded > 1000
    assert len(running) > 100 and running.count(1) < 0.3 * len(running)


def test_loads_do_not_wait_for_a_pause_of_stores():
    """Prompts fill the HBM, and more than a batch of stores in each step."""
    engine, prompt = make_engine(8, 128, 16), [1] * 240
    again, others, steps = Request([*prompt, 9], 1), 0, 0
    engine.submit(Request(prompt, 1))
    for number in range(300):
        while len(engine.waiting) < 4:
            others += 1
            engine.submit(Request([others % 250 + 2, others // 250 + 2] * 32, 1))
        if number == 20:  # its pages have been evicted from HBM
            engine.submit(again)
        engine.step()
        steps += bool(again.placement and not again.ready)
    assert again.finished and num_loaded(again) == 60 and steps < 20
