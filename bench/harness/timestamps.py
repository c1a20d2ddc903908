"""How long a program spends between two of its places, on the host and on the GPU.

A stamp is a small FFI call that the data orders like any other: it notes the host's clock when XLA
gets there, and records a CUDA event on XLA's stream. Between two of them lies what handlers take on
the CPU, with what XLA takes to call them, and what their work takes on the GPU: neither contains
the dispatch of the program by JAX. (A stamp has no side effect in JAX's sense: a program with one
is dispatched from Python, many times as slowly.)
"""

import ctypes
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from bench.harness import timing
from bench.harness.peers import library

REPEATS = 3
IDLE_REPEATS = 5


def stamp(array: Any, slot: int) -> Any:
    """Traces a call that notes when XLA gets here, on the host and, where there is one, the GPU.

    Args:
      array: what the stamp is ordered by, before and after; donate it, or XLA copies it first.
      slot: 0 or 1.

    Returns:
      The array as it was.
    """
    library()
    call = jax.ffi.ffi_call("bench_Stamp", jax.typeof(array), input_output_aliases={0: 0})
    return call(array, slot=np.int64(slot))


def stamped() -> tuple[float, float]:
    """Seconds between the last stamps 0 and 1: host, and GPU (NaN without one). Wait before."""
    seconds = (ctypes.c_double * 2)()
    library().stamped(seconds)
    return seconds[0], seconds[1]


class Timed(NamedTuple):
    """Seconds of a program.

    Attributes:
      total: wall clock of one call in a chain of calls.
      returns: of a call on an idle device until it is back in Python.
      done: of a call on an idle device until its results are there.
      handlers: of the CPU between the stamps of a call on an idle device.
      gpu: of the GPU between the stamps of a call in a chain; NaN without one.
    """

    total: float
    returns: float
    done: float
    handlers: float
    gpu: float


def measure(step: Callable[[Any], Any], state: Any) -> tuple[Timed, Any]:
    """Times a compiled program with stamps 0 and 1, `state = step(state)`; the last state, too."""
    once, state = timing.single_call(step, state, repeats=1)
    calls = timing.chain_length(once.done)
    chains: list[tuple[float, float]] = []
    for warmup in (1, *[0] * (REPEATS - 1)):
        total, state = timing.seconds_per_call(step, state, calls=calls, repeats=1, warmup=warmup)
        chains.append((total, stamped()[1]))  # stamps of the last call
    total, gpu = map(statistics.median, zip(*chains, strict=True))
    on_host: list[float] = []
    idle, state = timing.single_call(
        step, state, repeats=IDLE_REPEATS, after=lambda: on_host.append(stamped()[0])
    )
    return Timed(total, *idle, statistics.median(on_host), gpu), state
