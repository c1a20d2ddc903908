"""Random life cycles of the blocks of an engine with a tier, with failures at every step.

The test decides when steps, and lookups, reads and writes of the tier end, and how: a read may fail
after it has written something to its page, or never end. Pages have contents: what is ready must be
the block, as it was stored last.
"""

from concurrent.futures import Executor, Future
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import jaxkv
from jaxkv._src.offload.tier_copies import TierCopies
from jaxkv.offload import BlockState

NUM_PAGES, TIMEOUT_S = 8, 5.0
REQUESTS = [
    [name.encode() for name in text.split()]
    for text in ("a0 a1 a2 a3", "a0 a1 b2", "c0 c1 c2 c3 c4 c5 c6 c7")
]
KEYS = sorted({key for request in REQUESTS for key in request})
PARTS = (b"K", b"V")

progress = st.integers(0, 3)  # of new copies
failures = st.sampled_from([False, False, True])


class Pages:
    """Host pages of two parts."""

    block_bytes = 16

    def __init__(self):
        self.bytes = [[bytearray(16) for _ in PARTS] for _ in range(NUM_PAGES)]

    def keys(self, key):
        return [key + part for part in PARTS]

    def is_in_use(self):
        return True

    def parts(self, page):
        return [memoryview(part) for part in self.bytes[page]]


def contents(key, epoch):
    return [f"{key.decode()} {part.decode()} {epoch}".ljust(16).encode() for part in PARTS]


class SlowTier:
    """Blocks by key, and calls that have not ended."""

    block_bytes = 16

    def __init__(self):
        self.blocks, self.calls = {}, []

    def contains(self, keys):
        return [key in self.blocks for key in keys]

    def remove(self, keys):
        for key in keys:
            self.blocks.pop(key, None)

    def metrics(self):
        return {}

    def close(self):
        pass

    def read(self, key, into):
        return self.call("read", key, into)

    def write(self, key, block):
        return self.call("write", key, block)

    def call(self, *call):
        self.calls.append((*call, bytes(call[2]), Future()))
        return self.calls[-1][-1]

    def land(self, number, fails):
        """The effect of a call; its future is not done yet."""
        kind, key, buffer, before, _ = self.calls[number]
        assert kind == "read" or bytes(buffer) == before, "changed during its write"
        if fails:
            if kind == "read":
                buffer[:] = b"torn".ljust(16)
            return False
        if kind == "write":
            self.blocks.setdefault(key, before)  # one that is there is not written again
        elif key in self.blocks:
            buffer[:] = self.blocks[key]
        return key in self.blocks

    def end(self, number, result):
        self.calls.pop(number)[-1].set_result(result)


class Later(Executor):
    """Executors whose calls run when the test says so, those of each function in order."""

    def __init__(self):
        self.calls = []

    def submit(self, function, /, *arguments, **named):
        assert not named
        self.calls.append((function, arguments, Future()))
        return self.calls[-1][-1]

    def run(self, fails=False, first=None):
        """Runs the first call, or the first one of the function with the name `first`."""
        names = [function.__name__ for function, *_ in self.calls]
        number = names.index(first) if first in names else 0
        function, arguments, future = self.calls.pop(number)
        if fails:
            future.set_exception(OSError("injected"))
        else:
            future.set_result(function(*arguments))


class Step:
    """The result of a step; the test decides when it is over."""

    def __init__(self, failed):
        self.over, self.failed = False, failed

    def is_ready(self):
        return self.over

    def block_until_ready(self):
        if self.failed:
            raise RuntimeError("injected")


class LifeCycle(RuleBasedStateMachine):
    """An engine whose steps move contents, and its tier."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.engine = jaxkv.OffloadEngine(NUM_PAGES, batch_sizes=(3, NUM_PAGES))
        self.manager = self.engine.manager
        self.tier, self.pages, self.later = SlowTier(), Pages(), Later()
        self.copies = self.engine._tiers = TierCopies(
            self.manager,
            self.tier,
            self.pages,
            TIMEOUT_S,
            executor=self.later,
            remover=self.later,
            clock=lambda: self.now,
        )
        self.epoch = dict.fromkeys(KEYS, 0)
        self.device: list[Any] = []  # contents of each page; none is used twice
        self.steps: list[Step] = []
        self.prefetches: list[Any] = []

    @initialize(lost=st.sets(st.sampled_from([(k, p) for k in KEYS for p in PARTS]), max_size=3))
    def fill_tier(self, lost):
        """As an earlier process has left it."""
        for key in KEYS:
            for part, content in zip(PARTS, contents(key, 0), strict=True):
                if (key, part) not in lost:
                    self.tier.blocks[key + part] = content

    def on_device(self, contents):
        self.device += contents
        return range(len(self.device) - len(contents), len(self.device))

    @rule(request=st.sampled_from(REQUESTS), progress=progress, fails=failures)
    def serve(self, request, progress, fails):
        """Loads what is there, and stores everything; its copies may stay in flight."""
        found = request[: self.engine.lookup(request).num_blocks]
        if found:
            self.engine.load(found, self.on_device([None] * len(found)))
        blocks = [contents(key, self.epoch[key]) for key in request]
        self.engine.store(request, self.on_device(blocks))
        while progress > 0 and (self.engine._loads or self.engine._stores):
            self.step(fails)
        if progress > 1:
            self.end_steps(len(self.steps))
            self.poll()
        if progress > 2:
            self.end_all_calls()

    @rule()
    def end_all_calls(self):
        while self.tier.calls:
            self.tier.end(0, self.tier.land(0, fails=False))
        self.poll()

    @rule()
    def evict_all(self):
        """From the host pool; what has been stored before may be in the tier."""
        self.manager.discard()

    @rule(fails=failures)
    def step(self, fails=False):
        """Moves the pages of a batch at once; those of a failed step get anything."""
        batch = self.engine.next_batch()
        for host, page in zip(batch.host_pages.tolist(), batch.device_pages.tolist(), strict=True):
            if batch.kind == "load" and host >= 0:
                self.device[page] = None if fails else [*map(bytes, self.pages.parts(host))]
            elif host >= 0:
                moved = [b"torn".ljust(16)] * 2 if fails else self.device[page]
                for part, content in zip(self.pages.parts(host), moved, strict=True):
                    part[:] = content
        result: Any = Step(fails)
        self.engine.issue(batch, result)
        self.steps.append(result)

    @rule(count=st.integers(1, 3))
    def end_steps(self, count):
        for result in self.steps[:count]:
            result.over = True
        del self.steps[:count]

    def store(self, request):
        self.engine.store(request, self.on_device([contents(key, 0) for key in request]))
        self.step()
        self.end_steps(1)
        self.poll()

    @rule(
        request=st.sampled_from(REQUESTS),
        window=st.sampled_from([None, None, 2]),
        progress=progress,
    )
    def prefetch(self, request, window, progress):
        prefetch = self.engine.prefetch(request, window)
        self.prefetches.append((prefetch, self.now))
        while progress > 0 and self.later.calls:
            self.later.run()
        if progress > 1:
            self.poll()
        if progress > 2:
            self.end_all_calls()

    @precondition(lambda self: self.later.calls)
    @rule(fails=failures, first=st.sampled_from(["_ask", "_remove"]))
    def answer(self, fails, first):
        self.later.run(fails, first)

    @precondition(lambda self: self.tier.calls)
    @rule(
        data=st.data(),
        count=st.sampled_from([1, 2, 100]),
        fails=failures,
        between=st.sampled_from([None, None, "poll", "answer"]),
    )
    def end_calls(self, data, count, fails, between):
        """The next calls, or others; the first one fails, or its future is done late."""
        first = data.draw(st.integers(0, len(self.tier.calls) - 1))
        for i in range(min(count, len(self.tier.calls) - first)):
            result = self.tier.land(first, fails and i == 0)
            if between == "answer" and self.later.calls:
                self.later.run()
            if between:
                self.poll()
            self.tier.end(first, result)

    @rule()
    def poll(self):
        for copy in self.engine.poll():
            if copy.kind == "load" and not copy.failed:
                loaded = [self.device[page] for page in copy.device_pages]
                assert loaded == [contents(key, self.epoch[key]) for key in copy.keys]
        assert all(p.done for p, since in self.prefetches if self.now >= since + TIMEOUT_S)
        if not self.tier.calls:
            assert self.copies.metrics()["kv_offload_cascading_blocks"] == 0

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
    def lose(self, keys):
        self.tier.remove([part for key in keys for part in self.pages.keys(key)])

    @rule(seconds=st.sampled_from([1.0, TIMEOUT_S]))
    def wait(self, seconds):
        self.now += seconds

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3))
    def discard(self, keys):
        """What is discarded is not found again, but what is stored after that."""
        self.engine.discard(keys)
        for key in keys:
            self.epoch[key] += 1

    @invariant()
    def ready_pages_hold_their_blocks(self):
        for key in KEYS:
            if self.manager.state(key) is BlockState.READY:
                page = self.manager._blocks.ready[key].page
                assert [*self.pages.bytes[page]] == contents(key, self.epoch[key])

    @invariant()
    def slow_tiers_take_half_of_the_pages_at_most(self):
        metrics = self.copies.metrics()
        assert metrics["kv_offload_promoting_blocks"] <= NUM_PAGES // 2
        assert metrics["kv_offload_cascading_blocks"] <= NUM_PAGES // 2

    def teardown(self):
        """Everything ends, and nothing stays pinned, reserved or in the tier against a discard."""
        while self.engine._loads or self.engine._stores:
            self.step()
        self.end_steps(len(self.steps))
        self.poll()
        end_all(self)
        assert all(prefetch.done for prefetch, _ in self.prefetches)
        assert self.manager.metrics()["kv_offload_num_copies"] == 0
        assert not self.copies._prefetches and not self.copies._writes
        self.now += TIMEOUT_S
        self.poll()
        end_all(self)
        assert self.copies.drain(0.0)
        for key in KEYS:
            for part, content in zip(PARTS, contents(key, self.epoch[key]), strict=True):
                assert self.tier.blocks.get(key + part, content) == content
        self.ready_pages_hold_their_blocks()


def end_all(machine):
    while machine.later.calls or machine.tier.calls:
        while machine.later.calls:
            machine.later.run()
        machine.copies.poll()
        while machine.tier.calls:
            machine.tier.end(0, machine.tier.land(0, fails=False))
        machine.copies.poll()
