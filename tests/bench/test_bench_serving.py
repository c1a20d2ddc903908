"""`bench.serving`: workloads, the systems' copies, and the table of results."""

import argparse
import itertools
import json
import types
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from bench.harness import peak_bandwidth, timing
from bench.harness.records import File, Results, Row
from bench.harness.timing import Figure
from bench.report.catalog import TABLES
from bench.serving import cases, decode, runs, systems, workloads
from bench.serving.systems import (
    COPY_ENGINE,
    DEVICE_PUT,
    IN_HBM,
    JAXKV,
    NAMES,
)
from examples.serving.request import Request


@pytest.mark.cpu_only
@pytest.mark.parametrize("system", [IN_HBM, JAXKV])
def test_others_are_loaded_beside_running_requests(system):
    flags = argparse.Namespace(tiny=True, quick=False, part=["latency"], system=None)
    (case,) = cases.ttft(flags)
    taken, answers = runs.serve(case._replace(systems=(system,)), 1)
    (found,) = taken["latency"][system]
    on_the_host, in_hbm = (
        found[f"prompt tokens {where}"][1] for where in ("on the host", "in HBM")
    )
    assert (on_the_host > 80, in_hbm > 80) == (system == JAXKV, system == IN_HBM)
    assert len(answers["latency"][system]) > cases.TINY.running and found[runs.LATENCY][1] > 0


@pytest.mark.host_only
def test_inter_token_latency_is_of_the_running_requests_and_later_tokens():
    def request(submitted, *times):
        found = Request([1, 2], len(times))
        found.submitted_at, found.token_times = submitted, [*times]
        found.tokens += [0] * len(times)
        return found

    engine: Any = types.SimpleNamespace(
        limits=types.SimpleNamespace(page_size=4),
        spec=types.SimpleNamespace(page_bytes=1),
        pool=object(),
    )
    running, other = request(0.0, 1.0, 5.0, 5.25, 5.75), request(6.0, 6.5, 9.0)
    steps = systems.Steps(4, 1, 0.5, copied_pages=12, extents=3)
    served = workloads.Served([other], [running], steps, start=6.0, since=5.0)
    found = runs.figures(engine, served)
    assert found["host time per step"][1] == pytest.approx(125)
    assert found["steps dispatched to an idle device"][1] == pytest.approx(25)
    assert found["inter-token latency p50"][1] == pytest.approx(1e3 * (0.25 + 0.5) / 2)
    assert found[runs.TTFT][1] == pytest.approx(500) and found[runs.RATE][1] == pytest.approx(1 / 3)
    assert found["consecutive pages"][1] == 4


@pytest.mark.host_only
def test_every_repeat_is_served_by_all_systems_before_the_next(monkeypatch):
    flags = argparse.Namespace(tiny=True, quick=False, part=["random"], system=None)
    (case,) = cases.compare(flags)
    served = []

    class Work:
        def __init__(self, repeat):
            self.repeat = repeat

        def run(self, engine):
            served.append((self.repeat, engine.name))
            return [workloads.Served([], [], systems.Steps(0, 0, 0.0), float(self.repeat))] * 2

    def create(name, *_):
        return types.SimpleNamespace(name=name, release=lambda: None)

    monkeypatch.setattr(runs, "init_params", lambda *_: {})
    monkeypatch.setattr(systems, "create", create)
    monkeypatch.setattr(runs, "figures", lambda engine, served: {runs.RATE: ("1/s", served.start)})
    makers: dict[str, Any] = {"random": Work}
    taken, _ = runs.serve(case._replace(workloads=makers), 4)
    orders = [[name for repeat, name in served if repeat == number] for number in range(4)]
    assert [repeat for repeat, _ in served] == sorted(repeat for repeat, _ in served)
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert orders[1::2] == [order[::-1] for order in orders[::2]]
    rates = {name: [sample[runs.RATE][1] for sample in taken["random"][name]] for name in NAMES}
    assert all(found == [0, 0, 1, 1, 2, 2, 3, 3] for found in rates.values())


@pytest.mark.host_only
def test_orders_are_random():
    names = [*map(str, range(10))]
    assert [*runs.orders(names, 1)] != [*runs.orders(names, 1)]


@pytest.mark.host_only
@pytest.mark.parametrize(("part", "system"), [("random", JAXKV), ("multi_turn", COPY_ENGINE)])
def test_a_part_and_a_system_alone_are_recorded(part, system, monkeypatch):
    flags = argparse.Namespace(tiny=False, quick=False, part=[part], system=[system])
    served = workloads.Served([], [], systems.Steps(0, 0, 0.0), 0.0)
    monkeypatch.setattr(runs, "init_params", lambda *_: {})
    monkeypatch.setattr(systems, "create", mock.Mock())
    monkeypatch.setattr(workloads.Workload, "run", lambda *_: [served])
    monkeypatch.setattr(runs, "figures", lambda *_: {runs.RATE: ("1/s", 1.0)})
    found = Results("x")
    runs.record(found, cases.compare(flags)[0], *runs.serve(cases.compare(flags)[0], 1))
    assert [row.case for row in found.rows] == [f"{part}, pages of 32, {system}"]
    assert not found.targets


@pytest.mark.host_only
def test_ratios_are_of_the_same_repeat_and_unequal_answers_fail(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    flags = argparse.Namespace(tiny=True, quick=False, part=["latency"], system=None)
    (case,) = cases.ttft(flags)
    found = Results("x")
    metrics = (runs.LATENCY, runs.MEAN_LATENCY)
    times = {JAXKV: [3.0, 30.0, 6.0], IN_HBM: [2.0, 20.0, 3.0]}
    taken = {
        "latency": {
            system: [{m: ("ms", time) for m in metrics} for time in values]
            for system, values in times.items()
        }
    }
    runs.record(found, case, taken, {"latency": {IN_HBM: [[1], [2]], JAXKV: [[1], [3]]}})
    assert [(row.metric, row.value) for row in found.rows] == [
        *[(metric, median) for median in (6.0, 3.0) for metric in metrics],
        ("ratio", 1.5), ("ratio", 1.5),
    ]  # fmt: skip
    target, mean = found.targets
    assert runs.MEAN_LATENCY in mean.name
    assert "jaxkv / in HBM" in target.name and (target.got, target.met) == (1.5, False)
    assert target.error is not None
    assert [(check.got, check.met) for check in found.checks] == [(1, False)]


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("others", "loaded", "bound"),
    [
        ((), 0, None),
        ((IN_HBM,), 0, 1.2),
        ((IN_HBM,), 45, 1.2),
        ((IN_HBM,), 50, 1.155),
        ((), 50, 1.155),
    ],
)
def test_bound_of_a_rate_is_that_in_hbm_or_of_the_link(monkeypatch, others, loaded, bound):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    peak = {"load": 52.5, "store": 40.0}
    copy = staticmethod(lambda direction, size: ("a copy", peak[direction]))
    monkeypatch.setattr(runs.peak_bandwidth, "contiguous_copy", copy)
    flags = argparse.Namespace(tiny=True, quick=False, part=["random"], system=None)
    (case,) = cases.compare(flags)
    wanted = runs.Wanted("random", runs.RATE, DEVICE_PUT, ">=", 2.5)
    rates = {JAXKV: 11.0, DEVICE_PUT: 10.0, IN_HBM: 12.0}
    taken = {
        "random": {
            system: [{runs.RATE: ("1/s", rates[system]), runs.LOADED: ("GB/s", loaded)}] * 2
            for system in (JAXKV, DEVICE_PUT, *others)
        }
    }
    found = Results("x")
    case = case._replace(wanted=(wanted, wanted._replace(ratio=None)), dtype="bfloat16")
    runs.record(found, case, taken, {"random": {JAXKV: []}})
    (target,) = found.targets  # the other ratio is a row only
    assert [row.value for row in found.rows if row.unit == "x"] == pytest.approx([1.1, 1.1])
    assert (target.got, target.bound) == (pytest.approx(1.1), bound and pytest.approx(bound))
    assert target.above_peak is (bound is not None)
    assert {row.peak and row.peak["value"] for row in found.rows if row.metric == runs.LOADED} == {
        52.5
    }


def figures(rate, p99):
    return {runs.RATE: ("1/s", rate), runs.TTFT_P99: ("ms", p99)}


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("own", "others", "rates"),
    [
        # The limit is that of jaxkv with most in flight, 80 ms, between two points of device_put.
        ([(40, 80), (30, 50)], [(20, 200), (10, 70)], (40, 10 + 10 * 10 / 130)),
        ([(40, 80), (41, 80)], [(20, 80), (10, 70)], (41, 20)),
        # device_put has at least 100 ms: more than jaxkv.
        ([(40, 80), (30, 50)], [(20, 200), (10, 100)], (40, 10)),
        ([(40, 80), (30, 50)], [(9, 100), (10, 100)], (40, 10)),
    ],
)
def test_rates_at_equal_ttft_are_the_highest_within_one_limit(own, others, rates):
    taken = {
        f"multi_turn{fewer}": {
            JAXKV: [figures(*own[level])] * 2, DEVICE_PUT: [figures(*others[level])] * 2
        }
        for level, fewer in enumerate(("", ", 1 in flight"))
    }  # fmt: skip
    want = runs.Wanted("multi_turn", runs.RATE_AT_EQUAL_TTFT, DEVICE_PUT, ">=", 2.5)
    for got, rate in zip(runs.rates_at_equal_ttft(taken, want), rates, strict=True):
        assert got == pytest.approx([rate] * 2)
    assert runs.rates_at_equal_ttft({"multi_turn": taken["multi_turn"]}, want) == ([], [])


@pytest.mark.host_only
def test_conversations_with_fewer_in_flight_have_other_prompts_and_two_systems(monkeypatch):
    flags = argparse.Namespace(tiny=True, quick=False, part=["multi_turn"], system=None)
    (case,) = cases.compare(flags)
    works = {name: make(0) for name, make in case.workloads.items()}
    found = [work for work in works.values() if isinstance(work, workloads.Workload)]
    levels = {"multi_turn": 4, **cases.IN_FLIGHT}
    assert dict(zip(works, (work.parallel for work in found), strict=True)) == levels
    assert len({str(work.clients[0][0].new) for work in found}) == len(levels)
    monkeypatch.setattr(runs, "init_params", lambda *_: {})
    monkeypatch.setattr(systems, "create", mock.Mock())
    monkeypatch.setattr(runs, "figures", lambda engine, served: {})
    nothing = workloads.Served([], [], systems.Steps(0, 0, 0.0), 0.0)
    monkeypatch.setattr(workloads.Workload, "run", lambda *_: [nothing])
    taken, _ = runs.serve(case._replace(systems=(JAXKV, IN_HBM)), 1)
    ran = {name: [w for w in taken if name in taken[w]] for name in (JAXKV, IN_HBM)}
    assert ran == {JAXKV: [*works], IN_HBM: ["multi_turn"]}


@pytest.mark.host_only
def test_trace_has_whole_sessions_with_common_prefixes(tmp_path):
    path = tmp_path / "trace.jsonl"
    blocks = ([0, 1, 2, 9], [0, 5, 6], [0, 1, 2, 3, 4, 10], [0, 7, 8, 11])
    lines = [{"hash_ids": ids, "output_length": 700 + len(ids)} for ids in blocks]
    path.write_text("\n".join(map(json.dumps, lines)))
    work = workloads.trace(path, 2, 40, scale=64, parallel=1, vocab=256)
    first, second = work.clients
    assert [len(turn.new) for turn in first] == [3 * 8, 5 * 8] and len(second) == 1
    assert first[1].new[:24] == first[0].new and first[0].new[:8] == second[0].new[:8]
    assert [turn.answer for turn in first] == [704 // 64, 706 // 64]
    assert work.longest == 51 and work.sequences == [40 + 22, 16 + 10]


@pytest.mark.host_only
def test_conversations_have_the_given_lengths():
    work = workloads.multi_turn(3, 4, 19, 7, 2, parallel=1, vocab=256)
    assert len(work.clients) == 3 and work.longest == 48 and work.sequences == [48] * 3
    assert [len(turn.new) for turn in work.clients[0]] == [19, 7, 7, 7]


class OneStepEach:
    """Finishes one request in each step, the latest first; `order` has what it was asked to do."""

    def __init__(self):
        self.running, self.order = [], []

    busy = property(lambda self: bool(self.running))

    def take_steps(self):
        self.order.append("taken")
        return systems.Steps(len(self.order), 0, 0.0)

    def submit(self, request):
        self.running.append(request)
        self.order.append(len(request.prompt))

    def step(self):
        request = self.running.pop()
        request.tokens, request.finished = [*request.prompt, 0], True
        self.order.append("finished")
        request.token_times = [float(self.order.count("finished"))]


@pytest.mark.host_only
@pytest.mark.parametrize("rounds_of_window", [None, 1, 2])
def test_unmeasured_rounds_are_over_before_the_measured_ones(rounds_of_window):
    engine: Any = OneStepEach()
    work = workloads.multi_turn(
        3, 3, 10, 4, 1, parallel=2, vocab=256, first=1, rounds_of_window=rounds_of_window
    )
    found = work.run(engine)
    lengths = [len(request.prompt) for served in found for request in served.requests]
    assert sorted(lengths) == [15, 15, 15, 20, 20, 20]
    before = engine.order[: engine.order.index("taken")]
    assert before.count(10) == before.count("finished") == 3
    windows = 2 if rounds_of_window == 1 else 1
    assert len(found) == windows and engine.order.count("taken") == 1 + windows
    assert engine.order.count("finished") == 9 and engine.order[-1] == "taken"


@pytest.mark.host_only
def test_windows_follow_each_other():
    """A window starts where the one before ends: with its last token."""
    work = workloads.multi_turn(2, 4, 8, 4, 1, 1, vocab=256, first=1, rounds_of_window=1)
    engine: Any = OneStepEach()
    first, *others = work.run(engine)
    assert first.start > 9  # the clock's, as no measured request ended before
    assert [served.start for served in others] == [4.0, 6.0]
    assert [[request.token_times[-1] for request in s.requests] for s in (first, *others)] == [
        [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]
    ]  # fmt: skip
    assert first.steps.dispatched < others[0].steps.dispatched < others[1].steps.dispatched
    with pytest.raises(ValueError, match="6 measured requests are no multiple of window=4"):
        workloads.multi_turn(2, 4, 8, 4, 1, 1, vocab=256, first=1, rounds_of_window=2)


@pytest.mark.host_only
def test_samples_of_conversations_are_at_least_nine():
    """The rule of CONTRIBUTING.md for an interrupted sample."""
    flags = argparse.Namespace(tiny=False, quick=False, part=["multi_turn"], system=None)
    case, small_pages = cases.compare(flags)
    for found in (case, small_pages):
        for name, make in found.workloads.items():
            work = make(0)
            assert isinstance(work, workloads.Workload) and work.window == 48
            assert found.repeats[name] * work.measured // work.window >= 9


@pytest.mark.host_only
def test_serving_table_has_one_row_per_workload_and_system():
    rows = [
        Row("random, jaxkv", "requests/s", "1/s", 12.0),
        Row("random, jaxkv", "TTFT p50", "ms", 5.0),
        Row("random, recompute", "requests/s", "1/s", 8.0),
        Row("random: jaxkv / recompute", "2 standard errors of the ratio", "x", 0.1),
    ]
    file = File("gpu", "serving", None, None, {}, rows, [])
    found = TABLES["serving"]([file]).splitlines()[2:]
    assert [line.split(" | ")[:4] for line in found] == [
        ["| gpu", "random, jaxkv", "12", "5 / -"],
        ["| gpu", "random, recompute", "8", "- / -"],
    ]


@pytest.mark.parametrize(
    "copied, share, peak",
    [(400.0, 0.5, "sum by XLA"), (1000.0, 0.25, "a copy, read and written")],
)
def test_decode_is_compared_with_the_faster_read_of_hbm(monkeypatch, copied, share, peak):
    """A chain reads 500 GB/s, the sum 910 to 1110, a copy twice what it copies."""
    sums = itertools.cycle(np.linspace(0.9e-12, 1.1e-12, 15))
    monkeypatch.setattr(decode, "sum_by_xla", lambda num_bytes: lambda: next(sums))
    monkeypatch.setattr(peak_bandwidth, "device_copy", lambda: ("a copy", copied))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    chain = decode.Chain(jax.jit(lambda x: x + 1), jax.numpy.zeros(()), 1000)
    monkeypatch.setattr(decode.Chain, "__call__", lambda _: 2e-12)
    results = Results("serving_decode", log=False)
    decode._record(results, "attention", chain, decode.SMALL, 4, 0.4)
    (target,) = results.targets
    assert target.got == pytest.approx(share, 1e-3) and target.met is (share > 0.4)
    assert bool(target.error) == (peak == "sum by XLA")
    taken, bandwidth = results.rows
    assert taken.value == pytest.approx(2e-12 * 1000 / 4 * 1e6)
    assert bandwidth.value == pytest.approx(500)
    assert bandwidth.peak and bandwidth.peak["name"] == peak


def test_chain_is_timed_per_byte(monkeypatch):
    lengths = []

    def seconds_per_call(step, state, *, calls, **_):
        lengths.append(calls)
        return Figure(0.02), step(state)

    monkeypatch.setattr(timing, "seconds_per_call", seconds_per_call)
    chain = decode.Chain(lambda state: state + 1, 0, 1000)
    assert chain() == pytest.approx(2e-5) and chain.state == 2
    assert lengths == [2, timing.chain_length(0.02)]
