"""`check_errors`: one pending error of each kind, with its attributes."""

import asyncio
import pickle
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from jaxkv._src.runtime import native
from jaxkv._src.runtime.bounds import check_bounds

KINDS = {
    "page_index": jaxkv.PageIndexError,
    "transfer": jaxkv.TransferError,
    "bound": jaxkv.BoundError,
}


@pytest.fixture
def pending(monkeypatch):
    """`pending(*errors)`: the native extension's result at the next check."""

    extension = mock.Mock()
    monkeypatch.setattr(native, "extension", lambda: extension)

    def set_errors(*errors):
        extension.device_errors.side_effect = [[*errors], []]

    return set_errors


def entry(text: str, operation: str = "", argument: str = "") -> tuple[str, str, str]:
    return operation, argument, text


def test_operation_and_argument_are_those_of_all_entries(pending):
    loads = [entry(text, "load_pages", "host_pages") for text in "ab"]
    pending(("page_index", 0, 2, loads))
    with pytest.raises(jaxkv.PageIndexError) as raised:
        jaxkv.check_errors()
    assert (raised.value.operation, raised.value.argument) == ("load_pages", "host_pages")
    pending(("page_index", 0, 3, [*loads, entry("c", "load_pages", "device_pages")]))
    with pytest.raises(jaxkv.PageIndexError) as raised:
        jaxkv.check_errors()
    assert (raised.value.operation, raised.value.argument) == ("load_pages", None)


def test_entries_that_were_overwritten_are_counted(pending):
    pending(("page_index", 0, 2, []))
    with pytest.raises(jaxkv.PageIndexError, match=r"^2 entries were not copied") as raised:
        jaxkv.check_errors()
    assert (raised.value.operation, raised.value.count) == (None, 2)


@pytest.mark.parametrize(
    "kind, counted", [("page_index", "entry was"), ("transfer", "wait"), ("bound", "bound was")]
)
def test_one_error_is_counted_in_the_singular(kind, counted, pending):
    pending((kind, 0, 1, [entry("a")]))
    with pytest.raises(jaxkv.JaxkvError, match=rf"^1 {counted} .*: a \(device 0\)$"):
        jaxkv.check_errors()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", [None, 3])
def test_pending_error_of_one_kind_is_raised(kind, device, pending):
    pending((kind, device, 70, [entry(f"text {i}") for i in range(64)]))
    with pytest.raises(jaxkv.JaxkvError) as raised:
        jaxkv.check_errors()
    error = raised.value
    where = "" if device is None else " (device 3)"
    assert type(error) is KINDS[kind]
    assert str(error).startswith("70 ")
    assert str(error).endswith(f": text 0; text 1; text 2; text 3{where}")
    assert (error.device, error.count) == (device, 70)
    jaxkv.check_errors()


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_several_devices_are_merged(kind, pending):
    pending((kind, 0, 2, [entry("a"), entry("b")]), (kind, 5, 1, [entry("c")]))
    with pytest.raises(jaxkv.JaxkvError, match=r"^3 .*: a; b; c \(device 0, 5\)$") as raised:
        jaxkv.check_errors()
    error = raised.value
    assert type(error) is KINDS[kind]
    assert (error.operation, error.argument, error.device, error.count) == (None, None, None, 3)


def test_errors_of_several_kinds_are_raised_as_a_group(pending):
    pending(*((kind, i, i + 1, [entry(kind)]) for i, kind in enumerate(KINDS)))
    with pytest.raises(ExceptionGroup) as raised:
        jaxkv.check_errors()
    errors = [error for error in raised.value.exceptions if isinstance(error, jaxkv.JaxkvError)]
    assert [type(error) for error in errors] == [*KINDS.values()]
    assert [(error.device, error.count) for error in errors] == [(0, 1), (1, 2), (2, 3)]
    jaxkv.check_errors()


@pytest.mark.parametrize(
    "error, builtin",
    [
        (jaxkv.PageIndexError, IndexError),
        (jaxkv.TransferError, RuntimeError),
        (jaxkv.BoundError, ValueError),
        (jaxkv.PeerTimeoutError, RuntimeError),
    ],
)
def test_errors_derive_from_jaxkv_error(error, builtin):
    assert issubclass(error, jaxkv.JaxkvError) and issubclass(error, builtin)


@pytest.mark.parametrize(
    "ids, argument, count",
    [
        (([9, 1, 9], [0, 1, 2]), "src_ids", 2),
        (([0, 1, 2], [0, 1, 9]), "dst_ids", 1),
        (([0, 1, 2], [3, 1, 3]), "dst_ids", 2),
    ],
)
def test_host_check_reports_the_argument(ids, argument, count):
    array = jnp.zeros((4, 8))
    with pytest.raises(jaxkv.PageIndexError, match=f"^swap_blocks: {argument}") as raised:
        jaxkv.swap_blocks(array, array, *ids)
    error = raised.value
    assert (error.operation, error.argument, error.count) == ("swap_blocks", argument, count)
    assert error.device is None


@pytest.mark.gpu
def test_device_counts_each_kind():
    @jax.jit
    def step(src, dst, ids):
        carry = check_bounds("test.step", jnp.arange(3), rows=(ids[0] + 9, 5))
        return jaxkv.swap_blocks(src, dst, ids, ids), carry

    src, dst = ({"k": jnp.zeros((4, 8))} for _ in range(2))
    out = step(src, dst, jnp.array([100 + i for i in range(99)]))
    with pytest.raises(ExceptionGroup) as raised:
        jaxkv.check_errors(out)
    pages, bounds = raised.value.exceptions
    assert isinstance(pages, jaxkv.PageIndexError) and isinstance(bounds, jaxkv.BoundError)
    assert (pages.count, bounds.count) == (99, 1)
    assert pages.device == bounds.device == jax.devices()[0].local_hardware_id
    jaxkv.check_errors()


def scope_of_an_error() -> str | None:
    return jaxkv.JaxkvError("an error").scope


def test_tasks_leave_their_own_scopes():
    """Of one thread, in another order than they entered them."""
    seen = []

    async def run():
        entered, left = asyncio.Event(), asyncio.Event()

        async def first():
            with jaxkv.ErrorScope("task a"):
                await entered.wait()
            seen.append(scope_of_an_error())
            left.set()

        async def second():
            with jaxkv.ErrorScope("task b"), jaxkv.ErrorScope("task c"):
                entered.set()
                await left.wait()
                seen.append(scope_of_an_error())
            seen.append(scope_of_an_error())

        await asyncio.gather(first(), second())

    with jaxkv.ErrorScope("outer"):
        asyncio.run(run())
        assert seen == ["task c", "task c", "outer"]
    assert scope_of_an_error() is None


def test_scope_that_this_thread_did_not_enter():
    with jaxkv.ErrorScope("entered"):
        with pytest.raises(RuntimeError, match=r"^ErrorScope: 'other' .* thread that entered it"):
            jaxkv.ErrorScope("other").__exit__()
        assert scope_of_an_error() == "entered"


@pytest.mark.parametrize(
    "error",
    [
        jaxkv.PageIndexError("text", operation="load_pages", argument="host_pages", count=2),
        jaxkv.PeerTimeoutError(0, 1, "barrier", 7, 6, "text"),
        jaxkv.StaleCountsError("text"),
        jaxkv.HostMemoryError(2, 1, "MemAvailable"),
        jaxkv.HostSyncError("Array.__int__", "step.py:1"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_pass_between_processes(error):
    with jaxkv.ErrorScope("pickled"):
        copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and str(copy) == str(error) and copy.args == error.args
    assert vars(copy) == vars(error)
