"""Timing of device work by the host's clock."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

CHAIN_SECONDS = 0.12  # the start and end of a chain take up to a millisecond
MAX_CALLS = 100
# Labels of a ratio with its error: the row of the error, and the target.
TWO_ERRORS, WITHIN = "2 standard errors of the ratio", "within 2 standard errors"


def seconds_per_call(
    step: Callable[[Any], Any], state: Any, *, calls: int, repeats: int, warmup: int = 2
) -> tuple[float, Any]:
    """Median seconds per call in a chain `state = step(state)`.

    Calls follow each other without waiting, so that launches overlap with device work as in an
    engine; one wait ends each chain. `step` may donate its argument.

    Args:
      step: a compiled function from a pytree of arrays to the same.
      state: its first argument.
      calls: length of a chain.
      repeats: timed chains; the median is over these.
      warmup: untimed chains before; two, as command buffers are captured in the second run.

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


class Call(NamedTuple):
    """Median seconds of a call on an idle device, from its start.

    Attributes:
      returns: host time, during which the host is blocked.
      done: latency, until the results are available.
    """

    returns: float
    done: float


def single_call(
    step: Callable[[Any], Any],
    state: Any,
    *,
    repeats: int,
    after: Callable[[], None] = lambda: None,
) -> tuple[Call, Any]:
    """Times `state = step(state)` with a wait before and after each; also returns the last state.

    Args:
      step: a compiled function that has run before.
      state: its first argument.
      repeats: timed calls; the medians are over these.
      after: called after each wait, outside the timed interval.
    """
    samples = []
    for _ in range(repeats):
        state = jax.block_until_ready(state)
        start = time.perf_counter()
        state = step(state)
        returned = time.perf_counter()
        state = jax.block_until_ready(state)
        samples.append((returned - start, time.perf_counter() - start))
        after()
    return Call(*map(statistics.median, zip(*samples, strict=True))), state


def chain_length(seconds: float) -> int:
    """Shortest chain that can be timed accurately, in calls of `seconds`."""
    return max(1, min(MAX_CALLS, int(CHAIN_SECONDS / seconds)))


def ratio(times: list[float], baseline: list[float]) -> tuple[float, float]:
    """Median of the ratios of the rounds, and its standard error for a normal distribution."""
    ratios = [a / b for a, b in zip(times, baseline, strict=True)]
    median = statistics.median(ratios)
    deviation = 1.4826 * statistics.median(abs(r - median) for r in ratios)
    return median, 1.2533 * deviation / math.sqrt(len(ratios))
