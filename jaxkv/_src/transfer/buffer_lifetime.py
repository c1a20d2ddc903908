"""Lifetime analysis of the buffers of asynchronous copies in a lowered program.

XLA does not know that an in-flight copy still reads and writes its buffers. A buffer is safe if it
stays live until a wait for that copy, or is returned from the program together with the handle.
The analysis runs on the complete StableHLO module, in which calls, branches, loops and barriers
are explicit. A start whose buffers are all safe becomes asynchronous, and a precautionary wait at
a pytree boundary is removed if it is redundant. If the program itself also waits for the entire
copy, whichever path it takes, a start by the copy engine may leave segments for these waits to
enqueue: their buffers are live until then. The initial lowering is the safe form: a program that
is not analysed is correct, only slower.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkv._src.runtime.custom_calls import (
    config_of,
    configure,
    custom_calls,
    integer,
    integers,
    target_of,
)
from jaxkv._src.runtime.lowering import when_lowered
from jaxkv._src.transfer.block_copy import is_to_dense, num_buffers_of
from jaxkv._src.transfer.buffer_aliases import BufferAliases, on_every_path
from jaxkv._src.transfer.in_flight import donation_error
from jaxkv._src.transfer.returned_buffers import ReturnedBuffers
from jaxkv._src.transfer.sharded_arguments import (
    check_unpartitioned,
    is_in_shard_map,
    mark_partitioned,
)

WAIT_TARGET = "jaxkv_wait_copy"
# A wait that enqueues segments of its copy; not in CUDA graphs, whose replays call no handler.
ENQUEUING_WAIT_TARGET = "jaxkv_wait_copy_dma"
MOVE_TICKET_TARGET = "jaxkv_move_ticket"
DMA_START_TARGET = "jaxkv_start_copy_dma"
# Operands before the buffers: the plan, or the ids, which are read before the start returns.
_NUM_ID_OPERANDS: dict[str | None, int] = {"jaxkv_start_copy": 1, DMA_START_TARGET: 2}


def analysed(results: Iterable[jax.Array], operation: str) -> list[jax.Array]:
    """The results of a start or a wait; their program is analysed once it is lowered."""
    return list(_analysed_p.bind(*results, name=operation, in_shard_map=is_in_shard_map()))


def _lower_analysed(
    context: mlir.LoweringRuleContext, *results: ir.Value, name: str, in_shard_map: bool
) -> list[ir.Value]:
    module, operation = context.module_context.module, ir.OpResult(results[0]).owner.operation
    if "has_side_effect" in operation.attributes:
        # A side effect for XLA only, which must neither merge two starts nor remove an unused
        # wait. JAX would dispatch a program with effects from Python, many times slower.
        operation.attributes["has_side_effect"] = ir.BoolAttr.get(True)
    # Other programs call an exported one, and drop arrays that it returns: it stays as it is.
    if not context.module_context.lowering_parameters.for_export:
        if not in_shard_map:
            mark_partitioned(module, operation, name)
        when_lowered(module, _analyse)
    return list(results)


_analysed_p = Primitive("jaxkv_in_flight")
_analysed_p.multiple_results = True
_analysed_p.def_impl(lambda *results, **_: list(results))  # no lowering outside jit
_analysed_p.def_abstract_eval(lambda *results, **_: list(results))
mlir.register_lowering(_analysed_p, _lower_analysed, cacheable=False)


def _analyse(module: ir.Module) -> None:
    program = _Program(module)
    without_donation = jax.config.jax_debug_nans  # type: ignore[attr-defined]
    if without_donation and any(map(program.is_of_handle_argument, program.waits)):
        raise donation_error()
    _decide(program)
    if without_donation and any(map(program.leaves_in_flight, program.starts)):
        raise donation_error()
    check_unpartitioned(module)  # without the redundant waits


def _decide(program: _Program) -> None:
    """Removes redundant waits, makes safe starts asynchronous, and defers parts of long copies."""
    for wait in reversed(program.waits.copy()):
        if _is_removable(wait) and program.is_dead(wait):
            program.remove(wait)
    redundant = [
        wait for wait in program.waits if _is_removable(wait) and program.is_redundant(wait)
    ]
    for wait in program.waits:
        if not _is_removable(wait) and not program.retains_operands(wait):
            configure(wait, segment=config_of(wait)["last"])
    protected = [start for start in program.starts if program.is_protected(start)]
    for wait in redundant:
        program.remove(wait)
    deferred = [start for start in protected if program.is_continued(start)]
    waits = {wait for start in deferred for wait in program.waits_for(start)}
    for start in protected:
        configure(start, joined=ir.BoolAttr.get(False))
    for start in deferred:
        configure(start, deferred=ir.BoolAttr.get(True))
    for wait in waits:
        wait.attributes["call_target_name"] = ir.StringAttr.get(ENQUEUING_WAIT_TARGET)


class _Program:
    """A module with its starts and waits."""

    def __init__(self, module: ir.Module) -> None:
        calls = custom_calls(module)
        self.starts = [call for call in calls if target_of(call) in _NUM_ID_OPERANDS]
        self.waits = [call for call in calls if target_of(call) == WAIT_TARGET]
        self._retained: dict[tuple[ir.Value, int, frozenset[ir.Value] | None], bool] = {}
        self.aliases = BufferAliases(module, _in_place_results)
        self._results = ReturnedBuffers(module, self.aliases, self._plans())

    def _plans(self) -> set[ir.Value]:
        plans = [start.operands[0] for start in self.starts if _has_plan(start)]
        return {origin for plan in plans for origin in self.aliases.definitions(plan)}

    def remove(self, wait: ir.Operation) -> None:
        operands = list(wait.operands)
        first_array = integer(config_of(wait)["first_array"])
        arrays = operands[len(operands) - (len(wait.results) - first_array) :]
        for result, operand in zip(wait.results, operands[:first_array] + arrays, strict=True):
            result.replace_all_uses_with(operand)
        self.waits.remove(wait)
        wait.erase()
        self._results.update()

    def is_of_handle_argument(self, wait: ir.Operation) -> bool:
        """Whether another program may have started the copy of a wait."""
        seen, pending = set[ir.Value](), [wait.operands[0]]
        while pending:
            new = self.aliases.definitions(pending.pop()) - seen
            if any(map(self.aliases.is_argument, new)):
                return True
            seen |= new
            owners = [v.owner.operation for v in new if not isinstance(v.owner, ir.Block)]
            pending += [
                o.operands[0] for o in owners if _returns_ticket(o) or target_of(o) == WAIT_TARGET
            ]
        return False

    def leaves_in_flight(self, start: ir.Operation) -> bool:
        """Whether the program returns the ticket of a copy, for waits in another program."""
        return not ir.BoolAttr(config_of(start)["joined"]).value and any(
            self.aliases.returns_from_program(use.owner.operation)
            for ticket in self._tickets(start.results[0])
            for use in ticket.uses
        )

    def is_dead(self, wait: ir.Operation) -> bool:
        """Whether the results of a wait are unused and its copy was started in this program.

        `is_protected` of the start then covers the buffers.
        """
        if any(map(_is_used, wait.results)):
            return False
        arrays = list(wait.operands)[-len(integers(config_of(wait)["boundary"])) :]
        origins = (origin for array in arrays for origin in self.aliases.origins(array))
        return not any(map(self.aliases.is_argument, origins))

    def is_protected(self, start: ir.Operation) -> bool:
        """Whether all buffers of a start are live until the copy is complete."""
        num_ids = _NUM_ID_OPERANDS[target_of(start)]
        operands, written = list(start.operands), list(start.results)[1:]
        to_dense = is_to_dense(integers(config_of(start)["copy"]))
        read = operands[num_ids : -len(written)] if to_dense else operands[num_ids + len(written) :]
        per_segment = integer(config_of(start)["segment_buffers"])
        num_buffers = num_buffers_of(integers(config_of(start)["copy"]))
        last = _last_segment(start)
        segments = [(operands[0], last)] if _has_plan(start) else []
        for side in (read, written):
            of_all = len(side) < num_buffers  # a pool, or stacked arrays
            segments += [(v, last if of_all else i // per_segment) for i, v in enumerate(side)]
        tickets = self._tickets(start.results[0])
        return all(
            self._is_live(value, segment, tickets, removable=True)
            if value in written
            else self._is_retained(value, segment, tickets)
            for value, segment in segments
        )

    def is_continued(self, start: ir.Operation) -> bool:
        """Whether the waits for a copy enqueue all of it if its start does not.

        On every path the program has to wait for the last segment, after which XLA may free the
        buffers, and each wait for the copy has to be known. A copy that its start enqueues anyway
        does not count.
        """
        last = _last_segment(start)
        if target_of(start) != DMA_START_TARGET:
            return False
        if integer(config_of(start)["segments_ahead"]) > last:
            return False
        tickets = self._tickets(start.results[0])
        if not all(self._is_known(use) for ticket in tickets for use in ticket.uses):
            return False

        def is_waited_for(use: ir.OpOperand) -> bool:
            call = use.owner.operation
            if _is_wait(use) and integer(config_of(call)["segment"]) >= last:
                return True
            following = self._next_tickets(use)
            return bool(following) and not any(map(lost.__contains__, following))

        lost: set[ir.Value] = set()
        size = -1
        while len(lost) != size:  # greatest fixed point: loops end
            size = len(lost)
            lost |= {value for value in tickets - lost if not on_every_path(value, is_waited_for)}
        return start.results[0] not in lost

    def _is_known(self, use: ir.OpOperand) -> bool:
        """Whether the analysis follows a ticket through a use, or need not."""
        operation = use.owner.operation
        if target_of(operation) == WAIT_TARGET or self.aliases.returns_from_program(operation):
            return True
        # The condition of a loop returns no ticket.
        return operation.name == "stablehlo.return" or bool(self._next_tickets(use))

    def waits_for(self, start: ir.Operation) -> list[ir.Operation]:
        tickets = self._tickets(start.results[0])
        return [wait for wait in self.waits if wait.operands[0] in tickets]

    def is_redundant(self, wait: ir.Operation) -> bool:
        """Whether the buffers of a removable wait are safe without it."""
        arrays = list(wait.results)[integer(config_of(wait)["first_array"]) :]
        segments = integers(config_of(wait)["boundary"])
        return self.retains_operands(wait) and all(
            self._is_live(array, segment, removable=True)
            for array, segment in zip(arrays, segments, strict=True)
        )

    def retains_operands(self, wait: ir.Operation) -> bool:
        """Whether the `retained` operands of a wait are live until the copy is complete."""
        config = config_of(wait)
        last, retained = integer(config["last"]), integer(config["retained"])
        return all(
            self._is_retained(value, last) for value in list(wait.operands)[1 : 1 + retained]
        )

    def _is_retained(
        self, value: ir.Value, segment: int, tickets: set[ir.Value] | None = None
    ) -> bool:
        """Whether a buffer that a wait does not return is live, or an argument not donated."""
        return all(
            self._origin_is_retained(origin, segment, tickets)
            for origin in self.aliases.origins(value)
        )

    def _origin_is_retained(
        self, origin: ir.Value, segment: int, tickets: set[ir.Value] | None
    ) -> bool:
        key = origin, segment, None if tickets is None else frozenset(tickets)
        if key not in self._retained:  # all waits for a copy query the same buffers
            held = self.aliases.is_held_by_caller(origin) and not self._results.is_undonated(origin)
            self._retained[key] = held or self._is_live(origin, segment, tickets)
        return self._retained[key]

    def _is_live(
        self,
        value: ir.Value,
        segment: int,
        tickets: set[ir.Value] | None = None,
        *,
        removable: bool = False,
    ) -> bool:
        """Whether the buffer of a value is live until a segment is complete.

        Args:
          value: an SSA value.
          segment: the segment of the copy.
          tickets: if given, the tickets of the copy; other waits do not count.
          removable: whether removable waits count; their own check covers the returned arrays.
        """

        def ends_at(use: ir.OpOperand) -> bool:
            operation = use.owner.operation
            if self.aliases.returns_from_program(operation):
                return self._results.keeps(use.operand_number)
            if target_of(operation) != WAIT_TARGET:
                return False
            if _is_removable(operation) and not removable:
                return False
            if tickets and operation.operands[0] not in tickets:
                return False
            return integer(config_of(operation)["segment"]) >= segment

        def is_safe(use: ir.OpOperand) -> bool:
            aliases = self.aliases.after(use)
            return ends_at(use) or (bool(aliases) and not any(map(lost.__contains__, aliases)))

        values = self.aliases.reached(value, until=ends_at)
        lost: set[ir.Value] = set()
        size = -1
        while len(lost) != size:  # greatest fixed point: a loop carry may alias itself
            size = len(lost)
            candidates = [value for value in reversed(values) if value not in lost]
            lost |= {value for value in candidates if not on_every_path(value, is_safe)}
        return value not in lost

    def _tickets(self, ticket: ir.Value) -> set[ir.Value]:
        """The tickets of a copy: that of its start and those of its waits."""
        tickets, pending = set[ir.Value](), [ticket]
        while pending:
            for value in set(self.aliases.reached(pending.pop())) - tickets:
                tickets.add(value)
                pending += [t for use in value.uses for t in self._next_tickets(use)]
        return tickets

    def _next_tickets(self, use: ir.OpOperand) -> list[ir.Value]:
        """The tickets that a use of a ticket returns, of the same copy."""
        call = use.owner.operation
        tickets: list[ir.Value] = list(call.results)
        if _is_wait(use):
            return tickets[: integer(config_of(call)["first_array"])]
        return tickets if _returns_ticket(call) else self.aliases.after(use)


def _returns_ticket(operation: ir.Operation) -> bool:
    """Whether the result of an operation on a ticket identifies the same copy, in any buffer."""
    is_moved = target_of(operation) == MOVE_TICKET_TARGET
    return is_moved or operation.name == "sdy.sharding_constraint"


def _is_wait(use: ir.OpOperand) -> bool:
    """Whether a use of a ticket is a wait for its copy."""
    return use.operand_number == 0 and target_of(use.owner.operation) == WAIT_TARGET


def _has_plan(start: ir.Operation) -> bool:
    return _NUM_ID_OPERANDS[target_of(start)] == 1


def _last_segment(start: ir.Operation) -> int:
    config = config_of(start)
    return num_buffers_of(integers(config["copy"])) // integer(config["segment_buffers"]) - 1


def _in_place_results(wait: ir.Operation) -> int:
    """Number of results of a custom call that alias its last operands."""
    if target_of(wait) != WAIT_TARGET:
        return 0
    return len(wait.results) - integer(config_of(wait)["first_array"])


def _is_used(value: ir.Value) -> bool:
    """Whether the value has a use other than a dead barrier."""
    return any(
        use.owner.operation.name != "stablehlo.optimization_barrier"
        or _is_used(use.owner.operation.results[use.operand_number])
        for use in value.uses
    )


def _is_removable(wait: ir.Operation) -> bool:
    return bool(integers(config_of(wait)["boundary"]))
