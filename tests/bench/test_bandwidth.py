"""The bandwidth benchmark: cases as text, targets derived from rows, and figures."""

import numpy as np
import pytest

from bench.harness import copy_baselines
from bench.harness.records import Results, Row
from bench.report import plots
from bench.transfer import bandwidth_rows, bandwidth_targets, blocks, overlap
from bench.transfer.bandwidth_rows import KIB, Point

pytestmark = pytest.mark.end_to_end


@pytest.mark.parametrize("nbytes", [512, KIB, 28 * KIB, 1 << 20])
def test_point_formatted_as_text_parses_back(nbytes):
    point = Point("load", nbytes, 10_000, "kernel", 12)
    assert Point.parse(str(point)) == point
    assert Point.parse("load, page_first_direct, kernel, 4 KiB blocks") is None


GRID = bandwidth_rows.Grid((KIB, 4 * KIB, 8 * KIB), 100, (8 * KIB,), (1,), 1 << 20, 1 << 20)


def test_grid_counts_above_max_bytes_are_reduced():
    assert GRID.counts_of(KIB) == [100]
    assert GRID.counts_of(8 * KIB) == [1, 100]
    assert GRID.counts_of(64 * KIB) == [16]


def rated(rates, baselines=None):
    """A result with a row for each {(direction, bytes, count, name, SMs): GB/s}; the peak is 50."""
    found = Results("transfer")
    for point, rate in rates.items():
        others = (baselines or {}).get(point[:3], {})
        found.row(str(Point(*point)), "bandwidth", "GB/s", rate, ("one copy", 50.0), others)
    return found


def got(found, grid=GRID):
    bandwidth_targets.record_targets(found, grid)
    return {target.name: target.got for target in found.targets}


def test_peak_targets_use_only_copies_within_the_sm_limit():
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
    assert found["load, 1 KiB x 100: SM limit 12"] == 0.9
    assert found["load, 8 KiB x 100: SM limit 4"] == 0.8
    assert found["load, 8 KiB x 100: SM limit 2"] == 0.4
    assert found["store, 1 KiB x 100: SM limit 12"] is None


def test_speedup_targets_compare_equal_call_paths_and_sms():
    baselines = {
        ("load", 8 * KIB, 100): {copy_baselines.BATCH: 10.0, copy_baselines.TRITON: 25.0},
        ("load", 8 * KIB, 1): {copy_baselines.BATCH: 4.0, bandwidth_rows.BATCH_IN_JAX: 1.0},
    }
    found = got(
        rated(
            {
                ("load", 8 * KIB, 100, "kernel", 4): 40.0,
                ("load", 8 * KIB, 100, "kernel", 12): 30.0,
                ("load", 8 * KIB, 1, "kernel", 4): 2.0,
            },
            baselines,
        )
    )
    batch = copy_baselines.BATCH
    assert found[f"load, 8 KiB x 100: speedup over {batch}"] == 4.0
    assert found[f"load: speedup over {batch}, minimum over sizes and counts"] == 2.0
    assert found[f"store: speedup over {batch}, minimum over sizes and counts"] is None
    assert found["load, 8 KiB x 100: speedup over Triton, 12 SMs each"] == 1.2
    assert found["speedup over Triton, minimum over sizes"] == 1.2


def test_speedup_targets_use_the_faster_batch_baseline_also_for_the_chosen_implementation():
    baselines = {
        ("load", 8 * KIB, 100): {copy_baselines.BATCH: 10.0, copy_baselines.SHORT_BATCH: 25.0},
        ("load", 8 * KIB, 1): {copy_baselines.BATCH: 4.0, bandwidth_rows.BATCH_IN_JAX: 1.0},
    }
    rates = {
        ("load", 8 * KIB, 100, "kernel", 2): 50.0,
        ("load", 8 * KIB, 1, "kernel", 2): 4.0,
        ("load", 8 * KIB, 1, "dma", 0): 3.0,
    }
    results = rated(rates, baselines)
    results.row("load, 8 KiB x 100", bandwidth_rows.CHOSEN, "of the fastest", 1.0)
    results.row("load, 8 KiB x 1", bandwidth_rows.CHOSEN, "of the fastest", 0.25)
    found = got(results)
    lowest = f"load: speedup over {copy_baselines.BATCH}, minimum over sizes and counts"
    assert found[f"load, 8 KiB x 100: speedup over {copy_baselines.BATCH}"] == 2.0
    assert (found[lowest], found[f"{lowest}, chosen implementation"]) == (2.0, 1.0)


def test_speedup_targets_have_the_bound_of_a_copy_at_peak_bandwidth():
    rates = {("load", size, 100, "kernel", 12): 40.0 for size in GRID.blocks}
    baselines = {
        ("load", KIB, 100): {copy_baselines.BATCH: 2.0, copy_baselines.TRITON: 8.0},
        ("load", 4 * KIB, 100): {copy_baselines.BATCH: 25.0},
    }
    found = rated(rates, baselines)
    bandwidth_targets.record_targets(found, GRID)
    targets = {target.name: target for target in found.targets}
    bounds = {
        f"load, 1 KiB x 100: speedup over {copy_baselines.BATCH}": (25.0, False),
        f"load, 4 KiB x 100: speedup over {copy_baselines.BATCH}": (2.0, True),
        "load, 1 KiB x 100: speedup over Triton, 12 SMs each": (6.25, True),
        f"load, 8 KiB x 100: speedup over {copy_baselines.BATCH}": (None, False),
        "load, 1 KiB x 100: SM limit 12": (None, False),
    }
    for name, (bound, beyond) in bounds.items():
        assert (targets[name].bound, targets[name].above_peak) == (bound, beyond)


def test_main_points_with_several_counts_have_the_one_nearest_to_ten_thousand():
    counts = (1, 1024, 9_000, 100_000)
    found = rated({("load", KIB, count, "kernel", 12): 1.0 for count in counts})
    assert [point.num_blocks for point in bandwidth_rows.main_points(found.rows)] == [9_000]


def overlap_rows():
    baselines = {overlap.NO_LOAD: 10.0, overlap.SEQUENTIAL: 11.0}
    names = {overlap.NO_LOAD: 10.0, overlap.SEQUENTIAL: 11.0, "kernel, 4 SMs": 10.1}
    return [
        Row(f"{kind} step, 64 MiB: {name}", "time per step", "ms", value, None, baselines)
        for kind in overlap.KINDS
        for name, value in names.items()
    ]


def test_figures_have_lines_of_all_methods_and_peak_bandwidth():
    pytest.importorskip("matplotlib")
    rates = {
        (method, size, 10_000, name, sms): 40.0
        for method in blocks.DIRECTIONS
        for size in (KIB, 8 * KIB)
        for name, sms in (("kernel", 12), ("dma", 0))
    }
    baselines = {point[:3]: {copy_baselines.BATCH: 9.0} for point in rates}
    drawn = plots.transfer_figure(rated(rates, baselines).rows)
    labels = [line.get_label() for line in drawn.axes[0].get_lines()]
    assert labels[:3] == ["kernel", "dma", copy_baselines.BATCH]
    assert np.unique(np.asarray(drawn.axes[0].get_lines()[3].get_ydata())) == [50.0]
    drawn = plots.overlap_figure(overlap_rows())
    assert [len(panel.patches) for panel in drawn.axes] == [3, 3]
