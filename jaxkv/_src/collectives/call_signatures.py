"""Call signatures: identify a call of a program consistently across processes.

Ranks compare the signatures of their calls, so that data of different programs, or of different
calls of one program, is never reduced together. A signature is a hash of the lowered program, the
algorithms of its calls, and the index of the call. JAX lowers a program to the same text in every
process (the keys of its compilation cache rely on that), except for the backend configuration of
custom calls, for example ids of host objects. The hash excludes these configurations and the
values of large constants.

Signatures are set after a program has been lowered (`jaxkv._src.runtime.lowering`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from jax.interpreters import mlir

from jaxkv._src.runtime import native

UNKNOWN = np.int64(0)  # before lowering is complete; handlers reject it
LARGEST_CONSTANT = 64  # elements; the values of larger constants are not hashed
_BITS = 52  # kSignatures in symmetric_memory.h
_CONFIGURATION = "mhlo.backend_config"
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

ir = mlir.ir


def sign(module: Any, target: str, algorithms: tuple[str, ...]) -> None:
    """Sets the signatures of the calls of `target` in a lowered MLIR module.

    Args:
      module: the module.
      target: name of an FFI target with the attributes `signature` and `algorithm`.
      algorithms: names of the algorithms, by index.
    """
    with module.context:
        calls = [
            (call, {entry.name: entry.attr for entry in call.attributes[_CONFIGURATION]})
            for call in _custom_calls(module, target)
        ]
        names = [algorithms[ir.IntegerAttr(attrs["algorithm"]).value] for _, attrs in calls]
        program = hashlib.sha256(" ".join([*names, _text(module)]).encode()).hexdigest()
        of_program = f"{ir.StringAttr(module.operation.attributes['sym_name']).value}-{program[:6]}"
        for number, ((call, attributes), name) in enumerate(zip(calls, names, strict=True), 1):
            digest = hashlib.sha256(f"{program} {number}".encode()).digest()
            signature = max(1, int.from_bytes(digest[:8], "little") % 2**_BITS)
            attributes["signature"] = mlir.i64_attr(signature)
            call.attributes[_CONFIGURATION] = ir.DictAttr.get(attributes)
            operand = f"{name} of {_type_of(call.operands[0])}"
            description = f"{operand}, all_reduce {number} of {of_program}"
            native.extension().name_call(signature, description)


def _type_of(value: Any) -> str:
    kind = ir.RankedTensorType(value.type)
    return f"{_DTYPES[str(kind.element_type)]}{list(kind.shape)}"


def _text(module: Any) -> str:
    """Text of the program without the parts that may differ between processes."""
    copy = module.operation.clone()
    for call in _custom_calls(copy):
        for name in ("backend_config", _CONFIGURATION):
            if name in call.attributes:
                del call.attributes[name]
    return copy.operation.get_asm(large_elements_limit=LARGEST_CONSTANT)


def _custom_calls(root: Any, target: str | None = None) -> list[Any]:
    found = []

    def visit(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            its_target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target in (None, its_target):
                found.append(operation)
        return ir.WalkResult.ADVANCE

    root.operation.walk(visit)
    return found
