"""Errors of an all-reduce name the rank that is absent, not one that waits for it."""

import subprocess

import pytest

from tests.util.native_program import build_for_cpu


@pytest.mark.cpu_only
def test_all_ranks_name_the_absent_one(tmp_path):
    sources = ["cuda/collectives/symmetric_memory.cc", "cuda/collectives/symmetric_memory_cpu.cc"]
    built = build_for_cpu("all_reduce_absent", tmp_path, *sources, options=["-O1"])
    subprocess.run([built], check=True, timeout=300)
