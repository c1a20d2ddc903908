"""What XLA does not know of a started copy: that it uses its arrays until its waits.

Inside a program, what is marked is seen when it is lowered, so that a copy which nothing waits for
is waited for at its start. Between programs `keep_alive` holds the arrays of a copy until it ended.
"""

from __future__ import annotations

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
_mark_p.def_abstract_eval(lambda *results, watch, fulfilled: list(results))
mlir.register_lowering(_mark_p, _lower_mark, cacheable=False)


# Arrays of copies that have left their jit, until the copy has ended: who drops them without
# waiting must not free memory that is being written.
_in_flight: list[tuple[Any, list[Any]]] = []


def keep_alive(leaves: Any) -> None:
    """Holds the arrays of a transfer, the ticket (or None) first; tracers need no holding."""
    arrays = jax.tree.leaves(leaves)
    if not arrays or not all(isinstance(array, jax.Array) for array in arrays):
        return
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return
    _in_flight[:] = [entry for entry in _in_flight if not _ended(*entry)]
    ticket, *_ = leaves
    if ticket is not None:
        _in_flight.append((ticket, arrays))


def _ended(ticket: Any, arrays: list[jax.Array]) -> bool:
    if any(array.is_deleted() for array in arrays):  # donated, so a program waits for them
        return True
    if not ticket.is_ready():
        return False
    extension = _native.extension()
    if not extension.CUDA:
        return True
    shards = (shard.data for shard in ticket.addressable_shards)
    return all(extension.copy_ended(shard.unsafe_buffer_pointer()) for shard in shards)
