"""Records of a benchmark: rows, targets, checks, and their JSON file.

A file contains the measurements, the commit and the machine:

    {commit, dirty, env, rows: [{case, metric, unit, value, peak, baselines, error}],
     targets: [{name, want: {op, value, unit}, got, error, met, bound}], checks: [the same]}

Peak bandwidths and baselines are measured in the same run as their value. Targets are of
performance, checks of correctness. "error" is that of the value (`bench.harness.timing.median`): 0
of exact values, null of a single sample. A target with a single sample is not measured, as its
margin is unknown.
"""

import argparse
import dataclasses
import json
import math
import operator
import os
import pathlib
import re
import subprocess
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from bench.harness.timing import Figure, error_of
from jaxkv._src.environment import report

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
RESULTS = REPOSITORY / "bench" / "results"
# Records are written after the code that they measure, so they do not make that code "dirty".
EVIDENCE = (
    "bench/results",
    "docs/plots",
    "docs/performance.md",
    "docs/offload.md",
    "docs/sparse.md",
    "README.md",
)

SECOND_RUN = "second_run"  # the folder of records that repeat those of their device

NOT_MEASURED = "not measured"
HOST = "host"  # the folder of records that need no device

OPERATORS = {"==": operator.eq, ">=": operator.ge, "<=": operator.le}
NO_OPTIONS: Mapping[str, dict[str, Any]] = types.MappingProxyType({})
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured figure.

    Attributes:
      case: the measured configuration, e.g. "load page_first_direct kernel 64 KiB".
      metric: the measured quantity, e.g. "bandwidth".
      unit: unit of `value`, `peak` and `baselines`, e.g. "GB/s" (1e9 bytes per second).
      value: the figure.
      peak: peak bandwidth: {"name", "value"}.
      baselines: figures of the baselines, by name.
      error: of `value`; None if there is none.
    """

    case: str
    metric: str
    unit: str
    value: float
    peak: dict[str, Any] | None = None
    baselines: dict[str, float] = dataclasses.field(default_factory=dict)
    error: float | None = None

    def __str__(self) -> str:
        text = f"{self.case}: {self.metric} {self.value:.4g} {self.unit}"
        if self.error:
            text += f" +- {2 * self.error:.2g}"
        if self.peak:
            text += f", {self.peak['name']} {self.peak['value']:.4g}"
        return text + "".join(f", {name} {other:.4g}" for name, other in self.baselines.items())


@dataclasses.dataclass(frozen=True)
class Target:
    """A target or a check, and the measured figure; `met` follows from the two.

    Attributes:
      name: the measured quantity.
      op: one of OPERATORS; the target is met if `got op want`, also with a `got` that is worse by
        two errors, at the end of its confidence interval (`bench.harness.timing.median`).
      want: the target figure.
      unit: unit of both figures.
      got: the measured figure, None if not measured.
      bound: figure of a copy at peak bandwidth in the same run; None without a peak.
      error: of `got`; None of a plain float, which is judged without a margin.
    """

    name: str
    op: str
    want: float
    unit: str
    got: float | None
    bound: float | None = None
    error: float | None = None

    def __post_init__(self) -> None:
        if self.op not in OPERATORS:
            raise ValueError(f"op {self.op!r} of target {self.name!r} is not one of {[*OPERATORS]}")

    @property
    def met(self) -> bool | None:
        """None without a measurement."""
        worse = {"<=": 2.0, ">=": -2.0, "==": 0.0}[self.op] * (self.error or 0.0)
        return None if self.got is None else self._holds(self.got + worse)

    @property
    def above_peak(self) -> bool:
        """Whether a copy at peak bandwidth would miss the target."""
        return self.bound is not None and not self._holds(self.bound)

    @property
    def within_error(self) -> bool:
        """Whether the target is missed, but a figure that is better by two errors would meet it."""
        better = {"<=": -2.0, ">=": 2.0, "==": 0.0}[self.op] * (self.error or 0.0)
        return self.met is False and self.got is not None and self._holds(self.got + better)

    def _holds(self, value: float) -> bool:
        return bool(OPERATORS[self.op](value, self.want))

    def __str__(self) -> str:
        verdict = {True: "met", False: "missed", None: "not measured"}[self.met]
        got = "-" if self.got is None else f"{self.got:.4g}"
        return f"{verdict}: {self.name}: {got} {self.op} {self.want} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        want = {"op": self.op, "value": self.want, "unit": self.unit}
        return {
            "name": self.name, "want": want, "got": self.got, "error": self.error, "met": self.met,
            "bound": self.bound,
        }  # fmt: skip

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Target":
        want, others = content["want"], (content[key] for key in ("got", "bound", "error"))
        return cls(content["name"], want["op"], want["value"], want["unit"], *others)


def plain(value: float) -> tuple[float, float | None]:
    """A value and its error as in a record."""
    if not isinstance(value, Figure):
        return value, 0.0 if isinstance(value, int) else None
    return float(value), None if math.isnan(value.error) else value.error


class Results:
    """Collects the rows, targets and checks of one benchmark and saves them.

    Args:
      name: of the record.
      device: `HOST` for figures that do not depend on the device; by default, that in use.
      log: print each when it is added.
    """

    def __init__(self, name: str, *, device: str | None = None, log: bool = False):
        self.name, self.device, self.log = name, device, log
        self.rows: list[Row] = []
        self.targets: list[Target] = []
        self.checks: list[Target] = []

    def row(
        self,
        case: str,
        metric: str,
        unit: str,
        value: float,
        peak: tuple[str, float] | None = None,
        baselines: Mapping[str, float] | None = None,
        want: tuple[str, float] | None = None,
    ) -> Row:
        """`want`: operator and figure of a target for the value, named by case and metric."""
        if want:
            self.target(f"{case}: {metric}", value, *want, unit)
        named = {"name": peak[0], "value": float(peak[1])} if peak else None
        others = {name: float(other) for name, other in (baselines or {}).items()}
        value, error = plain(value)
        return self._add(self.rows, Row(case, metric, unit, value, named, others, error))

    def target(
        self,
        name: str,
        got: float | None,
        op: str,
        want: float,
        unit: str,
        bound: float | None = None,
    ) -> Target:
        """Not measured if `got` is None or a figure of a single sample."""
        known = None if got is None or math.isnan(error_of(got)) else got
        figure, error = (None, None) if known is None else plain(known)
        at_peak = None if bound is None else float(bound)
        return self._add(self.targets, Target(name, op, want, unit, figure, at_peak, error))

    def check(self, name: str, got: float | None, op: str, want: float, unit: str) -> Target:
        """A condition of correctness on an exact figure."""
        return self._add(self.checks, Target(name, op, want, unit, got, None, 0.0))

    def not_measured(self, what: str) -> None:
        """A part that failed: a row, so that the record names it."""
        self.row(report.without_directories(what)[:2000], NOT_MEASURED, "settings", 1)

    def _add(self, kind: list[T], one: T) -> T:
        kind.append(one)
        if self.log:
            print(one, flush=True)
        return one

    @property
    def exit_code(self) -> int:
        """1 if a check is not met, or not measured."""
        return int(any(check.met is not True for check in self.checks))

    def to_json(self) -> dict[str, Any]:
        commit, dirty = revision()
        return {
            "commit": commit,
            "dirty": dirty,
            "env": report.report(),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "targets": [target.to_json() for target in self.targets],
            "checks": [check.to_json() for check in self.checks],
        }

    def save(
        self, out: str | os.PathLike[str] | None = None, root: pathlib.Path = RESULTS
    ) -> pathlib.Path:
        """Writes `<root>/<device>/<name>.json`, and a copy below `out` if given.

        Returns:
          The path below `root`.
        """
        text = _one_line_each(self.to_json())
        path = pathlib.PurePath(self.device or device_slug(), f"{self.name}.json")
        for folder in [root] if out is None else [root, pathlib.Path(out)]:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
            print(f"wrote {folder / path}")
        return root / path


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
    checks: list[Target] = dataclasses.field(default_factory=list)

    @property
    def bench(self) -> str:
        """The benchmark; some write a file for each number of devices."""
        return re.sub(r"_\d+$", "", self.name)

    @property
    def date(self) -> str:
        return str(self.env.get("date", "no date"))[:10]

    @property
    def revision(self) -> str:
        mark = {True: " + changes", False: "", None: " (unverified)"}[self.dirty]
        return (self.commit[:9] if self.commit else "unknown commit") + mark

    def rows_of(self, metric: str) -> list[Row]:
        return [row for row in self.rows if row.metric == metric]


def read(root: pathlib.Path = RESULTS, folder: str = "") -> list[File]:
    """All result files `<root>/<device>/<folder>/<name>.json`, sorted by device and name.

    Raises:
      ValueError: "met" of a target is inconsistent with its "want" and "got".
    """
    paths = sorted(root.glob(str(pathlib.PurePath("*", folder, "*.json"))))
    return [_read_file(path, path.relative_to(root).parts[0]) for path in paths]


def _read_file(path: pathlib.Path, device: str) -> File:
    content = json.loads(path.read_text())
    found = {}
    for kind in ("targets", "checks"):
        found[kind] = [Target.from_json(target) for target in content[kind]]
        for target, stored in zip(found[kind], content[kind], strict=True):
            if target.met != stored["met"]:
                raise ValueError(
                    f"{path}: target {target.name!r} has met={stored['met']}, but its figures give "
                    f"met={target.met}"
                )
    rows = [Row(**row) for row in content["rows"]]
    about = content["commit"], content["dirty"], content["env"]
    return File(device, path.stem, *about, rows, found["targets"], found["checks"])


def _one_line_each(content: dict[str, Any]) -> str:
    """JSON with one line per row and target, readable with hundreds of them."""
    parts = []
    for key, value in content.items():
        if isinstance(value, list):
            lines = ",".join(f"\n  {json.dumps(entry)}" for entry in value)
            parts.append(f" {json.dumps(key)}: [{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: " + json.dumps(value, indent=1).replace("\n", "\n "))
    return "{\n" + ",\n".join(parts) + "\n}\n"


def device_slug() -> str:
    """The device kind as a folder name, e.g. "nvidia_h200"."""
    import jax

    return re.sub(r"\W+", "_", jax.local_devices()[0].device_kind).strip("_").lower()


class Revision(NamedTuple):
    commit: str | None
    dirty: bool | None


def revision(repository: pathlib.Path = REPOSITORY) -> Revision:
    """The commit of the running code, and whether files differ from it.

    In a copy of the tree without git history, both are taken from the environment:
    `JAXKV_COMMIT=$(git describe --always --dirty --abbrev=40 --exclude='*')`. Both are None if
    neither source is available.
    """
    if stated := os.environ.get("JAXKV_COMMIT"):
        return Revision(stated.removesuffix("-dirty"), stated.endswith("-dirty"))
    try:
        commit = git("rev-parse", "HEAD", repository=repository)
        others = [f":(exclude){path}" for path in EVIDENCE]
        changed = git("status", "--porcelain", "--", ".", *others, repository=repository)
    except (OSError, subprocess.CalledProcessError):
        return Revision(None, None)
    return Revision(commit, bool(changed))


def git(*arguments: str, repository: pathlib.Path = REPOSITORY) -> str:
    command = ["git", *arguments]
    return subprocess.run(
        command, cwd=repository, check=True, capture_output=True, text=True
    ).stdout.strip()


def arguments(
    description: str | None,
    argv: Sequence[str] | None,
    options: Mapping[str, dict[str, Any]] = NO_OPTIONS,
    *,
    quick: bool = True,
) -> argparse.Namespace:
    """Parses --out, --quick and `options`: names or flags, with options of `add_argument`.

    Call it before the first use of JAX: programs in other processes need GPU memory, too.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="DIR", help="also write the JSON file below DIR")
    if quick:
        parser.add_argument("--quick", action="store_true", help="fewer and smaller cases")
    for name, about in options.items():
        parser.add_argument(name, **about)
    return parser.parse_args(argv)
