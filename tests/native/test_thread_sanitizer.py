"""Native sources under ThreadSanitizer, which does not instrument Python's threads."""

import pathlib
import shutil
import subprocess

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "program, sources",
    [
        (
            "all_reduce_races",
            ["collectives/symmetric_memory.cc", "collectives/symmetric_memory_cpu.cc"],
        ),
        ("host_ids_races", []),
    ],
)
def test_threads_do_not_race(program, sources, tmp_path):
    if not shutil.which("g++") or not (ROOT / "cuda").exists():
        pytest.skip("needs g++ and a checkout")
    files = [ROOT / f"tests/native/{program}.cc", *(ROOT / "cuda" / name for name in sources)]
    options = [
        "-std=c++20",
        "-g",
        "-DJAXKV_TEST_HOOKS",
        "-I",
        str(ROOT / "cuda"),
        "-isystem",
        jax.ffi.include_dir(),
    ]
    built = tmp_path / program
    subprocess.run(["g++", "-fsanitize=thread", *options, *files, "-o", built], check=True)
    subprocess.run([built], check=True, timeout=300)
