"""The benchmarks: verification of copies, and quick runs of all benchmarks."""

import importlib
import types
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from bench import run_all
from bench.harness import copy_baselines, records, timestamps
from bench.harness.records import Results
from bench.recurrent import hybrid_models, steps
from bench.transfer import blocks, engines, pages, profile_copy
from bench.transfer.bandwidth_rows import KIB
from bench.transfer.blocks import Blocks, Method
from jaxkv._src.transfer import api, dispatch

pytestmark = pytest.mark.end_to_end

NAME = {"cpu": "host", "gpu": "kernel"}[jax.default_backend()]


@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
def test_program_with_stamps_copies_and_is_timed(direction):
    made = Blocks(KIB, 8)
    timed = made.program(Method(NAME), direction, 8, copies=2).measure()
    assert 0 < timed.handlers < timed.done
    assert 0 < timed.returns <= timed.done
    assert (timed.gpu > 0) == (NAME == "kernel")


@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
@pytest.mark.parametrize("broken", ["nothing moves", "one block too many"])
def test_program_with_wrong_bytes_raises_before_timing(monkeypatch, direction, broken):
    def copy(name, src, dst, src_ids, dst_ids):
        if broken == "nothing moves":
            return dst
        right = jaxkv.swap_blocks(src, dst, src_ids, dst_ids)
        unnamed = jnp.setdiff1d(jnp.arange(dst.shape[0]), dst_ids, size=1).astype(jnp.int32)
        return jaxkv.swap_blocks(src, right, src_ids[:1], unnamed)

    monkeypatch.setattr(blocks, "_copy", copy)
    with pytest.raises(AssertionError, match="words"):
        Blocks(KIB, 8).program(Method(NAME), direction, 8, copies=1)


def test_blocks_consumed_by_a_failed_program_are_recreated():
    made = Blocks(KIB, 8)
    made.arrays.clear()
    made.fill()
    made.program(Method(NAME), "load", 8, copies=1)


@pytest.mark.parametrize("method", [Method(NAME, 3), Method(NAME)])
def test_program_uses_the_implementation_and_sms_of_its_method(method, monkeypatch):
    taken = []

    def select_implementation(*args, **kwargs):
        taken.append(dispatch.select_implementation(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(api, "select_implementation", select_implementation)
    program = Blocks(KIB, 8).program(method, "load", 8, copies=2)
    assert {one.implementation for one in taken[1:]} == {NAME}
    # The host has no SMs: the requested number has no effect and is not reported.
    assert program.num_sms == (0 if NAME == "host" else method.num_sms or taken[0].num_sms)
    if NAME != "host":
        assert {one.num_sms for one in taken[1:]} == {program.num_sms}


def test_baseline_method_uses_no_sms_and_forces_no_implementation():
    with Method(copy_baselines.BATCH).taken(
        Method(copy_baselines.BATCH).sms_for(jaxkv.swap_blocks)
    ):
        assert dispatch._forced_implementation.get() is None


def test_time_between_stamps_grows_with_the_work_between_them():
    def program(length):
        @jax.jit
        def step(x):
            x = timestamps.stamp(x, 0)
            for _ in range(length):
                x = jax.lax.optimization_barrier(jnp.sort(-x))
            return timestamps.stamp(x, 1)

        return step

    x = jnp.zeros(1 << 16)
    seconds = [timestamps.measure(program(length), x)[0].handlers for length in (0, 20)]
    if jax.default_backend() == "cpu":  # elsewhere the handlers only enqueue
        assert seconds[1] > 2 * seconds[0]


@pytest.mark.gpu
@pytest.mark.parametrize("baseline", copy_baselines.CODES)
@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
def test_copy_baselines_inside_and_outside_jax_copy_all_blocks(baseline, direction):
    made = Blocks(8 * KIB, 32)
    made.program(Method(baseline), direction, 32, copies=2)  # verifies
    source, destination = (made.arrays[side] for side in made.sides(direction))
    _, ids = made.ids(Method(baseline), 32, seed=5)
    took = copy_baselines.run(baseline, source, destination, ids, calls=2, repeats=2)
    assert 0 < took.submit <= took.total
    assert not blocks._mismatches(
        made._on_device(made.sides(direction)[1]),
        made._on_device(made.sides(direction)[1]),
        made._on_device(made.sides(direction)[0]),
        jnp.asarray([ids]),
    )


PROFILED = [
    '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
    '"0","void copy_blocks<8, uint4>(Params)","gpu__time_duration.sum","ns","204,800"',
    '"0","k","lts__t_requests_aperture_sysmem.sum","request","1"',
    '"0","k","pcie__read_bytes.sum","byte","11,534,336"',
    '"0","k","pcie__write_bytes.sum","byte","1,048,576"',
    '"0","k","smsp__issue_active.avg.pct_of_peak_sustained_active","%","6.5"',
    '"0","k","smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct","%","92.5"',
]


def test_profile_from_tool_output_has_all_metrics_or_raises(monkeypatch):
    printed = ["==PROF== Connected", "load, 10 us", *PROFILED]
    found = Results("profile")
    monkeypatch.setattr(
        profile_copy.peak_bandwidth, "contiguous_copy", lambda *_: ("one copy", 55.0)
    )
    case = profile_copy.Case("load", KIB, 12)
    profile_copy.record(found, case, profile_copy.parse("\n".join(printed)))
    values = {row.metric: row.value for row in found.rows}
    assert values["kernel bandwidth"] == pytest.approx(10_000 * KIB / 204_800)
    assert values["kernel time"] == pytest.approx(204.8)
    assert values["bytes read (link)"] == 11
    assert values["warps stalled on memory"] == 92.5
    for lost in (printed[:3], printed[:2], ["==ERROR=="]):
        with pytest.raises(ValueError, match="printed no"):
            profile_copy.parse("\n".join(lost))


def test_record_as_text_has_one_line_per_row():
    text = records._one_line_each({"env": {"a": 1}, "rows": [{"x": 1}, {"x": 2}], "targets": []})
    assert '\n  {"x": 1},\n  {"x": 2}\n' in text


OF_DEVICES = ("all_reduce", "tensor_parallel")  # write a file for each number of devices


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", [name for name in run_all.BENCHMARKS if name != "demo"])
def test_quick_run_on_a_cpu_gives_positive_figures(name, tmp_path, monkeypatch):
    """Every benchmark completes on the CPU with positive figures."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    saved = []
    monkeypatch.setattr(Results, "save", lambda self, out: saved.append(self))
    assert importlib.import_module(f"bench.{run_all.BENCHMARKS[name]}").main(["--quick"]) == 0
    names = [f"{name}_{n}" for n in (2, 4, 8)] if name in OF_DEVICES else [name]
    for found in saved:
        assert found.name in names and found.rows
        positive = ("bandwidth", engines.LATENCY, "time per step")
        bandwidths_and_times = [r for r in found.rows if r.metric in positive]
        assert all(row.value > 0 for row in bandwidths_and_times)
        assert all(check.met for check in found.checks)
    assert saved


@pytest.mark.parametrize("name", OF_DEVICES)
def test_devices_flag_selects_available_numbers_of_devices(name, monkeypatch, capsys):
    """Only available numbers of devices run; the others are reported."""
    monkeypatch.setattr(jax, "devices", lambda: [None] * 4)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    bench = importlib.import_module(f"bench.{run_all.BENCHMARKS[name]}")
    saved = []
    monkeypatch.setattr(Results, "save", lambda self, out: saved.append(self.name))
    nothing = types.SimpleNamespace(measure=lambda: None, table=lambda: "")
    monkeypatch.setattr(bench, "Bench", lambda *_, **__: nothing, raising=False)
    monkeypatch.setattr(bench, "Stack", lambda *_: None, raising=False)
    monkeypatch.setattr(bench, "measure", lambda *_: None, raising=False)
    for flags, expected in (([], [2, 4]), (["--devices", "4", "8"], [4])):
        saved.clear()
        assert bench.main(flags) == 0
        assert saved == [f"{name}_{world}" for world in expected]
        assert "not measured: 8 devices, of 4" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench.main(["--devices", "3"])


@pytest.mark.cpu_only
def test_engine_baselines_and_jaxkv_move_the_same_pages():
    engine = engines.Engine(engines.Size(2, 6, 2 * KIB, repeats=1, jaxkv_repeats=1))
    for method in (engines.TPU_INFERENCE, engines.SGLANG, engines.ALL_PAGES):
        took = engine.time_baseline(method)
        assert took["load"].staging >= 6 * 2 * 2 * KIB
    assert engine.time_jaxkv("host")["load"].staging < 1024


@pytest.mark.cpu_only
@pytest.mark.parametrize("method", [engines.TPU_INFERENCE, engines.SGLANG, engines.ALL_PAGES])
def test_engine_baseline_waits_are_independent_of_the_number_of_pages(method, monkeypatch):
    monkeypatch.setattr(engines, "PAGES_AT_A_TIME", 2)
    waits = []
    for num_pages in (2, 8):
        engine = engines.Engine(engines.Size(1, num_pages, KIB, repeats=1, jaxkv_repeats=1))
        wait = mock.Mock(wraps=jax.block_until_ready)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "block_until_ready", wait)
            engine.time_baseline(method)
        waits.append(wait.call_count)
    assert waits[0] == waits[1]


@pytest.mark.cpu_only
def test_pages_case_with_a_load_that_copies_nothing_raises(monkeypatch):
    case = pages.Case(pages.size("cpu", quick=True), pages.DIRECT, "host")
    monkeypatch.setattr(jaxkv, "load_pages", lambda pool, cache, *ids, **options: cache)
    with pytest.raises(AssertionError, match="elements"):
        case.verify()


@pytest.mark.cpu_only
@pytest.mark.parametrize("broken", ["nothing", "can_skip", "needs_copy"])
def test_state_saving_method_that_skips_a_required_copy_raises(monkeypatch, broken):
    model = hybrid_models.Model("tiny", 2, 6, 32, (4, 8, 16), 64)
    case = steps.Case(model, 8, 12, jnp.ones((8, 8), jnp.bfloat16), products=1)
    if broken == "nothing":
        assert 8 * 12 < case.check() < 8 * 12 * steps.QUERY
        return
    forgets = {"can_skip": True, "needs_copy": False}[broken]
    monkeypatch.setattr(steps.Scheduler, broken, lambda *args: forgets)
    with pytest.raises(AssertionError, match="the methods differ"):
        case.check()


def test_combined_method_is_compared_with_the_faster_alternative():
    found = Results("recurrent")
    samples = {method: [1.0, 1.1, 1.2] for method in steps.METHODS}
    samples[steps.PREDICATE] = [0.9, 0.9, 0.9]
    samples[steps.COMBINED] = [0.72, 0.9, 0.99]
    for batch in (16, 64):
        steps.record_targets(found, f"batch {batch}", batch, samples)
    error = 1.2533 * 1.4826 * 0.1 / 3**0.5  # the ratios are 0.8, 1, 1.1
    assert [target.got for target in found.targets] == pytest.approx([0.9 / 1.1, 1.0, 1.0])
    assert [target.error for target in found.targets[1:]] == pytest.approx([error] * 2)
    assert [target.met for target in found.targets[1:]] == [False] * 2
