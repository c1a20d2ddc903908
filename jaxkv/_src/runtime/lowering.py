"""Callbacks on the complete StableHLO module of a program.

No lowering rule sees the entire program. But JAX reports the duration of the lowering to
`jax.monitoring` directly after it, in the same thread, before the module is compiled.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TypeAlias

import jax.monitoring
from jax.extend.mlir import ir

from jaxkv._src.runtime.donation import check_memory_kinds_of_aliases, match_memory_kinds

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_PING = "/jaxkv/listening"
# Bounded, since a failed lowering leaves its entry in the queue.
_MAX_PENDING = 16

_Callback: TypeAlias = Callable[[ir.Module], None]


class _Pending(threading.local):
    def __init__(self) -> None:
        self.entries: collections.deque[tuple[ir.Module, _Callback]]
        self.entries = collections.deque(maxlen=_MAX_PENDING)
        self.heard = False  # the last ping


_pending = _Pending()


def when_lowered(module: ir.Module, callback: _Callback) -> None:
    """Calls `callback(module)` once after this thread has lowered the module.

    Repeated requests are ignored. If JAX's event listeners are cleared between this request and the
    end of the lowering, `callback` is never called for the module.

    Args:
      module: the MLIR module that this thread is lowering.
      callback: a function; requests are compared by its identity.
    """
    if any(module is pending and callback is same for pending, same in _pending.entries):
        return
    _listen()
    _pending.entries.append((module, callback))


def _listen() -> None:
    """Registers the listener unless it is registered: JAX's listeners may have been cleared."""
    _pending.heard = False
    jax.monitoring.record_event_duration_secs(_PING, 0.0)
    if not _pending.heard:  # two threads may both register it: the second call finds no entries
        jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **_: str | int) -> None:
    if event == _PING:
        _pending.heard = True
    if event != _LOWERED:
        return
    # The lowering of a program may lower others, which complete first.
    complete = [entry for entry in _pending.entries if _is_complete(entry[0])]
    # Before any callback: one that raises must not leave the others to an unrelated lowering.
    for entry in complete:
        _pending.entries.remove(entry)
    modules = {id(module): module for module, _ in complete}.values()
    for module in modules:
        with module.context:
            match_memory_kinds(module)  # the callbacks read the aliases
    for module, callback in complete:
        with module.context:
            callback(module)
    for module in modules:  # errors of the callbacks are more specific
        with module.context:
            check_memory_kinds_of_aliases(module)


def _is_complete(module: ir.Module) -> bool:
    for function in module.body.operations:
        blocks = function.regions[0].blocks if function.operation.name == "func.func" else ()
        for block in blocks:
            count = len(block.operations)
            if not count or block.operations[count - 1].operation.name != "func.return":
                return False
    return True
