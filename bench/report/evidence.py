"""Lists targets and measurements, and writes both into the documentation.

`python -m bench.report.evidence` reads every `bench/results/<device>/<name>.json`, prints each
target and check with its measurement, and regenerates the plots and the sections of DOCUMENTS
between

    <!-- generated: NAME -->
    <!-- end -->

with the table of that name in `bench.report.catalog`. `--check` writes nothing, and fails if a
document is out of date, or a record stale and not pending, or a second run a copy or not of the
first one's code (`bench.report.staleness`), or a check of a record that is not pending not met;
plots are not compared, as their bytes differ between matplotlib versions.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Container, Sequence

from bench.harness.records import REPOSITORY, SECOND_RUN, File, read
from bench.report import plots, staleness
from bench.report.catalog import TABLES
from bench.report.tables import figures, verdict

DOCUMENTS = [
    REPOSITORY / name
    for name in (
        "README.md",
        "bench/results/README.md",
        "docs/offload.md",
        "docs/performance.md",
        "docs/sparse.md",
    )
]
PLOTS = REPOSITORY / "docs" / "plots"
MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def regenerate(text: str, files: Sequence[File]) -> str:
    """A text with every marked section replaced by its table.

    Raises:
      ValueError: a marked section whose name is not in TABLES, or without an end.
    """
    opened = text.count("<!-- generated:")
    if opened != len(MARKED.findall(text)):
        raise ValueError("a section starts with <!-- generated: NAME --> but has no <!-- end -->")

    def replace(match: re.Match[str]) -> str:
        name = match[2]
        if name not in TABLES:
            raise ValueError(f"no table {name!r}; tables: {', '.join(TABLES)}")
        return match[1] + TABLES[name](files) + match[3]

    return MARKED.sub(replace, text)


def draw(files: Sequence[File], folder: pathlib.Path = PLOTS) -> list[pathlib.Path]:
    """Draws all available plots; none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        print("plots not drawn: matplotlib is not installed")
        return []
    matplotlib.rcParams["svg.hashsalt"] = "jaxkv"  # equal figures must give identical files
    drawn = []
    for (bench, device), found in plots.drawn_files(files).items():
        if figure := plots.FIGURES[bench](found):
            drawn.append(folder / plots.name(bench, device))
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(drawn[-1], metadata={"Date": None})
    return drawn


def listing(files: Sequence[File]) -> str:
    lines = []
    for file in files:
        why = staleness.staleness(file)
        age = f"stale: {why}" if why else "current"
        lines.append(f"{file.device}/{file.name}: {file.revision}, {file.date}, {age}")
        for target in (*file.targets, *file.checks):
            want, got = figures(target)
            lines.append(f"  {verdict(target):12} {target.name}: target {want}, measured {got}")
    return "\n".join(lines) or "no result files"


def failed_checks(files: Sequence[File], pending: Container[str], folder: str = "") -> list[str]:
    """Checks that are not met, or not measured, of records that are not pending."""
    return [
        f"{pathlib.PurePath(file.device, folder, file.name)}: check {check}"
        for file in files
        if f"{file.device}/{file.name}" not in pending
        for check in file.checks
        if check.met is not True
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare only")
    flags = parser.parse_args(argv)
    files = read()
    print(listing(files))
    files = [file for file in files if file.device != "cpu"]  # not committed: no GPU, no claim
    outdated: list[str] = []
    if flags.check:
        pending = staleness.pending()
        outdated += staleness.failures(files, pending)
        again = read(folder=SECOND_RUN)
        outdated += failed_checks(files, pending) + failed_checks(again, pending, SECOND_RUN)
        outdated += staleness.second_run_failures(files, again)
    for path in DOCUMENTS:
        before = path.read_text()
        after = regenerate(before, files)
        if flags.check and after != before:
            outdated.append(f"{path.name} is out of date: run python -m bench.report.evidence")
        elif not flags.check:
            path.write_text(after)
    if flags.check:
        print("\n".join(outdated))
        return int(bool(outdated))
    for path in draw(files):
        print(f"drew {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
