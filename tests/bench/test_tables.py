"""Tables and plots of the documentation, without result files; the others: test_evidence.py."""

import numpy as np
import pytest

from bench.harness.records import File, Row, Target
from bench.report import plots, staleness, tables
from bench.report.catalog import SYMMETRIC, TABLES
from bench.report.gains import ALL_PAGES, LATENCY, REUSED, SGLANG, TPU_INFERENCE
from bench.report.tables import RATE

pytestmark = pytest.mark.host_only

PEAK = {"name": "one copy", "value": 50.0}
BASELINES = {TPU_INFERENCE: 20.0, SGLANG: 30.0, ALL_PAGES: 12.0}
STEP, NO_LOAD = "memory-bound step, 64 MiB", "without a load"


def file(name, rows, **others):
    return File("gpu", name, None, None, {}, rows, [], **others)


def body(table, *files):
    return TABLES[table](files).splitlines()[2:]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1,234,567"), (51.234, "51.2"), (5.123, "5.12"), (0.9, "0.900")],
)
def test_number_has_three_significant_digits(value, text):
    assert tables.number(value) == text


def engine_rows(size, times):
    stores = BASELINES | {name + REUSED: time + 1 for name, time in BASELINES.items()}
    return [
        Row(f"{case}, 2 layers x 3 pages of {size} KiB, {name}", LATENCY, "ms", time, None, others)
        for case, others in (("load", BASELINES), ("store", stores))
        for name, time in times.items()
    ]


def test_engines_table_has_the_time_with_device_ids():
    times = {"as chosen": 10.0, "as chosen HostIds": 9.0}
    assert body("engines", file("engines", engine_rows(8, times))) == [
        "| gpu | load, 2 layers x 3 pages of 8 KiB | 10 | 20 | 30 | 12 |",
        "| gpu | store, 2 layers x 3 pages of 8 KiB | 10 | 21 | 31 | 13 |",
    ]


def overlap_rows(times, metric="time per step"):
    others = {NO_LOAD: 5.0, "sequential": 8.0}
    return [Row(f"{STEP}: {n}", metric, "ms", t, None, others) for n, t in times.items()]


def test_gains_compare_jaxkv_with_each_baseline():
    rows = [*engine_rows(8, {"as chosen": 8.0}), *engine_rows(64, {"as chosen": 1.0})]
    steps = overlap_rows({NO_LOAD: 5.0, "sequential": 8.0, "dma": 5.0, "as chosen": 6.0})
    lines = body("gains", file("engines", rows), file("overlap", steps))
    assert [line.split(" | ")[3:] for line in lines] == [
        ["one `device_put` per page (tpu-inference)", "20", "8", "2.50x |"],
        ["one `device_put` of all pages, staged in HBM", "12", "8", "1.50x |"],
        ["one `device_put` per page (tpu-inference)", "21", "8", "2.62x |"],
        ["one `device_put` of all pages, staged in HBM", "13", "8", "1.62x |"],
        ["one `device_put` per page (tpu-inference)", "20", "1", "20x |"],
        ["one `device_put` of all pages, staged in HBM", "12", "1", "12x |"],
        ["one `device_put` per page (tpu-inference)", "21", "1", "21x |"],
        ["one `device_put` of all pages, staged in HBM", "13", "1", "13x |"],
        ["load before the step", "8", "6", "1.33x |"],
    ]


def serving_rows(rates, case="multi_turn, pages of 32"):
    rows = [Row(f"{case}, {system}", RATE, "1/s", rate) for system, rate in rates.items()]
    return [*rows, Row(f"{case}: {RATE}, jaxkv / recompute", "ratio", "x", 8.0)]


def test_gains_of_a_decode_step_are_inter_token_latencies():
    rows = [
        Row(f"scenario, qwen3-0.6b, {system}", f"inter-token latency {percentile}", "ms", time)
        for system, time in {"host metadata": 6.0, "in HBM": 4.0}.items()
        for percentile in ("p99", "p50")
    ]
    (line,) = body("gains", file("serving_decode", rows))
    assert line.split(" | ")[3:] == ["metadata on the host, no step ahead", "6", "4", "1.50x |"]


def test_gains_of_serving_are_times_to_the_first_token_and_per_request():
    case = "qwen3-8b, 8192 tokens cached, 1024 new"
    times = {"recompute": 300.0, "jaxkv": 50.0, "in HBM": 40.0}
    first = [Row(f"{case}, {name}", "TTFT p50", "ms", time) for name, time in times.items()]
    rows = serving_rows({"recompute": 5.0, "device_put": 20.0, "jaxkv": 40.0, "in HBM": 100.0})
    lines = body("gains", file("serving_ttft", first), file("serving", rows))
    assert [line.split(" | ")[3:] for line in lines] == [
        ["recomputation", "300", "50", "6x |"],
        ["recomputation", "200", "25", "8x |"],
        ["one `device_put` per page", "50", "25", "2x |"],
    ]


def test_gains_are_paired_ratios_where_the_record_has_their_error():
    case, rates = "qwen3-8b, 8192 tokens cached, 1024 new", {"recompute": 5.0, "device_put": 20.0}
    times = {"recompute": 300.0, "jaxkv": 50.0}
    first = [Row(f"{case}, {name}", "TTFT p50", "ms", time) for name, time in times.items()]
    pair = f"{case}: TTFT p50, jaxkv / recompute"
    first.append(Row(pair, "ratio", "x", 0.16, error=0.008))
    pair = f"multi_turn, pages of 32: {RATE}, jaxkv / device_put"
    rows = [*serving_rows({**rates, "jaxkv": 40.0}), Row(pair, "ratio", "x", 2.1, error=0.15)]
    lines = body("gains", file("serving_ttft", first), file("serving", rows))
    speedups = [line.split(" | ")[-1] for line in lines]
    assert speedups == ["6.25x +- 0.625 |", "8x |", "2.10x +- 0.300 |"]


def test_missed_targets_have_their_figures():
    targets = [
        Target("rate", ">=", 2, "x", 1.5, 1.8, 0.1), Target("time", "<=", 1, "ms", 0.5),
        Target("gain", ">=", 2, "x", None),
    ]  # fmt: skip
    missed = File("gpu", "serving", None, None, {}, [], targets)
    others = File("gpu", "serving_ttft", None, None, {}, [], targets[1:2])
    assert TABLES["serving_missed"]([missed, others]) == (
        "1 of 3 targets of `serving` are missed on gpu:\n\n"
        "- rate: 1.50 x +- 0.200, target >= 2 x, at peak 1.80 x\n"
    )
    assert tables.missed([others], "serving_ttft") == (
        "0 of 1 targets of `serving_ttft` are missed on gpu.\n"
    )


def test_serving_table_has_the_systems_with_most_requests_in_flight():
    rows = serving_rows({"jaxkv": 3.0, "in HBM": 5.0})
    fewer = serving_rows({"jaxkv": 2.0}, "multi_turn, 2 in flight, pages of 32")
    lines = body("serving", file("serving", [*rows, *fewer]))
    assert [line.split(" | ")[1:3] for line in lines] == [
        ["multi_turn, pages of 32, jaxkv", "3"],
        ["multi_turn, pages of 32, in HBM", "5"],
    ]


def test_table_of_fewer_requests_in_flight_has_those_only():
    rows = serving_rows({"jaxkv": 3.0})
    fewer = serving_rows({"jaxkv": 2.0, "device_put": 1.0}, "multi_turn, 2 in flight, pages of 32")
    lines = body("serving_in_flight", file("serving", [*rows, *fewer]))
    assert [line.split(" | ")[1:4] for line in lines] == [
        ["2", "jaxkv", "2"], ["2", "device_put", "1"]
    ]  # fmt: skip


def test_unmeasured_lists_missing_records_of_one_and_of_several_gpus():
    several = {"all_reduce_2", "all_reduce_8", "tensor_parallel_2", "multigpu_test_4"}
    one = staleness.SOURCES.keys() - {"pages", "offload_trace"}
    host = File("host", "offload_trace", None, None, {}, [], [], [])
    assert tables.unmeasured([host, *(file(name, []) for name in several | one)]) == (
        "Not measured on gpu: all_reduce_4, multigpu_test_2, multigpu_test_8, pages, "
        "tensor_parallel_4, tensor_parallel_8.\n"
    )


def test_targets_count_is_summed_over_all_records(monkeypatch):
    monkeypatch.setattr(staleness, "pending", lambda: {"gpu/other": "changed"})
    targets = [Target("a", ">=", 1, "x", got) for got in (1, 2, 0)]
    targets.append(Target("a", "<=", 1, "x", 1.5, error=0.3))
    checks = [Target("b", "==", 0, "tests", 0)]
    files = [File("gpu", name, None, None, {}, [], targets, checks) for name in ("one", "other")]
    assert tables.targets_count(files) == (
        "Of 8 targets of performance 4 are met, 4 missed (2 within the error of the figure). The "
        "figures of 4 are of the present code, 2 of them met. Of 2 checks of correctness 2 hold.\n"
    )


def transfer_rows():
    cells = ((10_000, "kernel", 50.0), (9_000, "kernel", 49.0), (1, "kernel", 4.0), (1, "dma", 5.0))
    rows = [
        Row(f"load, 8 KiB x {count}, {name}, 2 SMs", "bandwidth", "GB/s", rate, PEAK, {"loop": 1})
        for count, name, rate in cells
    ]
    for ids, share in (("device ids: kernel", 0.8), ("HostIds: dma", 1.0)):
        rows.append(Row(f"load, 8 KiB x 1, {ids}", "of the fastest method", "x", share))
    return rows


def test_transfer_tables_separate_the_count_nearest_to_ten_thousand():
    found = file("transfer", transfer_rows())
    assert body("transfer", found) == ["| gpu | load, 8 KiB x 10000 | 50 (100%; 2) | 1 | - | 50 |"]
    assert body("transfer_counts", found) == [
        "| gpu | load, 8 KiB x 9000 | 49 (98%; 2) | - | 1 | - | 50 |",
        "| gpu | load, 8 KiB x 1 | 4 (8%; 2) | 5 (10%; 2) | 1 | 80% / 100% | 50 |",
    ]


def test_all_reduce_nccl_table_compares_symmetric_kernels_with_the_chosen_algorithm():
    def row(method, ran, value, metric="GPU time", size="1 KiB"):
        return Row(f"2 devices, one process, {size}: {method} ({ran})", metric, "us", value)

    rows = [
        row("chosen", "low_latency", 2.0),
        row("chosen", "low_latency", 3.0, "time per call (chained)"),
        row(SYMMETRIC, "ncclSymk", 4.0),
        row(SYMMETRIC, "ncclSymk", 9.0, "time per call (chained)"),
        row("chosen", "low_latency", 2.0, size="2 KiB"),
    ]
    line = "| gpu | 2 | 1 KiB | 2 / 4 | 3 / 9 | - / - | ncclSymk |"
    assert body("all_reduce_nccl", file("all_reduce_2", rows)) == [line]


def test_metadata_table_has_builders_of_one_size_and_steps():
    rows = [
        Row("flex, 256 rows, 8192 tokens", LATENCY, "us", 5.0, None, {"NumPy": 7.0}),
        Row("flex, 256 rows, 8192 tokens", "kernels", "kernels", 3),
        Row("flex, 64 rows, 64 tokens", LATENCY, "us", 5.0),
        Row("decode step of 64 requests, metadata precomputed", LATENCY, "us", 6.0),
    ]
    assert body("metadata", file("metadata", rows)) == [
        "| gpu | flex, 256 rows, 8192 tokens | 3 | - | 5 | 7 |",
        "| gpu | decode step of 64 requests, metadata precomputed | - | - | 6 | - |",
    ]


@pytest.mark.parametrize("name", TABLES)
def test_table_without_records_is_not_measured_yet(name):
    assert TABLES[name]([]) in ("Not measured yet.\n", "No second runs.\n")


def test_step_table_has_ratios_to_the_step_without_a_load():
    rows = overlap_rows({NO_LOAD: 5.0, "dma": 5.5})
    assert body("overlap", file("overlap", rows))[1] == f"| gpu | {STEP}: dma | 5.50 | 1.10 |"


def test_figures_have_lines_of_all_methods_and_peak_bandwidth():
    pytest.importorskip("matplotlib")
    drawn = plots.transfer([file("transfer", transfer_rows())])
    assert drawn
    panel = drawn.axes[0]
    labels = [line.get_label() for line in panel.get_lines()]
    peak = np.asarray(panel.get_lines()[2].get_ydata()).tolist()
    assert (labels[:2], peak) == (["kernel", "loop"], [50.0])
    rows = overlap_rows({NO_LOAD: 5.0, "sequential": 8.0, "kernel": 6.0})
    drawn = plots.overlap([file("overlap", [*rows, Row(rows[0].case, "host", "us", 1.0)])])
    assert drawn and [len(panel.patches) for panel in drawn.axes] == [2]  # dotted: the third
    rates = {"jaxkv": 3.0, "recompute": 1.0, "copy engine": 4.0, "in HBM": 5.0}
    fewer = serving_rows(rates, "multi_turn, 2 in flight, pages of 32")
    drawn = plots.serving([file("serving", [*serving_rows(rates), *fewer])])
    assert drawn
    (panel,) = drawn.axes
    bars = [patch.get_width() for patch in panel.patches]  # type: ignore[attr-defined]
    in_hbm = np.asarray(panel.get_lines()[0].get_xdata()).tolist()
    assert (bars, in_hbm) == ([1.0, 4.0, 3.0], [5.0, 5.0])
