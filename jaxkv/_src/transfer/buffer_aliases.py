"""Alias analysis of a StableHLO module, through calls, branches, loops and barriers."""

from __future__ import annotations

import collections
from collections.abc import Callable

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy

from jaxkv._src.runtime.custom_calls import target_of

_BRANCHES = ("stablehlo.case", "stablehlo.if")
_LOOP = "stablehlo.while"
_SHARDING = "sdy.sharding"
# Custom calls of JAX whose result aliases the operand.
_PASS_THROUGH = (
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "annotate_device_placement",
)


class BufferAliases:
    """The aliases in a module with the entry function `main`.

    Args:
      module: the module.
      in_place_results: number of results of a custom call that alias its last operands, in order.
    """

    def __init__(self, module: ir.Module, in_place_results: Callable[[ir.Operation], int]) -> None:
        self._in_place_results = in_place_results
        self._functions: dict[str, ir.Operation] = {}
        self._calls: dict[str, list[ir.Operation]] = collections.defaultdict(list)
        module.operation.walk(self._register)

    def _register(self, operation: ir.Operation) -> ir.WalkResult:
        operation = operation.operation
        if operation.name == "func.func":
            self._functions[_symbol(operation)] = operation
        elif operation.name == "func.call":
            self._calls[_callee(operation)].append(operation)
        return ir.WalkResult.ADVANCE

    def returns_from_program(self, operation: ir.Operation) -> bool:
        return operation.name == "func.return" and _symbol(_parent(operation)) == "main"

    def returned(self) -> list[ir.Value]:
        """The results of the program."""
        return list(_terminator(self._functions["main"]).operands)

    def argument(self, number: int) -> ir.Value:
        """An argument of the program."""
        return _arguments(self._functions["main"])[number]

    def is_argument(self, value: ir.Value) -> bool:
        """Whether the value is an argument of the program."""
        return _is_block_argument(value) and _parent_of(value) == self._functions["main"]

    def is_held_by_caller(self, value: ir.Value) -> bool:
        """Whether the value is an argument of the program that is not donated."""
        if not self.is_argument(value):
            return False
        donation = self._attributes(value)
        return not ("tf.aliasing_output" in donation or "jax.buffer_donor" in donation)

    def memory_kind(self, value: ir.Value) -> str | None:
        """The memory kind of an argument of the program; None for other values."""
        if not self.is_argument(value) or "mhlo.memory_kind" not in self._attributes(value):
            return None
        return ir.StringAttr(self._attributes(value)["mhlo.memory_kind"]).value

    def sharding(self, argument: ir.Value) -> str | None:
        """The sharding of an argument of the program, as text; None if it has none."""
        for name in (_SHARDING, "mhlo.sharding"):
            if name in self._attributes(argument):
                return str(self._attributes(argument)[name])
        return None

    def _attributes(self, argument: ir.Value) -> ir.DictAttr:
        attributes = ir.ArrayAttr(self._functions["main"].attributes["arg_attrs"])
        return ir.DictAttr(attributes[ir.BlockArgument(argument).arg_number])

    def reached(
        self, value: ir.Value, until: Callable[[ir.OpOperand], bool] = lambda use: False
    ) -> list[ir.Value]:
        """The values that may later alias `value`, starting with `value`.

        Args:
          value: an SSA value.
          until: predicate of a use; a value with such a use on every path is not followed.
        """
        reached = {value: None}
        pending = collections.deque([value])
        while pending:
            value = pending.popleft()
            if on_every_path(value, until):
                continue
            for alias in (alias for use in value.uses for alias in self.after(use)):
                if alias not in reached:
                    reached[alias] = None
                    pending.append(alias)
        return list(reached)

    def after(self, use: ir.OpOperand) -> list[ir.Value]:
        """The values that alias an operand after its use, one for each path."""
        operation, i = use.owner.operation, use.operand_number
        parent = _parent(operation)
        match operation.name:
            case "stablehlo.optimization_barrier":
                return [operation.results[i]]
            case "stablehlo.custom_call":
                return self._result_in_place(operation, i)
            case "func.call":
                return [_arguments(self._functions[_callee(operation)])[i]]
            case "func.return":
                return [call.results[i] for call in self._calls[_symbol(parent)]]
            case "sdy.manual_computation":
                return [_arguments(operation)[i]]
            case "sdy.sharding_constraint" if self._keeps_sharding(operation):
                return [operation.results[0]]
            case "stablehlo.while":  # may run zero iterations
                return [operation.results[i], _arguments(operation, region=1)[i]]
            case "stablehlo.return" if parent.name == _LOOP:
                in_body = operation.block.region == parent.regions[1]
                return [parent.results[i], _arguments(parent, region=1)[i]] if in_body else []
            case "stablehlo.return" if parent.name in _BRANCHES:
                return [parent.results[i]]
            case "sdy.return":
                return [parent.results[i]]
        return []

    def _result_in_place(self, call: ir.Operation, i: int) -> list[ir.Value]:
        if target_of(call) in _PASS_THROUGH:
            return list(call.results)
        result = i - len(call.operands) + len(call.results)
        return (
            [call.results[result]] if i >= len(call.operands) - self._in_place_results(call) else []
        )

    def origins(self, value: ir.Value) -> list[ir.Value]:
        """The values that define the buffer of a value, one for each path."""
        origins, seen, pending = [], {value}, [value]
        while pending:
            value = pending.pop()
            is_argument = _is_block_argument(value)
            before = self._before_argument(value) if is_argument else self._before(value)
            if not before:
                origins.append(value)
            pending += [earlier for earlier in before if earlier not in seen]
            seen.update(before)
        return origins

    def same_array(self, value: ir.Value) -> list[ir.Value]:
        """Values that are the array of an origin: of a loop carry, or with another annotation."""
        if _is_block_argument(value):
            operation, i = _parent_of(value), ir.BlockArgument(value).arg_number
        else:
            operation, i = ir.OpResult(value).owner.operation, ir.OpResult(value).result_number
        match operation.name:
            case "stablehlo.while":
                return [operation.operands[i], _terminator(operation, region=1).operands[i]]
            case "stablehlo.custom_call" if target_of(operation) in _PASS_THROUGH:
                return [operation.operands[0]]
        return []

    def definitions(self, value: ir.Value) -> set[ir.Value]:
        """The `origins` of a value, and those of the same array before loops and annotations."""
        found = set[ir.Value]()
        pending = [value]
        while pending:
            new = set(self.origins(pending.pop())) - found
            found |= new
            pending += [earlier for origin in new for earlier in self.same_array(origin)]
        return found

    def _before(self, result: ir.Value) -> list[ir.Value]:
        operation, i = ir.OpResult(result).owner.operation, ir.OpResult(result).result_number
        match operation.name:
            case "stablehlo.optimization_barrier":
                return [operation.operands[i]]
            case "sdy.sharding_constraint" if self._keeps_sharding(operation):
                return [operation.operands[0]]
            case "stablehlo.custom_call":
                in_place = i >= len(operation.results) - self._in_place_results(operation)
                operand = i - len(operation.results) + len(operation.operands)
                return [operation.operands[operand]] if in_place else []
            case "func.call":
                return [_terminator(self._functions[_callee(operation)]).operands[i]]
            case "sdy.manual_computation":
                return [_terminator(operation).operands[i]]
            case "stablehlo.case" | "stablehlo.if":
                regions = range(len(operation.regions))
                return [_terminator(operation, region).operands[i] for region in regions]
            case "stablehlo.while":
                return self._before_argument(_arguments(operation, region=1)[i])
        return []

    def _keeps_sharding(self, constraint: ir.Operation) -> bool:
        """Whether the operand has this sharding, so that XLA does not copy it.

        JAX states the shardings of arrays over explicit axes in this way: of all results of a
        `shard_map` from 0.11 on, and of each barrier outside.
        """
        seen, pending = set[ir.Value](), [constraint.operands[0]]
        while pending:
            value = pending.pop()
            seen.add(value)
            if (stated := self._stated_sharding(value)) is not None:
                if stated != constraint.attributes["sharding"]:
                    return False
                continue
            is_argument = _is_block_argument(value)
            before = self._before_argument(value) if is_argument else self._before(value)
            before = before or self.same_array(value)
            if not before:
                return False
            pending += [earlier for earlier in before if earlier not in seen]
        return True

    def _stated_sharding(self, value: ir.Value) -> ir.Attribute | None:
        """The sharding of Shardy that the module states for a value, if any."""
        if _is_block_argument(value):
            is_stated = self.is_argument(value) and _SHARDING in self._attributes(value)
            return self._attributes(value)[_SHARDING] if is_stated else None
        operation, i = ir.OpResult(value).owner.operation, ir.OpResult(value).result_number
        match operation.name:
            case "sdy.sharding_constraint":
                return operation.attributes["sharding"]
            case "sdy.manual_computation":
                stated = sdy.TensorShardingPerValueAttr(operation.attributes["out_shardings"])
                return stated.shardings[i]
        return None

    def _before_argument(self, argument: ir.Value) -> list[ir.Value]:
        i, parent = ir.BlockArgument(argument).arg_number, _parent_of(argument)
        match parent.name:
            case "func.func":
                return [call.operands[i] for call in self._calls[_symbol(parent)]]
            case "sdy.manual_computation":
                return [parent.operands[i]]
            case "stablehlo.while":  # only a loop-invariant carry
                unchanged = _terminator(parent, region=1).operands[i] == argument
                return [parent.operands[i]] if unchanged else []
        return []


def on_every_path(value: ir.Value, predicate: Callable[[ir.OpOperand], bool]) -> bool:
    """Whether every path from the definition of a value has a use that satisfies `predicate`."""
    is_argument = _is_block_argument(value)
    scope = _parent_of(value) if is_argument else _parent(ir.OpResult(value).owner.operation)
    return _in_scope(list(value.uses), scope, predicate)


def _in_scope(
    uses: list[ir.OpOperand], scope: ir.Operation, predicate: Callable[[ir.OpOperand], bool]
) -> bool:
    branches: dict[ir.Operation, list[ir.OpOperand]] = collections.defaultdict(list)
    for use in uses:
        branch = _outermost_branch(use.owner.operation, scope)
        if branch is None:
            if predicate(use):
                return True
        elif branch.name != _LOOP:  # a loop may run zero iterations
            branches[branch].append(use)
    return any(
        all(
            _in_scope([use for use in found if _is_inside(use, region)], branch, predicate)
            for region in branch.regions
        )
        for branch, found in branches.items()
    )


def _outermost_branch(operation: ir.Operation, scope: ir.Operation) -> ir.Operation | None:
    """The outermost branch or loop within `scope` that contains an operation."""
    found = None
    while (operation := _parent(operation)) != scope:
        if operation.name == _LOOP or operation.name in _BRANCHES:
            found = operation
    return found


def _is_inside(use: ir.OpOperand, region: ir.Region) -> bool:
    operation = use.owner.operation
    while operation.parent is not None:
        if operation.block.region == region:
            return True
        operation = operation.parent.operation
    return False


def _is_block_argument(value: ir.Value) -> bool:
    return isinstance(value.owner, ir.Block)


def _parent(operation: ir.Operation) -> ir.Operation:
    assert operation.parent is not None  # only the module has none
    return operation.parent.operation


def _parent_of(argument: ir.Value) -> ir.Operation:
    """The operation with the block of a block argument."""
    return ir.BlockArgument(argument).owner.owner.operation


def _arguments(operation: ir.Operation, region: int = 0) -> ir.BlockArgumentList:
    return operation.regions[region].blocks[0].arguments


def _terminator(operation: ir.Operation, region: int = 0) -> ir.Operation:
    return list(operation.regions[region].blocks[0].operations)[-1].operation


def _symbol(function: ir.Operation) -> str:
    return ir.StringAttr(function.attributes["sym_name"]).value


def _callee(call: ir.Operation) -> str:
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value
