"""Checks of shardings, and groups of devices along a mesh axis."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.typing import ArrayLike

AxisName: TypeAlias = Hashable


def check_is_sharding(operation: str, sharding: object) -> None:
    """Raises a TypeError for another type, such as a mesh or a PartitionSpec."""
    if not isinstance(sharding, Sharding):
        raise TypeError(
            f"{operation}: sharding must be a jax.sharding.Sharding, got "
            f"{type(sharding).__name__}; pass NamedSharding(mesh, PartitionSpec())"
        )


def check_head_axis(num_parts: int, name: str, mesh: Mesh | None, head_axis: str | None) -> None:
    """Raises a ValueError unless mesh axis `head_axis` exists and divides `num_parts`.

    Raises a TypeError if `mesh` is not a mesh of devices.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, got {type(mesh).__name__}; pass one such as "
            "jax.make_mesh returns"
        )
    if head_axis is None:
        return
    if mesh is None:
        raise ValueError(f"head_axis={head_axis!r} requires a mesh, got mesh=None")
    if head_axis not in mesh.shape:
        raise ValueError(
            f"head_axis must be an axis of the mesh {dict(mesh.shape)}, got {head_axis!r}"
        )
    if num_parts % mesh.shape[head_axis]:
        raise ValueError(
            f"{name}={num_parts} must be a multiple of mesh axis {head_axis!r} "
            f"of size {mesh.shape[head_axis]}"
        )


def check_unsharded(leaves: Iterable[object], name: str = "an argument") -> None:
    """Raises a ValueError for arrays known to be sharded, which XLA would all-gather for the call.

    `name` begins the message.

    Shardings are known for concrete arrays and, while tracing, for a mesh with explicit axes.
    """
    for leaf in leaves:
        traced = isinstance(leaf, jax.core.Tracer)
        sharding = jax.typeof(leaf).sharding if traced else getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and not sharding.is_fully_replicated:
            raise ValueError(
                f"{name} has an array sharded by {sharding.spec} over mesh axes "
                f"{dict(sharding.mesh.shape)}, and XLA would gather it on every device: call the "
                "operation inside jax.shard_map, manual over all these axes, on the shard "
                "of each device"
            )


def check_arguments_unsharded(operation: str, arguments: Mapping[str, object]) -> None:
    """`check_unsharded` for the pytrees of arguments, by name."""
    for name, argument in arguments.items():
        check_unsharded(jax.tree.leaves(argument), f"{operation}: {name}")


def match_varying_axes(array: jax.Array, operands: Iterable[ArrayLike]) -> jax.Array:
    """`array`, typed as varying over each mesh axis over which it or an operand varies.

    For an array that a call writes, whose type is that of the result. Otherwise a cache typed as
    replicated would keep this type after each device wrote different pages, and `shard_map` would
    use one device's cache for all. Changes only the type; no effect outside `shard_map`.
    """
    axes = frozenset[AxisName]().union(*map(_varying_axes, operands)) - _varying_axes(array)
    return jax.lax.pcast(array, tuple(sorted(axes, key=str)), to="varying") if axes else array


def _varying_axes(array: ArrayLike) -> frozenset[AxisName]:
    if not isinstance(array, jax.core.Tracer):
        return frozenset()
    return jax.typeof(array).manual_axis_type.varying


def device_groups(mesh: Mesh, axis_name: str) -> np.ndarray:
    """The devices along an axis, `[num_groups, axis_size]`."""
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(axis_name), -1)
    return devices.reshape(-1, devices.shape[-1])
