"""Check of a lowered program for sharded arguments that XLA would gather for a page copy.

XLA cannot partition a copy. Outside `jax.shard_map` it gathers sharded operands on every device.
With automatic mesh axes the type of a traced array has no sharding; but the complete module has the
shardings of the program's arguments.

Also a check of the platform, which only lowering knows: arrays may be on CPUs though the process
has a GPU, for which the dispatch selects.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkv._src.runtime.custom_calls import target_of
from jaxkv._src.runtime.lowering import when_lowered
from jaxkv._src.transfer.buffer_aliases import BufferAliases

_MARK = "jaxkv.operation"
_PARTITIONED = "jaxkv.partitioned"
HANDLE_LEAVES = "a handle leaves"  # the precautionary wait at a pytree boundary
_SYNCHRONOUS = {
    "start_load": "load_pages",
    "start_store": "store_pages",
    "start_swap": "swap_blocks",
}
_VIEWS = ("stablehlo.reshape", "stablehlo.bitcast_convert")


def check_sharded_arguments(operation: str, written: Iterable[jax.Array]) -> list[jax.Array]:
    """The results of copies, with a check when the program is lowered.

    It raises a ValueError if an operand of a copy is a sharded argument of the program, and the
    copy is not inside `shard_map`.
    """
    return list(_checked_p.bind(*written, operation=operation))


def _lower_checked(
    context: mlir.LoweringRuleContext, *results: ir.Value, operation: str
) -> list[ir.Value]:
    for result in results:
        if not isinstance(result.owner, ir.Block):
            _check_platform(context, result.owner.operation, operation)
            result.owner.attributes[_MARK] = ir.StringAttr.get(operation)
    when_lowered(context.module_context.module, _check)
    return list(results)


def _check_platform(context: mlir.LoweringRuleContext, call: ir.Operation, operation: str) -> None:
    """Raises a NotImplementedError for a call of the copy engine on CPUs of a GPU process."""
    on_cpu = tuple(context.module_context.platforms) == ("cpu",)
    if on_cpu and jax.default_backend() == "gpu" and (target_of(call) or "").endswith("_dma"):
        raise NotImplementedError(
            f"{operation}: the arrays are on CPUs, but this process has a GPU, for which 'dma' was "
            "selected: pass implementation='kernel', which also runs on CPUs, or ids that are not "
            "HostIds"
        )


_checked_p = Primitive("jaxkv_sharded_arguments")
_checked_p.multiple_results = True
_checked_p.def_impl(lambda *results, operation: list(results))
_checked_p.def_abstract_eval(lambda *results, operation: list(results))
mlir.register_lowering(_checked_p, _lower_checked, cacheable=False)


def _check(module: ir.Module) -> None:
    marked = list(_marked(module, _MARK))
    operations = [ir.StringAttr(call.attributes[_MARK]).value for call in marked]
    for call in marked:
        del call.attributes[_MARK]
    if _num_partitions(module) == 1:
        return
    aliases = _Arguments(module, lambda call: 0)
    for operation, call in zip(operations, marked, strict=True):
        for argument in aliases.of(call):
            sharding = aliases.sharding(argument)
            if sharding and _num_shards(module, sharding) > 1:
                raise ValueError(
                    f"{operation}: an argument of the program, {argument.type}, has the sharding "
                    f"{sharding}, and XLA would gather it on every device: call the operation "
                    "inside jax.shard_map, manual over all mesh axes of the array, on the "
                    "shard of each device"
                )


def is_in_shard_map() -> bool:
    """Whether the caller is traced in a `shard_map`, or nested ones, over all mesh axes."""
    mesh = jax.sharding.get_abstract_mesh()
    others = [size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes]
    return bool(mesh.manual_axes) and math.prod(others) == 1


def mark_partitioned(module: ir.Module, call: ir.Operation, operation: str) -> None:
    """Marks a start or a wait outside `shard_map` for `check_unpartitioned`."""
    if _num_partitions(module) > 1:
        call.attributes[_PARTITIONED] = ir.StringAttr.get(operation)


def check_unpartitioned(module: ir.Module) -> None:
    """Raises a ValueError for a marked call, which XLA would have to partition.

    XLA accepts no side effects outside `shard_map`, even if all operands are replicated.
    """
    for call in _marked(module, _PARTITIONED):
        operation = ir.StringAttr(call.attributes[_PARTITIONED]).value
        if operation == HANDLE_LEAVES:
            raise ValueError(
                "a handle leaves jax.shard_map, but its copy cannot stay in flight until the "
                "program returns it: an array of the handle is dropped or returned twice, or has "
                "the buffer of another donated array; return all its arrays once, in the order of "
                "the donated arguments, or wait inside jax.shard_map"
            )
        other = _SYNCHRONOUS.get(operation)
        raise ValueError(
            f"{operation}: in a program for {_num_partitions(module)} devices, call it inside "
            "jax.shard_map over all mesh axes, on the arrays of each device"
            + (f", or use {other}" if other else "")
        )


class _Arguments(BufferAliases):
    """The arguments of a program that reach an operation outside `shard_map`."""

    def of(self, call: ir.Operation) -> Iterator[ir.Value]:
        """The arguments that are operands of a custom call or, for views, of the calls behind."""
        for operand in call.operands:
            for origin in self.origins(operand):
                if self.is_argument(origin):
                    yield origin
                elif call.name in _VIEWS and (behind := _custom_call(origin)):
                    yield from self.of(behind)

    def _before(self, result: ir.Value) -> list[ir.Value]:
        operation = ir.OpResult(result).owner.operation
        if operation.name in _VIEWS:
            return [operation.operands[0]]
        return super()._before(result)

    def _before_argument(self, argument: ir.Value) -> list[ir.Value]:
        parent = ir.BlockArgument(argument).owner.owner.operation
        if parent.name == "sdy.manual_computation":
            return []  # the shard of a device
        if parent.name == "stablehlo.while":  # a carry has the sharding of its initial value
            return [parent.operands[ir.BlockArgument(argument).arg_number]]
        return super()._before_argument(argument)


def _custom_call(value: ir.Value) -> ir.Operation | None:
    """The custom call with this result, if any."""
    if isinstance(value.owner, ir.Block):
        return None
    operation = ir.OpResult(value).owner.operation
    return None if target_of(operation) is None else operation


def _marked(module: ir.Module, mark: str) -> Iterator[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if mark in operation.operation.attributes:
            found.append(operation.operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    yield from found


def _num_partitions(module: ir.Module) -> int:
    return ir.IntegerAttr(module.operation.attributes["mhlo.num_partitions"]).value


def _num_shards(module: ir.Module, sharding: str) -> int:
    """Number of different shards, from the text of a sharding of Shardy or GSPMD."""
    if "sdy" in sharding:
        sizes = _axis_sizes(module, sharding)
        dimensions = re.search(r", \[(.*?)\][,>]", sharding)
        axes = re.findall(r'"([^"]+)"', dimensions[1]) if dimensions else []
        return math.prod(sizes.get(axis, 1) for axis in axes)
    tiles = re.search(r"devices=\[([\d,]+)\]", sharding)
    if not tiles:  # replicated, maximal or manual
        return 1
    counts = [int(count) for count in tiles[1].split(",")]
    return math.prod(counts[:-1] if "last_tile_dim_replicate" in sharding else counts)


def _axis_sizes(module: ir.Module, sharding: str) -> dict[str, int]:
    """Sizes of the mesh axes: of the mesh in the sharding, or of the module's."""
    meshes = [str(op) for op in module.body.operations if op.operation.name == "sdy.mesh"]
    return {
        axis: int(size)
        for text in (*meshes, sharding)
        for axis, size in re.findall(r'"([^"]+)"=(\d+)', text)
    }
