"""Custom calls of a StableHLO module: targets and backend configurations."""

from __future__ import annotations

from jax.extend.mlir import ir

CONFIG = "mhlo.backend_config"  # of FFI calls: a dictionary of their attributes


def custom_calls(root: ir.Module | ir.Operation) -> list[ir.Operation]:
    """All custom calls in a module or operation, in the order of the text."""
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if target_of(operation.operation) is not None:
            found.append(operation.operation)
        return ir.WalkResult.ADVANCE

    root.operation.walk(visit)
    return found


def target_of(operation: ir.Operation) -> str | None:
    """The target of a custom call; None for any other operation."""
    if operation.name != "stablehlo.custom_call":
        return None
    return ir.StringAttr(operation.attributes["call_target_name"]).value


def config_of(call: ir.Operation) -> ir.DictAttr:
    """The attributes of an FFI call, by name."""
    return ir.DictAttr(call.attributes[CONFIG])


def configure(call: ir.Operation, **changes: ir.Attribute) -> None:
    """Changes attributes of an FFI call."""
    config = config_of(call)
    entries = {config[i].name: config[i].attr for i in range(len(config))}
    call.attributes[CONFIG] = ir.DictAttr.get(entries | changes)


def integer(attribute: ir.Attribute) -> int:
    return ir.IntegerAttr(attribute).value


def integers(attribute: ir.Attribute) -> list[int]:
    elements = ir.DenseIntElementsAttr(attribute)
    return [elements[i] for i in range(len(elements))]
