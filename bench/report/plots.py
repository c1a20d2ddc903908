"""Plots of result files; `python -m bench.report.evidence` writes them to docs/plots."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.harness.blocks import DIRECTIONS, size_bytes, size_text
from bench.harness.records import File, Row
from bench.report.tables import NOT_MEASURED, RATE, lines, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JAXKV_STYLE: dict[str, Any] = {"marker": "o", "linewidth": 2}
BASELINE_STYLE: dict[str, Any] = {"marker": "x", "linewidth": 1, "linestyle": "--"}
PEAK_STYLE = {"color": "black", "linestyle": ":"}


class Panel(NamedTuple):
    """Lines over a size in bytes: {name: {bytes: value}}; `own` are jaxkv's, `peak` is dotted."""

    title: str
    lines: Mapping[str, Mapping[int, float]]
    own: frozenset[str]
    peak: Mapping[int, float]


def line_figure(panels: Sequence[Panel], xlabel: str, ylabel: str, *, log: bool) -> "Figure":
    """Sizes are on a logarithmic axis, with a tick for each."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    axes = drawn.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, panel in zip(axes, panels, strict=True):
        for name, line in panel.lines.items():
            style = JAXKV_STYLE if name in panel.own else BASELINE_STYLE
            axis.plot([*line], [*line.values()], label=name, **style)
        axis.plot([*panel.peak], [*panel.peak.values()], **PEAK_STYLE)
        sizes = sorted({size for line in panel.lines.values() for size in line})
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, map(size_text, sizes), rotation=45, minor=False)
        lowest = min(value for line in panel.lines.values() for value in line.values())
        if log:
            axis.set_yscale("log")
        axis.set(title=panel.title, xlabel=xlabel, ylim=(lowest / 2 if log else 0, None))
    axes[0].set_ylabel(ylabel)
    drawn.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn


def transfer(files: Sequence[File]) -> "Figure | None":
    """GB/s over the block size, one panel per direction."""
    found = points([row for file in files for row in file.rows], main=True)
    panels = []
    for direction in DIRECTIONS if found else ():
        own: dict[str, dict[int, float]] = {}
        others: dict[str, dict[int, float]] = {}
        peak: dict[int, float] = {}
        here = {size_bytes(p.size): rows for p, rows in found.items() if p.direction == direction}
        for size, methods in sorted(here.items()):
            for method, (row, _) in methods.items():
                own.setdefault(method, {})[size] = row.value
                for name, rate in row.baselines.items():
                    others.setdefault(name, {})[size] = rate
                peak |= {size: row.peak["value"]} if row.peak else {}
        if here:
            panels.append(Panel(direction, own | others, frozenset(own), peak))
    label = "GB/s; dotted: one contiguous copy"
    return line_figure(panels, "block size", label, log=False) if panels else None


def all_reduce(files: Sequence[File]) -> "Figure | None":
    """Time per chained call in us over message size, one panel for each number of devices."""
    metric, method = "time per call (chained)", "chosen|psum[^(]*|torch[^(]*"
    case = rf"(?P<n>\d+) devices, (?:one process|PyTorch), (?P<b>[^:]*): (?P<m>{method}) \(.*\)"
    by_world: dict[str, dict[str, dict[int, Row]]] = {}
    for (_, world, size), line in lines(files, "all_reduce", case).items():
        for (measured, name), row in line.items():
            if measured == metric:
                methods = by_world.setdefault(world, {})
                label = "jaxkv" if name == "chosen" else name
                methods.setdefault(label, {})[size_bytes(size)] = row
    panels = []
    for world, methods in sorted(by_world.items()):
        values = {
            name: {size: row.value for size, row in rows.items()} for name, rows in methods.items()
        }
        every = {size: row for rows in methods.values() for size, row in sorted(rows.items())}
        peak = {size: row.peak["value"] for size, row in sorted(every.items()) if row.peak}
        panels.append(Panel(f"{world} GPUs", values, frozenset({"jaxkv"}), peak))
    label = f"{metric}, us; dotted: the link"
    return line_figure(panels, "message size per device", label, log=True) if panels else None


def overlap(files: Sequence[File]) -> "Figure | None":
    """Milliseconds of a step for each load method, one panel per kind of step; dotted: no load."""
    from matplotlib.figure import Figure

    found = lines(files, "overlap", "(?P<kind>.*): (?P<m>.*)")
    if not found:
        return None
    longest = max(len(line) for line in found.values()) // 2
    drawn = Figure(figsize=(11, 1 + 0.44 * longest), layout="constrained")
    axes = drawn.subplots(1, len(found), squeeze=False)[0]
    for axis, ((_, kind), line) in zip(axes, found.items(), strict=True):
        bars = {m: row.value for (_, m), row in [*line.items()][::-1] if row.unit == "ms"}
        axis.barh([*bars], [*bars.values()])
        no_load = bars["without a load"]
        axis.axvline(no_load, **PEAK_STYLE)
        # Differences are a few percent of the total.
        label = "ms; the axis begins at 0.9 of the step without a load"
        axis.set(title=kind, xlabel=label, xlim=(0.9 * no_load, 1.02 * max(bars.values())))
    return drawn


def serving(files: Sequence[File]) -> "Figure | None":
    """Requests/s of each system, one panel per workload and page size; dotted: all in HBM."""
    from matplotlib.figure import Figure

    found = lines(files, "serving", r"(?P<w>\w+, pages of \d+), (?P<m>[^:]*)")
    if not found:
        return None
    drawn = Figure(figsize=(3.2 * len(found), 2.6), layout="constrained")
    axes = drawn.subplots(1, len(found), squeeze=False)[0]
    for axis, ((_, workload), line) in zip(axes, found.items(), strict=True):
        rates = {m: row.value for (metric, m), row in line.items() if metric == RATE}
        in_hbm = rates.pop("in HBM", None)
        rates = dict(sorted(rates.items(), key=lambda entry: (entry[0] == "jaxkv", entry[1])))
        bars = axis.barh([*rates], [*rates.values()])
        axis.bar_label(bars, fmt="%.1f", padding=2)
        if in_hbm:
            axis.axvline(in_hbm, **PEAK_STYLE)
        longest = max(in_hbm or 0, *rates.values())
        axis.set(title=workload, xlabel=RATE, xlim=(0, 1.25 * longest))
    return drawn


FIGURES: dict[str, Callable[[Sequence[File]], "Figure | None"]] = {
    "all_reduce": all_reduce,
    "overlap": overlap,
    "serving": serving,
    "transfer": transfer,
}


def drawn_files(files: Sequence[File]) -> dict[tuple[str, str], list[File]]:
    """The files of each plot, by benchmark and device."""
    found: dict[tuple[str, str], list[File]] = {}
    for file in files:
        if file.bench in FIGURES and file.rows:
            found.setdefault((file.bench, file.device), []).append(file)
    return found


def name(bench: str, device: str) -> str:
    return f"{bench}_{device}.svg"


def markdown(files: Sequence[File]) -> str:
    images = [
        f"![{bench} on {device}](plots/{name(bench, device)})\n"
        for bench, device in drawn_files(files)
    ]
    return "\n".join(images) or NOT_MEASURED
