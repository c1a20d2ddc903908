"""Prints the location of a build dependency: `python tools/locate.py nanobind|ffi-include|nvcc`.

Nothing is imported to find it: a package has to be installed, but not importable.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

NVCC_MINIMUM = (13, 0)


def package_dirs(name: str) -> list[Path]:
    """Folders of an installed package (several for a namespace package), without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []


def nanobind() -> str:
    """CMake folder of nanobind."""
    return str(package_dirs("nanobind")[0] / "cmake")


def ffi_include() -> str:
    """Folder of XLA's FFI headers, as jaxlib ships them."""
    return str(package_dirs("jaxlib")[0] / "include")


def nvcc_version(nvcc: str) -> tuple[int, int] | None:
    """(major, minor) of an nvcc, None if it does not run."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return None
    found = re.search(r"release (\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def _system_nvccs() -> Iterator[str]:
    yield os.environ.get("CUDACXX", "")
    yield shutil.which("nvcc") or ""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        yield shutil.which("nvcc", path=f"{os.environ.get(variable, '')}/bin") or ""
    yield "/usr/local/cuda/bin/nvcc"


def _packaged_nvccs() -> Iterator[str]:
    for folder in package_dirs("nvidia"):
        yield from (str(path) for path in sorted(folder.glob("cu*/bin/nvcc"), reverse=True))


def _first_good(nvccs: Iterator[str]) -> str:
    return next((p for p in nvccs if p and (nvcc_version(p) or (0, 0)) >= NVCC_MINIMUM), "")


def system_nvcc() -> str:
    """The machine's nvcc if it is new enough, else ""."""
    return _first_good(_system_nvccs())


def nvcc() -> str:
    """The nvcc for the build: the machine's, else that of the package index, else ""."""
    return system_nvcc() or _first_good(_packaged_nvccs())


if __name__ == "__main__":
    print({"nanobind": nanobind, "ffi-include": ffi_include, "nvcc": nvcc}[sys.argv[1]]())
