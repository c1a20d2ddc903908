"""The all_reduce and tensor_parallel benchmarks: verification, aggregation and targets."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from bench.collectives import all_reduce, all_reduce_rank, tensor_parallel
from bench.collectives.all_reduce import (
    BANDS,
    CHAINED_CALL,
    CHAINED_PAIR,
    CHOSEN,
    GPU_TIME,
    KIB,
    MIB,
    ONE_PROCESS,
    PROCESS_PER_DEVICE,
    PSUM,
    TORCH,
    Bench,
    Key,
    Run,
)
from bench.harness import processes, records
from bench.harness.profiler import Event
from bench.harness.records import Results
from bench.harness.timing import Figure, Samples
from bench.report import plots
from bench.report.catalog import TABLES
from jaxkv._src.tuning import all_reduce_table

pytestmark = pytest.mark.end_to_end

# --------------------------------------------------------------------------------------------------
# From a profile to seconds


def events(*named):
    """Events of 1 us and more, each starting 10 us after the previous one."""
    return [
        Event(10e3 * i, 10e3 * i + 1e3 * length, name) for i, (name, length) in enumerate(named)
    ]


@pytest.mark.parametrize("product", [[], [("loop_multiply_fusion_1", 9)]])
@pytest.mark.parametrize(
    "kernels, seconds",
    [
        ([("void jaxkv::all_reduce_kernel<2>(View)", 3)], 3e-6),
        ([("MemcpyD2D", 1), ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(Args)", 5)], 6e-6),
        ([("all_reduce_start_1", 2), ("MemcpyD2D", 1), ("all_reduce_done_1", 3)], 6e-6),
        ([("psum_512_0_fusion_1", 4)], 4e-6),
    ],
)
def test_all_reduce_duration_includes_its_kernels_and_the_copies_before(product, kernels, seconds):
    ran = events(*(kernels + product) * 3, ("MemcpyD2D", 7))
    assert all_reduce_rank.reductions(ran, 3) == pytest.approx([seconds] * 3)
    count = sum(name != "MemcpyD2D" for name, _ in kernels)
    assert all_reduce_rank.reductions(ran, 3 * count + 1) == []


def test_all_reduce_duration_excludes_a_copy_before_a_product():
    ran = events(("MemcpyD2D", 7), ("wrapped_multiply", 1), ("psum_1_fusion", 4))
    assert all_reduce_rank.reductions(ran, 1) == pytest.approx([4e-6])
    assert all_reduce_rank.reductions(events(("MemcpyD2D", 7)), 1) == []


def test_kernels_numbered_by_xla_have_one_name():
    names = {all_reduce_rank.unnumbered(f"psum_{512 + i}_0_fusion_1") for i in range(3)}
    assert names == {"psum_fusion"}
    assert all_reduce_rank.unnumbered("ncclDevKernel_2_RING_LL") == "ncclDevKernel_2_RING_LL"


def test_profile_is_split_at_pauses_between_programs():
    pause = all_reduce_rank.PAUSE_SECONDS * 1e9
    first, second = events(("a", 1), ("b", 2)), events(("c", 1))
    later = [Event(e.start + pause, e.end + pause, e.name) for e in second]
    parts = all_reduce_rank._between_pauses([*first, *later])
    assert [[event.name for event in part] for part in parts] == [["a", "b"], ["c"]]


def profile_of(rank, monkeypatch, devices):
    """Results from a simulated profile of two programs."""
    programs = [rank.lower(KIB, method) for method in ("one_shot", PSUM)]
    programs[0].chains = {"pair": lambda x: x}
    programs[1].chains = {"call": lambda x: x}  # the profiled one of the two
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(all_reduce_rank.profiler, "trace", lambda run: run() or devices)
    return all_reduce_rank.profiled(programs)


def calls_of(name, count, microseconds, start=0.0):
    """Pairs of an all-reduce and a product, 20 us apart."""
    return [
        Event(start + 20e3 * i + begin, start + 20e3 * i + begin + 1e3 * length, kernel)
        for i in range(count)
        for kernel, begin, length in ((name, 0, microseconds), ("loop_multiply_fusion", 15e3, 1))
    ]


def test_profile_is_assigned_to_programs_and_devices(rank, monkeypatch):
    count = all_reduce_rank.PROFILED_CALLS * all_reduce_rank.QUICK_CHAIN[0]
    devices = [
        calls_of("one_shot_kernel", count, us) + calls_of("ncclDevKernel", count, us + 1, 1e9)
        for us in (3, 4)
    ]
    jaxkv_times, psum = profile_of(rank, monkeypatch, [*devices, []])  # one GPU is not involved
    assert [one[0] for one in jaxkv_times["kernels"]] == pytest.approx([3e-6, 4e-6])
    assert {len(one) for one in jaxkv_times["kernels"]} == {count}
    assert [one[-1] for one in psum["kernels"]] == pytest.approx([4e-6, 5e-6])
    assert psum["names"] == ["ncclDevKernel"]
    jaxkv_times, psum = profile_of(rank, monkeypatch, [one[:-2] for one in devices])
    assert jaxkv_times["kernels"] and "ncclDevKernel" in psum["unprofiled"]
    for devices in ([], [calls_of("fusion", 4, 1)] * 2):
        assert all("unprofiled" in one for one in profile_of(rank, monkeypatch, devices))


def test_gpu_time_over_ranks_is_that_of_the_last_rank_to_enter():
    answers = [
        {"kernels": [[9e-6, 3e-6, 3e-6]], "call": [4e-6], "pair": [6e-6]},
        {"kernels": [[2e-6, 8e-6, 5e-6]], "call": [5e-6]},
    ]
    found = all_reduce.over_ranks(answers)
    assert found == pytest.approx({GPU_TIME: 3, CHAINED_CALL: 5})
    assert all_reduce.over_ranks([{"kernels": [[1.0]]}, {"unprofiled": "why"}]) == {}


def test_answers_missing_on_a_rank_are_dropped():
    one, two = {"method": "a", "bytes": 8, "call": 1.0}, {"method": "b", "bytes": 8, "call": 2.0}
    more = {"method": "a", "bytes": 8, "kernels": [[1.0]]}
    [(method, num_bytes, answers)] = all_reduce.together([[one, more, two], [one]])
    assert (method, num_bytes, answers) == ("a", 8, [{**one, **more}, one])


@pytest.mark.parametrize(
    "kernel, name",
    [
        ("ncclDevKernel_AllReduce_RING_LL(Args<4096ul>)", "ncclDevKernel_AllReduce_RING_LL"),
        ("void jaxkv::(anonymous namespace)::reduce<A, 2>(View)", "reduce"),
        ("all_reduce_start_1", "all_reduce_start_1"),
    ],
)
def test_short_kernel_name_has_no_namespace_and_arguments(kernel, name):
    assert all_reduce.short_name(kernel) == name


# --------------------------------------------------------------------------------------------------
# Targets


def bench_with(times):
    """A bench of 2 devices with {(setting, method, bytes): us of every metric}."""
    bench = Bench(Results("all_reduce"), "gpu", 2, quick=False)
    for key, microseconds in times.items():
        metrics = (GPU_TIME, CHAINED_CALL, CHAINED_PAIR)
        bench.times[Key(*key)] = dict.fromkeys(metrics, Figure(microseconds))
        bench.ran[Key(*key)] = "low_latency"
    return bench


def targets(bench):
    bench.record_targets()
    return {target.name: target.got for target in bench.results.targets}


def all_sizes(setting, method, microseconds):
    return {(setting, method, size): microseconds for size in all_reduce.SIZES}


def test_setting_that_fails_keeps_completed_measurements(monkeypatch, capsys):
    ranks = [
        [{"method": PSUM, "bytes": KIB, "call": [2e-6], "pair": [3e-6], "kernels": [[1e-6]]}],
        [
            {"method": PSUM, "bytes": KIB, "call": [2e-6], "pair": [4e-6]},
            {"method": PSUM, "bytes": KIB, "unprofiled": "no profile"},
            {"method": CHOSEN, "bytes": MIB, "unsupported": "too large"},
            {"method": CHOSEN, "bytes": KIB, "failed": "AssertionError: wrong values"},
        ],
    ]
    monkeypatch.setattr(
        processes, "run", lambda *_, **__: processes.ProcessResult(ranks, "exit code 1")
    )
    bench = bench_with({})
    bench.run(Run(PROCESS_PER_DEVICE, "a program", {}, each_device=True))
    assert bench.times == {
        (PROCESS_PER_DEVICE, PSUM, KIB): pytest.approx({CHAINED_CALL: 2, CHAINED_PAIR: 4})
    }
    assert [row.case for row in bench.results.rows] == [
        "2 devices, one process per device: exit code 1",
        "2 devices, one process per device, 1 KiB: psum: unprofiled: no profile",
        "2 devices, one process per device, 1 KiB: chosen: failed: AssertionError: wrong values",
    ]
    assert "1 MiB: chosen: unsupported: too large" in capsys.readouterr().out


def test_target_is_the_maximum_ratio_of_a_range_to_the_best_baseline():
    times = all_sizes(ONE_PROCESS, CHOSEN, 3.0) | all_sizes(TORCH, "torch NCCL", 10.0)
    times |= all_sizes(TORCH, "torch one_shot", 6.0) | all_sizes(ONE_PROCESS, PSUM, 12.0)
    times[ONE_PROCESS, CHOSEN, 16 * KIB] = 4.5
    found = targets(bench_with(times))
    first, second, *_ = BANDS
    for metric in (GPU_TIME, CHAINED_CALL):
        assert found[f"2 devices, one process, {first}: {metric}"] == pytest.approx(0.75)
        assert found[f"2 devices, one process, {second}: {metric}"] == pytest.approx(0.5)
        assert found[f"2 devices, one process per device, {first}: {metric}"] is None
    pairs = f"{all_reduce.PAIR_BAND}: {CHAINED_PAIR}"
    assert found[f"2 devices, one process, {pairs}"] == pytest.approx(0.375)
    assert found[f"2 devices, one process per device, {pairs}"] is None


def test_pairs_are_compared_with_the_best_psum_where_it_is_measured():
    times = all_sizes(ONE_PROCESS, CHOSEN, 3.0) | all_sizes(ONE_PROCESS, PSUM, 12.0)
    times |= all_sizes(PROCESS_PER_DEVICE, CHOSEN, 3.0) | all_sizes(PROCESS_PER_DEVICE, PSUM, 9.0)
    times |= all_sizes(TORCH, "torch NCCL", 1.0)
    times[ONE_PROCESS, all_reduce.SYMMETRIC, 32 * KIB] = 6.0
    bench = bench_with(times)
    found, pairs = targets(bench), f"{all_reduce.PAIR_BAND}: {CHAINED_PAIR}"
    for setting in (ONE_PROCESS, PROCESS_PER_DEVICE):
        assert found[f"2 devices, {setting}, {pairs}"] == pytest.approx(0.5)
    assert {target.unit for target in bench.results.targets} == {"x best peer", "x best psum"}


@pytest.mark.parametrize("missing", [(ONE_PROCESS, CHOSEN), (TORCH, "torch NCCL")])
def test_target_of_a_range_with_a_missing_size_is_not_measured(missing):
    times = all_sizes(ONE_PROCESS, CHOSEN, 3.0) | all_sizes(TORCH, "torch NCCL", 10.0)
    del times[(*missing, 4 * KIB)]
    found = targets(bench_with(times))
    assert found[f"2 devices, one process, {BANDS[0]}: {CHAINED_CALL}"] is None
    assert found[f"2 devices, one process, {BANDS[1]}: {CHAINED_CALL}"] == pytest.approx(0.3)


def test_target_bound_is_the_time_of_copies_over_the_links():
    """Copies are no baseline: each of 4 devices sends and receives 1.5 times the message."""
    times = all_sizes(ONE_PROCESS, CHOSEN, 9.0) | all_sizes(TORCH, "torch NCCL", 10.0)
    times |= {(TORCH, all_reduce.COPIES, size): 5.0 for size in (16 * MIB, 64 * MIB)}
    bench = bench_with(times)
    bench.world = 4
    bench.record_targets()
    band = BANDS[-1]
    [target] = [
        t for t in bench.results.targets if t.name == f"4 devices, one process, {band}: {GPU_TIME}"
    ]
    assert (target.got, target.bound) == (pytest.approx(0.9), pytest.approx(0.75))


def test_ranges_of_targets_cover_every_size_once():
    for size in all_reduce.SIZES:
        assert sum(band.min_bytes <= size <= band.max_bytes for band in BANDS) == 1


def test_figure_and_tables_have_the_measured_times():
    times = all_sizes(ONE_PROCESS, CHOSEN, 3.0) | all_sizes(TORCH, "torch NCCL", 10.0)
    times |= all_sizes(ONE_PROCESS, PSUM, 12.0) | all_sizes(ONE_PROCESS, "one_shot", 5.0)
    bench = bench_with(times)
    bench.record()
    rows = bench.results.rows
    file = records.File("some_gpu", "all_reduce_2", None, None, {}, rows, [])
    text = TABLES["all_reduce"]([file])
    line = next(line for line in text.splitlines() if " 64 MiB " in line)
    times_of = "3 / 12 / 10 | " * 3
    assert line == f"| some_gpu | 2 | one process | 64 MiB | low_latency | {times_of}low_latency |"
    pytest.importorskip("matplotlib")
    drawn = plots.all_reduce([file])
    assert drawn
    [panel] = drawn.axes
    assert [line.get_label() for line in panel.get_lines()][:3] == ["jaxkv", "torch NCCL", PSUM]


def test_figure_of_two_records_has_one_panel_per_number_of_devices():
    pytest.importorskip("matplotlib")
    files = []
    for world in (2, 4):
        bench = bench_with(all_sizes(ONE_PROCESS, CHOSEN, 3.0))
        bench.world = world
        bench.record()
        rows = bench.results.rows
        files.append(records.File("some_gpu", f"all_reduce_{world}", None, None, {}, rows, []))
    [(key, drawn)] = plots.drawn_files(files).items()
    assert key == ("all_reduce", "some_gpu") and drawn == files
    figure = plots.all_reduce(drawn)
    assert figure
    panels = figure.axes
    assert [panel.get_title() for panel in panels] == ["2 GPUs", "4 GPUs"]
    assert plots.markdown(files).count("all_reduce_some_gpu.svg") == 1


# --------------------------------------------------------------------------------------------------
# All-reduces


@pytest.fixture
def rank(monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("a GPU's ranks are programs of their own")
    monkeypatch.setattr(all_reduce_rank, "_devices", lambda request: jax.devices()[:2])
    request = all_reduce_rank.Request("cpu", 2, None, [KIB, 8 * KIB], quick=True)
    return all_reduce_rank.Bench(request)


def printed(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rank_reports_every_method_and_size(rank, capsys):
    rank.measure()
    timed = {(a["method"], a["bytes"]) for a in printed(capsys) if min(a.get("pair", [0])) > 0}
    methods = (CHOSEN, *all_reduce_table.ALGORITHMS)
    assert timed >= {(method, size) for method in methods for size in (KIB, 8 * KIB)}


@pytest.mark.parametrize("method", ["one_shot", PSUM])
def test_chains_donate_their_initial_value(rank, method):
    """Otherwise XLA would update a GPU's graphs before each call."""
    program = rank.lower(KIB, method)
    program.chains = {name: chain.compile() for name, chain in program.chains.items()}
    before = program.states["pair"]
    program.verify()
    assert before.is_deleted()
    program.sample()
    assert not program.states["pair"].is_deleted()


def test_wrong_values_are_reported_and_not_timed(rank, capsys, monkeypatch):
    right = rank.reduce
    monkeypatch.setattr(
        rank, "reduce", lambda x, method: x if method == "one_shot" else right(x, method)
    )
    rank.measure()
    of_method = [answer for answer in printed(capsys) if answer["method"] == "one_shot"]
    assert [answer["failed"] for answer in of_method] == ["AssertionError: wrong values"] * 2


@pytest.mark.cpu_only
def test_tensor_parallel_step_with_wrong_values_raises(monkeypatch):
    stack = tensor_parallel.Stack(tensor_parallel.SMALL._replace(layers=1), 2)
    unsummed = functools.wraps(jaxkv.all_reduce)(lambda memory, x, axis_name: x)
    monkeypatch.setattr(jaxkv, "all_reduce", unsummed)
    with pytest.raises(AssertionError, match="activations differ"):
        tensor_parallel.measure_batches(Results("tensor_parallel"), stack, (2,))


def test_tensor_parallel_target_is_the_ratio_to_psum(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "on_gpu", lambda: True)
    found = Results("tensor_parallel")
    stack = tensor_parallel.Stack.__new__(tensor_parallel.Stack)
    stack.world, stack.model = 2, tensor_parallel.SMALL
    times = {
        tensor_parallel.JAXKV: [8e-3] * 2,
        tensor_parallel.PSUM: [1e-2] * 2,
        tensor_parallel.NO_ALL_REDUCE: [6e-3] * 2,
    }
    samples = Samples(times)
    tensor_parallel.record(found, stack, 4, samples)
    [target] = found.targets
    assert (target.got, target.bound) == (0.8, 0.6) and target.met
    file = records.File("some_gpu", "tensor_parallel", None, None, {}, found.rows, [])
    assert "| 8 | 10 | 6 | 0.800 |" in TABLES["tensor_parallel"]([file])


def test_tensor_parallel_layer_equals_that_of_one_device():
    """Heads and columns sharded over two devices give the result of one device."""
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    model = tensor_parallel.SMALL._replace(layers=1)
    stack = tensor_parallel.Stack(model, 2)
    x, caches = stack.state(3)
    step = stack.step(lambda x: jax.lax.psum(x, tensor_parallel.AXIS))
    got = step(jnp.copy(x), caches)  # donated
    x, [cache], [weights] = jax.device_put((x, caches, stack.weights), jax.devices()[0])
    expected = tensor_parallel.rms_norm(
        tensor_parallel.layer(model, lambda x: x, x, weights, cache)
    )
    error = jnp.linalg.norm((jax.device_put(got, jax.devices()[0]) - expected).astype(jnp.float32))
    assert error <= 0.02 * jnp.linalg.norm(expected.astype(jnp.float32))
