"""An executor that does not keep the process alive."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class DaemonExecutor(Executor):
    """Calls functions in order in one daemon thread.

    That of a `ThreadPoolExecutor` is joined at exit, where a call that hangs, such as one of a
    server that is gone, would hold the process for ever.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True).start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, fn, args, kwargs))
        return future


def _run(calls: queue.SimpleQueue[tuple[Any, ...] | None]) -> None:
    while call := calls.get():
        future, fn, args, kwargs = call
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # the caller's, as in any executor
                future.set_exception(error)
        del call, future, fn, args, kwargs  # not kept until the next call
