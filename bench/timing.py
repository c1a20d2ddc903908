"""Times work on a device from the host's clock, honestly about what that includes."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax


def seconds_per_call(
    step: Callable[[Any], Any], state: Any, *, calls: int, repeats: int, warmup: int = 2
) -> tuple[float, Any]:
    """Median seconds of one call in a chain `state = step(state)`.

    Calls follow each other without waiting, so that launches overlap with device work as they do
    in an engine; one wait ends each chain. `step` may donate its argument.

    Args:
      step: a compiled function from a pytree of arrays to the same.
      state: its first argument.
      calls: length of a chain.
      repeats: chains timed; the median is over these.
      warmup: chains run before; two, because command buffers are captured in the second run.

    Returns:
      Seconds per call, and the last state.
    """
    samples = []
    for repeat in range(warmup + repeats):
        state = jax.block_until_ready(state)
        start = time.perf_counter()
        for _ in range(calls):
            state = step(state)
        state = jax.block_until_ready(state)
        if repeat >= warmup:
            samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples), state
