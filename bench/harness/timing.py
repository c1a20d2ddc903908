"""Timing of device work by the host's clock, and the statistics of all benchmarks.

A figure is the median of samples with its error; two errors reach to the farther end of a
confidence interval of the median, whatever the number of samples (`median`). Two methods are
compared by the median of the ratios of rounds, in each of which every method runs once, in random
order.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from scipy import special

CHAIN_SECONDS = 0.12  # the start and end of a chain take up to a millisecond
MAX_CALLS = 100
TWO_ERRORS = 0.97725  # a normal distribution is below two standard deviations
FEW = 6  # samples: with fewer, not even the lowest and the highest have this confidence
K = TypeVar("K")
T = TypeVar("T")


class Figure(float):
    """A measured value with its error, which arithmetic propagates.

    Operands of arithmetic are taken as independent; for the ratio of two methods that ran in the
    same rounds use `ratio`. A count or another exact value is `Figure(value)`.

    Attributes:
      error: as defined by `median`; NaN for a single sample.
    """

    error: float

    def __new__(cls, value: float, error: float = 0.0) -> "Figure":
        figure = super().__new__(cls, value)
        figure.error = error
        return figure

    def __add__(self, other: float) -> "Figure":
        return Figure(float(self) + float(other), math.hypot(self.error, error_of(other)))

    def __sub__(self, other: float) -> "Figure":
        return Figure(float(self) - float(other), math.hypot(self.error, error_of(other)))

    def __rsub__(self, other: float) -> "Figure":
        return Figure(other) - self

    def __neg__(self) -> "Figure":
        return Figure(-float(self), self.error)

    def __mul__(self, other: float) -> "Figure":
        a, b = float(self), float(other)
        return Figure(a * b, math.hypot(self.error * b, a * error_of(other)))

    def __truediv__(self, other: float) -> "Figure":
        a, b = float(self), float(other)
        return Figure(a / b, math.hypot(self.error / b, a / b * error_of(other) / b))

    def __rtruediv__(self, other: float) -> "Figure":
        return Figure(other) / self

    __radd__, __rmul__ = __add__, __mul__


def error_of(value: float) -> float:
    """Error; 0 for a plain number."""
    return value.error if isinstance(value, Figure) else 0.0


def median(samples: Sequence[float]) -> Figure:
    """The median, and its error.

    Two errors are the distance to the farther end of a confidence interval of the median whose ends
    are samples (order statistics), so that it holds for any distribution: the few samples in which
    the host was interrupted, which can double a standard deviation, do not change it. Each end
    excludes the true median with a probability of at most 2.3 %, as two standard deviations of a
    normal distribution do: noise meets a target whose true value is at the limit in no more of the
    runs.

    For fewer than six samples there is no such interval. The error is then that of a normal
    distribution, 1.2533 * standard deviation / sqrt(n), times t / 2, where t is the quantile of
    Student's distribution with n - 1 degrees of freedom for the same probability. NaN of a single
    sample.
    """
    values = sorted(map(float, samples))
    middle, number = statistics.median(values), len(values)
    if number == 1:
        return Figure(middle, math.nan)
    if number < FEW:
        error = 1.2533 * float(np.std(values, ddof=1)) / math.sqrt(number)
        return Figure(middle, error * float(special.stdtrit(number - 1, TWO_ERRORS)) / 2)
    # The true median is below sample k, from 0, where at most k of all samples are below it.
    below = special.bdtr(np.arange(number // 2), number, 0.5)
    k = int(np.searchsorted(below, 1 - TWO_ERRORS, side="right")) - 1
    return Figure(middle, max(middle - values[k], values[-1 - k] - middle) / 2)


def ratio(times: Sequence[float], baseline: Sequence[float]) -> Figure:
    """Median of the ratios of the rounds."""
    return median([float(a) / float(b) for a, b in zip(times, baseline, strict=True)])


class Samples(dict[K, list[float]]):
    """Seconds of each method by round."""

    def median(self, method: K) -> Figure:
        return median(self[method])

    def medians(self, scale: float = 1.0) -> dict[K, Figure]:
        return {method: self.median(method) * scale for method in self}

    def ratio(self, method: K, baseline: K) -> Figure:
        """Time of a method relative to that of a baseline."""
        return ratio(self[method], self[baseline])

    def fastest(self, methods: Iterable[K]) -> K | None:
        """None without a method."""
        return min(methods, key=self.median, default=None)


def compare(
    methods: Mapping[K, Callable[[], float]], count: int, *, warmup: int = 0, seconds: float = 0.0
) -> Samples[K]:
    """`rounds` of methods that return seconds, after `warmup` rounds that do not count."""
    taken = rounds(methods, warmup + count, seconds=seconds)
    return Samples({method: samples[warmup:] for method, samples in taken.items()})


def rounds(
    methods: Mapping[K, Callable[[], T]], count: int, *, seconds: float = 0.0
) -> dict[K, list[T]]:
    """Samples of each method by round.

    Every round runs all methods, in a new random order: clocks and temperatures drift, and depend
    on what ran before.

    Args:
      methods: functions that return one sample.
      count: rounds.
      seconds: more rounds, until this time has passed.
    """
    rng, taken = random.Random(0), {name: list[T]() for name in methods}
    begin, done = time.perf_counter(), 0
    while done < count or (methods and time.perf_counter() - begin < seconds):
        for name in rng.sample([*methods], len(methods)):
            taken[name].append(methods[name]())
        done += 1
    return taken


def seconds_per_call(
    step: Callable[[Any], Any], state: Any, *, calls: int, repeats: int, warmup: int = 2
) -> tuple[Figure, Any]:
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
    return median(samples), state


class Call(NamedTuple):
    """Median seconds of a call on an idle device, from its start.

    Attributes:
      returns: host time, during which the host is blocked.
      done: latency, until the results are available.
    """

    returns: Figure
    done: Figure


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
    return Call(*map(median, zip(*samples, strict=True))), state


def chain_length(seconds: float) -> int:
    """Shortest chain that can be timed accurately, in calls of `seconds`."""
    return max(1, min(MAX_CALLS, int(CHAIN_SECONDS / seconds)))
