"""The benchmarks: quick runs of all of them, and the verification of what they compare."""

import importlib
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from bench import engines, pages, run_all
from bench import recurrent_steps as steps
from bench.harness import host_metadata, records, timestamps, timing
from bench.harness.blocks import CHOICES, HOST_IDS, KIB, Method
from bench.harness.main import benchmark_of_devices
from bench.harness.records import Results
from bench.harness.timing import Call, Figure, Samples
from bench.metadata import make_batch, on_host

pytestmark = pytest.mark.end_to_end


def test_time_between_stamps_grows_with_the_work_between_them():
    def program(length):
        @jax.jit
        def step(x):
            x = timestamps.stamp(x, 0)
            for _ in range(length):
                x = jax.lax.optimization_barrier(jnp.sort(-x))
            return timestamps.stamp(x, 1)

        return step

    x = jnp.zeros(1 << 15)
    seconds = [timestamps.measure(program(length), x)[0].handlers for length in (0, 8)]
    if jax.default_backend() == "cpu":  # elsewhere the handlers only enqueue
        assert seconds[1] > 2 * seconds[0]


def test_record_as_text_has_one_line_per_row():
    text = records._one_line_each({"env": {"a": 1}, "rows": [{"x": 1}, {"x": 2}], "targets": []})
    assert '\n  {"x": 1},\n  {"x": 2}\n' in text


def test_results_record_errors_of_figures_and_exact_counts():
    found = Results("x")
    found.row("a", "time", "us", Figure(2.0, 0.5))
    found.row("a", "kernels", "kernels", 3)
    found.row("a", "share", "%", 0.25)
    assert [row.error for row in found.rows] == [0.5, 0.0, None]
    found.check("fails", 1, "==", 0, "x")
    assert found.exit_code == 1 and not found.targets


SINGLE_RUNS = (  # of a long time each, without an error
    "host_pool", "offload_manager", "serving", "serving_decode", "serving_ttft", "sparse_decode",
    "sparse",
)  # fmt: skip
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
    names += ["small_batches"] if name == "transfer" else []
    for found in saved:
        assert found.name in names and found.rows
        positive = ("bandwidth", engines.LATENCY, "time per step")
        assert all(row.value > 0 for row in found.rows if row.metric in positive)
        if name not in SINGLE_RUNS:
            assert [r for r in found.rows if r.error is None] == []
            assert [t for t in found.targets if t.got is not None and t.error is None] == []
        assert all(check.met for check in found.checks)
    assert saved


def test_run_all_runs_the_named_benchmarks_in_their_order(monkeypatch, capsys):
    ran = []

    def run(command, **_):
        ran.append(command[2:])
        return SimpleNamespace(returncode=int(command[2] == "bench.pages"))

    monkeypatch.setattr(run_all.subprocess, "run", run)
    assert run_all.main(["--quick", "--out", "x", "serving", "pages", "metadata"]) == 1
    flags = ["--quick", "--out", "x"]
    modules = ("bench.serving.compare", "bench.pages", "bench.metadata")
    assert ran == [[module, *flags] for module in modules]
    assert "failed: pages" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no benchmark page; of transfer, pages"):
        run_all.main(["page"])
    ran.clear()
    assert run_all.main([]) == 1 and len(ran) == len(run_all.BENCHMARKS)


def test_devices_flag_selects_available_numbers_of_devices(monkeypatch, capsys):
    """Only available numbers of devices run; the others are reported."""
    saved = []
    monkeypatch.setattr(Results, "save", lambda self, out: saved.append(self.name))
    main = benchmark_of_devices("x", None, lambda *_: None, lambda flags: 4)
    for flags, expected in (([], ["x_2", "x_4"]), (["--devices", "4", "8"], ["x_4"])):
        saved.clear()
        assert main(flags) == 0
        assert saved == expected
        assert "not measured: 8 devices, of 4" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--devices", "3"])


def test_failure_with_one_number_of_devices_is_recorded_and_keeps_the_others(monkeypatch):
    def measure(results, world, flags):
        results.row("case", "time", "us", 1.0)
        if world == 2:
            raise RuntimeError("no memory")

    saved = []
    monkeypatch.setattr(Results, "save", lambda self, out: saved.append(self))
    assert benchmark_of_devices("x", None, measure, lambda flags: 4)([]) == 1
    failed, complete = ([row.case for row in found.rows] for found in saved)
    assert failed == ["case", "2 devices: RuntimeError: no memory"] and complete == ["case"]


def test_failed_check_with_one_number_of_devices_fails(monkeypatch):
    def measure(results, world, flags):
        results.check("wrong values", int(world == 2), "==", 0, "values")

    monkeypatch.setattr(Results, "save", lambda self, out: None)
    main = benchmark_of_devices("x", None, measure, lambda flags: 4)
    assert (main([]), main(["--devices", "4"])) == (1, 0)


def test_added_rows_and_targets_are_printed(capsys):
    found = Results("x", log=True)
    found.row("a", "time", "us", Figure(2.0, 0.5), ("copy", 1.0), {"peer": 4.0}, ("<=", 1))
    assert capsys.readouterr().out.splitlines() == [
        "missed: a: time: 2 <= 1 us",
        "a: time 2 us +- 1, copy 1, peer 4",
    ]
    assert [(target.name, target.met) for target in found.targets] == [("a: time", False)]


@pytest.mark.cpu_only
def test_engine_baselines_and_jaxkv_move_the_same_pages():
    engine = engines.Engine(engines.Size(2, 6, 2 * KIB, rounds=1))
    load, store = sorted(engine.measure(), key=lambda comparison: comparison.direction)
    assert engines.SGLANG + engines.REUSED in store.peers
    for found in (load, store):
        for peer in found.peers:
            assert 0 < found.blocked(peer) <= found.latency(peer)
        for method in CHOICES:  # what a copy adds may be less than the noise
            assert len(found.host[str(method)]) == engines.HOST_ROUNDS
            assert found.latency(str(method)) > 0
    payload = 6 * 2 * 2 * KIB
    assert all(engine.staging[name] >= payload for name in engines.BASELINES)
    assert all(engine.staging[str(method)] < 1024 for method in CHOICES)


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "way, missing",
    [(engines.Baseline, "_load"), (engines.Jaxkv, "load"), (engines.Jaxkv, "store")],
)
def test_engine_way_that_copies_nothing_raises(way, missing, monkeypatch):
    monkeypatch.setattr(way, missing, lambda self: None)
    with pytest.raises(AssertionError, match="pages differ after a store and a load"):
        engines.Engine(engines.Size(1, 4, KIB, rounds=1)).measure()


@pytest.mark.cpu_only
@pytest.mark.parametrize("method", engines.BASELINES)
def test_engine_baseline_waits_are_independent_of_the_number_of_pages(method, monkeypatch):
    monkeypatch.setattr(engines, "PAGES_AT_A_TIME", 2)
    waits = []
    for num_pages in (2, 8):
        peer = engines.Baseline(engines.Engine(engines.Size(1, num_pages, KIB, rounds=1)), method)
        wait = mock.Mock(wraps=jax.block_until_ready)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "block_until_ready", wait)
            peer.store()
            peer.load()
        waits.append(wait.call_count)
    assert waits[0] == waits[1]


def test_engine_speedup_is_over_the_faster_engine_and_store_per_page_is_no_target():
    engine = engines.Engine(engines.Size(1, 4, KIB, rounds=1))
    engine.staging = dict.fromkeys((*map(str, CHOICES), *engines.BASELINES), 0)
    times = {"tpu-inference": 4.0, "sglang-jax": 3.0, engines.ALL_PAGES: 2.0, "as chosen": 1.5}
    times["as chosen HostIds"] = 1.0
    times |= {name + engines.REUSED: times[name] for name in engines.BASELINES}
    found = Results("engines")
    for direction in ("load", "store"):
        calls = {name: [Call(Figure(t), Figure(t))] * 3 for name, t in times.items()}
        host = {str(method): [1.5, 2.0, 9.0] for method in CHOICES}
        host |= {f"{method}{engines.NO_COPY}": [1.0, 1.5, 2.0] for method in CHOICES}
        engines.Comparison(engine, direction, calls, Samples(host)).record(found)
    got = {target.name: target.got for target in found.targets}
    case = f"{engine.size}, as chosen: speedup over"
    assert got[f"load, {case} {engines.PER_PAGE}"] == 2.0
    assert got[f"store, {case} {engines.ALL_PAGES}{engines.REUSED}"] == pytest.approx(4 / 3)
    assert not any("per page" in name for name in got if name.startswith("store"))
    blocked = {row.metric: row.value for row in found.rows[:4]}
    assert blocked[engines.HOST_TIME] == pytest.approx(2000)
    assert blocked[engines.ADDED] == pytest.approx(500)


def test_packed_metadata_is_unpacked_in_a_program():
    tree = on_host(make_batch(4, 8))
    flat, layout = host_metadata.uploaded(tree)
    got = jax.jit(host_metadata.unpacked, static_argnums=1)(flat, layout)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(tree), strict=True)
    assert flat.ndim == 1 and all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.cpu_only
def test_pages_case_with_a_load_that_copies_nothing_raises(monkeypatch):
    case = pages.Case(pages.size_of(pages.parse(["--quick"])), pages.DIRECT)
    monkeypatch.setattr(jaxkv, "load_pages", lambda pool, cache, *ids, **options: cache)
    with pytest.raises(AssertionError, match="wrong pages"):
        case.verify(Method("host", HOST_IDS))


def test_bound_of_the_submission_is_the_program_without_the_copy():
    seconds = {pages.NO_COPY: 0.4e-3, CHOICES[0]: 0.5e-3, CHOICES[1]: 0.6e-3}
    timed = {
        method: timestamps.Timed(*map(Figure, (1.0, returns, 1.0, 1e-5, 1e-3)))
        for method, returns in seconds.items()
    }
    what = pages.size_of(pages.parse(["--quick"]))
    found = Results("pages")
    case = SimpleNamespace(what=what, times=lambda *_, **__: dict(timed))
    pages.one_layer(found, case, CHOICES)  # type: ignore[arg-type]
    bounds = {target.name.rpartition(": ")[2]: target.bound for target in found.targets}
    assert bounds.keys() == pages.MOST_MS.keys()
    assert bounds.pop("submission") == pytest.approx(0.4) and {*bounds.values()} == {None}


@pytest.mark.cpu_only
def test_unsupported_method_is_left_out_and_keeps_pool_and_cache(monkeypatch):
    real = jaxkv.store_pages

    def store_pages(*args, implementation, **options):
        if implementation == "dma":
            raise NotImplementedError("no copy engine")
        return real(*args, implementation=implementation, **options)

    monkeypatch.setattr(jaxkv, "store_pages", store_pages)
    monkeypatch.setattr(pages, "methods", lambda: [Method("dma"), Method("host")])
    case = pages.Case(pages.size_of(pages.parse(["--quick"])), pages.DIRECT)
    assert case.supported() == [Method("host"), *CHOICES]


@pytest.mark.cpu_only
def test_pages_of_another_shape_are_measured_and_not_recorded(monkeypatch, capsys):
    monkeypatch.setattr(Results, "save", lambda *_: pytest.fail("recorded"))
    shape = {"layers": 1, "heads": 1, "head-dim": 8, "page-size": 4, "count": 2}
    flags = [f"--{name}={value}" for name, value in shape.items()]
    assert pages.main([*flags, "--dtype=bfloat16", "--layouts=page_first"]) == 0
    assert "submission" in capsys.readouterr().out


@pytest.mark.cpu_only
@pytest.mark.parametrize("broken", ["nothing", "can_skip", "needs_copy"])
def test_state_saving_method_that_skips_a_required_copy_raises(monkeypatch, broken):
    model = steps.Model("tiny", 2, 6, 32, (4, 8, 16), 64)
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
    samples = Samples({method: [1.0, 1.1, 1.2] for method in steps.METHODS})
    samples[steps.PREDICATE] = [0.9, 0.9, 0.9]
    samples[steps.COMBINED] = [0.72, 0.9, 0.99]
    steps.record_ratios(found, "batch 16", samples)
    assert [row.value for row in found.rows] == pytest.approx([0.9 / 1.1])  # to blocking
    (target,) = found.targets
    error = timing.median([0.8, 1, 1.1]).error
    assert (target.got, target.error, target.met) == (1.0, pytest.approx(error), False)
