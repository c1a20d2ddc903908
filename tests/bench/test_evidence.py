"""Recorded evidence: tables and verdicts follow from the figures in the files."""

import json
import subprocess

import pytest

from bench.checks import memcheck
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


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    command = ["git", *identity, *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit of measured code."""
    monkeypatch.delenv("JAXKV_COMMIT", raising=False)
    folder = tmp_path / "repository"
    (folder / "jaxkv").mkdir(parents=True)
    git(folder, "init", "-q")
    commit_change(folder, "jaxkv/code.py")
    return folder


def commit_change(folder, path):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    with (folder / path).open("a") as file:
        file.write("line\n")
    git(folder, "add", path)
    git(folder, "commit", "-q", "-m", f"change {path}")


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


@pytest.mark.parametrize(
    ("changed", "dirty"),
    [
        ("jaxkv/code.py", True),
        ("jaxkv/new.py", True),
        ("bench/results/cpu/x.json", False),
        ("README.md", False),
    ],
)
def test_revision_is_dirty_after_changes_of_code_only(repository, changed, dirty):
    assert records.revision(repository) == (git(repository, "rev-parse", "HEAD"), False)
    (repository / changed).parent.mkdir(parents=True, exist_ok=True)
    (repository / changed).write_text("changed\n")
    assert records.revision(repository).dirty is dirty


def test_revision_without_history_is_read_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("JAXKV_COMMIT", raising=False)
    assert records.revision(tmp_path) == (None, None)
    monkeypatch.setenv("JAXKV_COMMIT", "abc")
    assert records.revision(tmp_path) == ("abc", False)


@pytest.mark.parametrize(
    "dirty, mark", [(True, " + changes"), (False, ""), (None, " (unverified)")]
)
def test_revision_text_marks_changed_and_unverified_files(dirty, mark):
    assert records.File("gpu", "x", "c0ffee" * 6, dirty, {}, [], []).revision == "c0ffeec0f" + mark


def record(commit, dirty=False, name="transfer"):
    return records.File("gpu", name, commit, dirty, {}, [], [])


def test_record_is_stale_after_a_change_of_its_sources_only(repository):
    start = git(repository, "rev-parse", "HEAD")
    commit_change(repository, "README.md")
    commit_change(repository, "jaxkv/metadata/x.py")
    assert staleness.staleness(record(start), repository) is None
    commit_change(repository, "jaxkv/_src/autotune/x.py")
    fuzz = staleness.staleness(record(start, name="fuzz"), repository)
    assert fuzz == f"jaxkv/metadata/x.py changed after {start[:9]}"  # and not the tuner
    commit_change(repository, "cuda/transfer/x.cu")
    commit_change(repository, "jaxkv/_src/cache/y.py")
    why = f"cuda/transfer/x.cu and 1 more changed after {start[:9]}"
    assert staleness.staleness(record(start), repository) == why
    head = git(repository, "rev-parse", "HEAD")
    assert staleness.staleness(record(head), repository) is None
    assert staleness.staleness(record(head, True), repository) == "made with uncommitted changes"
    assert staleness.staleness(record(None), repository) == "unknown commit"
    assert "is not in this history" in str(staleness.staleness(record("f" * 40), repository))
    assert "no sources" in str(staleness.staleness(record(head, name="other"), repository))


CPP = """
  f("// %d");  // once
#define A
"""
PYTHON = """
'''A.'''
class A:
    def f(self):
        '''F.'''
        return "#"
"""
SAME = {  # path: text, another one of the same code, and one of other code
    "cuda/transfer/a.cu": (
        CPP,
        '/* f:\n   twice */\nf("// %d");\n#define A // no more\n',
        CPP.replace("%d", "%s"),
    ),
    "jaxkv/_src/transfer/a.py": (
        PYTHON,
        "class A:\n    def f(self):\n        '''No.'''\n        return '#'  # two\n",
        PYTHON.replace('"#"', '""'),
    ),
}


@pytest.mark.parametrize("path", SAME)
def test_comments_and_docstrings_are_no_code(repository, path):
    def commit(text):
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
        git(repository, "add", path)
        git(repository, "commit", "-q", "-m", "change")
        return git(repository, "rev-parse", "HEAD")

    text, same, other = SAME[path]
    start = commit(text)
    commit(same)
    assert staleness.staleness(record(start), repository) is None
    commit(other)
    assert f"{path} changed after" in str(staleness.staleness(record(start), repository))
    head = git(repository, "rev-parse", "HEAD")
    git(repository, "rm", "-q", path)
    git(repository, "commit", "-q", "-m", "removed")
    assert f"{path} changed after" in str(staleness.staleness(record(head), repository))


def test_tables_of_other_gpus_are_no_sources(repository):
    start = git(repository, "rev-parse", "HEAD")
    commit_change(repository, "jaxkv/_src/tuning/data/copy/another_gpu.json")
    assert staleness.staleness(record(start), repository) is None
    for table in ("gpu", "default"):
        start = git(repository, "rev-parse", "HEAD")
        commit_change(repository, f"jaxkv/_src/tuning/data/copy/{table}.json")
        assert f"{table}.json changed after" in str(staleness.staleness(record(start), repository))


def test_stale_records_and_only_these_must_be_pending(repository):
    start = git(repository, "rev-parse", "HEAD")
    commit_change(repository, "cuda/transfer/x.cu")
    files = [record(start), record(start, name="metadata")]
    assert staleness.failures(files, {"gpu/transfer": "no GPU at hand"}, repository) == []
    (stale,) = staleness.failures(files, {}, repository)
    assert stale.startswith("gpu/transfer is stale: cuda/transfer/x.cu changed after ")
    listed = dict.fromkeys(("gpu/transfer", "gpu/metadata", "gpu/other"), "reason")
    assert staleness.failures(files, listed, repository) == [
        "gpu/metadata is not stale: remove it from pending.toml",
        "gpu/other is not stale: remove it from pending.toml",
    ]
    assert staleness.failures(files, {"gpu/transfer": ""}, repository) == [stale]  # no reason


def test_sources_of_every_benchmark_exist():
    listed = {source for sources in staleness.SOURCES.values() for source in sources}
    paths = [records.REPOSITORY / source.removeprefix(":!") for source in listed]
    assert [path for path in paths if not path.exists()] == []
    assert {file.bench for file in records.read()} <= staleness.SOURCES.keys()


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
    assert header.endswith("| kernel | dma | plain | chosen / fastest | peak |")
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
        f"| some_gpu | multigpu_test_2 | 0 | 0 | 0 | 0 of 1 | - | 012345678 | {date} | - |",
        f"| some_gpu | transfer | 0 | 1 | 0 | 0 of 0 | - | 012345678 | {date} | - |",
    ]
    assert plots.markdown(files) == ("![transfer on some_gpu](plots/transfer_some_gpu.svg)\n")


@pytest.mark.parametrize(
    "got, bound, verdict",
    [
        (8.0, 9.0, "**missed**, above peak"),
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
    files = records.read(saved)
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


@pytest.mark.parametrize(
    ("output", "met"),
    [
        ("== 9 passed, 2 deselected ==\n========= ERROR SUMMARY: 0 errors\n", True),
        ("== 9 passed, 2 deselected ==\n========= ERROR SUMMARY: 1 error\n", False),
        ("== 1 failed, 9 passed ==\n========= ERROR SUMMARY: 0 errors\n", False),
        ("== 9 deselected ==\n========= ERROR SUMMARY: 0 errors\n", False),
        ("== 9 passed ==\n", False),
    ],
    ids=["clean", "memory error", "failed test", "no test", "no summary"],
)
def test_memcheck_targets_are_met_by_a_clean_run_only(output, met):
    assert memcheck.record(Results("memcheck"), output) == met
