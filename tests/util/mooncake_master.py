"""The Mooncake master of a test."""

import importlib.util
from pathlib import Path

import pytest

from bench.offload.mooncake_master import Master


def start_master(directory: Path) -> Master:
    """A running master; skips the test where Mooncake cannot be imported."""
    missing = "needs Mooncake: pip install jaxkv[mooncake], and libibverbs1"
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip(missing)
    pytest.importorskip("mooncake.store", reason=missing, exc_type=ImportError)
    return Master(directory)
