"""pytest plugin: `pytest_plugins = ["jaxkv.pytest_plugin"]` in conftest.py, or option `-p`."""

from collections.abc import Iterator

import pytest

from jaxkv._src.runtime.sync_guard import HostSyncReport, forbid_host_sync


@pytest.fixture
def no_host_sync() -> Iterator[HostSyncReport]:
    """Fails a test at a line with a host sync outside of `jaxkv.allow_host_sync`."""
    with forbid_host_sync() as report:
        yield report
