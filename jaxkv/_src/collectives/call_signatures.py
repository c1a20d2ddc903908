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

import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkv._src.runtime import native
from jaxkv._src.runtime.custom_calls import (
    CONFIG,
    config_of,
    configure,
    custom_calls,
    integer,
    target_of,
)

UNKNOWN = np.int64(0)  # before lowering is complete; handlers reject it
LARGEST_CONSTANT = 64  # elements; the values of larger constants are not hashed
_BITS = 52  # kSignatures in symmetric_memory.h
_DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def sign(module: ir.Module, target: str, algorithms: tuple[str, ...]) -> None:
    """Sets the signatures of the calls of `target` in a lowered MLIR module.

    Args:
      module: the module.
      target: name of an FFI target with the attributes `signature` and `algorithm`.
      algorithms: names of the algorithms, by index.
    """
    with module.context:
        everything = custom_calls(module)
        calls = [call for call in everything if target_of(call) == target]
        names = [algorithms[integer(config_of(call)["algorithm"])] for call in calls]
        text = _text(module, everything)
        program = hashlib.sha256(" ".join([*names, text]).encode()).hexdigest()
        of_program = f"{ir.StringAttr(module.operation.attributes['sym_name']).value}-{program[:6]}"
        for number, (call, name) in enumerate(zip(calls, names, strict=True), 1):
            digest = hashlib.sha256(f"{program} {number}".encode()).digest()
            signature = max(1, int.from_bytes(digest[:8], "little") % 2**_BITS)
            configure(call, signature=mlir.i64_attr(signature))
            operand = f"{name} of {_type_of(call.operands[0])}"
            description = f"{operand}, all_reduce {number} of {of_program}"
            native.extension().name_call(signature, description)


def _type_of(value: ir.Value) -> str:
    kind = ir.RankedTensorType(value.type)
    return f"{_DTYPES[str(kind.element_type)]}{list(kind.shape)}"


def _text(module: ir.Module, calls: list[ir.Operation]) -> str:
    """Text of the program without the parts of its custom calls that may differ by process."""
    # Removed from the module itself: a copy would have to be searched for its custom calls again.
    removed = [
        (call, name, call.attributes[name])
        for call in calls
        for name in ("backend_config", CONFIG)
        if name in call.attributes
    ]
    for call, name, _ in removed:
        del call.attributes[name]
    try:
        # JAX verifies the module; verification takes as long as the printing.
        text = module.operation.get_asm(large_elements_limit=LARGEST_CONSTANT, assume_verified=True)
    finally:
        for call, name, value in removed:
            call.attributes[name] = value
    return str(text)
