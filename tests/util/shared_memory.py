"""A mark for tests that create shared pools."""

import os

import pytest

from jaxkv._src.cache import shared_memory

needs_shared_memory = pytest.mark.skipif(
    not os.access(shared_memory.DIRECTORY, os.W_OK), reason="needs write access to /dev/shm"
)
