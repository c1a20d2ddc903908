"""Programs that include a source of jaxkv: CUDA with a simulated driver, or the CPU backend."""

import ctypes
import hashlib
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def find_nvcc() -> str:
    """The path of nvcc, "" without one."""
    locate = [sys.executable, str(ROOT / "tools/locate.py"), "nvcc"]
    return subprocess.run(locate, check=True, capture_output=True, text=True).stdout.strip()


def build(name: str, folder: pathlib.Path, *sources: str) -> str:
    """Compiles `tests/native/<name>.cc` and `sources`, with AddressSanitizer; the program's path.

    Undefined references are permitted: they must not be called. Kernels never run, and are compiled
    to PTX only. Skips the test without a checkout, nvcc (for its headers) or g++.
    """
    if not (ROOT / "cuda").exists():
        pytest.skip("needs a checkout")
    nvcc = find_nvcc()
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


def load_kernels(name: str, folder: pathlib.Path) -> ctypes.CDLL:
    """Compiles `tests/native/<name>.cc`, which runs kernels on the host, and loads it as a library.

    Skips the test without a checkout or g++.
    """
    native = ROOT / "tests/native"
    options = [f"-I{native / 'cuda_on_host'}", f"-I{native}", "-O1", "-Wall", "-Werror"]
    options += ["-Wno-unknown-pragmas", "-shared", "-fPIC"]
    return ctypes.CDLL(build_for_cpu(name, folder, options=options))


def build_for_gpu(name: str, *sources: str, architecture: str, options: Sequence[str] = ()) -> str:
    """Compiles `tests/native/<name>.cu` and `sources` for a GPU; the program's path.

    The program is kept below `build/`, named by a hash of what it depends on: one that was copied
    from another machine is used as it is.

    Args:
      name: of the program.
      sources: paths below the repository.
      architecture: as in sm_90a, without the prefix.
      options: of nvcc.

    Raises:
      FileNotFoundError: the program must be compiled, and there is no nvcc.
    """
    main = f"tests/native/{name}.cu"
    headers = [*(ROOT / "cuda").rglob("*.*"), *(ROOT / "tests/native").glob("*.h")]
    digest = hashlib.sha256(repr((sources, architecture, options)).encode())
    for file in sorted([*headers, ROOT / main]):
        digest.update(file.read_bytes())
    built = ROOT / "build" / name / f"{digest.hexdigest()[:16]}-sm_{architecture}"
    if not built.exists():
        if not (nvcc := find_nvcc()):
            raise FileNotFoundError(f"{built} does not exist, and there is no nvcc to compile it")
        built.parent.mkdir(parents=True, exist_ok=True)
        include = ["-I", str(ROOT / "cuda"), "-isystem", jax.ffi.include_dir()]
        command = [nvcc, "-std=c++20", "-O2", f"-arch=sm_{architecture}", "-Xcompiler=-Wall"]
        command += [*include, *options, *(str(ROOT / file) for file in (main, *sources))]
        subprocess.run([*command, "-o", str(built)], check=True)
    return str(built)
