"""Lists what was wanted and what was measured, and writes both into the documentation.

`python -m bench.evidence` reads every `bench/results/<device>/<name>.json`, prints each target with
the age of its measurement, and regenerates the plots and the parts of README.md and docs/targets.md
that stand between

    <!-- generated: NAME -->
    <!-- end -->

with the table called NAME. `--check` writes nothing, and fails if a text is out of date; plots are
not compared, as every matplotlib draws a little differently.
"""

import argparse
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from bench import all_reduce, demo, metadata, overlap, plot, tensor_parallel, transfer
from bench.results import REPOSITORY, RESULTS, Row, Target, git

README = REPOSITORY / "README.md"
TARGETS = REPOSITORY / "docs" / "targets.md"
PLOTS = REPOSITORY / "docs" / "plots"
NOT_MEASURED = "Not measured yet.\n"
MEASURED_CODE = ("jaxkv", "cuda")
MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class File:
    """One result file."""

    device: str
    name: str
    commit: str | None
    dirty: bool | None
    env: dict[str, Any]
    rows: list[Row]
    targets: list[Target]

    @property
    def bench(self) -> str:
        """The benchmark; some leave a file for each number of devices."""
        return re.sub(r"_\d+$", "", self.name)

    @property
    def date(self) -> str:
        return str(self.env.get("date", "no date"))[:10]

    @property
    def revision(self) -> str:
        mark = {True: " + changes", False: "", None: " (unverified)"}[self.dirty]
        return (self.commit or "unknown commit")[:9] + mark

    def rows_of(self, metric: str) -> list[Row]:
        return [row for row in self.rows if row.metric == metric]


def read(root: pathlib.Path = RESULTS) -> list[File]:
    """All result files, sorted by device and name.

    Raises:
      ValueError: a file whose "met" does not follow from its "want" and "got".
    """
    return [_read_file(path) for path in sorted(root.glob("*/*.json"))]


def _read_file(path: pathlib.Path) -> File:
    content = json.loads(path.read_text())
    targets = [Target.from_json(target) for target in content["targets"]]
    for target, stored in zip(targets, content["targets"], strict=True):
        if target.met != stored["met"]:
            raise ValueError(
                f"{path}: target {target.name!r} says met={stored['met']}, but its figures say "
                f"{target.met}"
            )
    rows = [Row(**row) for row in content["rows"]]
    return File(
        path.parent.name,
        path.stem,
        content["commit"],
        content["dirty"],
        content["env"],
        rows,
        targets,
    )


def age(file: File, repository: pathlib.Path = REPOSITORY) -> str:
    """How many commits have touched the measured code since the measurement."""
    if file.commit is None:
        return "unknown commit"
    try:
        commits = git(
            "rev-list", "--count", f"{file.commit}..HEAD", "--", *MEASURED_CODE,
            repository=repository,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return "commit not in this history"
    return "current" if commits == "0" else f"{commits} commits behind"


def number(value: float) -> str:
    """Three significant digits without an exponent; whole numbers in full."""
    if float(value).is_integer():
        return f"{int(value):,}"
    digits = max(0, 3 - len(str(int(abs(value))))) if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return NOT_MEASURED
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def verdict(target: Target) -> str:
    if target.met is False and target.beyond_roof:
        return "**missed**, above the roof"
    return {True: "met", False: "**missed**", None: "not measured"}[target.met]


def at_the_roof(target: Target) -> str:
    return "-" if target.bound is None else f"{number(target.bound)} {target.unit}"


def figures(target: Target) -> tuple[str, str]:
    want = number(target.want)
    got = "-" if target.got is None else number(target.got)
    if got == want and not target.met:  # a near miss
        got = f"{target.got:,.4f}"
    return f"{target.op} {want} {target.unit}", f"{got} {target.unit}" if got != "-" else got


def all_targets_table(files: Sequence[File]) -> str:
    header = (
        "device", "measured by", "target", "wanted", "got", "at the roof", "", "commit", "date",
    )  # fmt: skip
    lines = [
        (f.device, f.name, t.name, *figures(t), at_the_roof(t), verdict(t), f.revision, f.date)
        for f in files
        for t in f.targets
    ]
    return table(header, lines)


def targets_table(files: Sequence[File]) -> str:
    """One line for each file: how many targets are met, missed and not measured."""
    lines = []
    for file in (file for file in files if file.targets):
        verdicts = [target.met for target in file.targets]
        counts = [number(verdicts.count(met)) for met in (True, False, None)]
        lines.append((file.device, file.name, *counts, file.revision, file.date))
    header = ("device", "measured by", "met", "missed", "not measured", "commit", "date")
    return table(header, lines)


def tests_table(files: Sequence[File]) -> str:
    outcomes = ("passed", "failed", "skipped")
    lines = []
    for file in files:
        if file.bench not in ("gpu_test", "multigpu_test"):
            continue
        counted = [
            sum(row.value for row in file.rows_of(outcome) if row.case.endswith(".py"))
            for outcome in outcomes
        ]
        lines.append((file.device, file.name, *map(number, counted), file.revision, file.date))
    return table(("device", "run", *outcomes, "commit", "date"), lines)


def transfer_table(files: Sequence[File]) -> str:
    """One line for each direction and size of block, with about as many blocks in each."""
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for file in (file for file in files if file.name == "transfer"):
        for point, row in transfer.main_points(file.rows).items():
            assert row.roof
            line = lines.setdefault((file.device, point.cell), {})
            share = f"{row.value / row.roof['value']:.0%}"
            # The first is the implementation as it comes, without a wish for its SMs.
            line.setdefault(point.name, f"{number(row.value)} ({share}; {point.num_sms})")
            line |= {name: number(value) for name, value in row.peers.items()}
            line["roof"] = number(row.roof["value"])
    names = list(dict.fromkeys(name for line in lines.values() for name in line))
    names.sort(key=lambda name: (name == "roof", name not in transfer.NAMES))
    return table(
        ("device", "blocks, GB/s (share of the roof; SMs)", *names),
        [(*key, *(line.get(name, "-") for name in names)) for key, line in lines.items()],
    )


def plots(files: Sequence[File]) -> str:
    """Markdown for the plots that `draw` makes of the files."""
    images = [
        f"![{bench} on {device}](docs/plots/{_plot_name(bench, device)})\n"
        for bench, device in drawn_rows(files)
    ]
    return "\n".join(images) or NOT_MEASURED


def drawn_rows(files: Sequence[File]) -> dict[tuple[str, str], list[Row]]:
    """The rows of each plot, by benchmark and device."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for file in files:
        if file.bench in plot.FIGURES:
            rows.setdefault((file.bench, file.device), []).extend(file.rows)
    return {key: found for key, found in rows.items() if plot.FIGURES[key[0]].is_drawn(found)}


def _plot_name(bench: str, device: str) -> str:
    return f"{bench}_{device}.svg"


def overlap_table(files: Sequence[File]) -> str:
    """One line for each way to load during a step."""
    lines = [
        (file.device, row.case, number(row.value), number(row.value / row.peers[overlap.ALONE]))
        for file in files
        for row in (plot.overlap_steps(file.rows) if file.name == "overlap" else ())
    ]
    return table(("device", "step", "ms", "of the step alone"), lines)


def metadata_table(files: Sequence[File]) -> str:
    """One line for each builder, at one size of a batch, and one for each kind of step."""
    lines = []
    for file in (file for file in files if file.name == "metadata"):
        cases: dict[str, dict[str, Row]] = {}
        for row in file.rows:
            if metadata.is_main(row.case):
                cases.setdefault(row.case, {})[row.metric] = row
        for case, rows in cases.items():
            there = rows[metadata.UNTIL_THERE]
            host = there.peers.get(metadata.HOST_WAY)
            gpu = [rows.get(metric) for metric in (metadata.KERNELS, metadata.GPU_TIME)]
            cells = [number(row.value) if row else "-" for row in (*gpu, there)]
            lines.append((file.device, case, *cells, number(host) if host else "-"))
    header = ("device", "what", "kernels", "GPU time, us", "until it is there, us")
    return table((*header, f"{metadata.HOST_WAY}, us"), lines)


def all_reduce_table(files: Sequence[File]) -> str:
    """One line for each number of devices and some sizes: what the tuning table chooses."""
    metrics = (all_reduce.GPU_TIME, all_reduce.ALONE, all_reduce.PAIR)
    lines = []
    for file in (file for file in files if file.bench == "all_reduce"):
        found = all_reduce.rows_by_case(file.rows)
        psums = {case[:3]: case for case in found if case.way == all_reduce.PSUM}
        for case, ours in found.items():
            if case.way != all_reduce.CHOSEN or case.num_bytes not in all_reduce.MAIN_SIZES:
                continue
            psum = psums.get(case[:3])
            cells = [_times(ours.get(m), found[psum].get(m) if psum else None) for m in metrics]
            size = all_reduce.size_text(case.num_bytes)
            head = (file.device, str(case.world), case.setting, size, case.ran)
            lines.append((*head, *cells, psum.ran if psum else "-"))
    header = ("device", "GPUs", "driven by", "bytes", "algorithm", *metrics, "psum ran")
    return table(header, lines)


def _times(ours: Row | None, psum: Row | None) -> str:
    """Of ours, psum and the best peer."""
    best = min(ours.peers.values(), default=None) if ours else None
    times = (*(row.value if row else None for row in (ours, psum)), best)
    return " / ".join("-" if time is None else number(time) for time in times)


def tensor_parallel_table(files: Sequence[File]) -> str:
    """One line for each number of devices and batch."""
    lines = [
        (
            file.device, row.case, number(row.value), *map(number, row.peers.values()),
            number(row.value / row.peers[tensor_parallel.PSUM]),
        )
        for file in files
        for row in (file.rows_of("step") if file.bench == "tensor_parallel" else ())
    ]  # fmt: skip
    others = (tensor_parallel.PSUM, tensor_parallel.NOTHING)
    header = ("device", "step", "jaxkv, ms", *(f"{name}, ms" for name in others), "of psum's")
    return table(header, lines)


def demo_table(files: Sequence[File]) -> str:
    """One line for each device: the turns after the first, whose prompts have a past."""
    header: list[str] = []
    lines = []
    for file in files:
        rows = [row for row in file.rows if file.name == "demo" and row.case == demo.LATER_TURNS]
        if not rows:
            continue
        unequal = [target.got or 0 for target in file.targets if target.unit == demo.UNEQUAL]
        header = ["device", *map(_demo_heading, rows), demo.UNEQUAL]
        cells = [" / ".join(map(number, (row.value, *row.peers.values()))) for row in rows]
        lines.append([file.device, *cells, " / ".join(map(number, unequal))])
    return table(header, lines)


def _demo_heading(row: Row) -> str:
    runs = f" ({' / '.join((demo.RUN, *row.peers))})" if row.peers else ""
    return f"{row.metric}, {row.unit}{runs}"


TABLES: dict[str, Callable[[Sequence[File]], str]] = {
    "all_reduce": all_reduce_table,
    "all_targets": all_targets_table,
    "demo": demo_table,
    "metadata": metadata_table,
    "overlap": overlap_table,
    "plots": plots,
    "targets": targets_table,
    "tensor_parallel": tensor_parallel_table,
    "tests": tests_table,
    "transfer": transfer_table,
}


def regenerate(text: str, files: Sequence[File]) -> str:
    """A text with every marked part replaced by its table.

    Raises:
      ValueError: a marked part whose name is not in TABLES, or that does not end.
    """
    opened = text.count("<!-- generated:")
    if opened != len(MARKED.findall(text)):
        raise ValueError("a part begins with <!-- generated: NAME --> but has no <!-- end -->")

    def replace(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise ValueError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
        return match[1] + TABLES[name](files) + match[3]

    return MARKED.sub(replace, text)


def draw(files: Sequence[File], folder: pathlib.Path = PLOTS) -> list[pathlib.Path]:
    """Draws what can be drawn; nothing without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("plots not drawn: matplotlib is not installed")
        return []
    matplotlib.rcParams["svg.hashsalt"] = "jaxkv"  # the same figures must give the same file
    drawn = []
    for (bench, device), rows in drawn_rows(files).items():
        drawn.append(folder / _plot_name(bench, device))
        folder.mkdir(parents=True, exist_ok=True)
        plot.FIGURES[bench].figure(rows).savefig(drawn[-1], metadata={"Date": None})
    return drawn


def listing(files: Sequence[File]) -> str:
    lines = []
    for file in files:
        lines.append(f"{file.device}/{file.name}: {file.revision}, {file.date}, {age(file)}")
        for target in file.targets:
            want, got = figures(target)
            lines.append(f"  {verdict(target):12} {target.name}: wanted {want}, got {got}")
    return "\n".join(lines) or "no result files"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare only")
    flags = parser.parse_args(argv)
    files = read()
    print(listing(files))
    files = [file for file in files if file.device != "cpu"]  # not committed: no GPU, no claim
    stale = False
    for path in (README, TARGETS):
        before = path.read_text()
        after = regenerate(before, files)
        if flags.check and after != before:
            stale = True
            print(f"{path.name} is out of date: run python -m bench.evidence")
        elif not flags.check:
            path.write_text(after)
    if flags.check:
        return int(stale)
    for path in draw(files):
        print(f"drew {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
