"""Tables of the documentation, each generated from result files.

A `Table` groups the rows of a benchmark by the groups of a pattern of their cases: each distinct
key is a line, and its cells show values, baselines and ratios of the rows with that key. The
pattern's group "m" names the method; it is not part of the key.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bench.harness.records import HOST, RESULTS, SECOND_RUN, File, Row, Target, read
from bench.report import staleness

NOT_MEASURED = "Not measured yet.\n"
SEVERAL_GPUS, WORLDS = ("all_reduce", "multigpu_test", "tensor_parallel"), (2, 4, 8)
Line = dict[tuple[str, str], Row]  # by metric and method
Cell = Callable[[Line], str]
Key = tuple[str, str]  # device and name of a record
Differences = dict[str, tuple[Target | None, Target | None]]  # first and second run, by target
RATE = "requests/s"


def number(value: float) -> str:
    """Three significant digits without an exponent; integers in full."""
    if float(value).is_integer():
        return f"{int(value):,}"
    digits = max(0, 3 - len(str(int(abs(value))))) if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return NOT_MEASURED
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# Cells


def value(metric: str, method: str = "") -> Cell:
    return lambda line: or_dash(row.value if (row := line.get((metric, method))) else None)


def baseline(metric: str, *names: str, method: str = "") -> Cell:
    """The first of these baselines that was measured; any without a name."""

    def cell(line: Line) -> str:
        found = line[metric, method].baselines if (metric, method) in line else {}
        return or_dash(next((found[name] for name in names or found if name in found), None))

    return cell


def over(metric: str, name: str) -> Cell:
    return lambda line: number(line[metric, ""].value / line[metric, ""].baselines[name])


def best(metric: str, method: str) -> Cell:
    def cell(line: Line) -> str:
        found = line[metric, method].baselines if (metric, method) in line else {}
        return or_dash(min(found.values(), default=None))

    return cell


def slashed(*cells: Cell) -> Cell:
    return lambda line: " / ".join(cell(line) for cell in cells)


def values(*metrics: str) -> Cell:
    return slashed(*map(value, metrics))


def measured(row: Row) -> str:
    return " / ".join(map(number, (row.value, *row.baselines.values())))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of one benchmark.

    Attributes:
      bench: the benchmark.
      case: pattern of the cases of its rows; see the module.
      key: headings of the groups.
      cells: the other columns by heading.
      required: metric and method that a line must have.
    """

    bench: str
    case: str
    key: tuple[str, ...]
    cells: dict[str, Cell]
    required: tuple[str, str] | None = None

    def __call__(self, files: Sequence[File]) -> str:
        found = [
            (device, *key, *(cell(line) for cell in self.cells.values()))
            for (device, *key), line in lines(files, self.bench, self.case).items()
            if self.required is None or self.required in line
        ]
        return table(("device", *self.key, *self.cells), found)


def lines(files: Sequence[File], bench: str, case: str) -> dict[tuple[str, ...], Line]:
    """The rows of a benchmark by device and groups of the pattern."""
    found: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for file in (file for file in files if file.bench == bench):
        for row in file.rows:
            if match := re.fullmatch(case, row.case):
                groups = match.groupdict()
                method = groups.pop("m", None) or ""
                key = file.device, *(text or "" for text in groups.values())
                found.setdefault(key, {}).setdefault((row.metric, method), row)
    return found


# Targets and records


def verdict(target: Target) -> str:
    if target.met is False and target.above_peak:
        return "**missed**, above peak"
    if target.within_error:
        return "**missed**, within the error"
    return {True: "met", False: "**missed**", None: "not measured"}[target.met]


def figures(target: Target) -> tuple[str, str]:
    want, got = number(target.want), or_dash(target.got)
    if got == want and not target.met:  # a near miss
        got = f"{target.got:,.4f}"
    return f"{target.op} {want} {target.unit}", f"{got} {target.unit}" if got != "-" else got


def all_targets(files: Sequence[File]) -> str:
    """Every target; "+-" is followed by two errors."""
    header = ("device", "benchmark", "quantity", "target", "measured", "+-", "at peak", "result")
    rows = []
    for file in files:
        for t in file.targets:
            error = "-" if t.error is None else number(2 * t.error)
            peak = "-" if t.bound is None else f"{number(t.bound)} {t.unit}"
            rows.append((file.device, file.name, t.name, *figures(t), error, peak, verdict(t)))
    return table(header, rows)


def missed(files: Sequence[File], bench: str) -> str:
    """The missed targets of a benchmark."""
    found = ""
    for file in (file for file in files if file.bench == bench):
        targets = [target for target in file.targets if target.met is False]
        found += f"{len(targets)} of {len(file.targets)} targets of `{bench}` are missed"
        found += f" on {file.device}" + (":\n\n" if targets else ".\n")
        for target in targets:
            want, got = figures(target)
            peak = f", at peak {number(target.bound)} {target.unit}" if target.bound else ""
            error = f" +- {number(2 * target.error)}" if target.error else ""
            found += f"- {target.name}: {got}{error}, target {want}{peak}\n"
    return found or NOT_MEASURED


def checks(files: Sequence[File]) -> str:
    words = {True: "holds", False: "**fails**", None: "not measured"}
    found = [
        (file.device, file.name, check.name, *figures(check), words[check.met])
        for file in files
        for check in file.checks
    ]
    return table(("device", "benchmark", "condition", "required", "found", "result"), found)


def differences(files: Sequence[File]) -> dict[Key, Differences]:
    """Of each record with a second run: targets and checks whose verdicts differ between the runs,
    or that one of them lacks (None)."""
    found: dict[Key, Differences] = {}
    second = {(file.device, file.name): file for file in read(RESULTS, SECOND_RUN)}
    for file in files:
        if again := second.get((file.device, file.name)):
            one, two = (
                {target.name: target for target in (*run.targets, *run.checks)}
                for run in (file, again)
            )
            pairs = {name: (one.get(name), two.get(name)) for name in {**one, **two}}
            different = {name: pair for name, pair in pairs.items() if not _agree(*pair)}
            found[file.device, file.name] = different
    return found


def _agree(one: Target | None, two: Target | None) -> bool:
    return one is not None and two is not None and one.met == two.met


def met_by_all_runs(file: File, repeated: Mapping[Key, Differences]) -> list[bool | None]:
    """Verdict of each target, None if not measured; met by only one of two runs is missed."""
    different = repeated.get((file.device, file.name), {})
    return [target.met and target.name not in different for target in file.targets]


def all_records(files: Sequence[File]) -> str:
    """One row per file: number of targets met, missed and not measured; checks that hold."""
    rows, listed, repeated = [], staleness.pending(), differences(files)
    for file in files:
        verdicts = met_by_all_runs(file, repeated)
        counts = [number(verdicts.count(met)) for met in (True, False, None)]
        hold = f"{sum(bool(check.met) for check in file.checks)} of {len(file.checks)}"
        why = listed.get(f"{file.device}/{file.name}", "-")
        rows.append((file.device, file.name, *counts, hold, file.revision, file.date, why))
    header = (
        "device", "benchmark", "met", "missed", "not measured", "checks", "commit", "date",
        "pending",
    )  # fmt: skip
    return table(header, rows)


def disagreements(files: Sequence[File]) -> str:
    """Targets and checks with different verdicts in two runs."""
    found = differences(files)
    rows = [
        (*key, name, *("-" if one is None else f"{figures(one)[1]}, {verdict(one)}" for one in two))
        for key, different in found.items()
        for name, two in different.items()
    ]
    header = ("device", "benchmark", "quantity", "first run", "second run")
    if not rows:
        return "None.\n" if found else "No second runs.\n"
    return table(header, rows)


def unmeasured(files: Sequence[File]) -> str:
    """Benchmarks and tests of GPUs without a record, by device."""
    wanted = []
    for bench in sorted(staleness.SOURCES):
        several = bench in SEVERAL_GPUS
        wanted += [f"{bench}_{n}" for n in WORLDS] if several else [bench]
    elsewhere = {file.name for file in files if file.device == HOST}
    found = []
    for device in dict.fromkeys(file.device for file in files if file.device != HOST):
        here = elsewhere | {file.name for file in files if file.device == device}
        if missing := [name for name in wanted if name not in here]:
            found.append(f"Not measured on {device}: {', '.join(missing)}.\n")
    return "".join(found) or NOT_MEASURED


def targets_count(files: Sequence[File]) -> str:
    """How many are met, and of the records that are not pending."""
    repeated, listed = differences(files), staleness.pending()
    met, present = list[bool | None](), list[bool | None]()
    for file in files:
        verdicts = met_by_all_runs(file, repeated)
        met += verdicts
        present += [] if f"{file.device}/{file.name}" in listed else verdicts
    unclear = sum(target.within_error for file in files for target in file.targets)
    hold = [check.met for file in files for check in file.checks]
    if not met:
        return NOT_MEASURED
    return (
        f"Of {len(met)} targets of performance {met.count(True)} are met, {met.count(False)} "
        f"missed ({unclear} within the error of the figure). The figures of {len(present)} are of "
        f"the present code, {present.count(True)} of them met. Of {len(hold)} checks of "
        f"correctness {hold.count(True)} hold.\n"
    )


def tests(files: Sequence[File]) -> str:
    outcomes, rows = ("passed", "failed", "skipped"), []
    for file in (file for file in files if file.bench in ("gpu_test", "multigpu_test")):
        counted = [
            sum(row.value for row in file.rows_of(outcome) if row.case.endswith(".py"))
            for outcome in outcomes
        ]
        rows.append((file.device, file.name, *map(number, counted), file.revision, file.date))
    return table(("device", "run", *outcomes, "commit", "date"), rows)


# Bandwidth: the methods are columns

BLOCKS = r"(?P<direction>\w+), (?P<size>\d+ \w+) x (?P<count>\d+), (?P<m>.+), (?P<sms>\d+) SMs"
SHARE = "as chosen, share of the fastest (device ids / HostIds)"


class Point(NamedTuple):
    direction: str
    size: str
    blocks: int

    def __str__(self) -> str:
        return f"{self.direction}, {self.size} x {self.blocks}"

    @property
    def main_distance(self) -> float:
        return abs(math.log(self.blocks / 10_000))


def points(rows: Sequence[Row], *, main: bool) -> dict[Point, dict[str, tuple[Row, str]]]:
    """{point: {method: (row, SMs)}}; `main`: the number of blocks nearest to 10,000, or others.

    The first row of a method is that with its default number of SMs.
    """
    found: dict[Point, dict[str, tuple[Row, str]]] = {}
    for row in rows:
        if row.metric == "bandwidth" and (match := re.fullmatch(BLOCKS, row.case)):
            point = Point(match["direction"], match["size"], int(match["count"]))
            found.setdefault(point, {}).setdefault(match["m"], (row, match["sms"]))
    mains: dict[tuple[str, str], Point] = {}
    for point in found:
        key = point[:2]
        mains[key] = min(mains.get(key, point), point, key=lambda p: p.main_distance)
    return {p: methods for p, methods in found.items() if (mains[p[:2]] == p) == main}


def transfer(files: Sequence[File], *, main: bool = True) -> str:
    """One row per direction, block size and count."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for file in (file for file in files if file.name == "transfer"):
        shares: dict[str, list[str]] = {}
        for row in file.rows_of("of the fastest method"):
            cell = re.sub(r"(x \d+), .*", r"\1", row.case)
            shares.setdefault(cell, []).append(f"{row.value:.0%}")
        for point, methods in points(file.rows, main=main).items():
            line = found.setdefault((file.device, str(point)), {})
            for method, (row, sms) in methods.items():
                assert row.peak
                peak = row.peak["value"]
                line[method] = f"{number(row.value)} ({row.value / peak:.0%}; {sms})"
            line |= {name: number(rate) for name, rate in row.baselines.items()}
            line |= {SHARE: " / ".join(shares.get(str(point), ["-"])), "peak": number(peak)}
    names = list(dict.fromkeys(name for line in found.values() for name in line))
    own = {method for file in files for p in points(file.rows, main=main).values() for method in p}
    ends = {SHARE: 2, "peak": 3}
    names.sort(key=lambda name: ends.get(name, name not in own))
    header = ("device", "blocks, GB/s (share of peak; SMs)", *names)
    rows = [(*key, *(line.get(name, "-") for name in names)) for key, line in found.items()]
    return table(header, rows)


def demo(files: Sequence[File]) -> str:
    """One row per device: the turns after the first, whose prompts have a history."""
    header: tuple[str, ...] = ()
    found = []
    for (device,), line in lines(files, "demo", "later turns").items():
        (file,) = (file for file in files if (file.name, file.device) == ("demo", device))
        unequal = [check.got or 0 for check in file.checks if check.unit == "unequal tokens"]
        runs = [("offload", *row.baselines) if row.baselines else () for row in line.values()]
        heads = [
            f"{row.metric}, {row.unit}" + (f" ({' / '.join(names)})" if names else "")
            for row, names in zip(line.values(), runs, strict=True)
        ]
        header = ("device", *heads, "unequal tokens")
        found.append((device, *map(measured, line.values()), " / ".join(map(number, unequal))))
    return table(header, found)
