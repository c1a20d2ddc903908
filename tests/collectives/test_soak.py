"""`tests.collectives.soak`: a complete run, and the exit at a wrong sum."""

import subprocess
import sys

import jax
import pytest

import jaxkv
from tests.collectives import soak
from tests.util.ranks import mesh_of

pytestmark = pytest.mark.multigpu


def test_soak_of_two_seconds_is_exact():
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    command = [sys.executable, "-m", "tests.collectives.soak", "--seconds", "2"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    count, words = run.stdout.split(maxsplit=1)
    assert int(count) > 20
    assert words.startswith("all-reduces in 2 s on ") and words.endswith(", all exact\n")


def test_soak_with_a_wrong_value_raises(monkeypatch):
    real = jaxkv.all_reduce

    def adds_one(*arguments, **options):
        return real(*arguments, **options) + 1

    monkeypatch.setattr(jaxkv, "all_reduce", adds_one)
    with pytest.raises(ArithmeticError, match="values are wrong after "):
        soak.soak(mesh_of(2), 60, max_bytes=1 << 12)
