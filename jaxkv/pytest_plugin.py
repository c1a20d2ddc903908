"""pytest plugin: `pytest_plugins = ["jaxkv.pytest_plugin"]` in conftest.py, or option `-p`."""

from collections.abc import Iterator

import pytest

from jaxkv._src.runtime.sync_guard import HostSyncReport, forbid_host_sync


@pytest.fixture
def no_host_sync() -> Iterator[HostSyncReport]:
    """Fails a test at a line with a host sync outside `jaxkv.allow_host_sync` (HostSyncError).

    Its value is the `jaxkv.HostSyncReport` of the test.

        def test_step(no_host_sync):
            state = jax.jit(lambda x: x + 1)(jnp.int32(0))
            with jaxkv.allow_host_sync("compares the result"):
                assert int(state) == 1
    """
    with forbid_host_sync() as report:
        yield report
