"""Targets of the bandwidth benchmark.

A target uses the fastest jaxkv implementation unless its name has "chosen implementation".
"""

from collections.abc import Sequence

from bench.harness import copy_baselines
from bench.harness.records import Results, Row
from bench.transfer.bandwidth_rows import BATCH_IN_JAX, CHOSEN, KIB, Grid, Point, points
from bench.transfer.blocks import DIRECTIONS

# Baselines: the fastest of the first of these groups that was measured.
BATCHES = ((copy_baselines.BATCH, copy_baselines.SHORT_BATCH),)
BATCHES_AS_CALLED = ((BATCH_IN_JAX,), *BATCHES)
ONLY_TRITON = ((copy_baselines.TRITON,),)


def record_targets(results: Results, grid: Grid) -> None:
    """The targets of the grid; one that covers several cells uses the minimum."""
    found = points(results.rows)
    for direction in DIRECTIONS:
        for block_bytes in grid.blocks:
            if block_bytes >= KIB:
                _peak_targets(results, grid, found, direction, block_bytes)
    _batch_targets(results, grid, found)
    _triton_targets(results, grid, found)


def _batch_targets(results: Results, grid: Grid, found: dict[Point, Row]) -> None:
    speedup = f"speedup over {copy_baselines.BATCH}"
    for block_bytes, want in ((KIB, 20), (4 * KIB, 4), (8 * KIB, 2), (16 * KIB, 2)):
        cell = _many(grid, "load", block_bytes)
        ratio, bound = _ratio(found, cell, BATCHES), _bound(found, cell, BATCHES)
        results.target(f"{cell.cell}: {speedup}", ratio, ">=", want, "x", bound)
    shares = {row.case: row.value for row in results.rows if row.metric == CHOSEN}
    for direction in DIRECTIONS:
        cells = {point._replace(name="", num_sms=0) for point in found}
        ratios = {
            cell.cell: ratio
            for cell in cells
            if cell.direction == direction and (ratio := _ratio(found, cell, BATCHES_AS_CALLED))
        }
        chosen = [ratio * shares[cell] for cell, ratio in ratios.items() if cell in shares]
        name = f"{direction}: {speedup}, minimum over sizes and counts"
        for target, values in ((name, ratios.values()), (f"{name}, {CHOSEN}", chosen)):
            results.target(target, min(values, default=None), ">=", 0.97, "x")


def _triton_targets(results: Results, grid: Grid, found: dict[Point, Row]) -> None:
    for block_bytes, want in ((KIB, 7.0), (4 * KIB, 2.0), (8 * KIB, 1.15)):
        cell = _many(grid, "load", block_bytes)
        ratio = _ratio(found, cell, ONLY_TRITON, num_sms=12)
        bound = _bound(found, cell, ONLY_TRITON)
        name = f"{cell.cell}: speedup over Triton, 12 SMs each"
        results.target(name, ratio, ">=", want, "x", bound)
    ratios = [
        _ratio(found, _many(grid, direction, block_bytes), ONLY_TRITON, num_sms=12)
        for direction in DIRECTIONS
        for block_bytes in grid.blocks
    ]
    lowest = min((ratio for ratio in ratios if ratio), default=None)
    results.target("speedup over Triton, minimum over sizes", lowest, ">=", 1, "x")


def _many(grid: Grid, direction: str, block_bytes: int) -> Point:
    return Point(direction, block_bytes, min(grid.many, grid.max_bytes // block_bytes), "", 0)


def _peak_targets(
    results: Results, grid: Grid, found: dict[Point, Row], direction: str, block_bytes: int
) -> None:
    """Shares of peak bandwidth of copies by SMs; not of the copy engine, which uses none."""
    cell = _many(grid, direction, block_bytes)
    for limit, want in ((12, 0.9),) if block_bytes < 8 * KIB else ((4, 0.9), (2, 0.85)):
        shares = [
            row.value / row.peak["value"]
            for point, row in _in_cell(found, cell).items()
            if row.peak and 0 < point.num_sms <= limit
        ]
        best = max(shares, default=None)
        results.target(f"{cell.cell}: SM limit {limit}", best, ">=", want, "of peak")


def _in_cell(found: dict[Point, Row], cell: Point) -> dict[Point, Row]:
    return {point: row for point, row in found.items() if point[:3] == cell[:3]}


def _ratio(
    found: dict[Point, Row],
    cell: Point,
    groups: Sequence[Sequence[str]],
    num_sms: int | None = None,
) -> float | None:
    """Best jaxkv rate over the baselines' rate; None if either was not measured."""
    rates = [
        row.value
        for point, row in _in_cell(found, cell).items()
        if num_sms is None or point.num_sms == num_sms
    ]
    baseline = _baseline_rate(found, cell, groups)
    return max(rates) / baseline if rates and baseline else None


def _bound(found: dict[Point, Row], cell: Point, groups: Sequence[Sequence[str]]) -> float | None:
    """Ratio to the baselines of a copy at peak bandwidth."""
    row = next(iter(_in_cell(found, cell).values()), None)
    baseline = _baseline_rate(found, cell, groups)
    return row.peak["value"] / baseline if row and row.peak and baseline else None


def _baseline_rate(
    found: dict[Point, Row], cell: Point, groups: Sequence[Sequence[str]]
) -> float | None:
    """The fastest of the first group of baselines with a measurement in the cell."""
    row = next(iter(_in_cell(found, cell).values()), None)
    rates = row.baselines if row else {}
    measured = ([rates[name] for name in names if name in rates] for names in groups)
    return max(next(filter(None, measured), []), default=None)
