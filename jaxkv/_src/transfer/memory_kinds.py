"""Check of destinations in host memory that are typed as in device memory.

`jax.jit(jnp.zeros, out_shardings=...)` returns an array in pinned_host memory whose type says
device memory. The result of a copy into it has this type: XLA copies the array to the device, or
aborts the process if it is donated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkv._src.runtime.lowering import when_lowered
from jaxkv._src.transfer.buffer_aliases import BufferAliases

_ATTRIBUTES = "mhlo.frontend_attributes"
_MARK = "jaxkv_typed_on_device"


def check_memory_kinds(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, results of fusion barriers, with a check when the program is lowered.

    It raises a ValueError if an array is an argument in pinned_host memory, but typed as in device
    memory.
    """
    return list(_checked_p.bind(*arrays)) if arrays else []


def _lower_checked(context: Any, *values: Any) -> list[Any]:
    for value, aval in zip(values, context.avals_in, strict=True):
        if aval.memory_space == jax.memory.Space.Device:
            # Later than this, an operation may be replaced, with its attributes.
            mark = ir.DictAttr.get({_MARK: ir.StringAttr.get("true")})
            value.owner.attributes[_ATTRIBUTES] = mark
            # Only the complete module has the memory kinds of the arguments.
            when_lowered(context.module_context.module, _check)
    return list(values)


_checked_p = Primitive("jaxkv_memory_kinds")
_checked_p.multiple_results = True
_checked_p.def_abstract_eval(lambda *arrays: list(arrays))
mlir.register_lowering(_checked_p, _lower_checked, cacheable=False)


def _check(module: Any) -> None:
    aliases = BufferAliases(module, lambda call: 0)
    for barrier in _marked_barriers(module):
        del barrier.attributes[_ATTRIBUTES]
        for argument in aliases.origins(barrier.operands[0]):
            if aliases.memory_kind(argument) == "pinned_host":
                raise ValueError(
                    f"swap_blocks: an array of dst, {argument.type}, is in pinned_host memory, but "
                    "its type says device memory; make it with jaxkv.pinned_zeros or "
                    "jax.device_put, not by a jit with out_shardings"
                )


def _marked_barriers(module: Any) -> list[Any]:
    found = []

    def visit(operation: Any) -> Any:
        attributes = operation.operation.attributes
        if _ATTRIBUTES in attributes and _MARK in ir.DictAttr(attributes[_ATTRIBUTES]):
            found.append(operation.operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found
