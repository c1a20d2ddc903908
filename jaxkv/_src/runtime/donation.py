"""Donated arguments of a lowered program, matched to results in the same kind of memory.

Without memory kinds in `out_shardings` JAX matches donated arguments and results by shape and dtype
only. If an array in HBM and one in pinned host memory, equal in both, are donated, it may alias
each with the other's result, and XLA aborts the process.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

_ALIAS, _KIND, _HOST = "tf.aliasing_output", "mhlo.memory_kind", "pinned_host"
_SHARDINGS = ("sdy.sharding", "mhlo.sharding")
_Attributes = dict[str, ir.Attribute]


class _Entry:
    """The arguments of the entry function `main`, and the results that alias them."""

    def __init__(self, module: ir.Module) -> None:
        self._main = next(f.operation for f in module.body.operations if _is_main(f.operation))
        self._sharded = ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value > 1
        function = ir.FunctionType(ir.TypeAttr(self._main.attributes["function_type"]).value)
        self.types = list(function.inputs)
        self.arguments, self._results = map(self._attributes, ("arg_attrs", "res_attrs"))
        self.crossed = [i for i, a in enumerate(self.arguments) if self._is_crossed(a)]

    def _attributes(self, of: str) -> list[_Attributes]:
        if of not in self._main.attributes:
            return []
        return [_named(entry) for entry in ir.ArrayAttr(self._main.attributes[of])]

    def _is_crossed(self, argument: _Attributes) -> bool:
        """Whether a result in the other kind of memory is to reuse the memory of an argument."""
        aliased = _result(argument)
        return aliased is not None and _on_host(argument) != _on_host(self._results[aliased])

    def may_exchange(self, one: int, other: int) -> bool:
        a, b = self.arguments[one], self.arguments[other]
        equal = self.types[one] == self.types[other] and not (
            self._sharded and any(a.get(name) != b.get(name) for name in _SHARDINGS)
        )
        return equal and _on_host(a) != _on_host(b)

    def exchange(self, one: int, other: int) -> None:
        a, b = self.arguments[one], self.arguments[other]
        a[_ALIAS], b[_ALIAS] = b[_ALIAS], a[_ALIAS]
        entries = [ir.DictAttr.get(argument) for argument in self.arguments]
        self._main.attributes["arg_attrs"] = ir.ArrayAttr.get(entries)


def match_memory_kinds(module: ir.Module) -> None:
    """Exchanges crossed aliases of arguments in host and device memory."""
    entry = _Entry(module)
    remaining = entry.crossed
    while remaining:
        one = remaining.pop()
        other = next((other for other in remaining if entry.may_exchange(one, other)), None)
        if other is not None:
            entry.exchange(one, other)
            remaining.remove(other)


def check_memory_kinds_of_aliases(module: ir.Module) -> None:
    """Raises a ValueError for an alias that `match_memory_kinds` could not exchange."""
    entry = _Entry(module)
    for i in entry.crossed:
        kinds = "pinned_host", "device"
        here, there = kinds if _on_host(entry.arguments[i]) else kinds[::-1]
        raise ValueError(
            f"jaxkv: argument {i} of the program, {entry.types[i]} in {here} memory, is donated, "
            f"but no result in {here} memory has this shape and dtype, and JAX would reuse its "
            f"memory for result {_result(entry.arguments[i])} in {there} memory, which aborts the "
            "process. Return the array of the argument as well, do not donate it, or give the jit "
            "out_shardings with memory kinds"
        )


def _on_host(attributes: _Attributes) -> bool:
    return _KIND in attributes and bool(ir.StringAttr(attributes[_KIND]).value == _HOST)


def _result(argument: _Attributes) -> int | None:
    return int(ir.IntegerAttr(argument[_ALIAS]).value) if _ALIAS in argument else None


def _is_main(operation: ir.Operation) -> bool:
    if operation.name != "func.func":
        return False
    return bool(ir.StringAttr(operation.attributes["sym_name"]).value == "main")


def _named(entry: Any) -> _Attributes:
    named = ir.DictAttr(entry)
    return {named[i].name: named[i].attr for i in range(len(named))}
