"""Buffers of the arrays that a program returns.

XLA writes a result that aliases a donated argument to the buffer of that argument. JAX pairs
donated arguments and results of equal type in order, not by data flow: of `return draft, target`,
with the arguments in the other order, each result takes the buffer of the other argument, and XLA
copies. An asynchronous copy would still use the first buffers, which are overwritten, or freed at
the end.

A plan of a copy is a result without such an argument. JAX pairs it with a donated argument of its
type, mostly the plan of a copy that the program waits for. The new plan may be computed before the
end of that copy, so XLA would compute it elsewhere and copy it: that argument is not donated.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Set

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxkv._src.runtime.donation import ALIAS, MEMORY_KIND, SHARDINGS, Arguments
from jaxkv._src.transfer.buffer_aliases import BufferAliases

_DONOR = "jax.buffer_donor"
_UPDATES = ("stablehlo.dynamic_update_slice", "stablehlo.scatter")  # of their first operand


class ReturnedBuffers:
    """Donated arguments of a module, and the results that have their buffers.

    Args:
      module: a lowered program. Its donated arguments are paired again with the results that are
        these arrays, as far as JAX has stated the pairs.
      aliases: of the module.
      plans: the values that define the plans of its starts.
    """

    def __init__(self, module: ir.Module, aliases: BufferAliases, plans: Set[ir.Value]) -> None:
        self._aliases, self._arguments = aliases, Arguments(module)
        self._attributes, self._types = self._arguments.attributes, self._arguments.types
        self._undonated: set[int] = set()
        self._pair()
        self._separate(plans)

    @functools.cached_property
    def _returned(self) -> list[ir.Value]:
        return self._aliases.returned()

    @functools.cached_property
    def _definitions(self) -> list[set[ir.Value]]:
        """Of each result, computed once: every copy queries all of them."""
        return [self._aliases.definitions(value) for value in self._returned]

    @functools.cached_property
    def _pairs(self) -> dict[int, int]:
        return self._results_of_arguments()

    def update(self) -> None:
        """Has to be called when an operation was removed from the module."""
        for name in ("_returned", "_definitions", "_pairs"):
            self.__dict__.pop(name, None)

    def keeps(self, result: int) -> bool:
        """Whether a result is in the buffer that its array had in the program."""
        if self._same_array(result) != [result]:
            return False
        source, argument = self._source(result, exact=False), self._pairs.get(result)
        if source is None or not self._is_donated(source):
            return argument is None
        return argument == source or (argument is None and source not in self._pairs.values())

    def is_undonated(self, value: ir.Value) -> bool:
        """Whether the value is an argument that its caller donated, but that is not donated now.

        The caller may have dropped it, so that its memory is free at the end of the program.
        """
        is_argument = self._aliases.is_argument(value)
        return is_argument and ir.BlockArgument(value).arg_number in self._undonated

    def _separate(self, plans: Set[ir.Value]) -> None:
        """Gives plans of new copies buffers of their own."""
        fresh = [
            result
            for result, definitions in enumerate(self._definitions)
            if plans & definitions and self._source(result, exact=False) is None
        ]
        changed = True
        while changed:  # XLA may pair the result with another donor
            pairs = self._results_of_arguments()
            paired = {pairs[result] for result in fresh if result in pairs}
            spare = set(filter(self._is_spare, paired))
            for argument in spare:
                self._attributes[argument].pop(ALIAS, None)
                self._attributes[argument].pop(_DONOR, None)
            self._undonated |= spare
            changed = bool(spare)
        if self._undonated:
            self._arguments.write()

    def _is_spare(self, argument: int) -> bool:
        """Whether the program neither writes an argument nor returns it.

        Donated or not, XLA then leaves it where it is: it is not an array that a copy in flight
        writes, and a copy that reads it may go on.
        """
        return not any(
            self._aliases.returns_from_program(use.owner.operation)
            or use.operand_number in _in_place(use.owner.operation).values()
            for value in self._aliases.reached(self._aliases.argument(argument))
            for use in value.uses
        )

    def _pair(self) -> None:
        """Gives each array that an argument becomes the buffer of that argument."""
        changed = False
        taken: set[int] = set()
        for exact in (True, False):  # arrays that are updated come after arrays that are not
            for result in range(len(self._returned)):
                source = self._source(result, exact=exact)
                if source is None or source in taken or ALIAS not in self._attributes[source]:
                    continue
                taken.add(source)
                changed |= self._exchange(source, result)
        if changed:
            self._arguments.write()

    def _exchange(self, source: int, result: int) -> bool:
        if (
            self._arguments.result(source) == result
            or self._types[source] != self._returned[result].type
        ):
            return False
        holders = [i for i in range(len(self._types)) if self._arguments.result(i) == result]
        if any(not self._may_exchange(source, holder) for holder in holders):
            return False
        moved = self._attributes[source].pop(ALIAS)
        self._attributes[source][ALIAS] = ir.IntegerAttr.get(moved.type, result)
        for holder in holders:
            self._attributes[holder][ALIAS] = moved
        return True

    def _may_exchange(self, one: int, other: int) -> bool:
        a, b = self._attributes[one], self._attributes[other]
        return self._types[one] == self._types[other] and all(
            a.get(name) == b.get(name) for name in (MEMORY_KIND, *SHARDINGS)
        )

    def _is_donated(self, argument: int) -> bool:
        return ALIAS in self._attributes[argument] or _DONOR in self._attributes[argument]

    def _results_of_arguments(self) -> dict[int, int]:
        """Result -> argument whose buffer it has; XLA pairs donors in order of their sizes."""
        pairs = {
            aliased: i
            for i in range(len(self._types))
            if (aliased := self._arguments.result(i)) is not None
        }
        donors: dict[ir.Type, collections.deque[int]] = collections.defaultdict(collections.deque)
        for i, attributes in enumerate(self._attributes):
            if _DONOR in attributes:
                donors[self._types[i]].append(i)
        for result, value in enumerate(self._returned):
            if result not in pairs and donors[value.type]:
                pairs[result] = donors[value.type].popleft()
        return pairs

    def _same_array(self, result: int) -> list[int]:
        """The results that are the same array, of which XLA has to copy all but one."""
        kind = self._returned[result].type
        return [
            i
            for i, value in enumerate(self._returned)
            if value.type == kind and self._definitions[result] & self._definitions[i]
        ]

    def _source(self, result: int, *, exact: bool) -> int | None:
        """The argument that a result is; with updates by the program unless `exact`."""
        sources: set[int] = set()
        seen: set[ir.Value] = set()
        pending = [self._returned[result]]
        while pending:
            for origin in self._aliases.origins(pending.pop()):
                if origin in seen:
                    continue
                seen.add(origin)
                if self._aliases.is_argument(origin):
                    sources.add(ir.BlockArgument(origin).arg_number)
                elif before := self._aliases.same_array(origin) or _before(origin, exact=exact):
                    pending += before
                else:
                    return None
        return sources.pop() if len(sources) == 1 else None


def _before(value: ir.Value, *, exact: bool) -> list[ir.Value]:
    """The operand whose buffer XLA gives to a result of an operation that writes in place."""
    if isinstance(value.owner, ir.Block):
        return []
    operation, i = ir.OpResult(value).owner.operation, ir.OpResult(value).result_number
    if operation.name in _UPDATES and not exact:
        return [operation.operands[i]]
    operand = _in_place(operation).get(i)
    return [] if operand is None else [operation.operands[operand]]


def _in_place(operation: ir.Operation) -> dict[int, int]:
    """Result -> operand whose buffer it has, of a custom call."""
    if operation.name != "stablehlo.custom_call":
        return {}
    if "output_operand_aliases" not in operation.attributes:
        return {}
    aliases = map(
        stablehlo.OutputOperandAlias, ir.ArrayAttr(operation.attributes["output_operand_aliases"])
    )
    # The indices are empty if the call has one result.
    return {next(iter(a.output_tuple_indices), 0): a.operand_index for a in aliases}
