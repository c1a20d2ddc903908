"""Random life cycles of the manager with failures at every step, compared with a simple model.

Copies are simulated, with contents: a page holds what was last written to it, and what a load has
read must be the contents of its blocks when the load is completed.
"""

import dataclasses
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxkv.offload import (
    BlockNotReadyError,
    BlockState,
    BlockStored,
    Lookup,
    LookupStatus,
    OffloadManager,
    StaleSpecError,
)

pytestmark = pytest.mark.host_only

NUM_PAGES = 6
# Three requests; the second one shares a prefix with the first.
REQUESTS = [
    [name.encode() for name in text.split()]
    for text in ("a0 a1 a2 a3 a4", "a0 a1 b2 b3", "c0 c1 c2 c3 c4 c5 c6 c7")
]
KEYS = sorted({key for request in REQUESTS for key in request})
steps = st.integers(0, 3)  # of a new copy: none, started, moved, completed
parts = st.tuples(st.integers(0, 4), st.integers(1, 8))


def snapshot(manager):
    """Everything that later decisions depend on."""
    table, policy = manager._blocks, vars(manager._policy)
    return (
        {key: (b.page, b.state, b.pins) for key, b in [*table.ready.items()]},
        {key: (b.page, b.state, b.pins) for key, b in [*table.pending.items()]},
        [*table._free],
        [*table.generations],
        {name: [*v] if hasattr(v, "__iter__") else v for name, v in policy.items()},
        {job_id: copy.started for job_id, copy in manager._copies.items()},
        manager.metrics(),
        [*manager._events],
    )


@dataclasses.dataclass
class SimulatedCopy:
    spec: Any
    is_store: bool
    contents: list  # of the blocks when it was prepared; for a load, what it has read
    started: bool = False
    moved: bool = False
    over: bool = False


class LifeCycle(RuleBasedStateMachine):
    policy, write = "lru", "through"

    @initialize()
    def create(self):
        self.manager = OffloadManager(NUM_PAGES, policy=self.policy, write=self.write, events=True)
        self.copies: list[SimulatedCopy] = []
        self.ready: dict[bytes, int] = {}  # page of each block
        self.pending: dict[bytes, SimulatedCopy] = {}
        self.order: list[bytes] = []  # least recently used first
        self.uses: dict[bytes, int] = {}
        self.epoch = dict.fromkeys(KEYS, 0)  # contents of a block: (key, epoch)
        self.host = [None] * NUM_PAGES  # contents of each page
        self.generations = [0] * NUM_PAGES
        self.router: set[bytes] = set()

    # The model.

    def in_flight(self):
        return [copy for copy in self.copies if not copy.over]

    def pinned(self):
        return {
            key
            for copy in self.in_flight()
            if not copy.is_store
            for key, page in zip(copy.spec.keys, copy.spec.pages, strict=True)
            if self.ready.get(key) == page
        }

    def use(self, keys):
        for key in reversed(keys):
            if key in self.order:
                self.order.remove(key)
                self.order.append(key)

    def wants(self, key, evicted):
        if self.write == "second_use":
            return not evicted and self.uses.get(key, 0) > 1
        return evicted == (self.write == "back")

    def add(self, copy, steps):
        """A new copy, after its first steps; all of an empty one."""
        self.copies.append(copy)
        for _ in range(steps if copy.spec.keys else 3):
            self.proceed(copy)

    def unchanged_by(self, error, call, *args, **kwargs):
        before = snapshot(self.manager)
        with pytest.raises(error) as caught:
            call(*args, **kwargs)
        assert snapshot(self.manager) == before
        return str(caught.value)

    # Calls.

    @rule(request=st.sampled_from(REQUESTS), load_steps=steps, store_steps=steps)
    def serve(self, request, load_steps, store_steps):
        """A request as an engine serves it; its copies stay in flight, or not."""
        self.touch(request)
        self.prepare_load(request, [0, self.manager.lookup(request).num_blocks], load_steps)
        self.prepare_store(request, [0, 8], self.write == "back", store_steps)

    @rule(request=st.sampled_from(REQUESTS), window=st.one_of(st.none(), st.integers(1, 3)))
    def lookup(self, request, window):
        def longest(present):
            starts = {n: 0 if window is None else max(0, n - window) for n in range(9)}
            return max(
                n for n in range(len(request) + 1) if {*request[starts[n] : n]} <= {*present}
            )

        now, later = longest(self.ready), longest({**self.ready, **self.pending})
        found = self.manager.lookup(request, window)
        assert found == Lookup(now, later - now)
        status = LookupStatus.PENDING if later > now else LookupStatus.HIT
        assert found.status is (status if later else LookupStatus.MISS)

    def touch(self, request):
        self.manager.touch(request)
        self.use(request)
        for key in request:
            self.uses[key] = self.uses.get(key, 0) + 1

    @rule(request=st.sampled_from(REQUESTS), part=parts, steps=steps)
    def prepare_load(self, request, part, steps):
        keys = request[slice(*part)]
        if not {*keys} <= {*self.ready}:
            text = self.unchanged_by(BlockNotReadyError, self.manager.prepare_load, keys)
            assert f"keys[{[key in self.ready for key in keys].index(False)}]" in text
            return
        spec = self.manager.prepare_load(keys)
        assert list(spec.pages) == [self.ready[key] for key in keys]
        assert list(spec.generations) == [self.manager.generation(page) for page in spec.pages]
        self.add(SimulatedCopy(spec, False, []), steps)

    @rule(
        request=st.sampled_from(REQUESTS), part=parts, evicted=st.booleans(), steps=steps
    )  # fmt: skip
    def prepare_store(self, request, part, evicted, steps):
        keys = request[slice(*part)]
        wanted = [
            key for key in keys
            if key not in self.ready and key not in self.pending and self.wants(key, evicted)
        ]  # fmt: skip
        evictable = {*self.ready} - self.pinned() - {*keys}
        busy = {page for copy in self.in_flight() for page in copy.spec.pages}
        num_free = len({*range(NUM_PAGES)} - {*self.ready.values()} - busy)
        stored = wanted[: num_free + len(evictable)]
        spec = self.manager.prepare_store(keys, evicted=evicted)
        assert (list(spec.keys), spec.num_refused) == (stored, len(wanted) - len(stored))
        assert [keys[i] for i in spec.indices] == stored
        assert len(spec.evicted) == max(0, len(stored) - num_free)
        assert {*spec.evicted} <= evictable
        if self.policy == "lru":
            oldest = [key for key in self.order if key in evictable]
            assert list(spec.evicted) == oldest[: len(spec.evicted)]
        for key in spec.evicted:
            self.generations[self.ready.pop(key)] += 1
            self.order.remove(key)
        assert len({*spec.pages}) == len(stored)
        assert not {*spec.pages} & (busy | {*self.ready.values()})
        copy = SimulatedCopy(spec, True, [(key, self.epoch[key]) for key in stored])
        self.pending |= dict.fromkeys(stored, copy)
        self.order += reversed(stored)
        self.use(keys)
        self.add(copy, steps)

    @rule(request=st.sampled_from(REQUESTS), number=st.integers(1, 4))
    def fail_in_eviction(self, request, number):
        """The policy fails after some of its candidates, or before the first."""
        plan = self.manager._policy.plan

        def failing_plan(keys, num_free, evictable):
            left = iter(range(number - 1))

            def failing(key):
                if next(left, None) is None:
                    raise MemoryError
                return evictable(key)

            plan(keys, num_free, failing)
            raise MemoryError

        self.manager._policy.plan = failing_plan
        try:
            self.unchanged_by(MemoryError, self.manager.prepare_store, request)
        finally:
            del self.manager._policy.plan
        self.unchanged_by(ValueError, self.manager.prepare_store, [*request, request[0]])

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data(), steps=st.integers(1, 3), moves_again=st.booleans())
    def continue_copy(self, data, steps, moves_again):
        copy = data.draw(st.sampled_from(self.in_flight()))
        for _ in range(steps):
            self.proceed(copy, moves_again)

    def proceed(self, copy, moves_again=False):
        """The next step of a copy: start, the copy itself, perhaps in parts, completion."""
        if copy.over:
            return
        if not copy.started:
            if self.is_stale_load(copy):
                self.unchanged_by(StaleSpecError, self.manager.start, copy.spec)
                return
            self.manager.start(copy.spec)
            copy.started = True
        elif not copy.moved or moves_again:
            copy.moved = True
            if copy.is_store:
                for page, content in zip(copy.spec.pages, copy.contents, strict=True):
                    self.host[page] = content
            else:
                copy.contents = [self.host[page] for page in copy.spec.pages]
        elif self.is_stale_load(copy):
            assert "discarded" in self.unchanged_by(
                StaleSpecError, self.manager.complete, copy.spec
            )
        else:
            self.manager.complete(copy.spec)
            copy.over = True
            if not copy.is_store:
                assert copy.contents == [(key, self.epoch[key]) for key in copy.spec.keys]
                return
            for key, page in zip(copy.spec.keys, copy.spec.pages, strict=True):
                if self.pending.get(key) is copy:
                    del self.pending[key]
                    self.ready[key] = page

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def misuse(self, data):
        copy = data.draw(st.sampled_from([*self.in_flight(), *self.copies[-1:]]))
        calls = [self.manager.start if copy.started else self.manager.complete]
        if copy.over:
            calls = [self.manager.start, self.manager.complete, self.manager.abort]
        for call in calls:
            self.unchanged_by(StaleSpecError, call, copy.spec)
        forged = dataclasses.replace(copy.spec, generations=(-1, *copy.spec.generations[1:]))
        for call in (self.manager.start, self.manager.complete, self.manager.abort):
            self.unchanged_by(StaleSpecError, call, forged)

    @precondition(lambda self: self.in_flight())
    @rule(data=st.data())
    def abort(self, data):
        copy = data.draw(st.sampled_from(self.in_flight()))
        self.manager.abort(copy.spec)
        copy.over = True
        for key, page in zip(copy.spec.keys, copy.spec.pages, strict=True):
            if self.pending.get(key) is copy:
                del self.pending[key]
                self.order.remove(key)
                self.generations[page] += 1

    @rule(keys=st.one_of(st.none(), st.lists(st.sampled_from(KEYS), max_size=3)))
    def discard(self, keys):
        self.manager.discard(keys)
        for key in KEYS if keys is None else keys:
            self.epoch[key] += 1
            page = self.ready.pop(key, None)
            if writer := self.pending.pop(key, None):
                page = writer.spec.pages[writer.spec.keys.index(key)]
            if page is not None:
                self.generations[page] += 1
            if key in self.order:
                self.order.remove(key)

    def is_stale_load(self, copy):
        """Whether a block was discarded since the load was prepared, perhaps stored again."""
        pages = zip(copy.spec.keys, copy.spec.pages, strict=True)
        return not copy.is_store and any(self.ready.get(key) != page for key, page in pages)

    # What holds at all times.

    @invariant()
    def states_are_those_of_the_model(self):
        if not hasattr(self, "manager"):
            return
        for key in KEYS:
            expected = BlockState.READY if key in self.ready else None
            if key in self.pending:
                started = self.pending[key].started
                expected = BlockState.WRITING if started else BlockState.RESERVED
            assert self.manager.state(key) is expected
        assert [*map(self.manager.generation, range(NUM_PAGES))] == self.generations
        metrics = self.manager.metrics()
        assert metrics["kv_offload_pinned_blocks"] == len(self.pinned())
        assert metrics["kv_offload_num_copies"] == len(self.in_flight())
        busy = {page for copy in self.in_flight() for page in copy.spec.pages}
        assert metrics["kv_offload_cpu_cache_usage_perc"] == pytest.approx(len(busy) / NUM_PAGES)
        assert metrics["kv_offload_used_blocks"] == len(busy | {*self.ready.values()})

    @invariant()
    def ready_pages_hold_their_blocks(self):
        for key, page in getattr(self, "ready", {}).items():
            assert self.host[page] == (key, self.epoch[key])

    @invariant()
    def events_describe_the_ready_blocks(self):
        if not hasattr(self, "manager"):
            return
        for event in self.manager.take_events():
            if isinstance(event, BlockStored):
                assert not self.router & {*event.keys}
                self.router |= {*event.keys}
            else:
                assert self.router >= {*event.keys}
                self.router -= {*event.keys}
        assert self.router == {*self.ready}

    @invariant()
    def arc_is_within_its_bounds(self):
        if self.policy == "arc" and hasattr(self, "manager"):
            arc = self.manager._policy
            assert {*arc.t1} | {*arc.t2} == {*self.ready, *self.pending}
            assert not ({*arc.t1} | {*arc.t2}) & ({*arc.b1} | {*arc.b2})
            assert len(arc.t1) + len(arc.b1) <= NUM_PAGES
            assert len(arc.t1) + len(arc.b1) + len(arc.t2) + len(arc.b2) <= 2 * NUM_PAGES
            assert 0 <= arc.target <= NUM_PAGES


def case(name, **attributes):
    machine: Any = type(name, (LifeCycle,), attributes)
    made = machine.TestCase
    made.settings = settings(stateful_step_count=60, deadline=None)
    return made


TestLru = case("TestLru")
TestArc = case("TestArc", policy="arc")
TestWriteBack = case("TestWriteBack", write="back")
TestSecondUse = case("TestSecondUse", write="second_use")
TestArcSecondUse = case("TestArcSecondUse", policy="arc", write="second_use")
