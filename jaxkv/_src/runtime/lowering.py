"""Work on the StableHLO module of a program once all of it has been lowered.

No lowering rule sees the whole program. But JAX reports to `jax.monitoring` how long the lowering
took, right after it and in the same thread, and before the module is compiled.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

import jax.monitoring

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
# A lowering that fails leaves its module behind.
_MAX_PENDING = 16


class _Pending(threading.local):
    def __init__(self) -> None:
        self.work: collections.deque[tuple[Any, Callable[[Any], None]]] = collections.deque(
            maxlen=_MAX_PENDING
        )


_pending = _Pending()
_listening = threading.Lock()


def when_lowered(module: Any, work: Callable[[Any], None]) -> None:
    """Calls `work(module)` when this thread has lowered the module; once, however often asked.

    If somebody clears JAX's event listeners, the work is never done: a module must be right
    without it.

    Args:
      module: the MLIR module that this thread is lowering.
      work: a function, by whose identity calls are told apart.
    """
    if not any(module is pending and work is same for pending, same in _pending.work):
        _pending.work.append((module, work))
    if _listening.acquire(blocking=False):  # never released: one listener serves the process
        jax.monitoring.register_event_duration_secs_listener(_on_event)


def _on_event(event: str, duration_secs: float, **_: Any) -> None:
    if event != _LOWERED:
        return
    # To lower one program may take others, which are lowered meanwhile.
    for entry in list(_pending.work):
        module, work = entry
        if _is_complete(module):
            _pending.work.remove(entry)
            with module.context:
                work(module)


def _is_complete(module: Any) -> bool:
    for function in module.body.operations:
        blocks = function.regions[0].blocks if function.operation.name == "func.func" else ()
        for block in blocks:
            count = len(block.operations)
            if not count or block.operations[count - 1].operation.name != "func.return":
                return False
    return True
