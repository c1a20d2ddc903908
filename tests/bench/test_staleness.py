"""The commit of a record, and whether the record is of the code that ships."""

import subprocess

import pytest

from bench.harness import records
from bench.report import staleness

pytestmark = pytest.mark.host_only


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


def test_record_is_stale_after_a_change_of_its_benchmark(repository):
    start = git(repository, "rev-parse", "HEAD")
    for path in ("bench/pages.py", "bench/harness/records.py", "bench/harness/main.py"):
        commit_change(repository, path)
    assert staleness.staleness(record(start), repository) is None
    commit_change(repository, "bench/harness/timing.py")
    assert staleness.staleness(record(start, name="gpu_test"), repository) is None
    assert staleness.staleness(record(start), repository) is not None
    middle = git(repository, "rev-parse", "HEAD")
    commit_change(repository, "bench/transfer.py")
    for name in ("transfer", "small_batches"):
        why = staleness.staleness(record(middle, name=name), repository)
        assert why == f"bench/transfer.py changed after {middle[:9]}"
    assert staleness.staleness(record(middle, name="pages"), repository) is None
    commit_change(repository, "bench/serving/demo.py")
    assert staleness.staleness(record(middle, name="demo"), repository) is not None


def test_tests_of_the_benchmarks_are_no_sources_of_the_tests_on_a_gpu(repository):
    start = git(repository, "rev-parse", "HEAD")
    commit_change(repository, "tests/bench/test_pages.py")
    assert staleness.staleness(record(start, name="gpu_test"), repository) is None
    commit_change(repository, "tests/transfer/test_pages.py")
    why = f"tests/transfer/test_pages.py changed after {start[:9]}"
    assert staleness.staleness(record(start, name="gpu_test"), repository) == why


@pytest.mark.parametrize("paths", [*staleness.SOURCES.values(), *staleness.BENCHMARKS.values()])
def test_listed_sources_exist(paths):
    for path in [paths] if isinstance(paths, str) else paths:
        assert [*records.REPOSITORY.glob(path.removeprefix(":!"))], path


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


TUNING = "jaxkv/_src/tuning"
POOLS = "jaxkv/_src/autotune/pools.py"
RUN = {  # by benchmark, what it runs below other folders than its own
    "transfer": (
        POOLS, f"{TUNING}/copy_lookup.py", f"{TUNING}/hardware.py", f"{TUNING}/table_files.py"
    ),
    "engines": (POOLS,),
    "fuzz": ("tests/util/transfer_cases.py",),
    "gpu_test": ("bench/checks/gpu_test.py",),
    "memcheck": ("bench/checks/memcheck.py", "bench/checks/sanitizer.py"),
    "multigpu_test": ("bench/checks/gpu_test.py",),
    "pages": (POOLS,),
    "profile": (POOLS, "cuda/transfer/copy_kernel.cuh", "cuda/transfer/id_check.cuh"),
    "ranks_on_one_gpu": ("bench/checks/sanitizer.py", "tests/util/native_program.py"),
    "small_batches": (POOLS,),
    "all_reduce": (f"{TUNING}/table_files.py",),
    "metadata": ("cuda/metadata/flashinfer.cu", "jaxkv/_src/runtime/bounds.py"),
    "recurrent": (
        "jaxkv/_src/runtime/bounds.py",
        "jaxkv/_src/runtime/fusion_barrier.py",
        "jaxkv/metadata/common.py",
        "jaxkv/metadata/segments.py",
    ),
    "sparse": (POOLS, "cuda/cache/pinned_memory.cu", "jaxkv/_src/cache/host_pool.py"),
    "sparse_decode": (
        "cuda/cache/pinned_memory.cu",
        "examples/sparse/attention.py",
        "jaxkv/_src/cache/host_pool.py",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in RUN for path in RUN[name]])
def test_all_code_that_a_benchmark_runs_is_among_its_sources(name, path):
    assert (records.REPOSITORY / path).exists()
    measured = [found for s in staleness.SOURCES[name] for found in records.REPOSITORY.glob(s)]
    assert any((records.REPOSITORY / path).is_relative_to(found) for found in measured)


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


def test_sources_of_every_record_are_listed():
    assert {file.bench for file in records.read()} <= staleness.SOURCES.keys()
    assert set(staleness.BENCHMARKS) <= set(staleness.SOURCES)


def test_pending_records_have_a_reason_for_each_device(tmp_path):
    path = tmp_path / "pending.toml"
    assert staleness.pending(path) == {}
    path.write_text('[a]\n"no GPU" = ["x", "y"]\n"changed" = ["z"]\n[b]\n"no GPU" = ["x"]\n')
    listed = {"a/x": "no GPU", "a/y": "no GPU", "a/z": "changed", "b/x": "no GPU"}
    assert staleness.pending(path) == listed


@pytest.mark.parametrize("reasons", ['"" = ["x"]', '"no GPU" = ["x"]\n"changed" = ["x"]'])
def test_pending_record_without_exactly_one_reason_raises(tmp_path, reasons):
    path = tmp_path / "pending.toml"
    path.write_text(f"[a]\n{reasons}\n")
    with pytest.raises(ValueError, match=r"pending\.toml: a/x needs one reason"):
        staleness.pending(path)
