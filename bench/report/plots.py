"""Plots of result files; `python -m bench.report.evidence` writes them to docs/plots."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.collectives import all_reduce
from bench.harness.records import Row
from bench.transfer import bandwidth_rows, overlap
from bench.transfer.blocks import DIRECTIONS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Block sizes are on a logarithmic axis, with a tick for each size.
JAXKV_STYLE = {"marker": "o", "linewidth": 2}
BASELINE_STYLE = {"marker": "x", "linewidth": 1, "linestyle": "--"}
PEAK_STYLE = {"color": "black", "linestyle": ":"}


def transfer_figure(rows: Sequence[Row]) -> "Figure":
    """GB/s over the block size, one panel per direction; dotted: peak bandwidth_rows."""
    from matplotlib.figure import Figure

    points = bandwidth_rows.main_points(rows)
    drawn = Figure(figsize=(11, 4.5), layout="constrained")
    panels = drawn.subplots(1, len(DIRECTIONS), sharey=True)
    for panel, direction in zip(panels, DIRECTIONS, strict=True):
        here = {point: row for point, row in points.items() if point.direction == direction}
        for name, line in _lines(here).items():
            style: dict[str, Any] = JAXKV_STYLE if name in bandwidth_rows.NAMES else BASELINE_STYLE
            panel.plot([*line], [*line.values()], label=name, **style)
        peaks = {row.peak["value"] for row in here.values() if row.peak}
        for value in peaks:
            panel.axhline(value, **PEAK_STYLE)
        sizes = sorted({point.block_bytes for point in here})
        panel.set_xscale("log", base=2)
        panel.set_xticks(sizes, map(bandwidth_rows.size_text, sizes), rotation=45, minor=False)
        panel.set(title=direction, xlabel="block size", ylim=(0, None))
    panels[0].set_ylabel("GB/s; dotted: one contiguous copy")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn


def _lines(points: dict[bandwidth_rows.Point, Row]) -> dict[str, dict[int, float]]:
    """{name: {block bytes: GB/s}}: jaxkv with its default numbers of SMs, then baselines."""
    lines: dict[str, dict[int, float]] = {}
    baselines: dict[str, dict[int, float]] = {}
    for point, row in points.items():
        lines.setdefault(point.name, {}).setdefault(point.block_bytes, row.value)
        for name, value in row.baselines.items():
            baselines.setdefault(name, {})[point.block_bytes] = value
    return {name: dict(sorted(line.items())) for name, line in (lines | baselines).items()}


def overlap_figure(rows: Sequence[Row]) -> "Figure":
    """Milliseconds of a step for each load method, one panel per kind of step; dotted: no load."""
    from matplotlib.figure import Figure

    steps = overlap_steps(rows)
    kinds = list(dict.fromkeys(row.case.partition(":")[0] for row in steps))
    drawn = Figure(figsize=(11, 1 + 0.22 * len(steps)), layout="constrained")
    panels = drawn.subplots(1, len(kinds), squeeze=False)[0]
    for panel, kind in zip(panels, kinds, strict=True):
        bars = {row.case.partition(": ")[2]: row for row in reversed(steps) if kind in row.case}
        panel.barh([*bars], [row.value for row in bars.values()])
        no_load = bars[overlap.NO_LOAD].value
        panel.axvline(no_load, **PEAK_STYLE)
        # Differences are a few percent of the total.
        longest = max(row.value for row in bars.values())
        label = f"ms; the axis begins at 0.9 of the step {overlap.NO_LOAD}"
        panel.set(title=kind, xlabel=label, xlim=(0.9 * no_load, 1.02 * longest))
    return drawn


def overlap_steps(rows: Sequence[Row]) -> list[Row]:
    """The rows with the time of a step."""
    return [row for row in rows if row.unit == "ms"]


def all_reduce_figure(rows: Sequence[Row]) -> "Figure":
    """Time per chained call in us over message size, one panel for each number of devices."""
    from matplotlib.figure import Figure

    lines: dict[int, dict[str, dict[int, Row]]] = {}
    for case, row in all_reduce_rows(rows).items():
        name = "jaxkv" if case.method == all_reduce.CHOSEN else case.method
        lines.setdefault(case.world, {}).setdefault(name, {})[case.num_bytes] = row
    drawn = Figure(figsize=(5.5 * len(lines), 4.5), layout="constrained")
    panels = drawn.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    for panel, (world, by_name) in zip(panels, sorted(lines.items()), strict=True):
        for name, line in by_name.items():
            style: dict[str, Any] = JAXKV_STYLE if name == "jaxkv" else BASELINE_STYLE
            panel.plot([*line], [row.value for row in line.values()], label=name, **style)
        cells = {size: row for line in by_name.values() for size, row in line.items()}
        sizes = sorted(cells)
        peaks = {size: peak["value"] for size in sizes if (peak := cells[size].peak)}
        panel.plot([*peaks], [*peaks.values()], **PEAK_STYLE)
        lowest = min(row.value for line in by_name.values() for row in line.values())
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(sizes, map(all_reduce.size_text, sizes), rotation=45, minor=False)
        panel.set(title=f"{world} GPUs", xlabel="message size per device", ylim=(lowest / 2, None))
    panels[0].set_ylabel(f"{all_reduce.CHAINED_CALL}, us; dotted: the link")
    drawn.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn


def all_reduce_rows(rows: Sequence[Row]) -> dict[all_reduce.Case, Row]:
    """Times of chained calls: jaxkv in one process and its baselines."""
    return {
        case: by_metric[all_reduce.CHAINED_CALL]
        for case, by_metric in all_reduce.rows_by_case(rows).items()
        if all_reduce.CHAINED_CALL in by_metric
        and case.setting in (all_reduce.ONE_PROCESS, all_reduce.TORCH)
        and case.method.startswith((all_reduce.CHOSEN, all_reduce.PSUM, "torch"))
    }


class Drawing(NamedTuple):
    """A figure, and whether the rows contain its data."""

    figure: Callable[[Sequence[Row]], "Figure"]
    is_drawn: Callable[[Sequence[Row]], Any]


# Benchmark name -> the figure of its rows.
FIGURES = {
    "all_reduce": Drawing(all_reduce_figure, all_reduce_rows),
    "overlap": Drawing(overlap_figure, overlap_steps),
    "transfer": Drawing(transfer_figure, bandwidth_rows.main_points),
}
