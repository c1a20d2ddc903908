"""Share of time in which the GPU runs no kernel while requests are served, from a profile."""

import contextlib
import glob
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bench.harness.profiler import Event
from bench.serving.systems import Measured, Steps
from bench.serving.workloads import BesideLoads, Workload

SECONDS = 1.0  # of a profile; one step of Qwen3-8B has hundreds of events
NO_KERNELS = ("Memcpy", "Memset")  # how CUPTI's names of copies and fills begin


def measure(
    engine: Measured, work: Workload | BesideLoads, seconds: float = SECONDS
) -> float | None:
    """`idle_share` of the first `seconds` of the measured time of a workload; None without a GPU.

    Requests that are not finished by then are cancelled.
    """
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.ExitStack() as stack:
            profiled: Any = _Profiled(
                engine, lambda: stack.enter_context(_profile(folder)), seconds
            )
            with contextlib.suppress(_Enough):
                work.run(profiled)
            jax.block_until_ready(engine.state)
        for request in [*engine.waiting, *engine.running]:
            engine.cancel(request)
        while engine.busy:
            engine.step()
        return idle_share(_events(folder))


def idle_share(events: Sequence[Event]) -> float | None:
    """Share of the time from the first to the last event in which no kernel runs, on any stream.

    Copies and fills are no kernels: while the GPU only copies, it is idle. None without events.
    """
    if not events:
        return None
    times = np.array([(event.start, event.end) for event in events])
    is_kernel = [not event.name.startswith(NO_KERNELS) for event in events]
    starts, ends = times[is_kernel].T
    order = np.argsort(starts)
    starts, ends = starts[order], np.maximum.accumulate(ends[order])
    # Of each kernel, what is after the end of all that started before it.
    busy = ends - np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))
    return float(1 - busy.clip(0).sum() / (times[:, 1].max() - times[:, 0].min()))


class _Enough(Exception):
    """The profile is long enough."""


class _Profiled:
    """An engine that serves one workload; `start` is called at the start of its measured time."""

    def __init__(self, engine: Measured, start: Callable[[], object], seconds: float) -> None:
        self._engine, self._start, self._seconds = engine, start, seconds
        self._end: float | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def take_steps(self) -> Steps:
        if self._end is None:
            self._start()
            self._end = time.perf_counter() + self._seconds
        return self._engine.take_steps()

    def step(self) -> None:
        self._engine.step()
        if self._end is not None and time.perf_counter() >= self._end:
            raise _Enough


def _profile(folder: str) -> contextlib.AbstractContextManager[None]:
    """Of the GPU alone: a profile of Python would slow the host, and so leave the GPU idle."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    return jax.profiler.trace(folder, profiler_options=options)


def _events(folder: str) -> list[Event]:
    """Of all streams of this process's GPU."""
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    return [
        Event(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in jax.profiler.ProfileData.from_file(path).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
