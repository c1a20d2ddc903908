"""CUDA calls of a thread, counted by cuda_calls.cc."""

import contextlib
import ctypes
import functools
import importlib.util
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".cc")


@contextlib.contextmanager
def count_cuda_calls() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Calls in the `with` block, of this thread and of all others, by function; filled at its
    end."""
    library = _library()
    own: Counter[str] = Counter()
    others: Counter[str] = Counter()
    assert library.start_counting() == 0
    try:
        yield own, others
    finally:
        assert library.stop_counting() == 0
        for counter, by_this_thread in (own, True), (others, False):
            for line in library.counted(by_this_thread).decode().splitlines():
                function, calls = line.split()
                counter[function] = int(calls)


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/libcuda_calls.so"
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, "-std=c++20", "-O2", "-Wall", "-Werror", "-fPIC", "-shared"]
        subprocess.run([*command, str(SOURCE), "-o", path, str(_libcupti())], check=True)
        ctypes.CDLL(str(_libcupti()), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(path)
    library.counted.argtypes = [ctypes.c_bool]
    library.counted.restype = ctypes.c_char_p
    return library


def _libcupti() -> Path:
    """The library loaded in this process, else that of the CUDA packages or of the toolkit."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcupti.so" in line:
            return Path(line.split()[-1])
    spec = importlib.util.find_spec("nvidia")
    packages = spec.submodule_search_locations if spec else None
    roots = [*(packages or ()), "/usr/local/cuda/lib64"]
    return next(path for root in roots for path in Path(root).rglob("libcupti.so*"))
