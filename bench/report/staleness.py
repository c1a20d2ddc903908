"""Whether a record is of the code that ships.

A record is stale if a file below the sources that its benchmark measures, or of the benchmark,
differs between the commit of the record and HEAD in more than comments, docstrings, indentation and
blank lines; if that commit is not in the history; or if the record was made with uncommitted
changes. Tables of other GPUs are no sources. A stale record must be listed in
`bench/results/pending.toml` with the reason, and a record that is listed must be stale.

`bench/results/<device>/second_run/<name>.json` is the record of another run of the same code: the
file that the benchmark writes below `--out`.
"""

import ast
import pathlib
import re
import subprocess
import tomllib
from collections.abc import Mapping, Sequence

from bench.harness.records import REPOSITORY, RESULTS, SECOND_RUN, File, git

PENDING = RESULTS / "pending.toml"
COPIES = (
    "cuda/common", "cuda/transfer", "jaxkv/_src/cache", "jaxkv/_src/transfer",
    "jaxkv/_src/runtime/fusion_barrier.py", "jaxkv/_src/runtime/held_arrays.py",
    "jaxkv/_src/runtime/upload.py", "jaxkv/_src/tuning/copy_lookup.py",
    "jaxkv/_src/tuning/copy_table.py", "jaxkv/_src/tuning/data", "jaxkv/_src/tuning/hardware.py",
    "jaxkv/_src/tuning/table_files.py",
)  # fmt: skip
ALL_REDUCE = (
    "cuda/collectives", "cuda/common", "jaxkv/_src/collectives",
    "jaxkv/_src/tuning/all_reduce_table.py", "jaxkv/_src/tuning/data",
    "jaxkv/_src/tuning/table_files.py",
)  # fmt: skip
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef)
TABLES = pathlib.PurePath("jaxkv/_src/tuning/data")
POOLS = "jaxkv/_src/autotune/pools.py"  # the arrays of several benchmarks
OFFLOAD = ("jaxkv/_src/offload", ":!jaxkv/_src/offload/tiers")  # what runs without a tier
MANAGER = tuple(
    f"jaxkv/_src/offload/{name}.py"
    for name in ("blocks", "keys", "lookup", "manager", "policies", "specs", "writes")
)
ENGINE = (
    "examples/serving", ":!examples/serving/server.py", ":!examples/serving/api.py",
    ":!examples/serving/answer_text.py", "jaxkv/metadata",
)  # fmt: skip
SERVING = (*COPIES, *ENGINE, *OFFLOAD)
SPARSE = (
    "cuda/cache", "cuda/common", "cuda/sparse", "jaxkv/_src/cache",
    "jaxkv/_src/runtime/fusion_barrier.py", "jaxkv/_src/sparse",
    "jaxkv/_src/transfer/block_copy.py", "jaxkv/_src/transfer/memory_kinds.py",
    "jaxkv/_src/transfer/transformations.py", "jaxkv/sparse.py", POOLS,
)  # fmt: skip
# A change of a benchmark makes no test stale, nor does one of its own tests, or of the mutations.
TESTED = ("cuda", "jaxkv", "tests", ":!tests/bench", ":!tests/mutations.toml")
# All but `jaxkv.tune` and `jaxkv.offload`, and the references.
FUZZED = (
    "cuda", "jaxkv", ":!jaxkv/_src/autotune", ":!jaxkv/_src/offload", "tests/fuzz",
    "tests/util/*_reference.py", "tests/util/async_cases.py", "tests/util/batches.py",
    "tests/util/block_trees.py", "tests/util/ranks.py", "tests/util/recurrent_cases.py",
    "tests/util/sparse_cases.py", "tests/util/splits.py", "tests/util/transfer_cases.py",
)  # fmt: skip

# Record -> files and folders that it measures.
SOURCES = {
    "all_reduce": ALL_REDUCE,
    "array_caches": COPIES,
    "demo": SERVING,
    "dispatch": (*COPIES, "jaxkv/_src/runtime"),
    "engines": (*COPIES, POOLS),
    "fuzz": (*FUZZED, "tests/metadata"),
    "gpu_test": (*TESTED, "examples", "bench/checks/gpu_test.py"),
    "host_pool": ("cuda/cache", *COPIES),
    "memcheck": (
        *TESTED, ":!tests/docs", ":!tests/examples", "bench/checks/memcheck.py",
        "bench/checks/sanitizer.py",
    ),
    "metadata": ("cuda/common", "cuda/metadata", "jaxkv/_src/runtime/bounds.py", "jaxkv/metadata"),
    "multigpu_test": (*TESTED, "bench/checks/gpu_test.py"),
    "offload_manager": MANAGER,
    "offload_trace": MANAGER,
    "overlap": COPIES,
    "pages": (*COPIES, POOLS),
    "profile": (
        "cuda/common/ptx.cuh", "cuda/transfer/block_copy.cu", "cuda/transfer/block_copy.h",
        "cuda/transfer/copy_kernel.*", "cuda/transfer/id_*.cuh", POOLS,
    ),
    "ranks_on_one_gpu": (
        "bench/checks/ranks_on_one_gpu.py", "bench/checks/sanitizer.py", "cuda/collectives",
        "cuda/common", "tests/native/all_reduce_cases.h", "tests/native/all_reduce_checks.h",
        "tests/native/ranks_on_one_gpu.cu", "tests/util/native_program.py",
    ),
    "recurrent": (
        "cuda/common", "cuda/recurrent", "jaxkv/_src/recurrent", "jaxkv/_src/runtime/bounds.py",
        "jaxkv/_src/runtime/fusion_barrier.py", "jaxkv/metadata/common.py",
        "jaxkv/metadata/segments.py", "jaxkv/recurrent.py",
    ),
    "serving": SERVING,
    "serving_decode": ENGINE,
    "serving_ttft": SERVING,
    "small_batches": (*COPIES, POOLS),
    "soak": (*FUZZED, ":!jaxkv/metadata", "bench/checks/soak.py"),
    "sparse": SPARSE,
    "sparse_decode": (*SPARSE, "examples/sparse/attention.py"),
    "tensor_parallel": ALL_REDUCE,
    "transfer": (*COPIES, POOLS),
    "warm_restart": ("cuda/cache", "jaxkv/_src/cache"),
}  # fmt: skip
# Record of a measurement -> its code, beside `HARNESS`; a change of it measures something else.
HARNESS = ("bench/harness", ":!bench/harness/main.py", ":!bench/harness/records.py")
BENCHMARKS = {
    "all_reduce": "bench/collectives",
    "array_caches": "bench/array_caches.py",
    "demo": "bench/serving/demo.py",
    "dispatch": "bench/dispatch.py",
    "engines": "bench/engines.py",
    "host_pool": "bench/host_pool.py",
    "metadata": "bench/metadata.py",
    "offload_manager": "bench/offload/manager.py",
    "offload_trace": "bench/offload/trace.py",
    "overlap": "bench/overlap.py",
    "pages": "bench/pages.py",
    "profile": "bench/profile_copy.py",
    "recurrent": "bench/recurrent*.py",
    "serving": "bench/serving",
    "serving_decode": "bench/serving",
    "serving_ttft": "bench/serving",
    "small_batches": "bench/transfer.py",
    "sparse": "bench/sparse",
    "sparse_decode": "bench/sparse",
    "tensor_parallel": "bench/collectives/tensor_parallel.py",
    "transfer": "bench/transfer.py",
    "warm_restart": "bench/host_pool.py",
}


def sources(bench: str) -> tuple[str, ...]:
    """Files and folders, as Git's pathspecs."""
    measured_by = (BENCHMARKS[bench], *HARNESS) if bench in BENCHMARKS else ()
    return (*SOURCES[bench], *measured_by)


def staleness(
    file: File, repository: pathlib.Path = REPOSITORY, *, head: str = "HEAD"
) -> str | None:
    """Why a record is not of the code at `head`; None if it is."""
    if file.bench not in SOURCES:
        return f"no sources are listed for {file.bench!r}"
    if file.commit is None:
        return "unknown commit"
    if file.dirty:
        return "made with uncommitted changes"
    change = f"{file.commit}..{head}"
    try:
        changed = git(
            "diff", "--name-only", change, "--", *sources(file.bench), repository=repository
        ).splitlines()
    except (OSError, subprocess.CalledProcessError):
        return f"commit {file.commit[:9]} is not in this history"
    names = [
        name
        for name in changed
        if not _of_other_gpus(name, file.device)
        and not _is_same_code(name, file.commit, head, repository)
    ]
    if not names:
        return None
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{others} changed after {file.commit[:9]}"


def _of_other_gpus(name: str, device: str) -> bool:
    """Whether a file is a table that jaxkv does not read on this device."""
    path = pathlib.PurePath(name)
    return path.is_relative_to(TABLES) and path.stem not in (device, "default")


def _is_same_code(name: str, old: str, new: str, repository: pathlib.Path) -> bool:
    """Whether a file differs in comments, docstrings, indentation and blank lines only."""
    strip = {".py": _python, ".cu": _cpp, ".cuh": _cpp, ".cc": _cpp, ".h": _cpp}
    code = strip.get(pathlib.PurePath(name).suffix)
    try:
        texts = [git("show", f"{commit}:{name}", repository=repository) for commit in (old, new)]
    except subprocess.CalledProcessError:  # added or removed
        return False
    return code is not None and code(texts[0]) == code(texts[1])


def _python(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def _cpp(text: str) -> str:
    comment_or_literal = r"//[^\n]*|/\*.*?\*/|(\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])')"
    code = re.sub(comment_or_literal, lambda found: found[1] or " ", text, flags=re.DOTALL)
    return "\n".join(line for line in map(str.strip, code.splitlines()) if line)


def pending(path: pathlib.Path = PENDING) -> dict[str, str]:
    """{"device/name": reason} of the records that are to be made again.

    The file has a table for each device, with the names of records by reason.

    Raises:
      ValueError: a record has two reasons, or an empty one.
    """
    found: dict[str, str] = {}
    for device, names_of in tomllib.loads(path.read_text()).items() if path.exists() else ():
        for reason, names in names_of.items():
            for name in (f"{device}/{name}" for name in names):
                if not reason or name in found:
                    raise ValueError(f"{path.name}: {name} needs one reason")
                found[name] = reason
    return found


def failures(
    files: Sequence[File], listed: Mapping[str, str], repository: pathlib.Path = REPOSITORY
) -> list[str]:
    """Stale records that are not pending, and pending ones that are not stale."""
    found = []
    stale = {f"{file.device}/{file.name}": staleness(file, repository) for file in files}
    for name, why in stale.items():
        if why and name not in listed:
            found.append(f"{name} is stale: {why}; measure again, or add it to {PENDING.name}")
    for name in listed:
        if not stale.get(name):
            found.append(f"{name} is not stale: remove it from {PENDING.name}")
    return found


def second_run_failures(files: Sequence[File], second: Sequence[File]) -> list[str]:
    """Second runs without a first one, of its date (copies of it), or of other code."""
    first = {(file.device, file.name): file for file in files}
    found = []
    for file in second:
        name = f"{file.device}/{SECOND_RUN}/{file.name}"
        same = first.get((file.device, file.name))
        if same is None:
            found.append(f"{name} has no first run")
        elif same.env.get("date") == file.env.get("date"):
            found.append(f"{name} has the date of the first run: a copy")
        elif why := staleness(file, head=same.commit or "HEAD"):
            found.append(f"{name} is not of the first run's code: {why}")
    return found
