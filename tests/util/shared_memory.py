"""For tests that create shared pools: a mark, and the open files of a pool."""

import contextlib
import os

import pytest

from jaxkv._src.cache import shared_memory

needs_shared_memory = pytest.mark.skipif(
    not os.access(shared_memory.DIRECTORY, os.W_OK), reason="needs write access to /dev/shm"
)


def open_files(name: str) -> list[str]:
    """Those of this process for a pool; other threads may open and close others at any time."""
    files = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(f"/proc/self/fd/{number}"))
    return [file for file in files if name in file]
