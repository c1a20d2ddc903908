"""The device that new arrays go to, and arrays that must be made outside of jit."""

from __future__ import annotations

from typing import Any

import jax


def default_device() -> jax.Device:
    """The device that JAX puts new arrays on."""
    # HostIds ask before each step, and to make an array and look would take a hundred times longer.
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if isinstance(device, str):
        return jax.local_devices(backend=device)[0]
    return device or jax.local_devices()[0]


def check_outside_jit(made: Any) -> None:
    """Raises a RuntimeError if the array just made is one of a program that is being traced."""
    if isinstance(made, jax.core.Tracer):
        raise RuntimeError(
            "pools, caches and HostIds are made outside of jit: make them before the call, and "
            "pass them to the function"
        )
