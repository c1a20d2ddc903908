"""Nesting of scopes, their threads, and complete removal of the hooks."""

import asyncio
import gc
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxkv
from jaxkv._src.runtime import sync_guard
from jaxkv._src.runtime.sync_guard import HostSync, HostSyncReport
from tests.util.sync_guard_cases import double, no_hooks_left, one, three

__all__ = ["no_hooks_left"]  # a fixture that every test here uses

pytest_plugins = ("pytester", "jaxkv.pytest_plugin")


def test_allowed_syncs_are_recorded_with_their_reason():
    x = one()
    with jaxkv.forbid_host_sync() as outer:
        with jaxkv.allow_host_sync("the counts of the last step") as inner:
            int(x)
        with pytest.raises(jaxkv.HostSyncError), jaxkv.forbid_host_sync():
            int(x)
    assert outer.count == 0
    assert [sync.allowed for sync in outer.syncs] == ["the counts of the last step"]
    assert inner == outer


def test_innermost_scope_decides():
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
    """Expected lists of `run`: the reason of each read, by scope, up to the first rejected one."""
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
@pytest.mark.filterwarnings("ignore::jaxkv._src.runtime.sync_guard.HostSyncWarning")
def test_nested_scopes_match_the_model(program):
    x = one()
    want: list[list] = []
    got: list[HostSyncReport] = []
    # Within a counting scope, so that the patches are in place throughout.
    program = ("count", [program])
    forbidden = raised = False
    try:
        expect(program, [], want)
    except Refused:
        forbidden = True
    try:
        run(program, x, got)
    except jaxkv.HostSyncError:
        raised = True
    assert raised == forbidden
    assert [[sync.allowed for sync in report.syncs] for report in got] == want
    assert sync_guard._hooks._scopes == 0


def test_decorator_enters_a_scope_per_call():
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


def test_decorating_generators_and_coroutines_is_rejected():
    async def coroutine():
        pass

    def generator():
        yield

    async def both():
        yield

    for function in coroutine, generator, both:
        with pytest.raises(TypeError, match=f"{function.__name__} is a generator or coroutine"):
            jaxkv.forbid_host_sync()(function)


def test_reentered_scope_has_a_new_report():
    guard = jaxkv.forbid_host_sync()
    with pytest.raises(jaxkv.HostSyncError), guard:
        int(one())
    with guard as report:
        pass
    assert report.count == 0

    counts = jaxkv.forbid_host_sync(mode="count")
    with counts as first:
        int(one())
        with counts as inner:
            int(one())
    with counts as last:
        pass
    assert (first.count, inner.count, last.count) == (2, 1, 0)

    warns = jaxkv.forbid_host_sync(mode="warn")
    for _ in range(2):
        with pytest.warns(sync_guard.HostSyncWarning), warns:
            int(one())


def test_scope_shared_by_two_threads():
    x, guard = one(), jaxkv.forbid_host_sync(mode="count")
    entered, read = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    reports: list[HostSyncReport] = []

    def other():
        with guard as report:
            entered.wait()
            read.wait()
            int(x)
        reports.append(report)

    thread = threading.Thread(target=other)
    thread.start()
    # Entered after the other thread, left before it.
    entered.wait()
    with guard as report:
        int(x)
        int(x)
    read.wait()
    thread.join()
    assert (report.count, reports[0].count) == (2, 1)
    assert sync_guard._hooks._scopes == 0


def test_exit_in_another_thread_raises():
    guard, errors = jaxkv.forbid_host_sync(), []

    def leave():
        try:
            guard.__exit__(None, None, None)
        except RuntimeError as error:
            errors.append(str(error))

    with guard:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        with pytest.raises(jaxkv.HostSyncError), jaxkv.forbid_host_sync():
            int(one())
    assert errors == [
        "a host sync scope was exited in a thread or asyncio task that did not enter it"
    ]


def test_scopes_may_exit_out_of_order():
    """As in the bodies of generators."""
    x, outer, inner = one(), jaxkv.forbid_host_sync(), jaxkv.forbid_host_sync(mode="count")
    outer.__enter__()
    report = inner.__enter__()
    outer.__exit__(None, None, None)
    int(x)
    inner.__exit__(None, None, None)
    int(x)
    assert report.count == 1
    assert sync_guard._hooks._scopes == 0


def test_other_threads_are_unaffected():
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


def test_many_threads_enter_and_exit():
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


def test_other_tasks_are_unaffected():
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
def test_scopes_exit_on_exceptions(scope):
    with pytest.raises(ZeroDivisionError), scope():
        raise ZeroDivisionError
    assert int(one()) == 4


def test_dispatch_uses_the_cpp_path():
    """A compiled function is called as without a guard: no Python frame is entered."""
    x = three()
    double(x)

    def frames() -> list[str]:
        entered: list[str] = []

        def profile(frame, event, _):
            if event == "call":
                entered.append(str(frame))

        gc.disable()  # it would run callbacks in Python
        sys.setprofile(profile)
        try:
            double(x)
        finally:
            sys.setprofile(None)
            gc.enable()
        return entered

    assert frames() == []
    compiled = double._cache_size()
    with jaxkv.forbid_host_sync():
        assert frames() == []
    assert double._cache_size() == compiled


def test_jax_without_a_hooked_function_is_rejected(monkeypatch):
    lacking = {"jax._src.array:ArrayImpl": ["_read"], "jax._src.nowhere:Thing": ["wait"]}
    monkeypatch.setattr(sync_guard, "_WATCHED", {**sync_guard._WATCHED, **lacking})
    words = r"ArrayImpl\._read, jax\._src\.nowhere:Thing\.wait"
    with pytest.raises(RuntimeError, match=words), jaxkv.forbid_host_sync():
        pytest.fail("entered")
    monkeypatch.undo()


def test_failed_patch_is_rolled_back(monkeypatch):
    def fail(original, name):
        if name == "Array.__dlpack__":
            raise ZeroDivisionError
        return patch(original, name)

    patch = sync_guard._observed
    monkeypatch.setattr(sync_guard, "_observed", fail)
    with pytest.raises(ZeroDivisionError), jaxkv.forbid_host_sync():
        pytest.fail("entered")


@pytest.mark.parametrize("mode", ["ignore", "allow", None])
def test_unknown_mode_is_rejected(mode):
    with pytest.raises(ValueError, match=f"mode must be one of .*got {mode!r}"):
        jaxkv.forbid_host_sync(mode=mode)


@pytest.mark.parametrize("reason", ["", None, print])
def test_missing_reason_is_rejected(reason):
    with pytest.raises(ValueError, match="reason must be a non-empty string"):
        jaxkv.allow_host_sync(reason)


def test_fixture_fails_a_test_at_its_host_sync(pytester, monkeypatch):
    # Options and other plugins belong to the enclosing run.
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
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
        ["*HostSyncError: *test_fixture*.py:13: Array.__float__ is a host sync*"]
    )


def test_fixture_forbids_host_syncs(no_host_sync):
    with jaxkv.allow_host_sync("to see the guard at work"):
        int(one())
    assert [type(sync) for sync in no_host_sync.syncs] == [HostSync]
    assert Path(no_host_sync.syncs[0].where.rpartition(":")[0]) == Path(__file__)
