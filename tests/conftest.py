"""Shared fixtures: the platform, its implementations, and skips by marker."""

import os
import zlib
from collections.abc import Generator

import hypothesis
import jax
import pytest

from tests.util.implementations import IMPLEMENTATIONS

jax.config.update("jax_num_cpu_devices", 8)
# No deadlines: a slow machine or a sanitizer must not fail a test.
# In CI, where each run draws the same examples, fewer of them.
EXAMPLES = 20 if "CI" in os.environ else 100
hypothesis.settings.register_profile("jaxkv", deadline=None, max_examples=EXAMPLES)
# For repeated runs: another jax, a sanitizer (`pytest --hypothesis-profile=brief`).
hypothesis.settings.register_profile("brief", deadline=None, max_examples=5)
hypothesis.settings.load_profile("jaxkv")


@pytest.fixture(scope="module")
def multicast() -> Generator[None]:
    """Simulates a multicast switch in memory; a GPU machine may share the real one with others."""
    with pytest.MonkeyPatch.context() as patch:
        if jax.default_backend() == "cpu":
            patch.setenv("JAXKV_MULTICAST", "1")
        yield


@pytest.fixture(scope="module")
def memories(multicast):
    """By number of ranks; reused by many tests, as in a long-running server."""
    from jaxkv._src.tuning.all_reduce_table import WORLD_SIZES
    from tests.util.ranks import MAX_BYTES, memory_of  # starts the backend

    made = {n: memory_of(n, max_bytes=MAX_BYTES) for n in WORLD_SIZES if n <= jax.device_count()}
    yield made
    for memory in made.values():
        memory.check_errors()
        memory.close()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", type=int, default=1, metavar="N",
        help="the first case of each test, and of the others about one in N, always the same",
    )  # fmt: skip


def deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps a sample of the cases."""
    number, seen = config.getoption("--sample"), set[str]()
    kept, deselected = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        test = item.nodeid.partition("[")[0]
        chosen = test not in seen or zlib.crc32(item.nodeid.encode()) % number == 0
        seen.add(test)
        (kept if chosen else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect(config, items)
    platform = jax.default_backend()
    if platform == "cpu":
        # Most programs run once: LLVM would take longer to optimize them than they take to run.
        jax.config.update("jax_disable_most_optimizations", True)
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec and "xla" in map(str, callspec.params.values()):
            item.add_marker(pytest.mark.xla)
        if item.get_closest_marker("gpu") and platform != "gpu":
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: JAX runs on {platform}"))
        if item.get_closest_marker("cpu_only") and platform != "cpu":
            item.add_marker(pytest.mark.skip(reason=f"needs platform cpu: JAX runs on {platform}"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Skips calls that Pallas rejects: it supports only entire blocks of 128-byte units."""
    try:
        return (yield)
    except NotImplementedError as error:
        callspec = getattr(pyfuncitem, "callspec", None)
        requested = callspec and "pallas" in callspec.params.values()
        if requested and "'pallas' does not support this call" in str(error):
            pytest.skip(str(error))
        raise


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    named = IMPLEMENTATIONS[jax.default_backend()]
    if "implementation" in metafunc.fixturenames:
        metafunc.parametrize("implementation", (None, *named), ids=lambda name: name or "default")
    if "named_implementation" in metafunc.fixturenames:
        metafunc.parametrize("named_implementation", named)
    # For the largest grids: "xla" has one path for all shapes.
    if "native_implementation" in metafunc.fixturenames:
        native = [name for name in named if name != "xla"]
        metafunc.parametrize("native_implementation", native)
