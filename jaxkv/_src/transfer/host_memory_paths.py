"""Check of a lowered program for copies into so many host arrays that XLA would not compile it.

From each argument in host memory, XLA's host offloading pass follows the values that alias it.
After a custom call it follows all results, and it visits a value once for each path to it. Calls in
a row that write k arrays in host memory therefore multiply the visits by k each. XLA needs about
65 ns for a visit (jax 0.11.2): 10^9 visits take a minute.
"""

from __future__ import annotations

import collections

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from jaxkv._src.runtime.custom_calls import target_of

MAX_VISITS = 10**9


def check_paths(module: ir.Module, operation: str) -> None:
    """Raises ValueError if XLA would visit more than `MAX_VISITS` values in host memory."""
    visits = num_visits(module)
    if visits > MAX_VISITS:
        raise ValueError(
            f"{operation}: the compiler would follow the arrays in host memory along "
            f"{visits:.1e} paths, limit {MAX_VISITS:.0e}: a call that writes k arrays there "
            "multiplies the paths by k, and this program has several in a row; keep the blocks in "
            "one array (stack the layers, or use a HostPool), or start fewer copies in a program"
        )


def num_visits(module: ir.Module) -> int:
    """Number of visits of values by XLA's host offloading pass; a loop counts once."""
    return _Walk(module).total


class _Walk:
    """Counts the paths from the arguments in host memory to each value, in program order."""

    def __init__(self, module: ir.Module) -> None:
        self._paths: collections.defaultdict[ir.Value, int] = collections.defaultdict(int)
        self._functions = {
            ir.StringAttr(function.attributes["sym_name"]).value: function.operation
            for function in module.body.operations
            if function.operation.name == "func.func"
        }
        main = self._functions["main"]
        attributes = (
            ir.ArrayAttr(main.attributes["arg_attrs"]) if "arg_attrs" in main.attributes else ()
        )
        self.total = 0
        self._run(main, 0, [_names_host_memory(of_argument) for of_argument in attributes])

    def _run(self, operation: ir.Operation, region: int, arguments: list[int]) -> list[int]:
        """The paths to the results of a region, given those to its arguments."""
        block = operation.regions[region].blocks[0]
        for argument, paths in zip(block.arguments, arguments, strict=False):
            self._paths[argument] = paths
        inside = list(block.operations)
        for step in inside:
            results = self._after(step.operation)
            self.total += sum(results)
            for result, paths in zip(step.operation.results, results, strict=False):
                self._paths[result] = paths
        return self._of(inside[-1].operation)

    def _of(self, operation: ir.Operation) -> list[int]:
        return [self._paths[operand] for operand in operation.operands]

    def _after(self, operation: ir.Operation) -> list[int]:
        """The paths to the results of an operation."""
        paths = self._of(operation)
        match operation.name:
            case "stablehlo.optimization_barrier":
                return paths
            case "stablehlo.custom_call" if target_of(operation) == "annotate_device_placement":
                return [_names_host_memory(operation.attributes["mhlo.frontend_attributes"])]
            case "stablehlo.custom_call":
                operands = _aliased_operands(operation)
                return [sum(paths[i] for i in operands)] * len(operation.results)
            case "func.call":
                callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
                return self._run(self._functions[callee], 0, paths)
            case "sdy.manual_computation":
                return self._run(operation, 0, paths)
            case "stablehlo.while":
                return [a + b for a, b in zip(paths, self._run(operation, 1, paths), strict=True)]
            case "stablehlo.case" | "stablehlo.if":
                branches = [self._run(operation, i, []) for i in range(len(operation.regions))]
                return [sum(of_result) for of_result in zip(*branches, strict=True)]
        return []


def _names_host_memory(attributes: ir.Attribute) -> int:
    entries = ir.DictAttr(attributes)
    return int(any('"pinned_host"' in str(entries[i].attr) for i in range(len(entries))))


def _aliased_operands(call: ir.Operation) -> set[int]:
    if "output_operand_aliases" not in call.attributes:
        return set()
    aliases = ir.ArrayAttr(call.attributes["output_operand_aliases"])
    return {stablehlo.OutputOperandAlias(alias).operand_index for alias in aliases}
