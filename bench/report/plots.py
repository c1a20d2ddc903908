"""Plots of result files; `python -m bench.report.evidence` writes them to docs/plots."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.harness.blocks import DIRECTIONS, size_bytes, size_text
from bench.harness.records import File
from bench.report.tables import NOT_MEASURED, RATE, lines, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

JAXKV_STYLE: dict[str, Any] = {"marker": "o", "linewidth": 2}
BASELINE_STYLE: dict[str, Any] = {"marker": "x", "linewidth": 1, "linestyle": "--"}
PEAK_STYLE = {"color": "black", "linestyle": ":"}


class Panel(NamedTuple):
    """Lines over a size in bytes: {name: {bytes: value}}; `own` are jaxkv's, `peak` is dotted."""

    title: str
    lines: dict[str, dict[int, float]]
    own: frozenset[str]
    peak: dict[int, float]


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


def bar_figure(
    panels: Mapping[str, Mapping[str, float]], dotted: str, xlabel: str, width: float, *, zero: bool
) -> "Figure":
    """One panel of bars by name for each title; the bar named `dotted` is a line.

    Axes begin at 0 (`zero`), or at 0.9 of the lowest value.
    """
    from matplotlib.figure import Figure

    longest = max(map(len, panels.values()))
    drawn = Figure(figsize=(width * len(panels), 1.2 + 0.3 * longest), layout="constrained")
    axes = drawn.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, bars) in zip(axes, panels.items(), strict=True):
        names = [name for name in bars if name != dotted]
        drawn_bars = axis.barh(names, [bars[name] for name in names])
        axis.bar_label(drawn_bars, fmt="%.3g", padding=2)
        if dotted in bars:
            axis.axvline(bars[dotted], **PEAK_STYLE)
        low = 0 if zero else 0.9 * min(bars.values())
        high = max(bars.values())
        axis.set(title=title, xlabel=xlabel, xlim=(low, high + 0.25 * (high - low)))
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
    panels: dict[str, Panel] = {}
    for (_, world, size), line in lines(files, "all_reduce", case).items():
        for (measured, name), row in line.items():
            if measured == metric:
                panel = panels.setdefault(
                    world, Panel(f"{world} GPUs", {}, frozenset({"jaxkv"}), {})
                )
                label = "jaxkv" if name == "chosen" else name
                panel.lines.setdefault(label, {})[size_bytes(size)] = row.value
                if row.peak:
                    panel.peak[size_bytes(size)] = row.peak["value"]
    if not panels:
        return None
    ordered = [panel for _, panel in sorted(panels.items())]
    label = f"{metric}, us; dotted: the link"
    return line_figure(ordered, "message size per device", label, log=True)


def overlap(files: Sequence[File]) -> "Figure | None":
    """Milliseconds of a step for each load method, one panel per kind of step; dotted: no load."""
    panels = {
        kind: {m: row.value for (_, m), row in [*line.items()][::-1] if row.unit == "ms"}
        for (_, kind), line in lines(files, "overlap", "(?P<kind>.*): (?P<m>.*)").items()
    }
    label = "ms; axis from 0.9 of the least"
    return bar_figure(panels, "without a load", label, 5.5, zero=False) if panels else None


def serving(files: Sequence[File]) -> "Figure | None":
    """Requests/s of each system, one panel per workload and page size; dotted: all in HBM."""
    panels = {}
    for (_, workload), line in lines(
        files, "serving", r"(?P<w>\w+, pages of \d+), (?P<m>[^:]*)"
    ).items():
        rates = {m: row.value for (metric, m), row in line.items() if metric == RATE}
        panels[workload] = dict(sorted(rates.items(), key=lambda one: (one[0] == "jaxkv", one[1])))
    return bar_figure(panels, "in HBM", RATE, 3.5, zero=True) if panels else None


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
