"""Programs that include a CUDA source of jaxkv, with a driver of their own: no GPU is needed."""

import pathlib
import shutil
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent


def build(name: str, folder: pathlib.Path) -> str:
    """Compiles `tests/native/<name>.cc` with AddressSanitizer; the program's path.

    Skips the test where there is no checkout, nvcc (for its headers) or g++.
    """
    if not (ROOT / "cuda").exists():
        pytest.skip("needs a checkout")
    locate = [sys.executable, str(ROOT / "tools/locate.py"), "nvcc"]
    nvcc = subprocess.run(locate, check=True, capture_output=True, text=True).stdout.strip()
    if not nvcc or not shutil.which("g++"):
        pytest.skip("needs nvcc, for its headers, and g++")
    source, built = str(ROOT / f"tests/native/{name}.cc"), str(folder / name)
    options = ["-std=c++20", "-Xcompiler=-fsanitize=address", "--cudart=none"]
    options += ["-isystem", jax.ffi.include_dir(), "-x", "c++"]
    subprocess.run([nvcc, *options, source, "-o", built], check=True)
    return built
