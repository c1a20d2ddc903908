"""Host syncs seen by a guard, and its reports; its scopes are in test_sync_guard_scopes.py."""

import operator
import pickle
import struct
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxkv
from jaxkv._src.runtime import sync_guard
from jaxkv._src.runtime.sync_guard import HostSyncWarning
from tests.util.sync_guard_cases import double, one, three

# Each waits once for an int32 array of one element: the function named in the report.
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
    "__dlpack__": (lambda x: x.__dlpack__(), "Array.__dlpack__"),
    "x.block_until_ready": (lambda x: x.block_until_ready(), "Array.block_until_ready"),
    "block_until_ready": (jax.block_until_ready, "jax.block_until_ready"),
    "block_until_ready of two": (lambda x: jax.block_until_ready((x, x)), "jax.block_until_ready"),
    "effects_barrier": (lambda x: jax.effects_barrier(), "jax.effects_barrier"),
    "check_errors": (jaxkv.check_errors, "jaxkv.check_errors"),
}

# They check whether the array is deleted before they wait for it.
LOOK_FIRST = {"if", "device_get", "nonzero", "from_dlpack", "effects_barrier"}

SPEC = jaxkv.KVCacheSpec(num_layers=1, page_size=2, num_kv_heads=1, head_dim=4, dtype="int8")

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
    "HostIds": lambda x: jaxkv.HostIds([0, -1]),
    "HostPool": lambda x: jaxkv.HostPool.create(SPEC, num_pages=2),
    "random": lambda x: jax.random.normal(jax.random.key(0), (3,)),
    "async copy": lambda x: x.copy_to_host_async(),
    "to pinned": lambda x: jax.device_put(x, pinned()),
    "is_ready": lambda x: x.is_ready(),
    "shape": lambda x: (x.shape, x.dtype, len(x), x.sharding, x.nbytes),
    "pointer": lambda x: x.unsafe_buffer_pointer(),
    "nothing to wait for": lambda x: jax.block_until_ready(()),
    "check_errors": lambda x: jaxkv.check_errors(),
}
if jax.default_backend() == "cpu":
    WAITS |= {
        "memoryview": (memoryview, "Array.__buffer__"),
        "bytes": (bytes, "Array.__buffer__"),
        "from_dlpack": (lambda x: jnp.from_dlpack(x), "jax.from_dlpack"),
    }
else:
    WAITS["cuda"] = (lambda x: x.__cuda_array_interface__, "Array.__cuda_array_interface__")
    # The stream waits, not the host.
    NO_WAITS |= {
        "from_dlpack": lambda x: jnp.from_dlpack(x),
        "dlpack": lambda x: x.__dlpack__(stream=2),  # each thread's default stream
    }


def pinned() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def argument_of(name: str) -> jax.Array:
    return three() if name in ("nonzero", "ufunc", "bytes") else one()


def here() -> int:
    """The line of the call."""
    return sys._getframe(1).f_lineno


@pytest.mark.parametrize("name", WAITS)
def test_raise_mode_reports_function_and_line_without_waiting(name):
    function, what = WAITS[name]
    x = argument_of(name)
    if name not in LOOK_FIRST:
        x.delete()  # later reads raise a different error
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
def test_count_mode_records_each_sync_once(name):
    function, what = WAITS[name]
    x = argument_of(name)
    with jaxkv.forbid_host_sync(mode="count") as report:
        line = here() + 1
        got = function(x)
        function(x)  # a second read is reported, too
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
def test_operations_without_host_sync_pass(name):
    x = three()
    with jaxkv.forbid_host_sync():
        NO_WAITS[name](x)


@pytest.mark.parametrize("dtype", ["int8", "float32", "bfloat16", "float8_e4m3fn", "bool"])
@pytest.mark.parametrize("place", ["device", "pinned_host", "sharded"])
def test_reads_from_every_memory_are_detected(dtype, place):
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


def test_seconds_are_the_duration_of_the_sync(monkeypatch):
    x, waits, now = one(), iter([3.0, 1.0]), 10.0

    def wait(_):
        nonlocal now
        now += next(waits)

    monkeypatch.setattr(type(x), "block_until_ready", wait)
    clock = types.SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr(sync_guard, "time", clock)
    with jaxkv.forbid_host_sync(mode="count") as report:
        for _ in range(2):
            x.block_until_ready()
    assert [sync.seconds for sync in report.syncs] == [3.0, 1.0]


def test_nested_syncs_are_recorded_once():
    effect = jax.jit(lambda x: jax.debug.callback(lambda _: None, x, ordered=True))
    effect(one())  # its token is an array
    with jaxkv.forbid_host_sync(mode="count") as report:
        jax.effects_barrier()
    assert [sync.what for sync in report.syncs] == ["jax.effects_barrier"]


def test_suppressed_error_is_raised_on_exit():
    x = three()
    with pytest.raises(jaxkv.HostSyncError, match="test_sync_guard"), jaxkv.forbid_host_sync():
        np.array_equal(x, x)


def test_error_in_place_of_the_host_sync_is_its_cause():
    """struct.pack replaces every error of `__float__`."""
    x = three()
    with pytest.raises(jaxkv.HostSyncError, match="__float__") as raised, jaxkv.forbid_host_sync():
        struct.pack("f", x[0])
    assert isinstance(raised.value.__cause__, struct.error)


def test_errors_of_the_sync_itself_propagate():
    x = three()
    x.delete()
    with jaxkv.forbid_host_sync(mode="count") as report:
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(x)
        with pytest.raises(TypeError, match="Only scalar"):
            int(three())
    assert report.syncs == []


def test_tracers_are_ignored():
    with (
        pytest.raises(jax.errors.ConcretizationTypeError),
        jaxkv.forbid_host_sync() as report,
    ):
        jax.jit(lambda x: int(x))(one())
    assert report.syncs == []


def test_warn_mode_warns_once_per_line():
    x = one()
    with pytest.warns(HostSyncWarning) as caught, jaxkv.forbid_host_sync(mode="warn") as report:
        line = here()
        for _ in range(3):
            assert int(x) == 4
        np.asarray(x)
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line + 2), (__file__, line + 3)]
    assert "Array.__int__ blocked the host" in str(caught[0].message)
    assert report.count == 4


def test_warning_as_error_propagates_through_numpy():
    with warnings.catch_warnings(), jaxkv.forbid_host_sync(mode="warn") as report:
        warnings.simplefilter("error")
        with pytest.raises(HostSyncWarning):
            np.asarray(three())
    assert report.syncs == []


@pytest.mark.cpu_only
def test_dlpack_with_a_stream_is_not_a_host_sync():
    x: Any = three()
    # It reaches XLA, which has no streams here.
    with pytest.raises(jax.errors.JaxRuntimeError, match="Stream"), jaxkv.forbid_host_sync():
        x.__dlpack__(stream=2)
