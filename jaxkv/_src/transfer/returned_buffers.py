"""Buffers of the arrays that a program returns.

XLA writes a result that aliases a donated argument to the buffer of that argument. JAX pairs
donated arguments and results of equal type in order, not by data flow: of `return draft, target`,
with the arguments in the other order, each result takes the buffer of the other argument, and XLA
copies. An asynchronous copy would still use the first buffers, which are overwritten, or freed at
the end.
"""

from __future__ import annotations

import collections

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxkv._src.transfer.buffer_aliases import BufferAliases

_ALIAS, _DONOR = "tf.aliasing_output", "jax.buffer_donor"
_KINDS = ("mhlo.memory_kind", "sdy.sharding", "mhlo.sharding")
_UPDATES = ("stablehlo.dynamic_update_slice", "stablehlo.scatter")  # of their first operand


class ReturnedBuffers:
    """Donated arguments of a module, and the results that have their buffers.

    Args:
      aliases: of the module. Its donated arguments are paired anew with the results that are these
        arrays, as far as JAX has stated the pairs.
    """

    def __init__(self, aliases: BufferAliases) -> None:
        self._aliases = aliases
        self._returned = aliases.returned()
        self._attributes = aliases.attributes_of_arguments()
        self._types = [argument.type for argument in aliases.arguments()]
        self._pair()

    def keeps(self, result: int) -> bool:
        """Whether a result is in the buffer that its array had in the program."""
        if self._same_array(result) != [result]:
            return False
        aliased = self._results_of_arguments()
        source, argument = self._source(result, exact=False), aliased.get(result)
        if source is None or not self._is_donated(source):
            return argument is None
        return argument == source or (argument is None and source not in aliased.values())

    def _pair(self) -> None:
        """Gives each array that an argument becomes the buffer of that argument."""
        changed = False
        taken: set[int] = set()
        for exact in (True, False):  # arrays that are updated come after arrays that are not
            for result in range(len(self._returned)):
                source = self._source(result, exact=exact)
                if source is None or source in taken or _ALIAS not in self._attributes[source]:
                    continue
                taken.add(source)
                changed |= self._exchange(source, result)
        if changed:
            self._aliases.set_attributes_of_arguments(self._attributes)

    def _exchange(self, source: int, result: int) -> bool:
        before = _alias_of(self._attributes[source])
        if before == result or self._types[source] != self._returned[result].type:
            return False
        holders = [i for i, a in enumerate(self._attributes) if _alias_of(a) == result]
        if any(not self._may_exchange(source, holder) for holder in holders):
            return False
        moved = self._attributes[source].pop(_ALIAS)
        self._attributes[source][_ALIAS] = ir.IntegerAttr.get(moved.type, result)
        for holder in holders:
            self._attributes[holder][_ALIAS] = moved
        return True

    def _may_exchange(self, one: int, other: int) -> bool:
        a, b = self._attributes[one], self._attributes[other]
        return self._types[one] == self._types[other] and all(
            a.get(kind) == b.get(kind) for kind in _KINDS
        )

    def _is_donated(self, argument: int) -> bool:
        return _ALIAS in self._attributes[argument] or _DONOR in self._attributes[argument]

    def _results_of_arguments(self) -> dict[int, int]:
        """Result -> argument whose buffer it has; XLA pairs donors in order of their sizes."""
        pairs = {
            alias: i for i, a in enumerate(self._attributes) if (alias := _alias_of(a)) is not None
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
        origins = set(self._aliases.origins(self._returned[result]))
        return [
            i
            for i, value in enumerate(self._returned)
            if value.type == self._returned[result].type
            and origins & set(self._aliases.origins(value))
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
                elif before := self._aliases.carried(origin) or _before(origin, exact=exact):
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
    if operation.name != "stablehlo.custom_call":
        return []
    if "output_operand_aliases" not in operation.attributes:
        return []
    for entry in ir.ArrayAttr(operation.attributes["output_operand_aliases"]):
        alias = stablehlo.OutputOperandAlias(entry)
        if list(alias.output_tuple_indices) in ([i], [] if i == 0 else [i]):
            return [operation.operands[alias.operand_index]]
    return []


def _alias_of(attributes: dict[str, ir.Attribute]) -> int | None:
    return int(ir.IntegerAttr(attributes[_ALIAS]).value) if _ALIAS in attributes else None
