"""What XLA does not know of a started copy: that it uses its arrays until its waits.

Inside a program, what is marked is seen when it is lowered, so that a copy which nothing waits for
is waited for at its start. Between programs `keep_alive` holds the arrays of a copy until it ended.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxkv import _native


class Watch:
    """The promises of a start: what its program must wait for, found out while it is lowered.

    A start that is waited for completely runs beside the program; any other is lowered as one that
    all that follows waits for. The program is known to its end only when it is lowered, as JAX then
    drops operations that nothing uses. A side effect would keep them; but with an effect a program
    is dispatched from Python, many times as slowly.
    """

    def __init__(self, promises: Iterable[Any]) -> None:
        self.promises = frozenset(promises)
        self.start: Any = None  # the MLIR operation
        self.kept: frozenset[Any] = frozenset()

    def started(self, operation: Any) -> None:
        self.start, self.kept = operation, frozenset()

    def keep(self, promises: frozenset[Any]) -> None:
        self.kept |= promises
        if self.kept >= self.promises and self.start is not None:
            name = "mhlo.backend_config"
            config = {entry.name: entry.attr for entry in self.start.attributes[name]}
            config["joined"] = mlir.ir.BoolAttr.get(False)
            self.start.attributes[name] = mlir.ir.DictAttr.get(config)


def mark(results: Sequence[Any], watch: Watch | None, fulfilled: frozenset[Any] | None) -> Any:
    """The results of a start (`fulfilled` is None) or a wait, seen when they are lowered."""
    return list(_mark_p.bind(*results, watch=watch, fulfilled=fulfilled))


def _lower_mark(
    context: Any, *results: Any, watch: Watch | None, fulfilled: frozenset[Any] | None
) -> list[Any]:
    operation = results[0].owner
    if watch is not None and fulfilled is None:
        watch.started(operation)
    elif watch is not None and fulfilled is not None:
        watch.keep(fulfilled)
    if "has_side_effect" in operation.attributes:
        # Not for JAX, only for XLA: two starts are two, and a wait stays although nothing reads it.
        operation.attributes["has_side_effect"] = mlir.ir.BoolAttr.get(True)
    return list(results)


_mark_p = Primitive("jaxkv_mark")
_mark_p.multiple_results = True
_mark_p.def_impl(lambda *results, watch, fulfilled: list(results))  # outside jit nothing is lowered
_mark_p.def_abstract_eval(lambda *results, watch, fulfilled: list(results))
mlir.register_lowering(_mark_p, _lower_mark, cacheable=False)


@dataclasses.dataclass(eq=False)
class _InFlight:
    """Arrays of a copy that has left its jit; who drops them must not free them while it runs."""

    ticket: Any
    arrays: list[Any]
    started: list[int] | None = None  # what must have ended, known once the start has run

    def ended(self) -> bool:
        # Of those that were donated, the program that got them takes care.
        self.arrays = [array for array in self.arrays if not array.is_deleted()]
        if not self.arrays or not _native.extension().CUDA:
            return all(array.is_ready() for array in self.arrays)
        if self.started is None:
            if not all(array.is_ready() for array in self.arrays):
                return False
            self.started = _native.extension().started_copies()
        return _native.extension().copies_ended(self.started)


# Threads take entries out and put them back, one at a time, so that none is lost. There is no lock:
# letting go of an array may run anything, this module too.
_in_flight: collections.deque[_InFlight] = collections.deque()


def keep_alive(leaves: Any, *, instead_of: Any = None) -> None:
    """Holds the arrays of a transfer, the ticket (or None) first; tracers need no holding.

    Lets go of copies that have ended, and of those that are held with the ticket `instead_of`.
    """
    arrays = jax.tree.leaves(leaves)
    if not all(isinstance(array, jax.Array) for array in arrays):
        return
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return
    _let_go(instead_of)
    if arrays and leaves[0] is not None:
        _in_flight.append(_InFlight(leaves[0], arrays))


def _let_go(ticket: Any) -> None:
    for _ in range(len(_in_flight)):
        try:
            entry = _in_flight.popleft()
        except IndexError:  # another thread looks at it
            return
        if ticket is None or entry.ticket is not ticket:
            _put_back_unless_ended(entry)


def _put_back_unless_ended(entry: _InFlight) -> None:
    ended = False
    try:
        ended = entry.ended()
    except RuntimeError:  # another thread donated an array after we looked
        pass
    finally:
        if not ended:
            _in_flight.append(entry)


def check_same_trace(before: Any, after: Any) -> None:
    """Raises a RuntimeError unless a transfer may hold `after` where it held `before`."""
    if isinstance(after, jax.core.Tracer) and _trace_of(before) is not _trace_of(after):
        raise RuntimeError(
            "the transfer belongs to another trace: it was started outside of the function (of a "
            "jit, checkpoint or loop) that waits for it; make it an argument and a result of a jit "
            "or checkpoint, and wait before a loop"
        )


def _trace_of(array: Any) -> Any:
    return array._trace if isinstance(array, jax.core.Tracer) else None
