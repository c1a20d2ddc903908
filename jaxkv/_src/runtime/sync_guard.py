"""Host-sync guard: raises, warns or counts when the host waits for a device.

A step loop keeps the device busy only while the host runs ahead of it; one `int(token)` ends that.
`jax.transfer_guard` detects some of these waits, but none on CPU, and never `block_until_ready`, a
read of pinned_host memory or a second read of an array. This guard hooks the few JAX functions
through which every host sync passes. (vLLM's `gpu_sync_allowed` does the same for PyTorch.)
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import pkgutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import jax

from jaxkv._src.runtime import native

Mode = Literal["raise", "warn", "count"]

# Functions in which the host waits, by owner. int(x), print(x), x.tolist(), device_get(x) and,
# without the buffer protocol, np.asarray(x) all read `_value`.
_ARRAY = "jax._src.array:ArrayImpl"
_WATCHED = {
    _ARRAY: ["_value", "block_until_ready", "__dlpack__", "__cuda_array_interface__"],
    "jax._src.lib:xla_client": ["batched_block_until_ready"],
    "jax._src.dispatch:RuntimeTokenSet": ["block_until_ready"],
}
if sys.version_info >= (3, 12):  # PEP 688: the buffer protocol in Python
    _WATCHED[_ARRAY].append("__buffer__")

_LIBRARIES = {"jax", "jaxlib", "jaxkv", "numpy"}
_PLUMBING = {__name__, "jax._src.traceback_util"}


class HostSyncError(RuntimeError):
    """A forbidden host sync, raised before the host waits.

    Attributes:
      what: the function that would have waited, such as "Array.__int__".
      where: "file:line" of the caller.
    """

    def __init__(self, what: str, where: str) -> None:
        self.what = what
        self.where = where
        super().__init__(
            f"{where}: {what} is a host sync; remove it, or allow it by "
            "`with jaxkv.allow_host_sync(reason):`"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.where), self.__dict__


class HostSyncWarning(UserWarning):
    """The host waited for a device under `forbid_host_sync(mode="warn")`."""


@dataclasses.dataclass(frozen=True)
class HostSync:
    """One host sync.

    Attributes:
      what: the function that waited, such as "Array.__int__" or "jax.block_until_ready".
      where: "file:line" of the first frame outside JAX, NumPy and jaxkv.
      seconds: duration, about 0 if the result was available.
      allowed: the reason given to `allow_host_sync`, or None if not allowed.
    """

    what: str
    where: str
    seconds: float
    allowed: str | None


@dataclasses.dataclass(frozen=True)
class HostSyncReport:
    """The host syncs of a scope, complete on exit from the scope.

    Attributes:
      syncs: in the order of completion, without those that raised HostSyncError before the wait.
        Each has `what` (the function that waited), `where` ("file:line"), `seconds` and `allowed`
        (the reason given to `allow_host_sync`, or None).
    """

    syncs: list[HostSync] = dataclasses.field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of host syncs outside `allow_host_sync`."""
        return sum(sync.allowed is None for sync in self.syncs)


_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Scope(contextlib.ContextDecorator):
    """The rule of a scope on one thread; reusable, without state of its entries."""

    def __init__(self, mode: Mode | None, reason: str | None = None) -> None:
        self.mode, self.reason = mode, reason  # mode None: allowed for that reason

    def _recreate_cm(self) -> _Scope:
        return _Scope(self.mode, self.reason)

    def __call__(self, function: _Function) -> _Function:
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction)
        if any(is_kind(function) for is_kind in (*kinds, inspect.isasyncgenfunction)):
            raise TypeError(
                f"{function.__qualname__} is a generator or coroutine function, whose body runs "
                "after the decorated call: use `with` in the body"
            )
        return super().__call__(function)

    def __enter__(self) -> HostSyncReport:
        if self.mode is not None:
            _hooks.start()
        entry = _Entry(self)
        _scopes.set((*_scopes.get(), entry))
        return entry.report

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        entries = _scopes.get()
        own = [i for i, entry in enumerate(entries) if entry.scope is self]
        if not own:
            raise RuntimeError(
                "a host sync scope was exited in a thread or asyncio task that did not enter it"
            )
        _scopes.set(entries[: own[-1]] + entries[own[-1] + 1 :])
        if self.mode is not None:
            _hooks.stop()
        errors = entries[own[-1]].errors
        replaced = isinstance(error, Exception) and not isinstance(error, HostSyncError)
        if errors and (error is None or replaced):
            raise errors[0] from error  # caught in the body, e.g. by np.array_equal or struct.pack


class _Entry:
    """One entry of a scope, which several threads may enter."""

    def __init__(self, scope: _Scope) -> None:
        self.scope = scope
        self.report = HostSyncReport()
        self.warned: set[str] = set()  # as "file:line"
        self.errors: list[HostSyncError] = []


# Outermost first. A new thread has none; an asyncio task inherits those of its creator.
_scopes: contextvars.ContextVar[tuple[_Entry, ...]] = contextvars.ContextVar(
    "jaxkv_host_sync_scopes", default=()
)


def forbid_host_sync(*, mode: Mode = "raise") -> _Scope:
    """Forbids host syncs of this thread, in a `with` statement or a decorated function.

        with jaxkv.forbid_host_sync(mode="count") as report:
            state = step(state)
        assert not report.count, report.syncs

    A host sync is a read of an array's value (int, bool, print, np.asarray, item, tolist,
    device_get, dlpack and other views of its memory), `block_until_ready` or `effects_barrier`,
    even if the value is already available, since that depends on timing. Uploads to a device,
    dispatch, tracing, `copy_to_host_async` and `is_ready` are not host syncs; a loop until
    `is_ready()` is not detected. See docs/sync_guard.md.

    Scopes nest: the innermost one decides, and the reports of all enclosing scopes include the
    sync. Other threads are not affected. JAX is patched only while a thread is in such a scope.
    vLLM's `gpu_sync_allowed` marks permitted syncs of PyTorch in the same way.

    Args:
      mode: "raise" raises before the wait, and again on exit if the error was caught in the scope;
        "warn" issues a HostSyncWarning for each source line and continues; "count" only records.

    Returns:
      A context manager with a `HostSyncReport` as its value; also a decorator of functions. It is
      reentrant and may be shared by threads: each use has its own report.

    Raises:
      HostSyncError: in the scope, for mode "raise".
      TypeError: on decoration of a generator or coroutine function; use `with` in its body.
      RuntimeError: on entry, if this version of JAX is not supported; on exit, in a thread or
        asyncio task that has not entered the scope. The scope then stays active where it was
        entered.
      ValueError: `mode` is invalid.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
    return _Scope(mode)


def allow_host_sync(reason: str) -> _Scope:
    """Allows host syncs within `forbid_host_sync`, in a `with` statement or a decorated function.

        with jaxkv.allow_host_sync("end of text"):
            done = int(token) == 2

    Args:
      reason: justification of the host sync, recorded in the reports.

    Returns:
      A context manager and decorator, as for `forbid_host_sync`. Outside of `forbid_host_sync` its
      report may be incomplete.

    Raises:
      TypeError: on decoration of a generator or coroutine function.
      ValueError: `reason` is empty or not a string.
    """
    if not isinstance(reason, str) or not reason:
        raise ValueError(f"reason must be a non-empty string, got {reason!r}")
    return _Scope(None, reason)


def _observe(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls a function that waits, under the rule of the innermost scope."""
    entries = _scopes.get()
    # With a stream, __dlpack__ makes that stream wait, not the host.
    if not entries or kwargs.get("stream") is not None:
        return function(*args, **kwargs)
    innermost = entries[-1]
    rule = innermost.scope
    what, file, line = _locate(name)
    where = f"{file}:{line}"
    if rule.mode == "raise":
        innermost.errors.append(HostSyncError(what, where))
        raise innermost.errors[-1]
    token = _scopes.set(())  # nested calls belong to the same host sync
    start = time.perf_counter()
    try:
        result = function(*args, **kwargs)
    finally:
        seconds = time.perf_counter() - start
        _scopes.reset(token)
    if rule.mode == "warn" and where not in innermost.warned:
        text = f"{what} blocked the host for {seconds:.6f} s"
        warnings.warn_explicit(text, HostSyncWarning, file, line)
        innermost.warned.add(where)
    for entry in entries:
        entry.report.syncs.append(HostSync(what, where, seconds, rule.reason))
    return result


def _locate(name: str) -> tuple[str, str, int]:
    """The library function called by user code, and the file and line of the call."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package not in _LIBRARIES:
            break
        if module not in _PLUMBING:
            function = frame.f_code.co_qualname.rpartition("<locals>.")[2]
            method = function.removeprefix("ArrayImpl.")
            name = f"{package}.{function}" if method == function else f"Array.{method}"
        frame = frame.f_back
    return name, frame.f_code.co_filename, frame.f_lineno


class _Hooks:
    """Patches JAX while at least one thread is in a scope of `forbid_host_sync`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scopes = 0
        self._restore = contextlib.ExitStack()

    def start(self) -> None:
        with self._lock:
            if not self._scopes:
                self._patch()
            self._scopes += 1

    def stop(self) -> None:
        with self._lock:
            self._scopes -= 1
            if not self._scopes:
                self._restore.close()

    def _patch(self) -> None:
        with contextlib.ExitStack() as restore:
            for owner, name, original in _points():
                setattr(owner, name, _observed(original, f"Array.{name}"))
                restore.callback(setattr, owner, name, original)
            if sys.version_info < (3, 12):
                array_type = pkgutil.resolve_name(_ARRAY)
                watch_buffers = native.extension().watch_buffers
                watch_buffers(array_type, functools.partial(_observe, "Array.__buffer__"))
                restore.callback(watch_buffers, array_type, None)
            self._restore = restore.pop_all()


_hooks = _Hooks()


def _points() -> list[tuple[Any, str, Any]]:
    """Owner, name and current value of each hooked attribute."""
    points, missing = [], []
    for path, names in _WATCHED.items():
        try:
            owner = pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            owner = object
        for name in names:
            if name in vars(owner):
                points.append((owner, name, vars(owner)[name]))
            else:
                missing.append(f"{path}.{name}")
    if missing:
        raise RuntimeError(
            f"forbid_host_sync does not support jax {jax.__version__}, which lacks "
            f"{', '.join(missing)}: use another version of jax or of jaxkv"
        )
    return points


def _observed(original: Any, name: str) -> Any:
    if isinstance(original, property):
        getter: Any = original.fget
        return property(functools.partial(_observe, name, getter))

    def observed(*args: Any, **kwargs: Any) -> Any:
        return _observe(name, original, *args, **kwargs)

    return observed
