"""Donated arguments of a lowered program, matched to results in the same kind of memory.

Without memory kinds in `out_shardings` JAX matches donated arguments and results by shape and dtype
only. If an array in HBM and one in pinned host memory, equal in both, are donated, it may alias
each with the other's result, and XLA aborts the process.
"""

from __future__ import annotations

from typing import Any

from jax.extend.mlir import ir

ALIAS = "tf.aliasing_output"
MEMORY_KIND = "mhlo.memory_kind"
SHARDINGS = ("sdy.sharding", "mhlo.sharding")
_HOST = "pinned_host"
_Attributes = dict[str, ir.Attribute]


class Arguments:
    """The arguments of the entry function `main`.

    Attributes:
      types: of the arguments.
      attributes: of each argument, by name; `write` applies changes to the module.
    """

    def __init__(self, module: ir.Module) -> None:
        self._main = next(f.operation for f in module.body.operations if _is_main(f.operation))
        function = ir.FunctionType(ir.TypeAttr(self._main.attributes["function_type"]).value)
        self.types = list(function.inputs)
        self.attributes = self._attributes("arg_attrs") or [{} for _ in self.types]

    def _attributes(self, of: str) -> list[_Attributes]:
        if of not in self._main.attributes:
            return []
        return [_named(entry) for entry in ir.ArrayAttr(self._main.attributes[of])]

    def result(self, argument: int) -> int | None:
        """The result that has the buffer of an argument."""
        attributes = self.attributes[argument]
        return int(ir.IntegerAttr(attributes[ALIAS]).value) if ALIAS in attributes else None

    def write(self) -> None:
        entries = [ir.DictAttr.get(of_argument) for of_argument in self.attributes]
        self._main.attributes["arg_attrs"] = ir.ArrayAttr.get(entries)


class _Entry(Arguments):
    """With the results that alias the arguments."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(module)
        self._sharded = ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value > 1
        self._results = self._attributes("res_attrs")
        self.crossed = [i for i in range(len(self.types)) if self._is_crossed(i)]

    def _is_crossed(self, argument: int) -> bool:
        """Whether a result in the other kind of memory is to reuse the memory of an argument."""
        aliased = self.result(argument)
        return aliased is not None and (
            _on_host(self.attributes[argument]) != _on_host(self._results[aliased])
        )

    def may_exchange(self, one: int, other: int) -> bool:
        a, b = self.attributes[one], self.attributes[other]
        equal = self.types[one] == self.types[other] and not (
            self._sharded and any(a.get(name) != b.get(name) for name in SHARDINGS)
        )
        return equal and _on_host(a) != _on_host(b)

    def exchange(self, one: int, other: int) -> None:
        a, b = self.attributes[one], self.attributes[other]
        a[ALIAS], b[ALIAS] = b[ALIAS], a[ALIAS]
        self.write()


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
        here, there = kinds if _on_host(entry.attributes[i]) else kinds[::-1]
        raise ValueError(
            f"jaxkv: argument {i} of the program, {entry.types[i]} in {here} memory, is donated, "
            f"but no result in {here} memory has this shape and dtype, and JAX would reuse its "
            f"memory for result {entry.result(i)} in {there} memory, which aborts the "
            "process. Return the array of the argument as well, do not donate it, or give the jit "
            "out_shardings with memory kinds"
        )


def _on_host(attributes: _Attributes) -> bool:
    return MEMORY_KIND in attributes and bool(ir.StringAttr(attributes[MEMORY_KIND]).value == _HOST)


def _is_main(operation: ir.Operation) -> bool:
    if operation.name != "func.func":
        return False
    return bool(ir.StringAttr(operation.attributes["sym_name"]).value == "main")


def _named(entry: Any) -> _Attributes:
    named = ir.DictAttr(entry)
    return {named[i].name: named[i].attr for i in range(len(named))}
