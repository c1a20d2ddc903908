"""Recorded evidence: tables and verdicts follow from the figures in the files."""

import json
import math

import pytest

from bench.harness import blocks, peak_bandwidth, records
from bench.harness.records import Results, Target
from bench.harness.timing import Figure
from bench.report import evidence, plots, staleness, tables

pytestmark = pytest.mark.host_only

README = """# Title
before
<!-- generated: records -->
stale
<!-- end -->
between
<!-- generated: transfer -->
<!-- end -->
after
"""


def measured(got=0.5):
    found = Results("transfer")
    for name, rate in (("kernel, 12 SMs", 25.0), ("kernel, 4 SMs", 20.0), ("dma, 0 SMs", 10.0)):
        case = f"load, 4 KiB x 10000, {name}"
        figure, peak, baselines = Figure(rate, 0.5), ("one copy", 50.0), {"plain": 4.0}
        found.row(case, "bandwidth", "GB/s", figure, peak, baselines)
    share = None if got is None else Figure(got, 0.1)
    found.target("load is near peak", share, ">=", 0.9, "of peak")
    return found


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A folder with the files of two benchmarks, measured on a known commit."""
    monkeypatch.setenv("JAXKV_COMMIT", "0123456789abcdef")
    monkeypatch.setattr(records, "device_slug", lambda: "some_gpu")
    measured().save(root=tmp_path)
    tests = Results("multigpu_test_2")
    tests.row("tests/test_a.py", "passed", "tests", 3)
    tests.row("tests/test_a.py", "skipped", "tests", 1)
    tests.row("tests/test_a.py: no reason", "skip reason", "tests", 1)
    tests.row("tests/test_b.py", "passed", "tests", 4)
    tests.row("tests/test_b.py", "failed", "tests", 2)
    tests.row("tests/test_b.py::test_x", "failed", "tests", 1)
    tests.check("failed tests", 2, "==", 0, "tests")
    tests.save(root=tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("op", "want", "got", "error", "met"),
    [
        (">=", 0.9, 0.9, 0.0, True),
        (">=", 0.9, 0.89, None, False),
        (">=", 0.9, 0.92, 0.01, True),
        (">=", 0.9, 0.92, 0.02, False),
        ("<=", 5, 5.1, None, False),
        ("<=", 5, 4, 0.5, True),
        ("<=", 5, 4, 0.6, False),
        ("==", 0, 0, 0.0, True),
        ("==", 0, 1, 0.0, False),
        ("==", 0, None, None, None),
    ],
)
def test_target_is_met_two_standard_errors_from_its_figure(op, want, got, error, met):
    assert Target("t", op, want, "unit", got, None, error).met is met


def test_target_with_a_single_sample_is_not_measured():
    found = Results("x")
    single, number, share = (
        found.target("t", got, "<=", 5, "us") for got in (Figure(4, math.nan), 4, 4.0)
    )
    assert (single.got, single.error, single.met) == (None, None, None)
    assert [(t.got, t.error, t.met) for t in (number, share)] == [(4, 0.0, True), (4, None, True)]
    assert found.row("a", "time", "us", Figure(4, math.nan), want=("<=", 5)).value == 4
    assert found.targets[-1].met is None


def test_target_with_an_unknown_operator_raises():
    with pytest.raises(ValueError, match="op '~' of target 't' is not one of"):
        Target("t", "~", 1, "unit", 1)


def test_saved_record_has_the_documented_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXKV_COMMIT", "abc-dirty")
    path = measured().save(root=tmp_path)
    content = json.loads(path.read_text())
    assert path == tmp_path / records.device_slug() / "transfer.json"
    assert set(content) == {"commit", "dirty", "env", "rows", "targets", "checks"}
    assert (content["commit"], content["dirty"]) == ("abc", True)
    assert content["env"]["devices"]["count"] >= 1
    assert len(content["rows"]) == 3
    assert content["rows"][:1] == [
        {
            "case": "load, 4 KiB x 10000, kernel, 12 SMs",
            "metric": "bandwidth",
            "unit": "GB/s",
            "value": 25.0,
            "peak": {"name": "one copy", "value": 50.0},
            "baselines": {"plain": 4.0},
            "error": 0.5,
        }
    ]
    want = {"op": ">=", "value": 0.9, "unit": "of peak"}
    name = "load is near peak"
    assert content["targets"] == [
        {"name": name, "want": want, "got": 0.5, "error": 0.1, "met": False, "bound": None}
    ]


def test_saved_record_with_out_is_written_twice(tmp_path):
    path = measured().save(tmp_path / "carried", root=tmp_path / "kept")
    copy = tmp_path / "carried" / path.relative_to(tmp_path / "kept")
    assert copy.read_text() == path.read_text()


def test_read_returns_saved_rows_and_targets(saved):
    tests, transfer = records.read(saved)
    assert (tests.name, transfer.name) == ("multigpu_test_2", "transfer")
    assert (transfer.device, transfer.commit) == ("some_gpu", "0123456789abcdef")
    assert transfer.dirty is False
    assert transfer.rows == measured().rows
    assert transfer.targets == measured().targets


def test_read_with_an_inconsistent_verdict_raises(saved):
    path = saved / "some_gpu" / "transfer.json"
    path.write_text(path.read_text().replace('"met": false', '"met": true'))
    with pytest.raises(ValueError, match="has met=True, but its figures give met=False"):
        records.read(saved)


def test_listing_has_target_measurement_and_verdict(saved):
    text = evidence.listing(records.read(saved))
    assert "some_gpu/transfer: 012345678" in text
    assert "**missed**   load is near peak: target >= 0.900 of peak, measured 0.500 of peak" in text
    assert "**missed**   failed tests: target == 0 tests, measured 2 tests" in text


def test_tables_of_saved_records_have_their_figures(saved):
    files = records.read(saved)
    date = files[0].date
    assert tables.tests(files).splitlines()[2:] == [
        f"| some_gpu | multigpu_test_2 | 7 | 2 | 1 | 012345678 | {date} |"
    ]
    header, _, *lines = tables.transfer(files).splitlines()
    assert header.endswith(
        "| kernel | dma | plain | as chosen, share of the fastest (device ids / HostIds) | peak |"
    )
    assert lines == [
        "| some_gpu | load, 4 KiB x 10000 | 25 (50%; 12) | 10 (20%; 0) | 4 | - | 50 |",
    ]
    wanted = ">= 0.900 of peak | 0.500 of peak | 0.200 | - | **missed**"
    assert tables.all_targets(files).splitlines()[2:] == [
        f"| some_gpu | transfer | load is near peak | {wanted} |"
    ]
    assert tables.checks(files).splitlines()[2:] == [
        "| some_gpu | multigpu_test_2 | failed tests | == 0 tests | 2 tests | **fails** |"
    ]
    assert tables.all_records(files).splitlines()[2:] == [
        f"| some_gpu | multigpu_test_2 | 0 | 0 | 0 | 0 of 1 | 012345678 | {date} | - |",
        f"| some_gpu | transfer | 0 | 1 | 0 | 0 of 0 | 012345678 | {date} | - |",
    ]
    assert plots.markdown(files) == ("![transfer on some_gpu](plots/transfer_some_gpu.svg)\n")


@pytest.mark.parametrize(
    "got, bound, verdict",
    [
        (8.0, 9.0, "**missed**, above peak"),
        (Figure(9.5, 1.0), 9.0, "**missed**, above peak"),
        (Figure(9.5, 0.2), 11.0, "**missed**"),
        (Figure(9.5, 0.25), 11.0, "**missed**, within the error"),
        (Figure(10.5, 0.5), 11.0, "**missed**, within the error"),
        (8.0, 11.0, "**missed**"),
        (10.0, 9.0, "met"),
        (8.0, None, "**missed**"),
        (None, 9.0, "not measured"),
    ],
)
def test_target_above_peak_is_marked(got, bound, verdict, tmp_path):
    found = Results("transfer")
    found.target("speedup over a baseline", got, ">=", 10.0, "x", bound)
    found.save(root=tmp_path)
    (target,) = records.read(tmp_path)[0].targets
    assert target.bound == bound
    assert tables.verdict(target) == verdict
    peak = "-" if bound is None else f"{tables.number(bound)} x"
    assert f" | {peak} | {verdict} |" in tables.all_targets(records.read(tmp_path))


def test_regenerate_replaces_marked_sections_only(saved):
    files = records.read(saved)
    text = evidence.regenerate(README, files)
    assert "stale" not in text
    assert tables.transfer(files) in text
    kept = ["# Title", "before", "between", "after"]
    assert [line for line in text.splitlines() if line in kept] == kept
    assert evidence.regenerate(text, files) == text


def test_regenerate_with_an_unknown_table_raises():
    with pytest.raises(ValueError, match="no table 'tabel'; tables: all_reduce, "):
        evidence.regenerate("<!-- generated: tabel -->\n<!-- end -->", [])


def test_regenerate_with_a_section_without_end_raises():
    with pytest.raises(ValueError, match="has no <!-- end -->"):
        evidence.regenerate("<!-- generated: tests -->\ntext\n", [])


def test_check_fails_until_documents_are_regenerated(saved, tmp_path, monkeypatch, capsys):
    readme, targets = tmp_path / "README.md", tmp_path / "targets.md"
    for path in (readme, targets):
        path.write_text(README)
    monkeypatch.setattr(evidence, "DOCUMENTS", [readme, targets])
    monkeypatch.setattr(evidence, "draw", lambda files: [])
    files = [file for file in records.read(saved) if not file.checks]
    monkeypatch.setattr(evidence, "read", lambda *, folder="": [] if folder else files)
    monkeypatch.setattr(staleness, "staleness", lambda *_: None)
    monkeypatch.setattr(staleness, "pending", dict)
    assert evidence.main(["--check"]) == 1
    assert readme.read_text() == README
    output = capsys.readouterr().out
    assert "README.md is out of date" in output and "targets.md is out of date" in output
    assert evidence.main([]) == 0
    assert evidence.main(["--check"]) == 0
    for path in (readme, targets):  # only one of them outdated
        new = path.read_text()
        path.write_text(README)
        assert evidence.main(["--check"]) == 1
        path.write_text(new)


@pytest.mark.parametrize(
    ("failed", "stale", "pending", "code"),
    [
        (0, None, {}, 0),
        (2, None, {}, 1),
        (None, None, {}, 1),  # not measured
        (2, "changed", {"gpu/fuzz": "run again"}, 0),
    ],
)
def test_check_fails_for_a_check_that_is_not_met(
    failed, stale, pending, code, tmp_path, monkeypatch, capsys
):
    found = Results("fuzz", device="gpu")
    found.check("failed cases", failed, "==", 0, "cases")
    found.save(root=tmp_path)
    files = records.read(tmp_path)
    monkeypatch.setattr(evidence, "DOCUMENTS", [])
    monkeypatch.setattr(evidence, "read", lambda *, folder="": [] if folder else files)
    monkeypatch.setattr(staleness, "staleness", lambda *_: stale)
    monkeypatch.setattr(staleness, "pending", lambda: pending)
    assert evidence.main(["--check"]) == code
    assert ("gpu/fuzz: check " in capsys.readouterr().out) == bool(code)


def test_check_fails_for_a_check_of_a_second_run(tmp_path, monkeypatch, capsys):
    found = Results("fuzz", device="gpu")
    found.check("failed cases", 2, "==", 0, "cases")
    found.save(root=tmp_path)
    second = records.read(tmp_path)
    monkeypatch.setattr(evidence, "DOCUMENTS", [])
    monkeypatch.setattr(evidence, "read", lambda *, folder="": second if folder else [])
    monkeypatch.setattr(staleness, "second_run_failures", lambda *_: [])
    monkeypatch.setattr(staleness, "pending", dict)
    assert evidence.main(["--check"]) == 1
    assert "gpu/second_run/fuzz: check " in capsys.readouterr().out


def test_plots_of_equal_figures_are_identical(saved, tmp_path):
    pytest.importorskip("matplotlib")
    files = records.read(saved)
    (first,) = evidence.draw(files, tmp_path / "first")
    (second,) = evidence.draw(files, tmp_path / "second")
    assert first.name == "transfer_some_gpu.svg"
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize("direction", blocks.DIRECTIONS)
def test_peak_bandwidth_on_a_gpu_is_a_driver_copy(direction):
    name, rate = peak_bandwidth.contiguous_copy(direction, 1 << 20)
    assert name.startswith("1 MiB cuMemcpy")
    assert rate > 0
