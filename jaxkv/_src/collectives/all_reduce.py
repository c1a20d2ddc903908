"""All-reduce over a mesh axis in one kernel: `jax.lax.psum` over symmetric memory.

docs/all_reduce.md has the algorithms and their largest messages. low_latency, one_shot and two_shot
support bfloat16, float16 and float32 and accumulate in float32 in rank order, so the result is
bitwise identical on all devices and in all runs. (vLLM's custom all-reduce has the last two,
TensorRT-LLM's the first.)

multimem supports the same dtypes and also accumulates in float32, but the switch determines the
order: the result is bitwise identical on all devices, but differs from the other algorithms and
may differ between runs. **It has never run on hardware.** No tuning table selects it. It must be
requested explicitly, and requires JAXKV_MULTICAST=1 in the environment when the `SymmetricMemory`
is created, devices of a single process, and multicast support reported by the driver. Do not set
the variable where several machines share the GPUs of a host: a multicast object may take the GPUs
out of service for all of them. (PyTorch's symmetric memory has such an algorithm.)

Ordering: all devices run the same program, and each call takes a token from the previous one
(`call_order`). The epochs of a device are stored in its own memory, so a CUDA graph of a step can
be replayed. Derivatives are those of `psum`.

In each call the ranks compare the call number and the signature (`call_signatures`), which covers
the program, the position of the call in it, algorithm, shape and dtype. On a mismatch the call
fails like a timeout, and the error names both calls (as in the debug modes of NCCL and PyTorch).
Processes that run the programs of a memory in different orders therefore get an error, not a wrong
sum. docs/all_reduce.md has the rules for multithreaded programs.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import ad, batching, mlir

from jaxkv._src.collectives import call_order, call_signatures
from jaxkv._src.collectives.symmetric_memory import SymmetricMemory
from jaxkv._src.runtime import native
from jaxkv._src.runtime.lowering import when_lowered
from jaxkv._src.runtime.sharding import device_groups

Implementation = Literal["low_latency", "one_shot", "two_shot", "multimem", "psum"]
Tree = TypeVar("Tree")  # an array or a pytree of arrays

DTYPES = ("bfloat16", "float16", "float32")
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)
NATIVE = IMPLEMENTATIONS[:-1]  # by their numbers in operand.h


def all_reduce(
    memory: SymmetricMemory,
    x: Tree,
    axis_name: str,
    *,
    implementation: Implementation | None = None,
) -> Tree:
    """All-reduce: the sum of `x` over the devices of a mesh axis, on each of them.

    Call it inside `jax.shard_map`, like `jax.lax.psum`. Loops, `vmap` (one batched call) and
    differentiation are supported.

        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=jax.P("tp"), out_specs=jax.P())
        def total(x):
            return jaxkv.all_reduce(memory, x.sum(0), "tp")

        y = total(x)
        memory.check_errors(y)

    The calls of one program, on any memory, run in program order. The body of a `shard_map`, a
    loop, an inner `jit` or `jax.checkpoint`, and a branch of `cond`, each count as a program of
    their own. There must be a data dependence between calls inside such a body and calls outside
    it, and between the calls of two `shard_map`s in one `jit` (for example by
    `jax.lax.optimization_barrier`); otherwise devices may run them in different orders. The same
    holds for collectives of your own, such as `psum`, in a program with calls.

    The kernels follow vLLM's custom all-reduce and, for "low_latency", TensorRT-LLM's one-shot.

    Args:
      memory: symmetric memory of the mesh that `shard_map` runs on.
      x: array or pytree of arrays of any shape. bfloat16, float16 and float32 are summed in
        float32, in rank order. Exceptions: "multimem", in the order of the switch, and "psum",
        which is `jax.lax.psum` and the only implementation for other dtypes.
      axis_name: the axis of `memory`.
      implementation: "low_latency", "one_shot", "two_shot", "multimem" or "psum"; None for the
        choice of the tuning table of `memory` for the array's size, with psum as the fallback.

    Returns:
      Arrays of the shapes and dtypes of `x`.

    Raises:
      TypeError: `memory` has another type.
      ValueError: the axis or the mesh is not that of `memory`, or the implementation is unknown.
        A different device order is detected at lowering, except where JAX only knows an abstract
        mesh.
      NotImplementedError: `implementation` does not support this call; the text has the reason.
      RuntimeError: the memory is closed.
      PeerTimeoutError: while tracing, if a device timed out in an earlier call or its peers made a
        different call. A compiled call raises `jax.errors.JaxRuntimeError` or `ValueError` instead,
        with this name in its text.
    """
    _check_memory(memory)
    _check_axis_name(memory, axis_name)
    _check_mesh(memory)
    memory.check_errors()
    leaves, structure = jax.tree.flatten(x)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    names = [select_implementation(memory, leaf, implementation)[0] for leaf in leaves]
    results: dict[int, jax.Array] = {}
    # psum last: XLA can combine several, but not with another call between them.
    for i in sorted(range(len(leaves)), key=lambda i: names[i] == "psum"):
        results[i] = _all_reduce_array(memory, leaves[i], names[i], implementation)
    in_order = [results[i] for i in range(len(leaves))]
    return cast(Tree, jax.tree.unflatten(structure, in_order))


def select_implementation(
    memory: SymmetricMemory, x: jax.Array | jax.ShapeDtypeStruct, implementation: str | None
) -> tuple[str, str]:
    """The implementation for an array, and the reason for the choice.

    Raises:
      ValueError: an unknown implementation.
      NotImplementedError: `implementation` does not support this call.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(
            f"all_reduce: implementation must be one of {known}, got {implementation!r}"
        )
    num_bytes = int(np.prod(x.shape, dtype=np.int64)) * x.dtype.itemsize
    table = memory._table
    wanted = implementation or table.algorithm(memory.world_size, num_bytes)
    unsupported_reason = _unsupported_reason(memory, wanted, num_bytes, x.dtype)
    if unsupported_reason and implementation:
        raise NotImplementedError(
            f"all_reduce: implementation {implementation!r} does not support this call: "
            f"{unsupported_reason}"
        )
    if unsupported_reason:
        return "psum", f"fallback from {wanted} of {table.name}: {unsupported_reason}"
    if num_bytes == 0 and wanted != "psum":
        return "psum", f"instead of {wanted}: the array is empty"
    return wanted, "requested" if implementation else f"selected by {table.name}"


def explain(
    memory: SymmetricMemory,
    x: Any,
    axis_name: str,
    *,
    implementation: Implementation | None = None,
) -> str:
    """Implementation of each array of `x`, with the reason; also works outside `shard_map`."""
    _check_memory(memory)
    _check_axis_name(memory, axis_name)
    lines = []
    for leaf in jax.tree.leaves(x):
        leaf = jax.eval_shape(jnp.asarray, leaf)
        name, why = select_implementation(memory, leaf, implementation)
        lines.append(f"all_reduce of {leaf.dtype}{list(leaf.shape)}: {name} ({why})")
    return "\n".join(lines)


def _unsupported_reason(
    memory: SymmetricMemory, algorithm: str, num_bytes: int, dtype: np.dtype
) -> str | None:
    if algorithm == "psum":
        return None
    if str(dtype) not in DTYPES:
        return f"dtype must be one of {', '.join(DTYPES)}, got {dtype}"
    if algorithm == "multimem" and memory._multicast_unsupported_reason:
        return memory._multicast_unsupported_reason
    buffers = {"low_latency": "low_latency_bytes", "one_shot": "slot_bytes"}
    names = buffers.get(algorithm, "max_bytes"), "max_bytes"
    limit, name = min(((getattr(memory, name), name) for name in names), key=lambda entry: entry[0])
    if num_bytes > limit:
        return f"{num_bytes} bytes exceed {name} = {limit} bytes"
    return None


def _check_memory(memory: object) -> None:
    if not isinstance(memory, SymmetricMemory):
        kind = "an array" if hasattr(memory, "dtype") else type(memory).__name__
        raise TypeError(
            f"all_reduce: memory must be a jaxkv.SymmetricMemory, got {kind}; the order of the "
            "arguments is all_reduce(memory, x, axis_name)"
        )


def _check_axis_name(memory: SymmetricMemory, axis_name: str) -> None:
    if axis_name != memory.axis_name:
        raise ValueError(
            f"all_reduce: axis_name must be {memory.axis_name!r}, as in the SymmetricMemory, "
            f"got {axis_name!r}"
        )


def _check_mesh(memory: SymmetricMemory) -> None:
    shape = dict(jax.sharding.get_abstract_mesh().shape)
    expected = dict(memory.mesh.shape)
    if shape != expected:
        raise ValueError(
            f"all_reduce: must run in a jax.shard_map over the mesh {expected} of memory, got "
            f"{shape or 'none'}"
        )


def _check_devices(expected: jax.sharding.Mesh, axis_context: object, axis_name: str) -> None:
    """Raises if the devices along the axis differ; no check if the mesh is abstract."""
    mesh = getattr(axis_context, "mesh", None)
    if not isinstance(mesh, jax.sharding.Mesh) or mesh == expected:
        return
    expected_ids, ids = (
        [[device.id for device in group] for group in device_groups(each, axis_name)]
        for each in (expected, mesh)
    )
    if sorted(expected_ids) != sorted(ids):
        raise ValueError(
            f"all_reduce: must run in a jax.shard_map over the mesh of memory, whose devices along "
            f"{axis_name!r} are {expected_ids}, got a mesh of the same shape with {ids}"
        )


@dataclasses.dataclass(frozen=True)
class _Call:
    """Static parameters of a call. Weak reference to the memory: programs may outlive it."""

    memory: weakref.ref[SymmetricMemory]
    communicator: int
    mesh: jax.sharding.Mesh
    axis_name: str
    requested: str | None
    algorithm: str


def _all_reduce_array(
    memory: SymmetricMemory, x: jax.Array, name: str, requested: str | None
) -> jax.Array:
    with jax.named_scope(f"jaxkv.all_reduce.{name}"):
        if name == "psum":
            return call_order.psum(x, memory.axis_name)
        native.extension()
        call = _Call(
            memory=weakref.ref(memory),
            communicator=memory._id,
            mesh=memory.mesh,
            axis_name=memory.axis_name,
            requested=requested,
            algorithm=name,
        )
        return _reduce_p.bind(x, call=call)


def _result_type(x: Any, *, call: _Call) -> Any:
    """Invariant along the axis, as the result of psum."""
    summed = jax.eval_shape(lambda x: jax.lax.psum(x, call.axis_name), x)
    varying = summed.manual_axis_type  # None with check_vma=False
    return x if varying is None else x.update(manual_axis_type=varying)


def _jvp(
    primals: Sequence[jax.Array], tangents: Sequence[jax.Array | ad.Zero], *, call: _Call
) -> tuple[jax.Array, jax.Array | ad.Zero]:
    result = _reduce_p.bind(*primals, call=call)
    (tangent,) = tangents
    if isinstance(tangent, ad.Zero):
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, call_order.psum(tangent, call.axis_name)


def _batched(
    args: Sequence[jax.Array], dims: Sequence[int], *, call: _Call
) -> tuple[jax.Array, int]:
    """One call for all rows; the implementation is selected by the total size."""
    memory = call.memory()
    if memory is None:
        raise RuntimeError("all_reduce under vmap: the SymmetricMemory of the call was deleted")
    rows = jnp.moveaxis(args[0], dims[0], 0)
    name, _ = select_implementation(memory, rows, call.requested)
    return _all_reduce_array(memory, rows, name, call.requested), 0


def _lower(
    context: mlir.LoweringRuleContext, x: ir.Value, *, call: _Call
) -> list[ir.Value | Sequence[ir.Value]]:
    _check_devices(call.mesh, context.module_context.axis_context, call.axis_name)
    token = call_order.token_before(context)
    with_token = context.replace(
        avals_in=[*context.avals_in, call_order.TOKEN_TYPE],
        avals_out=[*context.avals_out, call_order.TOKEN_TYPE],
    )
    results = jax.ffi.ffi_lowering(call_order.TARGET)(
        with_token,
        x,
        token,
        communicator=np.int64(call.communicator),
        algorithm=np.int64(NATIVE.index(call.algorithm)),
        signature=call_signatures.UNKNOWN,
    )
    result, token = cast(Sequence[ir.Value], results)
    call_order.add_call(context, result, token)
    when_lowered(context.module_context.module, _sign)
    return [result]


def _sign(module: ir.Module) -> None:
    call_signatures.sign(module, call_order.TARGET, NATIVE)


_reduce_p = Primitive("jaxkv_all_reduce")
_reduce_p.def_abstract_eval(_result_type)
mlir.register_lowering(_reduce_p, _lower, cacheable=False)
ad.primitive_jvps[_reduce_p] = _jvp  # not custom_jvp: its body would be a separate program
batching.primitive_batchers[_reduce_p] = _batched
