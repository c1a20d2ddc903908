"""Time between two points of a program, on the host and on the GPU.

A stamp is a small FFI call, ordered by its data dependencies: it records the host's clock when XLA
reaches it, and a CUDA event on XLA's stream. The interval between two stamps contains the handlers'
CPU time, XLA's overhead for calling them, and their GPU time, but no dispatch of the program by
JAX. (A stamp has no side effect in JAX's sense: a program with one is dispatched from Python, at a
multiple of the cost.)
"""

import ctypes
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from bench.harness import timing
from bench.harness.copy_baselines import library

REPEATS = 9
IDLE_REPEATS = 9


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
        """Of the GPU, or of the host without one."""
        return self.handlers if math.isnan(self.gpu) else self.gpu


def measure(step: Callable[[Any], Any], state: Any) -> tuple[Timed, Any]:
    """Times a compiled `state = step(state)` with stamps 0 and 1; returns the last state, too."""
    once, state = timing.single_call(step, state, repeats=1)
    calls = timing.chain_length(once.done)
    chains: list[tuple[float, float]] = []
    for warmup in (1, *[0] * (REPEATS - 1)):
        total, state = timing.seconds_per_call(step, state, calls=calls, repeats=1, warmup=warmup)
        chains.append((total, stamped()[1]))  # stamps of the last call
    totals, gpu = map(timing.median, zip(*chains, strict=True))
    on_host: list[float] = []
    idle, state = timing.single_call(
        step, state, repeats=IDLE_REPEATS, after=lambda: on_host.append(stamped()[0])
    )
    return Timed(totals, *idle, timing.median(on_host), gpu), state
