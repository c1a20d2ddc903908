"""Time between two points of a program, on the host and on the GPU.

A stamp is a small FFI call, ordered by its data dependencies: it records the host's clock when XLA
reaches it, and a CUDA event on XLA's stream. The interval between two stamps contains the handlers'
CPU time, XLA's overhead for calling them, and their GPU time, but no dispatch of the program by
JAX. (A stamp has no side effect in JAX's sense: a program with one is dispatched from Python, at a
multiple of the cost.)
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bench.harness import timing
from bench.harness.copy_baselines import library

REPEATS = 9


def stamp(state: Any, slot: int) -> Any:
    """Traces a timestamp at this point of the program, on the host and, if present, the GPU.

    Args:
      state: array, or pytree whose first array orders the stamp; donate it, or XLA copies it first.
      slot: 0 or 1.

    Returns:
      The state, unchanged.
    """
    library()
    (first, *others), tree = jax.tree.flatten(state)
    call = jax.ffi.ffi_call("bench_Stamp", jax.typeof(first), input_output_aliases={0: 0})
    return jax.tree.unflatten(tree, [call(first, slot=np.int64(slot)), *others])


def stamped() -> tuple[float, float]:
    """Seconds between the last stamps 0 and 1: host, and GPU (NaN without one). Wait before."""
    seconds = (ctypes.c_double * 2)()
    library().stamped(seconds)
    return seconds[0], seconds[1]


class Timed(NamedTuple):
    """Times of a program in seconds.

    Attributes:
      total: wall clock time per call in a chain of calls.
      returns: host time of a call on an idle device.
      done: latency of a call on an idle device.
      handlers: host time between the stamps of a call on an idle device.
      gpu: GPU time between the stamps of a call in a chain; NaN without a GPU.
    """

    total: timing.Figure
    returns: timing.Figure
    done: timing.Figure
    handlers: timing.Figure
    gpu: timing.Figure

    @property
    def device(self) -> timing.Figure:
        """Time of the GPU, or of the host without one."""
        return self.handlers if math.isnan(self.gpu) else self.gpu


class Sample(NamedTuple):
    """Seconds, as in `Timed`."""

    total: float
    returns: float
    done: float
    handlers: float
    gpu: float


def warmed_up(step: Callable[[Any], Any], state: Any) -> tuple[int, Any]:
    """The length of a chain of `state = step(state)`, and the state after a first one."""
    once, state = timing.single_call(step, state, repeats=1)
    calls = timing.chain_length(once.done)
    _, state = timing.seconds_per_call(step, state, calls=calls, repeats=1, warmup=0)
    return calls, state


def sample(step: Callable[[Any], Any], state: Any, *, calls: int) -> tuple[Sample, Any]:
    """One chain, then one call on an idle device; returns the last state, too."""
    total, state = timing.seconds_per_call(step, state, calls=calls, repeats=1, warmup=0)
    gpu = stamped()[1]  # of the last call
    idle, state = timing.single_call(step, state, repeats=1)
    seconds = map(float, (total, idle.returns, idle.done, stamped()[0], gpu))
    return Sample(*seconds), state


def timed(samples: Sequence[Sample]) -> Timed:
    return Timed(*map(timing.median, zip(*samples, strict=True)))


def measure(step: Callable[[Any], Any], state: Any) -> tuple[Timed, Any]:
    """Times a compiled `state = step(state)` with stamps 0 and 1; returns the last state, too."""
    calls, state = warmed_up(step, state)
    samples = []
    for _ in range(REPEATS):
        taken, state = sample(step, state, calls=calls)
        samples.append(taken)
    return timed(samples), state
