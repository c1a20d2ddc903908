"""Tables of the documentation, without result files; the others are in test_evidence.py."""

import pytest

from bench.collectives import all_reduce, tensor_parallel
from bench.harness.records import File, Row, Target
from bench.report import gains, tables
from bench.transfer import bandwidth_rows, engines, overlap
from bench.transfer.bandwidth_rows import Point

pytestmark = pytest.mark.host_only

PEAK = {"name": "one copy", "value": 50.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1,234,567"), (51.234, "51.2"), (5.123, "5.12"), (0.9, "0.900")],
)
def test_number_has_three_significant_digits(value, text):
    assert tables.number(value) == text


def test_engines_table_has_the_fastest_implementation_with_device_ids():
    baselines = {engines.TPU_INFERENCE: 20.0, engines.SGLANG: 30.0, engines.ALL_PAGES: 12.0}
    reused = {method + engines.REUSED: time + 1 for method, time in baselines.items()}
    cases = {"load, 2 layers": baselines, "store, 2 layers": baselines | reused}
    times = {"kernel": 10.5, "pallas": 10.0, "dma": 9.0}
    rows = [
        Row(f"{case}, {name}", engines.LATENCY, "ms", time, None, figures)
        for case, figures in cases.items()
        for name, time in times.items()
    ]
    rows.append(Row("load, 2 layers, kernel", "host time (blocking)", "ms", 0.1, None, baselines))
    file = File("gpu", "engines", None, None, {}, rows, [])
    assert tables.engines_table([file]).splitlines()[2:] == [
        "| gpu | load, 2 layers | 10 | 20 | 30 | 12 |",
        "| gpu | store, 2 layers | 10 | 21 | 31 | 13 |",
    ]


def test_gains_compare_the_fastest_with_each_baseline():
    baselines = {engines.TPU_INFERENCE: 20.0, engines.SGLANG: 30.0, engines.ALL_PAGES: 12.0}
    rows = [
        Row(f"load, 2 pages of {size} KiB, {name}", engines.LATENCY, "ms", time, None, baselines)
        for size in (8, 64)
        for name, time in {"kernel": 10.0, "pallas": 8.0, "dma": 4.0}.items()
    ]
    step = "memory-bound step"
    times = {overlap.NO_LOAD: 5.0, overlap.SEQUENTIAL: 8.0, "kernel": 6.0, "dma": 7.0}
    steps = [
        Row(f"{step}: {name}", "time per step", "ms", time, None, {overlap.SEQUENTIAL: 8.0})
        for name, time in times.items()
    ]
    files = [
        File("gpu", "engines", None, None, {}, rows, []),
        File("gpu", "overlap", None, None, {}, steps, []),
    ]
    assert [gain[3:] for gain in gains.gains(files)] == [
        ("one `device_put` per page (tpu-inference)", 20.0, 8.0),
        ("one `device_put` of all pages, staged in HBM", 12.0, 8.0),
        ("load before the step", 8.0, 6.0),
    ]
    assert tables.gains_table(files).splitlines()[-1].endswith(" | 8 | 6 | 1.33x |")


def test_unmeasured_lists_missing_records_of_several_gpus():
    names = ["all_reduce_2", "all_reduce_8", "tensor_parallel_2", "multigpu_test_4", "transfer"]
    files = [File("gpu", name, None, None, {}, [], []) for name in names]
    assert tables.unmeasured(files) == (
        "Not measured on gpu: all_reduce_4, multigpu_test_2, multigpu_test_8, "
        "tensor_parallel_4, tensor_parallel_8.\n"
    )


def test_targets_count_is_summed_over_all_records():
    targets = [Target("a", ">=", 1, "x", got) for got in (1, 2, 0)]
    checks = [Target("b", "==", 0, "tests", 0)]
    files = [File("gpu", name, None, None, {}, [], targets, checks) for name in ("one", "other")]
    assert tables.targets_count(files) == (
        "Of 6 targets of performance 4 are met, 2 missed; of 2 checks of correctness 2 hold.\n"
    )


def test_transfer_counts_table_has_other_counts_and_the_chosen_share():
    rows = [
        Row(str(Point("load", 8192, count, name, 2)), "bandwidth", "GB/s", rate, PEAK)
        for count, name, rate in ((10_000, "kernel", 50.0), (1, "kernel", 4.0), (1, "dma", 5.0))
    ]
    rows.append(Row("load, 8 KiB x 1", bandwidth_rows.CHOSEN, "of the fastest", 0.8))
    file = File("gpu", "transfer", None, None, {}, rows, [])
    (line,) = tables.transfer_counts_table([file]).splitlines()[2:]
    assert line == "| gpu | load, 8 KiB x 1 | 4 (8%; 2) | 5 (10%; 2) | 80% | 50 |"
    assert "x 10000" in tables.transfer_table([file])


def test_all_reduce_nccl_table_compares_symmetric_kernels_with_the_chosen_algorithm():
    def row(method, ran, value, metric=all_reduce.GPU_TIME, size=1024):
        case = all_reduce.Case(2, all_reduce.ONE_PROCESS, size, method, ran)
        return Row(str(case), metric, "us", value)

    rows = [
        row(all_reduce.CHOSEN, "low_latency", 2.0),
        row(all_reduce.CHOSEN, "low_latency", 3.0, all_reduce.CHAINED_CALL),
        row(all_reduce.SYMMETRIC, "ncclSymk", 4.0),
        row(all_reduce.SYMMETRIC, "ncclSymk", 9.0, all_reduce.CHAINED_CALL),
        row(all_reduce.SYMMETRIC, "ncclSymk", 9.0, size=2048),
    ]
    file = File("gpu", "all_reduce_2", None, None, {}, rows, [])
    (line,) = tables.all_reduce_nccl_table([file]).splitlines()[2:]
    assert line == "| gpu | 2 | 1 KiB | 2 / 4 | 3 / 9 | - / - | ncclSymk |"


@pytest.mark.parametrize("name", tables.TABLES.keys() - {"retired"})
def test_table_without_records_is_not_measured_yet(name):
    assert tables.TABLES[name]([]) == "Not measured yet.\n"


def test_step_tables_have_ratios_to_the_step_without_a_load_and_to_psum():
    step = "memory-bound step, 64 MiB"
    baselines = {overlap.NO_LOAD: 10.0}
    loads = [Row(f"{step}: {overlap.NO_LOAD}", "time per step", "ms", 10.0, None, baselines)]
    loads.append(Row(f"{step}: dma", "time per step", "ms", 11.0, None, baselines))
    text = tables.overlap_table([File("gpu", "overlap", None, None, {}, loads, [])])
    assert text.splitlines()[3] == f"| gpu | {step}: dma | 11 | 1.10 |"
    baselines = {tensor_parallel.PSUM: 4.0, tensor_parallel.NO_ALL_REDUCE: 2.0}
    rows = [Row("2 devices", "time per step", "ms", 3.0, None, baselines)]
    text = tables.tensor_parallel_table(
        [File("gpu", "tensor_parallel_2", None, None, {}, rows, [])]
    )
    assert text.splitlines()[2] == "| gpu | 2 devices | 3 | 4 | 2 | 0.750 |"
