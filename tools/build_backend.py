"""scikit-build-core, plus nvcc as a build requirement if the machine has none."""

from __future__ import annotations

import os
import platform
import sys

from locate import system_nvcc
from scikit_build_core import build as backend
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, list[str] | str] | None

# Compiler, back end, headers and static runtime: no CUDA toolkit needed.
NVCC_PACKAGES = [
    f"nvidia-{part}==13.0.*"
    for part in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
]


def _nvcc_requirements() -> list[str]:
    packaged = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
    wanted = os.environ.get("JAXKV_CUDA", "AUTO") != "OFF"
    return NVCC_PACKAGES if packaged and wanted and not system_nvcc() else []


def get_requires_for_build_wheel(
    config_settings: Settings = None,
) -> list[str]:
    """Build requirements of a wheel (PEP 517)."""
    return backend.get_requires_for_build_wheel(config_settings) + _nvcc_requirements()


def get_requires_for_build_editable(
    config_settings: Settings = None,
) -> list[str]:
    """Build requirements of an editable install (PEP 660)."""
    return backend.get_requires_for_build_editable(config_settings) + _nvcc_requirements()
