"""Whether the verdicts of two runs of a benchmark agree.

`bench/results/<device>/second_run/<name>.json` is the record of another run of the same code (the
file that the benchmark writes below `--out`): the sources that the benchmark measures are the same
in both commits, and those of the benchmark. Tables show the first run.
"""

from collections.abc import Sequence
from typing import NamedTuple

from bench.harness.records import RESULTS, SECOND_RUN, File, Target, read
from bench.report.staleness import staleness
from bench.run_all import BENCHMARKS


class Agreement(NamedTuple):
    """Verdicts of two runs.

    Attributes:
      first, second: the two records.
      different: targets and checks whose verdicts differ, or that one of the runs lacks (None).
    """

    first: File
    second: File
    different: dict[str, tuple[Target | None, Target | None]]

    def __str__(self) -> str:
        number = len(self._verdicts(self.first).keys() | self._verdicts(self.second))
        return f"{number - len(self.different)} of {number}"

    @classmethod
    def of(cls, first: File, second: File) -> "Agreement":
        found = [cls._verdicts(file) for file in (first, second)]
        pairs = {name: tuple(run.get(name) for run in found) for name in {**found[0], **found[1]}}
        different = {
            name: (one, other)
            for name, (one, other) in pairs.items()
            if one is None or other is None or one.met != other.met
        }
        return cls(first, second, different)

    @staticmethod
    def _verdicts(file: File) -> dict[str, Target]:
        return {target.name: target for target in (*file.targets, *file.checks)}


def agreements(files: Sequence[File]) -> dict[tuple[str, str], Agreement]:
    """The agreement of each record with a second run, by device and name."""
    first = {(file.device, file.name): file for file in files}
    second = {(file.device, file.name): file for file in read(RESULTS, SECOND_RUN)}
    return {key: Agreement.of(first[key], second[key]) for key in first if key in second}


def failures(files: Sequence[File], second: Sequence[File]) -> list[str]:
    """Second runs without a first one, of the same date (copies of the first one), or of other
    code."""
    first = {(file.device, file.name): file for file in files}
    found = []
    for file in second:
        name = f"{file.device}/{SECOND_RUN}/{file.name}"
        same = first.get((file.device, file.name))
        if same is None:
            found.append(f"{name} has no first run")
        elif same.env.get("date") == file.env.get("date"):
            found.append(f"{name} has the date of the first run: a copy")
        elif why := staleness(file, head=same.commit or "HEAD", also=benchmark(file.bench)):
            found.append(f"{name} is not of the first run's code: {why}")
    return found


def benchmark(name: str) -> tuple[str, ...]:
    """Paths of the sources of a benchmark, which may change what a figure means."""
    module = BENCHMARKS.get("transfer" if name == "small_batches" else name, "checks")
    return "bench/harness", f"bench/{module.partition('.')[0]}*"
