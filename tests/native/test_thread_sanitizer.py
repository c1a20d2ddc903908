"""Native sources under ThreadSanitizer, which does not instrument Python's threads."""

import subprocess

import pytest

from tests.util.native_program import build_for_cpu


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    "program, sources",
    [
        (
            "all_reduce_races",
            ["cuda/collectives/symmetric_memory.cc", "cuda/collectives/symmetric_memory_cpu.cc"],
        ),
        ("host_ids_races", []),
    ],
)
def test_threads_do_not_race(program, sources, tmp_path):
    options = ["-fsanitize=thread", "-g", "-DJAXKV_TEST_HOOKS"]
    built = build_for_cpu(program, tmp_path, *sources, options=options)
    subprocess.run([built], check=True, timeout=300)
