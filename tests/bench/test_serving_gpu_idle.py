"""`bench.serving.gpu_idle`: the share of time in which a GPU runs no kernel."""

import argparse
import contextlib
import types
from typing import Any
from unittest import mock

import jax
import pytest

from bench.harness.profiler import Event
from bench.harness.records import File, Results, Row
from bench.report.catalog import TABLES
from bench.serving import cases, gpu_idle, runs
from bench.serving.systems import DEVICE_PUT, IN_HBM, JAXKV
from bench.serving.workloads import Workload
from tests.bench.test_bench_serving_systems import conversations, create


@pytest.mark.host_only
@pytest.mark.parametrize(
    ("events", "share"),
    [
        ([], None),
        ([(3, 7, "a")], 0),
        ([(3, 7, "MemcpyH2D")], 1),
        ([(0, 4, "a"), (6, 10, "b")], 0.2),
        ([(6, 10, "b"), (0, 4, "a")], 0.2),
        ([(0, 4, "a"), (4, 10, "b")], 0),
        ([(0, 6, "a"), (2, 9, "b"), (9, 10, "c")], 0),  # of two streams
        ([(0, 8, "a"), (1, 2, "b"), (3, 4, "c"), (9, 10, "d")], 0.1),  # beside a long one
        ([(0, 4, "a"), (0, 4, "a"), (8, 10, "b")], 0.4),
        # Copies: in a gap, during a kernel, and before and after all of them.
        ([(0, 4, "a"), (4, 6, "MemcpyD2H"), (6, 10, "b")], 0.2),
        ([(0, 4, "a"), (2, 3, "Memset"), (4, 10, "memcpy_kernel")], 0),
        ([(0, 5, "MemcpyH2D"), (5, 9, "a"), (9, 10, "Memset")], 0.6),
    ],
)
def test_idle_share_is_the_time_without_a_kernel(events, share):
    found = gpu_idle.idle_share([Event(*event) for event in events])
    assert found == (share if share is None else pytest.approx(share))


@pytest.mark.host_only
def test_events_of_all_streams_are_read(tmp_path, monkeypatch):
    """The other lines of a GPU, derived from these, and the host's planes do not count."""

    def line(name, *events):
        found = [types.SimpleNamespace(start_ns=s, duration_ns=d, name=n) for s, d, n in events]
        return types.SimpleNamespace(name=name, events=found)

    gpu = [
        line("Stream #13(Compute,MemcpyD2D)", (0, 4, "gemm"), (6, 2, "MemcpyD2D")),
        line("Stream #20(MemcpyH2D)", (1, 9, "MemcpyH2D")),
        line("XLA Modules", (0, 10, "jit_step")),
    ]
    planes = [
        types.SimpleNamespace(name="/device:GPU:0", lines=gpu),
        types.SimpleNamespace(name="/host:CPU", lines=[line("Stream", (0, 99, "python"))]),
    ]
    read = mock.Mock(from_file=lambda path: types.SimpleNamespace(planes=planes))
    monkeypatch.setattr(jax.profiler, "ProfileData", read)
    (tmp_path / "host.xplane.pb").touch()
    events = gpu_idle._events(str(tmp_path))
    assert events == [Event(0, 4, "gemm"), Event(6, 8, "MemcpyD2D"), Event(1, 10, "MemcpyH2D")]
    assert gpu_idle.idle_share(events) == pytest.approx(0.6)


@pytest.mark.cpu_only
@pytest.mark.end_to_end
def test_a_profile_is_of_the_measured_time_and_ends_early(monkeypatch):
    """Requests that it cancels leave the engine as it was: later answers are right."""
    engine, profiled, prompts = create(JAXKV), list[str](), list[int]()
    submit = engine.submit

    def noted(request):
        prompts.append(len(request.prompt))
        submit(request)

    @contextlib.contextmanager
    def profile(folder):
        profiled.append(f"from request {len(prompts)}")
        yield
        profiled.append(f"to request {len(prompts)}")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "submit", noted)
        patch.setattr(gpu_idle, "_profile", profile)
        patch.setattr(gpu_idle, "_events", lambda folder: [Event(0, 3, "a"), Event(4, 5, "b")])
        work = conversations()
        work.first = 1
        assert gpu_idle.measure(engine, work, seconds=0.0) == pytest.approx(0.2)
    # Five conversations, two at once: the first step after the first turns is the last.
    assert prompts == [21] * 5 + [45] * 2 and profiled == ["from request 5", "to request 7"]
    assert not engine.busy and not engine.waiting and not engine.running
    assert gpu_idle.measure(engine, conversations(), seconds=60.0) is None  # of a CPU
    (served,), (wanted,) = (conversations().run(one) for one in (engine, create(IN_HBM)))
    answers = [sorted(request.tokens for request in found.requests) for found in (served, wanted)]
    assert answers[0] == answers[1]
    engine.release()


def profiled_case(monkeypatch, measure):
    """Samples of two systems, after their profiles by `measure`."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(gpu_idle, "measure", measure)
    flags = argparse.Namespace(tiny=False, quick=False, part=["random"], system=None)
    (case,) = cases.compare(flags)
    assert list(case.profiled) == list(case.workloads) == ["random"]
    taken: Any = {
        "random": {name: [{runs.RATE: ("1/s", 1.0)} for _ in range(9)] for name in (IN_HBM, JAXKV)}
    }
    engines: Any = {IN_HBM: IN_HBM, JAXKV: JAXKV, DEVICE_PUT: DEVICE_PUT}
    makers: Any = {"random": lambda repeat: repeat, "trace": None}  # the latter was not served
    case = case._replace(profiled=makers)
    runs.profile(case, engines, taken)
    results = Results("x")
    runs.record(results, case._replace(wanted=()), taken, {"random": {IN_HBM: []}})
    return results


@pytest.mark.host_only
def test_the_idle_share_is_one_row_without_error_from_a_repeat_of_its_own(monkeypatch):
    served = []

    def measure(engine, work):
        served.append((engine, work))
        return 0.25 if engine == JAXKV else None

    results = profiled_case(monkeypatch, measure)
    assert served == [(IN_HBM, cases.REPEATS["random"]), (JAXKV, cases.REPEATS["random"])]
    (row,) = [row for row in results.rows if row.metric == runs.GPU_IDLE]
    assert (row.case, row.unit, row.value, row.error) == (
        "random, pages of 32, jaxkv", "%", 25.0, None,
    )  # fmt: skip


@pytest.mark.host_only
def test_samples_are_recorded_although_the_profile_failed(monkeypatch, capsys):
    def measure(engine, work):
        raise RuntimeError("no profile")

    results = profiled_case(monkeypatch, measure)
    assert [row.metric for row in results.rows] == [runs.RATE] * 2
    assert "no profile" in capsys.readouterr().err


@pytest.mark.host_only
def test_the_trace_is_profiled_after_the_first_requests_of_its_sessions():
    flags = argparse.Namespace(tiny=True, quick=False, part=None, system=None)
    (case,) = cases.compare(flags)
    assert [*case.profiled] == ["multi_turn", "trace", "random"]
    work, profiled = case.workloads["trace"](7), case.profiled["trace"](7)
    assert isinstance(work, Workload) and isinstance(profiled, Workload)
    assert (work.first, profiled.first) == (0, 1) and profiled.clients == work.clients


@pytest.mark.host_only
def test_older_records_have_no_idle_share():
    rate = Row("random, jaxkv", runs.RATE, "1/s", 12.0)
    share = Row("random, jaxkv", runs.GPU_IDLE, "%", 2.0)
    for rows, text in (([rate], "-"), ([rate, share], "2")):
        found = File("gpu", "serving", None, None, {}, rows, [])
        header, _, line = TABLES["serving"]([found]).splitlines()
        cells = dict(zip(header.split(" | "), line.split(" | "), strict=True))
        assert cells[f"{runs.GPU_IDLE}, %"] == text
