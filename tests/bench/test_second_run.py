"""Two runs of a benchmark: their verdicts, and what evidence says of them."""

import pytest

from bench.harness import records
from bench.harness.records import SECOND_RUN, Results
from bench.report import staleness, tables

pytestmark = pytest.mark.host_only


def save(root, name="pages", *, commit="a" * 40, date="2026-11-27", load=0.95, store=0.95, wrong=0):
    found = Results(name, device="gpu")
    found.target("load", load, ">=", 0.9, "of peak")
    if store is not None:
        found.target("store", store, ">=", 0.9, "of peak")
    found.check("wrong bytes", wrong, "==", 0, "bytes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXKV_COMMIT", commit)
        patch.setattr(records.report, "report", lambda: {"date": date})
        found.save(root=root)


@pytest.fixture
def runs(tmp_path):
    """`runs(first, second)`: records of two runs, from the arguments of `save`."""

    def of(first, second):
        save(tmp_path, **first)
        save(tmp_path / "out", **{"date": "2026-11-28"} | second)
        path = tmp_path / "gpu" / SECOND_RUN
        (tmp_path / "out" / "gpu").rename(path)
        return records.read(tmp_path), records.read(tmp_path, SECOND_RUN)

    return of


def test_a_second_run_is_read_apart_from_the_first(runs):
    (first,), (second,) = runs({"load": 0.95}, {"load": 0.94})
    assert (first.device, first.name) == (second.device, second.name) == ("gpu", "pages")
    assert [run.targets[0].got for run in (first, second)] == [0.95, 0.94]


@pytest.mark.parametrize(
    ("second", "different"),
    [
        ({}, []),
        ({"load": 0.91}, []),
        ({"load": 0.89}, ["load"]),
        ({"store": None}, ["store"]),
        ({"load": 0.89, "wrong": 1}, ["load", "wrong bytes"]),
    ],
)
def test_verdicts_and_not_figures_must_agree(runs, second, different, monkeypatch):
    one, two = runs({}, second)
    for first, other in ((one, two), (two, one)):
        monkeypatch.setattr(tables, "read", lambda *_, other=other: other)
        assert list(tables.differences(first)["gpu", "pages"]) == different


@pytest.mark.parametrize(
    ("second", "changed", "words"),
    [
        ({}, "", []),
        ({"commit": "b" * 40}, "", []),
        (
            {"commit": "b" * 40},
            "cuda/transfer/copy_kernel.cu\n",
            ["gpu/second_run/pages is not of the first run's code: cuda/transfer/copy_kernel.cu"],
        ),
        ({"commit": "a" * 40 + "-dirty"}, "", ["code: made with uncommitted changes"]),
        ({"name": "transfer"}, "", ["gpu/second_run/transfer has no first run"]),
        ({"date": "2026-11-27"}, "", ["gpu/second_run/pages has the date of the first run"]),
    ],
)
def test_a_second_run_is_of_the_first_ones_code(runs, second, changed, words, monkeypatch):
    compared = []

    def git(command, *arguments, repository):
        if command == "show":
            return arguments[0]  # another text in each commit
        _, change, *paths = arguments
        compared.append(change)
        assert {"bench/harness", "bench/pages.py", "cuda/transfer"} <= {*paths}
        return changed

    monkeypatch.setattr(staleness, "git", git)
    found = staleness.second_run_failures(*runs({}, second))
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))
    assert compared in ([], [f"{second.get('commit', 'a' * 40)}..{'a' * 40}"])


def test_tables_name_what_differs(runs, tmp_path, monkeypatch):
    first, _ = runs({}, {"load": 0.85})
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (line,) = tables.all_records(first).splitlines()[2:]
    assert line.startswith("| gpu | pages | 1 | 1 | 0 | 1 of 1 | aaaaaaaaa |")
    assert tables.targets_count(first).startswith("Of 2 targets of performance 1 are met, 1 missed")
    (line,) = tables.disagreements(first).splitlines()[2:]
    shown = "0.950 of peak, met | 0.850 of peak, **missed**"
    assert line == f"| gpu | pages | load | {shown} |"
    assert tables.disagreements([]) == "No second runs.\n"


def test_runs_that_agree_are_not_the_absence_of_a_second_run(runs, tmp_path, monkeypatch):
    first, _ = runs({}, {})
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.disagreements(first) == "None.\n"
