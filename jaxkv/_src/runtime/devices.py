"""Where JAX places new arrays, platforms of devices, and a check for arrays created inside jit."""

from __future__ import annotations

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding


def default_device() -> jax.Device:
    """The device on which JAX places new arrays."""
    # HostIds query it in each step; creating an array to inspect takes a hundred times longer.
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device or jax.local_devices()[0]


def context_mesh() -> Mesh | None:
    """The mesh of `jax.set_mesh`, if any; None inside jit."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside jit
        return None
    return None if mesh.empty else mesh


def default_sharding() -> Sharding:
    """The sharding of new arrays in JAX: over all devices of a mesh of `jax.set_mesh`, or one."""
    mesh = context_mesh()
    if mesh is None:
        return SingleDeviceSharding(default_device())
    return NamedSharding(mesh, PartitionSpec())


def device_of_id(platform: str, number: int) -> jax.Device:
    """The device of a platform with this `Device.id`."""
    return next(device for device in jax.devices(platform) if device.id == number)


def platform_of(device: jax.Device) -> str:
    """The platform of a device: JAX's name, but "rocm" for the GPUs of AMD."""
    if device.platform == "gpu" and "rocm" in device.client.platform_version.lower():
        return "rocm"
    return device.platform


def has_native_memory(device: jax.Device) -> bool:
    """Whether the extension allocates and addresses the pinned host memory of a device."""
    return platform_of(device) in ("cpu", "gpu")


def check_outside_jit(array: jax.Array) -> None:
    """Raises a RuntimeError if a new array is a tracer."""
    if isinstance(array, jax.core.Tracer):
        raise RuntimeError(
            "pools, caches and HostIds must be created outside of jit: create them before the "
            "call and pass them as arguments"
        )
