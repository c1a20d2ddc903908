"""The benchmarks: verification, targets derived from rows, and every quick run."""

import importlib
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from bench import run_all
from bench.harness import peers, records, timestamps
from bench.harness.records import Results, Row
from bench.recurrent import hybrid_models, steps
from bench.report import plots
from bench.transfer import bandwidth, blocks, engines, overlap, pages, profile_copy
from bench.transfer.bandwidth import KIB, Point
from bench.transfer.blocks import Blocks, Method
from jaxkv._src.transfer import api, dispatch

pytestmark = pytest.mark.end_to_end

NAME = {"cpu": "host", "gpu": "kernel"}[jax.default_backend()]


@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
def test_a_program_copies_and_is_timed(direction):
    made = Blocks(KIB, 8)
    timed = made.program(Method(NAME), direction, 8, copies=2).measure()
    assert 0 < timed.handlers < timed.done
    assert 0 < timed.returns <= timed.done
    assert (timed.gpu > 0) == (NAME == "kernel")


@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
@pytest.mark.parametrize("broken", ["nothing moves", "one block too many"])
def test_wrong_bytes_are_found_before_anything_is_timed(monkeypatch, direction, broken):
    def copy(name, src, dst, src_ids, dst_ids):
        if broken == "nothing moves":
            return dst
        right = jaxkv.swap_blocks(src, dst, src_ids, dst_ids)
        unnamed = jnp.setdiff1d(jnp.arange(dst.shape[0]), dst_ids, size=1).astype(jnp.int32)
        return jaxkv.swap_blocks(src, right, src_ids[:1], unnamed)

    monkeypatch.setattr(blocks, "_copy", copy)
    with pytest.raises(AssertionError, match="words"):
        Blocks(KIB, 8).program(Method(NAME), direction, 8, copies=1)


def test_blocks_that_a_failed_program_took_are_made_again():
    made = Blocks(KIB, 8)
    made.arrays.clear()
    made.fill()
    made.program(Method(NAME), "load", 8, copies=1)


@pytest.mark.parametrize("way", [Method(NAME, 3), Method(NAME)])
def test_a_program_copies_in_its_way(way, monkeypatch):
    taken = []

    def select_implementation(*args, **kwargs):
        taken.append(dispatch.select_implementation(*args, **kwargs))
        return taken[-1]

    monkeypatch.setattr(api, "select_implementation", select_implementation)
    program = Blocks(KIB, 8).program(way, "load", 8, copies=2)
    assert {one.implementation for one in taken[1:]} == {NAME}
    # The host has no SMs: the requested number has no effect and is not reported.
    assert program.num_sms == (0 if NAME == "host" else way.num_sms or taken[0].num_sms)
    if NAME != "host":
        assert {one.num_sms for one in taken[1:]} == {program.num_sms}


def test_peers_use_no_sms_and_force_nothing():
    with Method(peers.BATCH).taken(Method(peers.BATCH).sms_for(jaxkv.swap_blocks)):
        assert dispatch._forced_implementation.get() is None


def test_time_between_stamps_grows_with_what_lies_between():
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
@pytest.mark.parametrize("peer", peers.CODES)
@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
def test_peers_copy_inside_and_outside_jax(peer, direction):
    made = Blocks(8 * KIB, 32)
    made.program(Method(peer), direction, 32, copies=2)  # verifies
    source, destination = (made.arrays[side] for side in made.sides(direction))
    _, ids = made.ids(Method(peer), 32, seed=5)
    took = peers.run(peer, source, destination, ids, calls=2, repeats=2)
    assert 0 < took.submit <= took.total
    assert not blocks._mismatches(
        made._on_device(made.sides(direction)[1]),
        made._on_device(made.sides(direction)[1]),
        made._on_device(made.sides(direction)[0]),
        jnp.asarray([ids]),
    )


@pytest.mark.parametrize("nbytes", [512, KIB, 28 * KIB, 1 << 20])
def test_points_are_read_back_from_their_text(nbytes):
    point = Point("load", nbytes, 10_000, "kernel", 12)
    assert Point.parse(str(point)) == point
    assert Point.parse("load, page_first_direct, kernel, 4 KiB blocks") is None


GRID = bandwidth.Grid((KIB, 4 * KIB, 8 * KIB), 100, (8 * KIB,), (1,), 1 << 20, 1 << 20)


def test_counts_stay_within_the_bytes_of_a_copy():
    assert GRID.counts_of(KIB) == [100]
    assert GRID.counts_of(8 * KIB) == [1, 100]
    assert GRID.counts_of(64 * KIB) == [16]


def rated(rates, peers=None):
    """A result with a row for each {(direction, bytes, count, name, SMs): GB/s}; the peak is 50."""
    found = Results("transfer")
    for point, rate in rates.items():
        others = (peers or {}).get(point[:3], {})
        found.row(str(Point(*point)), "bandwidth", "GB/s", rate, ("one copy", 50.0), others)
    return found


def got(found, grid=GRID):
    bandwidth.record_targets(found, grid)
    return {target.name: target.got for target in found.targets}


def test_roof_targets_count_the_sms():
    found = got(
        rated(
            {
                ("load", KIB, 100, "kernel", 16): 49.0,
                ("load", KIB, 100, "kernel", 12): 45.0,
                ("load", 8 * KIB, 100, "pallas", 4): 40.0,
                ("load", 8 * KIB, 100, "kernel", 2): 20.0,
                ("load", 8 * KIB, 100, "dma", 0): 50.0,
            }
        )
    )
    assert found["load, 1 KiB x 100: at most 12 SMs"] == 0.9
    assert found["load, 8 KiB x 100: at most 4 SMs"] == 0.8
    assert found["load, 8 KiB x 100: at most 2 SMs"] == 0.4
    assert found["store, 1 KiB x 100: at most 12 SMs"] is None


def test_peer_targets_compare_on_the_same_footing():
    theirs = {
        ("load", 8 * KIB, 100): {peers.BATCH: 10.0, peers.TRITON: 25.0},
        ("load", 8 * KIB, 1): {peers.BATCH: 4.0, bandwidth.BATCH_IN_JAX: 1.0},
    }
    found = got(
        rated(
            {
                ("load", 8 * KIB, 100, "kernel", 4): 40.0,
                ("load", 8 * KIB, 100, "kernel", 12): 30.0,
                ("load", 8 * KIB, 1, "kernel", 4): 2.0,
            },
            theirs,
        )
    )
    batch = peers.BATCH
    assert found[f"load, 8 KiB x 100: against {batch}"] == 4.0
    assert found[f"load: against {batch}, the worst of all sizes and counts"] == 2.0
    assert found[f"store: against {batch}, the worst of all sizes and counts"] is None
    assert found["load, 8 KiB x 100: against Triton, both with 12 SMs"] == 1.2
    assert found["against Triton, the worst of the sizes that it ran"] == 1.2


def test_of_two_kinds_of_batches_the_faster_counts_and_a_choice_is_held_against_it():
    theirs = {
        ("load", 8 * KIB, 100): {peers.BATCH: 10.0, peers.SHORT_BATCH: 25.0},
        ("load", 8 * KIB, 1): {peers.BATCH: 4.0, bandwidth.BATCH_IN_JAX: 1.0},
    }
    rates = {
        ("load", 8 * KIB, 100, "kernel", 2): 50.0,
        ("load", 8 * KIB, 1, "kernel", 2): 4.0,
        ("load", 8 * KIB, 1, "dma", 0): 3.0,
    }
    results = rated(rates, theirs)
    results.row("load, 8 KiB x 100", bandwidth.CHOSEN, "of the fastest", 1.0)
    results.row("load, 8 KiB x 1", bandwidth.CHOSEN, "of the fastest", 0.25)
    found = got(results)
    worst = f"load: against {peers.BATCH}, the worst of all sizes and counts"
    assert found[f"load, 8 KiB x 100: against {peers.BATCH}"] == 2.0
    assert (found[worst], found[f"{worst}, as chosen"]) == (2.0, 1.0)


def test_ratios_to_peers_stand_beside_that_of_a_copy_at_the_roof():
    rates = {("load", size, 100, "kernel", 12): 40.0 for size in GRID.blocks}
    theirs = {
        ("load", KIB, 100): {peers.BATCH: 2.0, peers.TRITON: 8.0},
        ("load", 4 * KIB, 100): {peers.BATCH: 25.0},
    }
    found = rated(rates, theirs)
    bandwidth.record_targets(found, GRID)
    targets = {target.name: target for target in found.targets}
    bounds = {
        f"load, 1 KiB x 100: against {peers.BATCH}": (25.0, False),
        f"load, 4 KiB x 100: against {peers.BATCH}": (2.0, True),
        "load, 1 KiB x 100: against Triton, both with 12 SMs": (6.25, True),
        f"load, 8 KiB x 100: against {peers.BATCH}": (None, False),
        "load, 1 KiB x 100: at most 12 SMs": (None, False),
    }
    for name, (bound, beyond) in bounds.items():
        assert (targets[name].bound, targets[name].above_peak) == (bound, beyond)


PROFILED = [
    '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"',
    '"0","void copy_blocks<8, uint4>(Params)","gpu__time_duration.sum","ns","204,800"',
    '"0","k","lts__t_requests_aperture_sysmem.sum","request","1"',
    '"0","k","pcie__read_bytes.sum","byte","11,534,336"',
    '"0","k","pcie__write_bytes.sum","byte","1,048,576"',
    '"0","k","smsp__issue_active.avg.pct_of_peak_sustained_active","%","6.5"',
    '"0","k","smsp__warp_issue_stalled_long_scoreboard_per_warp_active.pct","%","92.5"',
]


def test_profile_is_read_from_what_the_tool_printed(monkeypatch):
    printed = ["==PROF== Connected", "load, 10 us", *PROFILED]
    found = Results("profile")
    monkeypatch.setattr(
        profile_copy.peak_bandwidth, "contiguous_copy", lambda *_: ("one copy", 55.0)
    )
    case = profile_copy.Case("load", KIB, 12)
    profile_copy.record(found, case, profile_copy.parse("\n".join(printed)))
    values = {row.metric: row.value for row in found.rows}
    assert values["bandwidth of the kernel"] == pytest.approx(10_000 * KIB / 204_800)
    assert values["time of the kernel"] == pytest.approx(204.8)
    assert values["bytes read over the link"] == 11
    assert values["warps that wait for memory"] == 92.5
    for lost in (printed[:3], printed[:2], ["==ERROR=="]):
        with pytest.raises(ValueError, match="printed no"):
            profile_copy.parse("\n".join(lost))


def test_main_points_have_about_ten_thousand_blocks():
    counts = (1, 1024, 9_000, 100_000)
    found = rated({("load", KIB, count, "kernel", 12): 1.0 for count in counts})
    assert [point.num_blocks for point in bandwidth.main_points(found.rows)] == [9_000]


def overlap_rows():
    peers = {overlap.ALONE: 10.0, overlap.SEQUENTIAL: 11.0}
    names = {overlap.ALONE: 10.0, overlap.SEQUENTIAL: 11.0, "kernel, 4 SMs": 10.1}
    return [
        Row(f"{kind} step, 64 MiB: {name}", "step", "ms", value, None, peers)
        for kind in overlap.KINDS
        for name, value in names.items()
    ]


def test_figures_show_lines_and_roof():
    pytest.importorskip("matplotlib")
    rates = {
        (way, size, 10_000, name, sms): 40.0
        for way in blocks.DIRECTIONS
        for size in (KIB, 8 * KIB)
        for name, sms in (("kernel", 12), ("dma", 0))
    }
    theirs = {point[:3]: {peers.BATCH: 9.0} for point in rates}
    drawn = plots.transfer_figure(rated(rates, theirs).rows)
    labels = [line.get_label() for line in drawn.axes[0].get_lines()]
    assert labels[:3] == ["kernel", "dma", peers.BATCH]
    assert np.unique(np.asarray(drawn.axes[0].get_lines()[3].get_ydata())) == [50.0]
    drawn = plots.overlap_figure(overlap_rows())
    assert [len(panel.patches) for panel in drawn.axes] == [3, 3]


def test_result_file_has_a_line_for_each_row():
    text = records._one_line_each({"env": {"a": 1}, "rows": [{"x": 1}, {"x": 2}], "targets": []})
    assert '\n  {"x": 1},\n  {"x": 2}\n' in text


OF_DEVICES = ("all_reduce", "tensor_parallel")  # write a file for each number of devices


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", [name for name in run_all.BENCHMARKS if name != "demo"])
def test_quick_run(name, tmp_path, monkeypatch):
    """Every benchmark completes on the CPU with positive figures."""
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    saved = []
    monkeypatch.setattr(Results, "save", lambda self, out: saved.append(self))
    assert importlib.import_module(f"bench.{run_all.BENCHMARKS[name]}").main(["--quick"]) == 0
    names = [f"{name}_{n}" for n in (2, 4, 8)] if name in OF_DEVICES else [name]
    for found in saved:
        assert found.name in names and found.rows
        bandwidths_and_times = [r for r in found.rows if r.metric in ("bandwidth", "time", "step")]
        assert all(row.value > 0 for row in bandwidths_and_times)
        assert all(target.met for target in found.targets)
    assert saved


@pytest.mark.parametrize("name", OF_DEVICES)
def test_numbers_of_devices_that_are_asked_for(name, monkeypatch, capsys):
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
def test_engines_move_the_same_pages_in_every_way():
    engine = engines.Engine(engines.Size(2, 6, 2 * KIB, repeats=1, repeats_of_ours=1))
    for way in (engines.TPU_INFERENCE, engines.SGLANG, engines.WHOLE):
        took = engine.theirs(way)
        assert took["load"].staging >= 6 * 2 * 2 * KIB
    assert engine.ours("host")["load"].staging < 1024


@pytest.mark.cpu_only
@pytest.mark.parametrize("way", [engines.TPU_INFERENCE, engines.SGLANG, engines.WHOLE])
def test_engine_baseline_waits_do_not_grow_with_the_number_of_pages(way, monkeypatch):
    monkeypatch.setattr(engines, "PAGES_AT_A_TIME", 2)
    waits = []
    for num_pages in (2, 8):
        engine = engines.Engine(engines.Size(1, num_pages, KIB, repeats=1, repeats_of_ours=1))
        wait = mock.Mock(wraps=jax.block_until_ready)
        with monkeypatch.context() as patch:
            patch.setattr(jax, "block_until_ready", wait)
            engine.theirs(way)
        waits.append(wait.call_count)
    assert waits[0] == waits[1]


@pytest.mark.cpu_only
def test_pages_that_do_not_come_back_are_found(monkeypatch):
    case = pages.Case(pages.size("cpu", quick=True), pages.DIRECT, "host")
    monkeypatch.setattr(jaxkv, "load_pages", lambda pool, cache, *ids, **options: cache)
    with pytest.raises(AssertionError, match="elements"):
        case.verify()


@pytest.mark.cpu_only
@pytest.mark.parametrize("broken", ["nothing", "can_skip", "due"])
def test_a_way_that_saves_too_little_is_found(monkeypatch, broken):
    model = hybrid_models.Model("tiny", 2, 6, 32, (4, 8, 16), 64)
    case = steps.Case(model, 8, 12, jnp.ones((8, 8), jnp.bfloat16), products=1)
    if broken == "nothing":
        assert 8 * 12 < case.check() < 8 * 12 * steps.QUERY
        return
    forgets = {"can_skip": True, "due": False}[broken]
    monkeypatch.setattr(steps.Scheduler, broken, lambda *args: forgets)
    with pytest.raises(AssertionError, match="the ways differ"):
        case.check()


def test_combined_is_held_against_the_better_way_to_within_the_error():
    found = Results("recurrent")
    samples = {way: [1.0, 1.1, 1.2] for way in steps.WAYS}
    samples[steps.PREDICATE] = [0.9, 0.9, 0.9]
    samples[steps.COMBINED] = [0.72, 0.9, 0.99]
    for batch in (16, 64):
        steps.record_targets(found, f"batch {batch}", batch, samples)
    error = 1.2533 * 1.4826 * 0.1 / 3**0.5  # the ratios are 0.8, 1, 1.1
    assert [target.got for target in found.targets] == pytest.approx([0.9 / 1.1, 1.0, 1.0])
    assert [target.want for target in found.targets] == pytest.approx(
        [steps.WANTED, 1 + 2 * error, 1 + 2 * error]
    )
    assert [row.value for row in found.rows] == pytest.approx([2 * error] * 2)
