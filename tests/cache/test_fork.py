"""`cuda/cache/pinned_memory.cc` in the child of a fork, which has no thread that frees memory."""

import subprocess

import pytest

from tests.util.native_program import build_for_cpu

pytestmark = pytest.mark.cpu_only


def test_child_neither_waits_for_frees_of_its_parent_nor_unmaps_its_memory(tmp_path):
    program = build_for_cpu("fork_beside_frees", tmp_path, options=["-O1", "-DJAXKV_CUDA=1"])
    ran = subprocess.run([program], check=True, capture_output=True, text=True, timeout=600)
    assert ran.stdout == "0\n"
