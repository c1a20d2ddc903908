"""Order of the collectives in a program: each takes a result of the previous one.

All devices run the same program, but only data dependences order its calls: the CPU backend runs
independent operations concurrently, and so may a CUDA graph. The order covers the calls of all
memories; otherwise devices that wait in calls on different memories could starve each other of
threads. It also covers `psum` where it replaces or differentiates a call: XLA runs it on a stream
of its own, so that on two GPUs each of two independent kernels could occupy the SMs that the other
needs, in opposite order.

Calls are ordered when they are lowered, by tokens. Lowering is the only stage at which all of them
appear in one list, regardless of the transformations applied to the functions, and an order of
`psum` by its arguments would keep results alive for its derivative.
"""

from __future__ import annotations

import dataclasses
import functools
import threading

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir

from jaxkv._src.runtime.custom_calls import target_of
from jaxkv._src.runtime.lowering import when_lowered

TARGET = "jaxkv_all_reduce"
TOKEN_TYPE = jax.typeof(np.zeros(1, np.int32))


def psum(x: jax.Array, axis_name: str) -> jax.Array:
    """`jax.lax.psum`, in order with the calls of the same program."""
    # The transpose is a psum too, unless the types tell what varies along the axis.
    transposes = axis_name not in jax.typeof(x).manual_axis_type.varying
    mark = functools.partial(_order_p.bind, transposes=transposes)
    return mark(jax.lax.psum(mark(x, begins=True), axis_name), begins=False)


@dataclasses.dataclass
class _Collectives:
    """The last ones of a block: result and token of a call, and the results of later psums."""

    call: tuple[ir.Value, ir.Value] | None
    psums: list[ir.Value] = dataclasses.field(default_factory=list)


class _Blocks(threading.local):
    """The last collectives in each block of the module that this thread lowers.

    Of one module only. When lowerings are nested, the outer one finds its calls in the module.
    """

    def __init__(self) -> None:
        self._module: ir.Module | None = None
        self._of_block: dict[ir.Block, _Collectives] = {}

    def current(self, context: mlir.LoweringRuleContext) -> _Collectives:
        module = context.module_context.module
        if self._module is not module:
            self._module, self._of_block = module, {}
            when_lowered(module, _forget)
        block = ir.InsertionPoint.current.block
        if block not in self._of_block:
            self._of_block[block] = _Collectives(_last_call(block))
        return self._of_block[block]

    def forget(self, module: ir.Module) -> None:
        if self._module is module:
            self._module, self._of_block = None, {}


_blocks = _Blocks()
_forget = _blocks.forget


def token_before(context: mlir.LoweringRuleContext) -> ir.Value:
    """The token to pass to the call that is lowered next."""
    last = _blocks.current(context)
    token = last.call[1] if last.call else mlir.ir_constant(np.zeros(1, np.int32))
    if last.psums:
        token = _barrier(token, *last.psums)[0]
    return token


def add_call(context: mlir.LoweringRuleContext, result: ir.Value, token: ir.Value) -> None:
    """Makes a call that has been lowered the last one."""
    last = _blocks.current(context)
    last.call, last.psums = (result, token), []


def _last_call(block: ir.Block) -> tuple[ir.Value, ir.Value] | None:
    """Result and token of the last call in this program, or None.

    A program is one MLIR block: calls in the body of a loop, an inner `jit`, `jax.checkpoint`, a
    branch of `cond` or another `shard_map` are not visible.
    """
    call = None
    for operation in block.operations:
        if target_of(operation.operation) == TARGET:
            call = operation.operation.results[0], operation.operation.results[1]
    return call


def _barrier(*values: ir.Value) -> list[ir.Value]:
    return list(stablehlo.OptimizationBarrierOp(values).results)


def _lower_order(
    context: mlir.LoweringRuleContext, x: ir.Value, *, begins: bool, transposes: bool
) -> list[ir.Value]:
    last = _blocks.current(context)
    if not begins:
        last.psums.append(x)
    elif last.call:
        # The result too: XLA drops from a barrier what is used nowhere else, as the last token.
        x, _, token = _barrier(x, *last.call)
        last.call = last.call[0], token
    return [x]


def _transpose_order(
    cotangent: jax.Array, x: object, *, begins: bool, transposes: bool
) -> list[jax.Array]:
    if not transposes:
        return [cotangent]
    return [_order_p.bind(cotangent, begins=not begins, transposes=True)]


# The identity; marks where a psum begins and ends.
_order_p = Primitive("jaxkv_call_order")
_order_p.def_abstract_eval(lambda x, **params: x)
mlir.register_lowering(_order_p, _lower_order, cacheable=False)
ad.deflinear2(_order_p, _transpose_order)
batching.primitive_batchers[_order_p] = lambda args, dims, **params: (
    _order_p.bind(*args, **params),
    dims[0],
)
