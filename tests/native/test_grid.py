"""Thread blocks that wait for each other must be resident together."""

import subprocess

import pytest

from tests.util.native_program import build_for_cpu

OPTIONS = ["-O1", "-fsanitize=undefined", "-fno-sanitize-recover"]


@pytest.mark.cpu_only
def test_calls_fit_gpus_of_any_size(tmp_path):
    built = build_for_cpu("all_reduce_grid", tmp_path, options=OPTIONS)
    subprocess.run([built], check=True, timeout=60)
