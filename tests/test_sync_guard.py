"""What a guard sees, where and when, and that nothing of it is left behind."""

import asyncio
import operator
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxkv
from jaxkv import sync_guard
from jaxkv.sync_guard import HostSync, HostSyncReport, HostSyncWarning

pytest_plugins = ("pytester", "jaxkv.pytest_plugin")

# Each waits once for an int32 array of one element: the function that the report names.
WAITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (int, "Array.__int__"),
    "float": (float, "Array.__float__"),
    "bool": (bool, "Array.__bool__"),
    "complex": (complex, "Array.__complex__"),
    "index": (operator.index, "Array.__index__"),
    "if": (lambda x: "yes" if x > 2 else "no", "Array.__bool__"),
    "str": (str, "Array.__str__"),
    "repr": (repr, "Array.__repr__"),
    "format": (lambda x: f"{x:3d}", "Array.__format__"),
    "item": (lambda x: x.item(), "jax._item"),
    "tolist": (lambda x: x.tolist(), "Array.tolist"),
    "tobytes": (lambda x: x.tobytes(), "Array.tobytes"),
    "pickle": (pickle.dumps, "Array.__reduce__"),
    "device_get": (lambda x: jax.device_get({"x": x}), "jax.device_get"),
    "asarray": (np.asarray, "Array.__array__|Array.__buffer__"),
    "array": (np.array, "Array.__array__|Array.__buffer__"),
    "ufunc": (lambda x: np.add(np.ones(3), x), "Array.__array__|Array.__buffer__"),
    "array_repr": (np.array_repr, "numpy.array_repr"),
    "nonzero": (lambda x: jnp.nonzero(x), "jax.nonzero"),
    "from_dlpack": (lambda x: jnp.from_dlpack(x), "jax.from_dlpack"),
    "__dlpack__": (lambda x: x.__dlpack__(), "Array.__dlpack__"),
    "x.block_until_ready": (lambda x: x.block_until_ready(), "Array.block_until_ready"),
    "block_until_ready": (jax.block_until_ready, "jax.block_until_ready"),
    "block_until_ready of two": (lambda x: jax.block_until_ready((x, x)), "jax.block_until_ready"),
    "effects_barrier": (lambda x: jax.effects_barrier(), "jax.effects_barrier"),
    "check_errors": (jaxkv.check_errors, "jaxkv.check_errors"),
}
ONLY_CPU = {
    "memoryview": (memoryview, "Array.__buffer__"),
    "bytes": (bytes, "Array.__buffer__"),
}
if jax.default_backend() == "cpu":
    WAITS |= ONLY_CPU
else:
    WAITS["cuda array"] = (lambda x: x.__cuda_array_interface__, "Array.__cuda_array_interface__")

# They ask whether the array is deleted before they wait for it.
LOOK_FIRST = {"if", "device_get", "nonzero", "from_dlpack", "effects_barrier"}

double: Any = jax.jit(lambda x: x * 2)

NO_WAITS: dict[str, Callable[[Any], Any]] = {
    "dispatch": double,
    "trace": lambda x: jax.jit(lambda y: jnp.where(y > 0, y, jnp.sort(y)))(x),
    "eager": lambda x: jnp.sin(x) + x,
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c), jnp.int32(0), x),
    "index": lambda x: x.at[0].set(x[0]),
    "iterate": list,
    "compare": lambda x: x == x,
    "upload": lambda x: jax.device_put(np.arange(3)),
    "argument": lambda x: double(np.arange(3)),
    "random": lambda x: jax.random.normal(jax.random.key(0), (3,)),
    "async copy": lambda x: x.copy_to_host_async(),
    "to pinned": lambda x: jax.device_put(x, pinned()),
    "is_ready": lambda x: x.is_ready(),
    "shape": lambda x: (x.shape, x.dtype, len(x), x.sharding, x.nbytes),
    "pointer": lambda x: x.unsafe_buffer_pointer(),
    "nothing to wait for": lambda x: jax.block_until_ready(()),
    "check_errors": lambda x: jaxkv.check_errors(),
}


def pinned() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def one() -> jax.Array:
    return double(jnp.asarray([2], jnp.int32)).reshape(())


def three() -> jax.Array:
    return double(jnp.arange(3, dtype=jnp.int32))


def argument_of(name: str) -> jax.Array:
    return three() if name in ("nonzero", "ufunc", "bytes") else one()


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = sync_guard._points()
    yield
    assert sync_guard._points() == before
    with jaxkv.allow_host_sync("to see whether anything still watches") as report:
        np.asarray(three())
    assert report.syncs == []
    assert sync_guard._watch._scopes == 0
    assert sync_guard._scopes.get() == ()


def here() -> int:
    """The line of the call."""
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize("name", WAITS)
def test_raise_names_what_and_where_and_does_not_wait(name):
    function, what = WAITS[name]
    x = argument_of(name)
    if name not in LOOK_FIRST:
        x.delete()  # whatever reads it now gets another error
    with pytest.raises(jaxkv.HostSyncError) as raised, jaxkv.forbid_host_sync() as report:
        line = here() + 1
        function(x)
    if function.__name__ == "<lambda>":
        line = function.__code__.co_firstlineno
    assert raised.value.where == f"{__file__}:{line}"
    assert raised.value.what in what.split("|")
    assert raised.value.what in str(raised.value) and raised.value.where in str(raised.value)
    assert report.syncs == []


@pytest.mark.parametrize("name", WAITS)
def test_count_lists_each_wait_once_and_changes_no_result(name):
    function, what = WAITS[name]
    x = argument_of(name)
    with jaxkv.forbid_host_sync(mode="count") as report:
        line = here() + 1
        got = function(x)
        function(x)  # a second read is a read
    want = function(x)
    if "dlpack" not in name and not isinstance(want, memoryview):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    first, second = report.syncs
    assert report.count == 2
    assert first.what == second.what and first.what in what.split("|")
    if function.__name__ != "<lambda>":
        assert (first.where, second.where) == (f"{__file__}:{line}", f"{__file__}:{line + 1}")
    assert all(sync.seconds >= 0 and sync.allowed is None for sync in report.syncs)


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_does_not_wait_is_free(name):
    x = three()
    with jaxkv.forbid_host_sync():
        NO_WAITS[name](x)


@pytest.mark.parametrize("dtype", ["int8", "float32", "bfloat16", "float8_e4m3fn", "bool"])
@pytest.mark.parametrize("place", ["device", "pinned_host", "sharded"])
def test_reads_from_every_memory_are_seen(dtype, place):
    x = jnp.ones(4, dtype)
    if place == "pinned_host":
        x = jax.device_put(x, pinned())
    elif place == "sharded":
        devices = jax.devices()[:2]
        mesh = jax.make_mesh((len(devices),), ("x",), devices=devices)
        x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("x")))
    with jaxkv.forbid_host_sync(mode="count") as report:
        got = np.asarray(x)
    assert report.count == 1
    np.testing.assert_array_equal(got, np.ones(4, dtype))
    with pytest.raises(jaxkv.HostSyncError), jaxkv.forbid_host_sync():
        np.asarray(x)


def test_seconds_are_those_of_the_wait():
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 20_000, lambda _, y: jnp.sin(y), x)

    x = jnp.ones(1000)
    slow(x).block_until_ready()
    with jaxkv.forbid_host_sync(mode="count") as report:
        y = slow(x)
        for _ in range(2):
            np.asarray(y)
    first, second = report.syncs
    assert first.seconds > second.seconds


def test_an_error_that_the_body_hides_is_raised_at_its_end():
    x = three()
    with pytest.raises(jaxkv.HostSyncError, match="test_sync_guard"), jaxkv.forbid_host_sync():
        np.array_equal(x, x)


def test_errors_of_the_wait_itself_are_as_without_a_guard():
    x = three()
    x.delete()
    with jaxkv.forbid_host_sync(mode="count") as report:
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(x)
        with pytest.raises(TypeError, match="Only scalar"):
            int(three())
    assert report.syncs == []


def test_tracers_are_none_of_its_business():
    with (
        pytest.raises(jax.errors.ConcretizationTypeError),
        jaxkv.forbid_host_sync() as report,
    ):
        jax.jit(lambda x: int(x))(one())
    assert report.syncs == []


def test_warns_once_for_each_place():
    x = one()
    with pytest.warns(HostSyncWarning) as caught, jaxkv.forbid_host_sync(mode="warn") as report:
        line = here()
        for _ in range(3):
            assert int(x) == 4
        np.asarray(x)
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line + 2), (__file__, line + 3)]
    assert "Array.__int__ waited" in str(caught[0].message)
    assert report.count == 4


def test_a_warning_that_is_an_error_gets_through_numpy():
    with warnings.catch_warnings(), jaxkv.forbid_host_sync(mode="warn") as report:
        warnings.simplefilter("error")
        with pytest.raises(HostSyncWarning):
            np.asarray(three())
    assert report.syncs == []


def test_allowed_waits_are_listed_with_their_reason():
    x = one()
    with jaxkv.forbid_host_sync() as outer:
        with jaxkv.allow_host_sync("the counts of the last step") as inner:
            int(x)
        with pytest.raises(jaxkv.HostSyncError), jaxkv.forbid_host_sync():
            int(x)
    assert outer.count == 0
    assert [sync.allowed for sync in outer.syncs] == ["the counts of the last step"]
    assert inner == outer


def test_the_innermost_scope_decides():
    with (
        jaxkv.forbid_host_sync() as outer,
        jaxkv.allow_host_sync("why not") as allowed,
        jaxkv.forbid_host_sync(mode="count") as inner,
    ):
        int(one())
    assert outer.count == allowed.count == inner.count == 1


ACTIONS = ("raise", "warn", "count", "allow", "read")
programs = st.recursive(
    st.just("read"),
    lambda body: st.tuples(st.sampled_from(ACTIONS[:4]), st.lists(body, max_size=3)),
    max_leaves=12,
)


def run(program, x: jax.Array, reports: list[HostSyncReport]) -> None:
    if program == "read":
        int(x)
        return
    action, body = program
    scope = jaxkv.allow_host_sync("a") if action == "allow" else jaxkv.forbid_host_sync(mode=action)
    with scope as report:
        reports.append(report)
        for part in body:
            run(part, x, reports)


class Refused(Exception):
    """The model's error."""


def expect(program, stack: list[tuple[str, list]], reports: list[list]) -> None:
    """What `run` must list: the reason of each read, by scope, up to the first that is refused."""
    if program == "read":
        rule = stack[-1][0]
        if rule == "raise":
            raise Refused
        for _, report in stack:
            report.append("a" if rule == "allow" else None)
        return
    action, body = program
    own: list = []
    reports.append(own)
    for part in body:
        expect(part, [*stack, (action, own)], reports)


@given(programs)
@pytest.mark.filterwarnings("ignore::jaxkv.sync_guard.HostSyncWarning")
def test_nesting_follows_the_model(program):
    x = one()
    want: list[list] = []
    got: list[HostSyncReport] = []
    # Under a scope that counts, so that the patches are in place throughout.
    program = ("count", [program])
    refused = raised = False
    try:
        expect(program, [], want)
    except Refused:
        refused = True
    try:
        run(program, x, got)
    except jaxkv.HostSyncError:
        raised = True
    assert raised == refused
    assert [[sync.allowed for sync in report.syncs] for report in got] == want
    assert sync_guard._watch._scopes == 0


def test_decorators_make_a_scope_for_each_call():
    @jaxkv.forbid_host_sync()
    def step(read, depth):
        """Reads."""
        return step(read, depth - 1) if depth else read(one())

    read = jaxkv.allow_host_sync("the result")(int)
    for _ in range(2):
        assert step(read, depth=2) == 4
        with pytest.raises(jaxkv.HostSyncError):
            step(int, depth=2)
    assert step.__doc__ == "Reads."


def test_decorating_what_runs_later_is_refused():
    async def coroutine():
        pass

    def generator():
        yield

    async def both():
        yield

    for function in coroutine, generator, both:
        with pytest.raises(TypeError, match=f"{function.__name__} is no plain function"):
            jaxkv.forbid_host_sync()(function)


def test_other_threads_do_not_notice():
    x = three()
    entered, read = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    seen: list[Any] = []

    def other():
        entered.wait()
        seen.extend((np.asarray(x).tolist(), int(x[0]), jax.block_until_ready((x, x))[0] is x))
        with jaxkv.forbid_host_sync(mode="count") as report:
            x.tolist()
        seen.append(report.count)
        read.wait()

    thread = threading.Thread(target=other)
    thread.start()
    with jaxkv.forbid_host_sync() as report:
        entered.wait()
        read.wait()
        with jaxkv.allow_host_sync("still watched when the other has left"):
            int(x[0])
    thread.join()
    assert seen == [[0, 2, 4], 0, True, 1]
    assert len(report.syncs) == 1


def test_many_threads_enter_and_leave():
    x = one()
    reports: list[HostSyncReport] = []
    start = threading.Barrier(8, timeout=60)

    def work():
        start.wait()
        for _ in range(50):
            with jaxkv.forbid_host_sync(mode="count") as report:
                int(x)
            reports.append(report)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.count for report in reports] == [1] * 400


def test_other_tasks_do_not_notice():
    x = one()

    async def guarded():
        with jaxkv.forbid_host_sync(mode="count") as report:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return report

    async def free():
        await asyncio.sleep(0)
        return int(x)

    async def both():
        return await asyncio.gather(guarded(), free())

    report, value = asyncio.run(both())
    assert value == 4
    assert report.syncs == []


@pytest.mark.parametrize("scope", [jaxkv.forbid_host_sync, lambda: jaxkv.allow_host_sync("x")])
def test_scopes_end_with_exceptions(scope):
    with pytest.raises(ZeroDivisionError), scope():
        raise ZeroDivisionError
    assert int(one()) == 4


def test_dispatch_stays_off_python():
    """A compiled function is called as without a guard: no Python frame is entered."""
    x = three()
    double(x)

    def frames() -> list[str]:
        entered: list[str] = []

        def profile(frame, event, _):
            if event == "call":
                entered.append(str(frame))

        sys.setprofile(profile)
        try:
            double(x)
        finally:
            sys.setprofile(None)
        return entered

    assert frames() == []
    compiled = double._cache_size()
    with jaxkv.forbid_host_sync():
        assert frames() == []
    assert double._cache_size() == compiled


def test_a_jax_without_a_watched_function_is_refused(monkeypatch):
    lacking = {"jax._src.array:ArrayImpl": ["_read"], "jax._src.nowhere:Thing": ["wait"]}
    monkeypatch.setattr(sync_guard, "_WATCHED", {**sync_guard._WATCHED, **lacking})
    words = r"ArrayImpl\._read, jax\._src\.nowhere:Thing\.wait"
    with pytest.raises(RuntimeError, match=words), jaxkv.forbid_host_sync():
        pytest.fail("entered")
    monkeypatch.undo()


def test_patching_that_fails_is_undone(monkeypatch):
    def fail(original, name):
        if name == "Array.__dlpack__":
            raise ZeroDivisionError
        return patch(original, name)

    patch = sync_guard._observed
    monkeypatch.setattr(sync_guard, "_observed", fail)
    with pytest.raises(ZeroDivisionError), jaxkv.forbid_host_sync():
        pytest.fail("entered")


@pytest.mark.parametrize("mode", ["ignore", "allow", None])
def test_unknown_modes_are_refused(mode):
    with pytest.raises(ValueError, match=f"mode must be one of .*not {mode!r}"):
        jaxkv.forbid_host_sync(mode=mode)


@pytest.mark.parametrize("reason", ["", None, print])
def test_a_reason_is_needed(reason):
    with pytest.raises(ValueError, match="reason must be a text"):
        jaxkv.allow_host_sync(reason)


def test_the_fixture_fails_a_test_at_its_wait(pytester):
    pytester.makeconftest('pytest_plugins = ["jaxkv.pytest_plugin"]')
    pytester.makepyfile(
        """
        import jax.numpy as jnp
        import jaxkv

        def test_dispatch(no_host_sync):
            jnp.ones(3) + 1

        def test_allowed(no_host_sync):
            with jaxkv.allow_host_sync("to compare"):
                assert float(jnp.ones(())) == 1
            assert no_host_sync.count == 0

        def test_wait(no_host_sync):
            float(jnp.ones(()))
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=1, errors=1)
    result.stdout.fnmatch_lines(
        ["*HostSyncError: *test_the_fixture*.py:13: Array.__float__ waits*"]
    )


def test_the_fixture_guards(no_host_sync):
    with jaxkv.allow_host_sync("to see the guard at work"):
        int(one())
    assert [type(sync) for sync in no_host_sync.syncs] == [HostSync]
    assert Path(no_host_sync.syncs[0].where.rpartition(":")[0]) == Path(__file__)
