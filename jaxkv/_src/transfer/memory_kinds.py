"""Checks of memory kinds in the complete program; the types of traced arrays may lack them.

A pool whose type says device memory is no longer in memory kind pinned_host, or has only lost its
memory space: the memory kinds of the program's arguments tell the two apart. In the same way for
destinations of `swap_blocks` and `start_swap`: `jax.jit(jnp.zeros, out_shardings=...)` returns an
array in pinned_host memory whose type says device memory. The result of a copy into it has this
type: XLA copies the array to the device, or aborts the process if it is donated. Programs with too
many destinations in host memory are refused: see host_memory_paths.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import mlir

from jaxkv._src.cache.host_pool import PASS_A_POOL
from jaxkv._src.runtime.fusion_barrier import fusion_barrier
from jaxkv._src.runtime.lowering import when_lowered
from jaxkv._src.transfer.buffer_aliases import BufferAliases
from jaxkv._src.transfer.host_memory_paths import check_paths

SWAPS = ("swap_blocks", "start_swap")  # operations on an engine's own arrays
_ATTRIBUTES = "mhlo.frontend_attributes"
_MARK = "jaxkv_typed_on_device"  # its value is the operation
# Requests of the same function are merged.
_CHECK_PATHS = {name: partial(check_paths, operation=name) for name in SWAPS}


def check_memory_kinds(operation: str, arrays: Sequence[Any]) -> list[Any]:
    """The arrays, results of fusion barriers, with a check when the program is lowered.

    It raises a ValueError if an array is an argument in pinned_host memory, but typed as in device
    memory.
    """
    return list(_checked_p.bind(*arrays, operation=operation)) if arrays else []


def check_host_results(operation: str, results: Sequence[Any]) -> None:
    """Raises where XLA would abort the process: one of several results of a call in host memory.

    The compiler for GPUs of jax 0.10 fails in its analysis of host memory for them. The CPU
    backend compiles these calls.
    """
    on_host = any(result.memory_space == jax.memory.Space.Host for result in results)
    aborts = jax.__version_info__ < (0, 11) and jax.default_backend() == "gpu"
    if len(results) > 1 and on_host and aborts:
        raise NotImplementedError(
            f"{operation}: jax {jax.__version__} cannot compile a call for GPUs with "
            f"{len(results)} results in host memory: XLA would abort the process. Install "
            "jax>=0.11, or use store_pages with one pool"
        )


def check_shard_map_is_compiled(
    operation: str, written: Sequence[Any], results: Sequence[Any]
) -> None:
    """Raises a ValueError for a written array in host memory in a `shard_map` outside jit.

    There JAX runs each operation by itself, and moves what `shard_map` returns to device memory.
    """
    for array, result in zip(written, results, strict=True):
        # By name: JAX does not export the type.
        is_eager = type(array).__name__ == "ShardMapTracer"
        if is_eager and result.memory_space == jax.memory.Space.Host:
            raise ValueError(
                f"{operation}: writes {array.dtype}{list(array.shape)} in pinned_host memory in a "
                "jax.shard_map outside jit, whose results JAX moves to device memory: wrap the "
                "shard_map in jax.jit, and donate the array"
            )


def with_checked_pool(operation: str, pool: Any, cache: Any) -> tuple[Any, Any]:
    """Pool and cache; a pool typed as in device memory is checked when the program is lowered.

    It raises a ValueError if the pool is an argument that is not in pinned_host memory.
    """
    data = getattr(pool, "data", None)
    if not isinstance(data, jax.core.Tracer):
        return pool, cache
    if jax.typeof(data).memory_space == jax.memory.Space.Host:
        return pool, cache
    (data,) = _checked_p.bind(fusion_barrier(data), operation=operation)
    return dataclasses.replace(pool, data=data), cache


def _lower_checked(context: Any, *values: Any, operation: str) -> list[Any]:
    for value, aval in zip(values, context.avals_in, strict=True):
        if aval.memory_space == jax.memory.Space.Device:
            # Later than this, an operation may be replaced, with its attributes.
            mark = ir.DictAttr.get({_MARK: ir.StringAttr.get(operation)})
            value.owner.attributes[_ATTRIBUTES] = mark
            # Only the complete module has the memory kinds of the arguments.
            when_lowered(context.module_context.module, _check)
        elif len(values) > 1:
            when_lowered(context.module_context.module, _CHECK_PATHS[operation])
    return list(values)


_checked_p = Primitive("jaxkv_memory_kinds")
_checked_p.multiple_results = True
_checked_p.def_impl(lambda *arrays, operation: list(arrays))
_checked_p.def_abstract_eval(lambda *arrays, operation: list(arrays))
mlir.register_lowering(_checked_p, _lower_checked, cacheable=False)


def _check(module: Any) -> None:
    aliases = BufferAliases(module, lambda call: 0)
    for barrier in _marked_barriers(module):
        operation = ir.StringAttr(ir.DictAttr(barrier.attributes[_ATTRIBUTES])[_MARK]).value
        del barrier.attributes[_ATTRIBUTES]
        for argument in aliases.origins(barrier.operands[0]):
            kind = aliases.memory_kind(argument)  # None if all arguments are in default memory
            if operation not in SWAPS and kind != "pinned_host" and aliases.is_argument(argument):
                raise ValueError(
                    f"{operation}: pool.data, {argument.type}, must be in memory kind pinned_host, "
                    f"got {kind or 'device'}: {PASS_A_POOL}, or, to lower ahead of time, one of "
                    "jax.ShapeDtypeStruct(..., sharding=pool.data.sharding)"
                )
            if operation in SWAPS and kind == "pinned_host":
                raise ValueError(
                    f"{operation}: an array of dst, {argument.type}, is in pinned_host memory, but "
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
