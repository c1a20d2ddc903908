"""Programs that include a source of jaxkv: CUDA with a simulated driver, or the CPU backend."""

import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def build(name: str, folder: pathlib.Path, *sources: str) -> str:
    """Compiles `tests/native/<name>.cc` and `sources`, with AddressSanitizer; the program's path.

    Undefined references are permitted: they must not be called. Kernels never run, and are compiled
    to PTX only. Skips the test without a checkout, nvcc (for its headers) or g++.
    """
    if not (ROOT / "cuda").exists():
        pytest.skip("needs a checkout")
    locate = [sys.executable, str(ROOT / "tools/locate.py"), "nvcc"]
    nvcc = subprocess.run(locate, check=True, capture_output=True, text=True).stdout.strip()
    if not nvcc or not shutil.which("g++"):
        pytest.skip("needs nvcc, for its headers, and g++")
    files = [str(ROOT / file) for file in (f"tests/native/{name}.cc", *sources)]
    include = ["-I", str(ROOT / "cuda"), "-isystem", jax.ffi.include_dir()]
    options = ["-std=c++20", "-arch=compute_90", *include, "--cudart=none"]
    options += ["-Xcompiler=-fsanitize=address,-no-pie", "-Xlinker=--unresolved-symbols=ignore-all"]
    built = str(folder / name)
    subprocess.run([nvcc, *options, *files, "-o", built], check=True)
    return built


def build_for_cpu(name: str, folder: pathlib.Path, *sources: str, options: Sequence[str]) -> str:
    """Compiles `tests/native/<name>.cc` and `sources`, without nvcc; the program's path.

    Skips the test without a checkout or g++.
    """
    if not shutil.which("g++") or not (ROOT / "cuda").exists():
        pytest.skip("needs g++ and a checkout")
    files = [str(ROOT / file) for file in (f"tests/native/{name}.cc", *sources)]
    include = ["-I", str(ROOT / "cuda"), "-isystem", jax.ffi.include_dir()]
    built = str(folder / name)
    command = ["g++", "-std=c++20", "-pthread", *options, *include, *files, "-o", built]
    subprocess.run(command, check=True)
    return built
