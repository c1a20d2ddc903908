"""Sums over the devices of a mesh axis by one kernel each: `jax.lax.psum` over symmetric memory.

| algorithm | what a device does | largest message |
|---|---|---|
| low_latency | sends all to all; words say themselves that they arrived | `low_latency_bytes` |
| one_shot | sends all to all, one barrier, adds up | `slot_bytes` |
| two_shot | adds up one part, sends the sum to all; larger ones in tiles | `max_bytes` |
| multimem | has the NVLink switch add up one part and send the sum to all | `max_bytes` |
| psum | `jax.lax.psum`, by XLA | any |

The first three take bfloat16, float16 and float32, add in float32 in the order of the ranks, and so
give the same bits on every device and in every run. (vLLM's custom all-reduce has the second and
the third, TensorRT-LLM's the first.)

multimem takes the same dtypes and adds in float32 too, in an order that is the switch's own: all
devices get the same bits, but not those of the others, nor surely those of another run. **It has
never run on hardware.** No table chooses it: it serves who asks for it, with JAXKV_MULTICAST=1 in
the environment when the `SymmetricMemory` is created, for devices of one process for which the
driver reports multicast. Don't set that where machines share the GPUs of a host: a multicast object
may take them out of service for all. (PyTorch's symmetric memory has such an algorithm.)

What keeps the devices together: all run one program, in which each call takes a token of the call
before. How far a device is (epochs) lies in its own memory, so a CUDA graph of a step can be
replayed. Derivatives are those of `psum`.

In each call devices compare its number and its signature (`call_signatures`): of the program,
the call's place in it, algorithm, shape and dtype. A call that differs fails like one that nobody
came to, and the error names both (as NCCL's and PyTorch's debug modes do). So it is an error if
processes run the programs of a memory in different orders, and no wrong sum: see docs/all_reduce.md
for what several threads may do.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxkv._src.collectives import call_signatures
from jaxkv._src.collectives.symmetric_memory import SymmetricMemory
from jaxkv._src.runtime import native
from jaxkv._src.runtime.lowering import when_lowered
from jaxkv._src.runtime.sharding import device_groups

DTYPES = ("bfloat16", "float16", "float32")
NATIVE = ("low_latency", "one_shot", "two_shot", "multimem")  # by their numbers in operand.h
IMPLEMENTATIONS = (*NATIVE, "psum")

_TARGET = "jaxkv_all_reduce"


def all_reduce(
    memory: SymmetricMemory, x: Any, axis_name: str, *, implementation: str | None = None
) -> Any:
    """The sum of `x` over the devices along a mesh axis, on each of them.

    To be called inside `jax.shard_map`, as `jax.lax.psum`; works there too in loops, under `vmap`,
    which makes one call of all rows, and where derivatives are taken.

    Calls of one program follow each other in the order in which it makes them, of whatever memory.
    The body of a `shard_map`, of a loop, of an inner `jit` or of `jax.checkpoint` is a program of
    its own, and so is a branch of `cond`: calls in there and calls beside it, also those of two
    `shard_map`s in one `jit`, must depend on each other (`jax.lax.optimization_barrier` makes
    them), or a device may come to them in another order than its peers.

    Args:
      memory: of the mesh that `shard_map` runs on.
      x: array or pytree of arrays of any shape.
      axis_name: the axis of `memory`.
      implementation: "low_latency", "one_shot", "two_shot", "multimem", "psum", or None for what
        the tuning table of `memory` names for the array's size, and psum for what that cannot
        serve.

    Returns:
      Arrays of the shapes and dtypes of `x`.

    Raises:
      ValueError: the axis or the mesh is not that of `memory`, or the name of an implementation is
        unknown. Devices in another order are seen when the program is lowered, but not where JAX
        knows an abstract mesh only.
      NotImplementedError: `implementation` does not serve this call, and why.
      PeerTimeoutError: while tracing, a device waited in vain in a call before, or its peers made
        another call. A compiled call raises `jax.errors.JaxRuntimeError` for that, with this name
        in its text.
    """
    _check_axis_name(memory, axis_name)
    _check_mesh(memory)
    memory.check_errors()
    return jax.tree.map(
        functools.partial(_all_reduce_array, memory, implementation=implementation), x
    )


def select_implementation(
    memory: SymmetricMemory, x: Any, implementation: str | None
) -> tuple[str, str]:
    """The implementation that serves an array, and why it is that one.

    Raises:
      As `all_reduce`.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation must be one of {known}, got {implementation!r}")
    num_bytes = int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize
    table = memory._table
    wanted = implementation or table.algorithm(memory.world_size, num_bytes)
    unsupported_reason = _unsupported_reason(memory, wanted, num_bytes, x.dtype)
    if unsupported_reason and implementation:
        raise NotImplementedError(
            f"{implementation!r} does not serve this call: {unsupported_reason}"
        )
    if unsupported_reason:
        return "psum", f"{wanted} is best by {table.name}, but {unsupported_reason}"
    return wanted, "asked for" if implementation else f"best by {table.name}"


def explain(
    memory: SymmetricMemory, x: Any, axis_name: str, *, implementation: str | None = None
) -> str:
    """Says which implementation each array of `x` takes, and why; outside of `shard_map` too."""
    _check_axis_name(memory, axis_name)
    lines = []
    for leaf in jax.tree.leaves(x):
        leaf = jax.eval_shape(jnp.asarray, leaf)
        name, why = select_implementation(memory, leaf, implementation)
        lines.append(f"all_reduce of {leaf.dtype}{list(leaf.shape)}: {name} ({why})")
    return "\n".join(lines)


def _unsupported_reason(
    memory: SymmetricMemory, algorithm: str, num_bytes: int, dtype: Any
) -> str | None:
    if algorithm == "psum":
        return None
    if str(dtype) not in DTYPES:
        return f"its dtype must be one of {', '.join(DTYPES)}, got {dtype}"
    if algorithm == "multimem" and memory._multicast_unsupported_reason:
        return memory._multicast_unsupported_reason
    boxes = {"low_latency": "low_latency_bytes", "one_shot": "slot_bytes"}
    names = boxes.get(algorithm, "max_bytes"), "max_bytes"
    limit, name = min(((getattr(memory, name), name) for name in names), key=lambda entry: entry[0])
    if num_bytes > limit:
        return f"its {num_bytes} bytes exceed {name} = {limit} bytes"
    return None


def _check_axis_name(memory: SymmetricMemory, axis_name: str) -> None:
    if axis_name != memory.axis_name:
        raise ValueError(
            f"axis_name must be {memory.axis_name!r}, the axis of the symmetric memory, "
            f"got {axis_name!r}"
        )


def _check_mesh(memory: SymmetricMemory) -> None:
    here = dict(jax.sharding.get_abstract_mesh().shape)
    expected = dict(memory.mesh.shape)
    if here != expected:
        raise ValueError(
            f"all_reduce must run in a shard_map over the symmetric memory's mesh {expected}, "
            f"got {here or 'none'}"
        )


def _check_devices(expected: jax.sharding.Mesh, axis_context: Any, axis_name: str) -> None:
    """Raises unless the same devices stand along the axis, where a lowered program knows any."""
    here = getattr(axis_context, "mesh", None)
    if not isinstance(here, jax.sharding.Mesh):
        return
    ours, theirs = (
        [[device.id for device in group] for group in device_groups(mesh, axis_name)]
        for mesh in (expected, here)
    )
    if sorted(ours) != sorted(theirs):
        raise ValueError(
            f"all_reduce must run in a shard_map over the symmetric memory's mesh, whose devices "
            f"along {axis_name!r} are {ours}, got a mesh of the same shape with {theirs}"
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """What of a call is static. No reference to the memory: programs may outlive it."""

    memory: weakref.ref[SymmetricMemory]
    communicator: int
    mesh: jax.sharding.Mesh
    axis_name: str
    asked: str | None
    algorithm: str


def _all_reduce_array(memory: SymmetricMemory, x: Any, *, implementation: str | None) -> Any:
    x = jnp.asarray(x)
    name, _ = select_implementation(memory, x, implementation)
    with jax.named_scope(f"jaxkv.all_reduce.{name}"):
        if name == "psum" or x.size == 0:
            return jax.lax.psum(x, memory.axis_name)
        native.extension()
        whose = weakref.ref(memory), memory._id, memory.mesh, memory.axis_name
        call = _Call(*whose, implementation, name)
        return _reduce_p.bind(x, call=call)


def _result_type(x: Any, *, call: _Call) -> Any:
    """The same on all devices along the axis, as psum's."""
    summed = jax.eval_shape(lambda x: jax.lax.psum(x, call.axis_name), x)
    varying = summed.manual_axis_type  # None where shard_map does not check it
    return x if varying is None else x.update(manual_axis_type=varying)


def _jvp(primals: Any, tangents: Any, *, call: _Call) -> tuple[Any, Any]:
    result = _reduce_p.bind(*primals, call=call)
    (tangent,) = tangents
    if isinstance(tangent, ad.Zero):
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, jax.lax.psum(tangent, call.axis_name)


def _batched(args: Sequence[Any], dims: Sequence[Any], *, call: _Call) -> tuple[Any, int]:
    """One call of all rows, by what serves so many bytes."""
    memory = call.memory()
    if memory is None:
        raise RuntimeError("all_reduce under vmap: its SymmetricMemory is gone")
    rows = jnp.moveaxis(args[0], dims[0], 0)
    return _all_reduce_array(memory, rows, implementation=call.asked), 0


def _lower(context: Any, x: Any, *, call: _Call) -> Sequence[Any]:
    _check_devices(call.mesh, context.module_context.axis_context, call.axis_name)
    token_type = jax.typeof(np.zeros(1, np.int32))
    token = _previous_token() or mlir.ir_constant(np.zeros(1, np.int32))
    context = context.replace(
        avals_in=[*context.avals_in, token_type], avals_out=[*context.avals_out, token_type]
    )
    result, _ = jax.ffi.ffi_lowering(_TARGET)(
        context,
        x,
        token,
        communicator=np.int64(call.communicator),
        algorithm=np.int64(NATIVE.index(call.algorithm)),
        signature=call_signatures.UNKNOWN,
    )
    when_lowered(context.module_context.module, _sign)
    return [result]


def _sign(module: Any) -> None:
    call_signatures.sign(module, _TARGET, NATIVE)


def _previous_token() -> Any | None:
    """What the call before returned, if there is one in this program.

    That is a block of MLIR: calls in the body of a loop, of an inner `jit`, of `jax.checkpoint`, in
    a branch of `cond` or in another `shard_map` are not seen from here.

    All devices run one program, but only data keeps its calls in one order: the CPU backend runs
    what does not depend on each other at the same time, and so may a CUDA graph. The calls of all
    memories are in one order, or devices that wait in calls of different ones could keep each
    other's threads. Only here, where a program is lowered, are they seen as one list, whatever
    transformed the functions that made them.
    """
    operations = mlir.ir.InsertionPoint.current.block.operations
    for i in reversed(range(len(operations))):
        operation = operations[i].operation
        target = operation.attributes.get("call_target_name")
        if target is not None and mlir.ir.StringAttr(target).value == _TARGET:
            return operation.results[1]
    return None


_reduce_p = Primitive("jaxkv_all_reduce")
_reduce_p.def_abstract_eval(_result_type)
mlir.register_lowering(_reduce_p, _lower, cacheable=False)
ad.primitive_jvps[_reduce_p] = _jvp  # no custom_jvp, whose body is a program of its own
batching.primitive_batchers[_reduce_p] = _batched
