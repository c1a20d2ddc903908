"""Loads the native extension and registers its FFI targets for CUDA and CPU."""

from __future__ import annotations

import functools
from types import ModuleType

import jax


@functools.cache
def extension() -> ModuleType:
    """The extension, with registered FFI targets; requires neither a GPU nor a driver."""
    try:
        from jaxkv import _ext
    except ImportError as error:
        raise ImportError(
            f"jaxkv's native extension is missing or failed to load ({error}): "
            "build it with `pip install .` in a checkout of jaxkv"
        ) from error
    for platform, targets in _ext.registrations().items():
        for target, stages in targets.items():
            jax.ffi.register_ffi_target(target, stages, platform=platform)
    return _ext
