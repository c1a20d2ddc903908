"""GPU work of a compiled program, from a profile."""

import glob
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from bench.harness import timing


class Kernels(NamedTuple):
    """GPU work of one call.

    Attributes:
      number: kernels, copies and fills launched.
      busy: their total duration in seconds.
    """

    number: int
    busy: timing.Figure


class Event(NamedTuple):
    """A kernel, copy or fill: start and end in nanoseconds of the GPU's clock, and its name."""

    start: float
    end: float
    name: str


def profile(call: Callable[[], Any], repeats: int = 20) -> Kernels | None:
    """Medians over calls of a program that has run before; None without a GPU.

    Calls follow each other without waiting, as steps do.

    Raises:
      RuntimeError: the number of kernels differs between calls.
    """
    if jax.default_backend() != "gpu":
        return None
    jax.block_until_ready(call())
    devices = trace(lambda: jax.block_until_ready([call() for _ in range(repeats)]))
    events = sorted((event.start, event.end) for events in devices for event in events)
    if not events or len(events) % repeats:
        raise RuntimeError(f"{len(events)} kernels in {repeats} calls")
    count = len(events) // repeats
    calls = [events[i : i + count] for i in range(0, len(events), count)]
    busy = timing.median([sum(end - start for start, end in one) for one in calls])
    return Kernels(count, busy / 1e9)


def trace(run: Callable[[], Any]) -> list[list[Event]]:
    """Work of each GPU of this process during `run`, in order; `run` must wait for its results."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(path)
    devices = sorted(
        (plane for plane in data.planes if plane.name.startswith("/device:GPU")),
        key=lambda plane: plane.name,
    )
    return [_device_events(plane) for plane in devices]


def _device_events(plane: Any) -> list[Event]:
    return sorted(
        Event(event.start_ns, event.start_ns + event.duration_ns, event.name)
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
